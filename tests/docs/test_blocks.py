"""The code blocks of the pages: commands and keys exist; in a slow test all blocks run."""

import ast
import functools
import re
import runpy
import shlex
from pathlib import Path

import jax
import pytest

from jaxdist.__main__ import COMMANDS
from jaxdist.models import registry
from jaxdist.trainer.run_config import full_schema
from support import page_blocks
from support.page_blocks import CONFIGS, LANGUAGES, CodeBlock, blocks_of, matches
from support.paths import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *(
            path
            for path in (ROOT / "docs").rglob("*.md")
            if "evidence" not in path.parts
            and "<!-- Written by" not in path.read_text()
        ),
    ]
)
SHELLS = ("bash", "sh", "console")


def blocks(name: str) -> list[CodeBlock]:
    return list(blocks_of((ROOT / name).read_text()))


@functools.cache
def flags_of(command: str) -> frozenset[str]:
    script = runpy.run_path(str(ROOT / "docs/generate.py"))
    helps = [
        script["help_of"](command, arguments)
        for arguments in ([], *script["subcommands"](command))
    ]
    return frozenset(re.findall(r"(?<![\w-])--[\w-]+", "\n".join(helps)))


@functools.cache
def known_keys() -> frozenset[str]:
    return frozenset(full_schema(registry.DEFAULT_TARGET))


def faults_of_command(line: str) -> list[str]:
    """Returns what the jaxdist commands of a line name that does not exist."""
    starts = r"(?:^|[\s;&|(])(?:\S*python\d? -m jaxdist\.|\S*/jaxdist |jaxdist )(\w+)"
    found = list(re.finditer(starts, line))
    faults = []
    for one, later in zip(found, [*found, None][1:], strict=True):
        rest = line[one.end() : later.start() if later else None]
        faults += faults_of_one(one[1], re.split(r" --(?= |$)|[;&|]", rest)[0])
    return faults


def faults_of_one(command: str, rest: str) -> list[str]:
    if command not in COMMANDS:
        return [f"no command {command}"]
    faults = []
    for word in shlex.split(rest, comments=True):
        flag = word.partition("=")[0]
        if flag.startswith("--config."):
            key = flag.removeprefix("--config.")
            own = any(t in rest for t in ("model.target", "init.from", "vit_digits"))
            if key not in known_keys() and not (own and key.startswith("model.")):
                faults.append(f"no key {key}")
        elif flag.startswith("--") and flag not in flags_of(command):
            faults.append(f"{command} has no {flag}")
    for name in re.findall(r"--config ([a-z]\w+)(?=[:\s]|$)", rest):
        if name not in CONFIGS:
            faults.append(f"no config {name}")
    return faults


def test_a_fault_in_a_command_is_found():
    assert faults_of_command("jaxdist train --config quickstart --dry-run") == []
    assert faults_of_command("python -m jaxdist.trian") == ["no command trian"]
    assert faults_of_command("jaxdist train --dry") == ["train has no --dry"]
    line = "pip install x && .venv/bin/python -m jaxdist.train --confg x; jaxdist pln"
    assert faults_of_command(line) == ["train has no --confg", "no command pln"]
    line = "jaxdist launch --processes 2 -- jaxdist train --config.mesh.x=2"
    assert faults_of_command(line) == ["no key mesh.x"]
    assert faults_of_command("jaxdist plan --config quickstrt") == [
        "no config quickstrt"
    ]


def test_output_is_compared():
    printed = "step 10 loss 5.1\nrest\nsaved in runs/a\n"
    assert matches("step 10 loss 4.75\n...\nsaved in ...", printed)
    assert not matches("step 20 loss 4.75", printed)
    assert not matches("step 10 loss 5", printed)
    assert matches("rest", printed)
    assert not matches("step 10 loss\nrest", printed)
    assert not matches("saved in runs/b", printed)
    assert not matches("est", printed)


@pytest.mark.parametrize("name", PAGES)
def test_blocks_name_what_exists(name):
    faults = []
    for block in blocks(name):
        where = f"{name}:{block.line}"
        if block.language not in LANGUAGES:
            faults.append(f"{where}: language {block.language!r}, not of {LANGUAGES}")
        if block.language == "python":
            ast.parse(block.code, filename=where)
        if block.language in SHELLS and "\nerror: " not in block.code:
            for command in page_blocks.commands_in(block):
                faults += [
                    f"{where}: {f}: {command}" for f in faults_of_command(command)
                ]
        if block.language == "console":
            assert page_blocks.console_steps(block.code), where
    assert not faults, "\n".join(faults)


def runs(name: str) -> bool:
    return any(
        block.language in ("python", "bash", "console") for block in blocks(name)
    )


RUN = [name for name in PAGES if runs(name)]


def test_enough_pages_have_blocks_that_run():
    assert len(RUN) >= 20, RUN


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_blocks_run(name, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with jax.numpy_rank_promotion("allow"):  # as outside of the tests
        page_blocks.run_page((ROOT / name).read_text(), name, tmp_path)
