"""Code blocks of the pages, and how they are run.

A page's blocks run in order in one folder. `python` blocks share one namespace. `bash`
and `console` blocks run with `--config NAME` as `NAME:tiny`, if NAME has that form. A `console` block shows
commands after `$`, and consecutive lines of their output. `...` stands for any text, a
number with a fraction for any such number, and a line `...` for any lines. `<!-- setup: python` or `bash` begins a block
that readers do not see. `sh` blocks need hardware, network or hours: they do not run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

FILES = sorted((ROOT / "configs").glob("*.py"))
CONFIGS = {file.stem for file in FILES}
WITH_TINY = {file.stem for file in FILES if "sized(" in file.read_text()}
LANGUAGES = {"python", "bash", "console", "sh", "text", "json", "yaml", "toml"}
# Measured numbers have a fraction or an exponent; counts are compared as they are.
NUMBER = r"[-+]?\d[\d,]*\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+"


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block, or a hidden one."""

    language: str
    code: str
    line: int  # of its first line in the page, from 1


def blocks_of(page: str) -> Iterator[CodeBlock]:
    """Yields a page's blocks in order."""
    pattern = re.compile(
        r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)```"
        r"|^<!-- setup: (?P<hidden>\w+)\n(?P<setup>.*?)^-->",
        re.DOTALL | re.MULTILINE,
    )
    for found in pattern.finditer(page):
        code = found["code"] if found["hidden"] is None else found["setup"]
        indent = found["indent"] or ""
        code = "".join(
            line.removeprefix(indent) for line in code.splitlines(keepends=True)
        )
        line = page.count("\n", 0, found.start()) + 2
        yield CodeBlock(found["language"] or found["hidden"] or "", code, line)


def commands_in(block: CodeBlock) -> list[str]:
    """Lists the commands of a shell block, continued lines joined."""
    code = block.code.replace("\\\n", " ")
    if block.language == "console":
        shown = [line[2:] for line in code.splitlines() if line.startswith("$ ")]
    else:
        shown = code.splitlines()
    return [line for line in shown if line.strip() and not line.startswith("#")]


def at_tiny(command: str) -> str:
    """Replaces packaged configs by their smallest form."""

    def tiny(found: re.Match[str]) -> str:
        return f"--config {found[1]}:tiny" if found[1] in WITH_TINY else found[0]

    return re.sub(r"--config (\w+)(?![\w:/.])", tiny, command)


def run_shell(command: str, folder: Path, may_fail: bool = False) -> str:
    """Runs a command of a page and returns what it printed.

    Raises:
        AssertionError: The exit code is not 0, and it may not fail.
    """
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["JAX_PLATFORMS"] = "cpu"
    command = at_tiny(command)
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert may_fail or done.returncode == 0, (
        f"{command}\n{done.returncode}\n{done.stdout[-3000:]}"
    )
    return done.stdout


def matches(shown: str, printed: str) -> bool:
    """Compares the output that a page shows with what a command printed."""
    pattern = ""
    for line in shown.strip("\n").splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
            continue
        pieces = re.split(rf"(\.\.\.|{NUMBER})", line.strip())
        for piece in pieces:
            if piece == "...":
                pattern += ".*?"
            elif re.fullmatch(NUMBER, piece):
                pattern += NUMBER
            else:
                pattern += re.sub(r"(\\ )+", r"\\s+", re.escape(piece))
        pattern = rf"{pattern}\s*\n"
    lines = "".join(f"{line.strip()}\n" for line in printed.splitlines())
    return re.search(rf"^{pattern}", lines, re.MULTILINE) is not None


def run_page(page: str, name: str, folder: Path) -> None:
    """Runs a page's blocks in order.

    Raises:
        AssertionError: A command failed, or printed what the page does not show.
    """
    for shared in ("examples", "configs"):
        (folder / shared).symlink_to(ROOT / shared)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(page):
        where = f"{name}:{block.line}"
        if block.language == "python":
            # The lines keep their numbers in tracebacks.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, name, "exec"), names)
        elif block.language == "bash":
            run_shell("\n".join(commands_in(block)), folder)
        elif block.language == "console":
            for command, shown in console_steps(block.code):
                fails = re.search(r"^error: ", shown, re.MULTILINE) is not None
                printed = run_shell(command, folder, may_fail=fails)
                assert matches(shown, printed), f"{where}: $ {command}\n{printed}"


def console_steps(code: str) -> list[tuple[str, str]]:
    """Splits a console block into commands and what each one prints."""
    steps: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, shown = re.sub(r"\\\n", " ", part).partition("\n")
        steps.append((command, shown))
    return steps
