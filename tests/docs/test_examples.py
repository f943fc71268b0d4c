"""The examples: single-device code that trains alone, found by name or by path, and
laid out unchanged.
"""

import ast
import json
import os
import re
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from jaxdist import train, verify
from jaxdist.config import ConfigError
from jaxdist.models import registry
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import cli, run_config, validation
from jaxdist.verification import cases
from jaxdist.verification.runner import verify_layouts
from support.paths import ROOT

FILES = sorted((ROOT / "examples").glob("*_module.py"))
DATA = {"plain_module": "digits", "named_module": "stdlib", "staged_module": "stdlib"}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))  # as `python -m` from there


def run_of(name: str, **options) -> run_config.RunConfig:
    """Returns a small run of an example, pointed to by its path."""
    config = run_config.default_config(f"examples/{name}.py:Model")
    config.data.source, config.batch.sequence_length = DATA[name], 16
    config.model.update(options)
    return run_config.from_config(config)


# --- what they are --------------------------------------------------------------------


def test_they_import_nothing_of_ours_and_stay_short():
    assert {file.stem for file in FILES} == set(DATA)
    for file in FILES:
        text = file.read_text()
        nodes = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        modules = {alias.name for node in nodes for alias in node.names} | {
            node.module for node in nodes if isinstance(node, ast.ImportFrom)
        }
        assert "jax" in modules
        assert not [module for module in modules if module.startswith("jaxdist")], file
        assert len(text.splitlines()) < 120, file


@pytest.mark.parametrize("name", DATA)
def test_they_train_alone(name):
    losses = runpy.run_path(str(ROOT / f"examples/{name}.py"))["main"](steps=20)
    assert len(losses) == 20
    assert np.mean(losses[-5:]) < 0.8 * losses[0], losses


@pytest.mark.parametrize("name", DATA)
def test_the_command_at_their_head_is_a_run(name):
    head = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text()))
    (command,) = re.findall(r"python -m jaxdist.train (.*)", head)
    run = cli.parse(cli.ConfigParser("test", None), command.split())[1]
    assert run.model["target"] == f"examples.{name}:Model"
    validation.validate(run, jax.devices())
    own = f"--config.model.target=examples.{name}:Model"
    assert f"jaxdist verify --config {command.split()[1]} {own}" in PAGE


# --- how they are found ---------------------------------------------------------------


def test_a_class_is_found_by_module_and_by_path():
    by_path = registry.find_model("examples/plain_module.py:Model")
    # executed once
    assert by_path is registry.find_model("./examples/plain_module.py:Model")
    assert by_path is registry.find_model(f"{ROOT}/examples/plain_module.py:Model")
    by_name = registry.find_model("examples.plain_module:Model")
    assert by_name.__name__ == by_path.__name__ == "Model"
    assert sys.modules[by_path.__module__].__file__ == str(
        ROOT / "examples/plain_module.py"
    )
    assert run_config.model_defaults("examples/plain_module.py:Model")["width"] == 32


def test_a_file_finds_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine.py").write_text(
        "from flax import nnx\nfrom beside_it import WIDTH\nclass Mine(nnx.Module):\n    width = WIDTH\n"
    )
    assert registry.find_model(f"{tmp_path}/mine.py:Mine").width == 3


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (
            "examples.plain_module",
            "must be package.module:Class or path/of/file.py:Class",
        ),
        ("examples/plane_module.py:Model", "No such file or directory"),
        ("examples.plane_module:Model", "a file is path/of/file.py:Class"),
        (
            "examples/plain_module.py:Modell",
            "has no nnx.Module 'Modell'. Did you mean Model?",
        ),
    ],
)
def test_a_target_that_is_none(target, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)):
        registry.find_model(target)


def test_a_broken_file_is_not_kept(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("from flax import nnx\nraise RuntimeError('on import')\n")
    with pytest.raises(RuntimeError, match="on import"):
        registry.find_model(f"{file}:Model")
    file.write_text("from flax import nnx\nclass Model(nnx.Module): pass\n")
    assert registry.find_model(f"{file}:Model").__name__ == "Model"


def test_the_console_script_finds_modules_where_it_is_called(tmp_path):
    text = (ROOT / "examples/plain_module.py").read_text()
    (tmp_path / "here").mkdir()
    (tmp_path / "here/my_own.py").write_text(
        text.replace("width: int = 32", "breadth: int = 32")
    )
    # as pip writes it: its own folder is on the path, ours is not
    script = tmp_path / "script.py"
    script.write_text("from jaxdist.__main__ import main\nmain()\n")
    command = [sys.executable, str(script), "train", "--config", "quickstart", "--help"]
    done = subprocess.run(
        [*command, "--config.model.target=my_own:Model"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "--config.model.breadth" in done.stdout


# --- what jaxdist makes of them -------------------------------------------------------


def test_a_plain_module_trains_by_the_command_and_goes_on(tmp_path):
    command = [
        "--config",
        "vit_digits",
        "--config.model.target=examples.plain_module:Model",
    ]
    command += [
        "--workdir",
        str(tmp_path),
        "--config.train.log_every=1",
        "--config.model.width=8",
    ]
    command += ["--config.optimizer.schedule=constant", "--config.train.eval_every=0"]
    command += ["--config.optimizer.warmup_steps=1"]
    assert train.main([*command, "--config.train.steps=3"]) == 0
    assert train.main([*command, "--config.train.steps=6"]) == 0
    rows = read_rows(tmp_path).train
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # samples
    assert [row["tokens_seen"] for row in rows] == [64 * n for n in range(1, 7)]
    assert rows[-1]["loss"] < rows[0]["loss"]


PROVED = [
    pytest.param("plain_module", {"width": 8}, "fsdp 8", marks=pytest.mark.slow),
    pytest.param(
        "named_module",
        {"width": 16, "hidden": 32},
        "data 2 x fsdp 2 x tensor 2",
        marks=pytest.mark.slow,
    ),
    ("staged_module", {"num_layers": 2, "width": 16}, "pipeline 2 x fsdp 2 x tensor 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "only"), PROVED)
def test_a_layout_is_proved(name, options, only):
    run = run_of(name, **options)
    assert only in cases.layouts_for(run, 8)
    report = verify_layouts(run, jax.devices(), precisions=("float32",), only=only)
    assert report.passed, report.layouts
    assert only in [result.layout for result in report.layouts]


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_verify_proves_all_layouts(name, capsys):
    base = "vit_digits" if DATA[name] == "digits" else "quickstart"
    command = [
        "--config",
        base,
        f"--config.model.target=examples.{name}:Model",
        "--json",
    ]
    assert verify.main(command) == 0
    proved = {row["layout"] for row in json.loads(capsys.readouterr().out)["layouts"]}
    assert {
        "data 8",
        "fsdp 8, accumulation 4",
        "data 2 x fsdp 2 x tensor 2",
        "tensor 8",
    } <= proved
    assert ("pipeline 4 x data 2, 2 chunks" in proved) == (name == "staged_module")


# --- the pages about them -------------------------------------------------------------

PAGE = (ROOT / "docs/how-to/own-model.md").read_text()
PAGES = ("own-model", "own-model-details", "optimizers", "data-formats")


def blocks(language: str, page: str = PAGE) -> list[str]:
    """Lists the blocks of a language in order, with those of hidden set-ups."""
    found = re.findall(
        rf"(?:```|<!-- setup: ){language}\n(.*?)(?:```|-->)", page, re.DOTALL
    )
    assert found
    return found


def test_the_page_quotes_the_files():
    quoted = [block for block in blocks("python") if block.startswith("# examples/")]
    assert len(quoted) == 3
    for block in quoted:
        head, body = block.split("\n", 1)
        text = (ROOT / head.removeprefix("# ").strip()).read_text()
        for part in re.split(r"\n +\.\.\.\n", body):
            assert part.strip("\n") in text, part
        assert "def loss(self, batch, key):" in body


def test_the_snippets_of_the_pages_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = []
    for page in PAGES:
        path = ROOT / f"docs/how-to/{page}.md"
        names: dict = {}
        for block in blocks("python", path.read_text()):
            exec(compile(block, str(path), "exec"), names)
            if "get_config" in names:
                run = run_config.from_config(names.pop("get_config")())
                made.append(validation.validate(run, jax.devices()[:1]).spec)
    ruled, frozen = made
    assert ruled.named_parameters()["hidden/kernel"][1] == ("d_model", "d_ff")
    assert set(frozen.named_frozen()) == {"first/kernel", "first/bias"}


def test_the_commands_of_the_page_are_commands():
    commands = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("jaxdist")
    ]
    assert len(commands) >= 5
    for line in commands:
        words = line.split()
        assert words[1] in ("train", "verify")
        flags = [word for word in words[2:] if word.startswith("--config")]
        given = words[words.index("--config") + 1]
        arguments = ["--config", given, *(flag for flag in flags if flag != "--config")]
        run = cli.parse(cli.ConfigParser("test", None), arguments)[1]
        assert issubclass(run.model_class, nnx.Module)
