"""Configs that lie in run folders: no code is executed because they name it; they are
configs themselves.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

import jaxdist
from jaxdist import convert, evaluate, generate, plan, train
from jaxdist.config import ConfigError, schema
from jaxdist.models import registry
from jaxdist.storage import run_format
from jaxdist.trainer import cli, exit_code, run_config, workdir
from support.paths import ROOT

CODE = """from pathlib import Path
from flax import nnx
Path(__file__).with_suffix(".executed").touch()
class Model(nnx.Module):
    def __init__(self, width: int = 4, *, rngs):
        self.weight = nnx.Param(rngs.params.normal((width,)))
    def loss(self, batch, key):
        return (self.weight[...] ** 2).mean()
"""


@pytest.fixture(name="code")
def code_fixture(tmp_path, request):
    """Returns a function that writes a model's file; it is forgotten at the end."""
    modules, path = set(sys.modules), list(sys.path)

    def write(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CODE)
        return file

    yield write
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
    sys.path[:] = path


def folder_with(folder, target, **model):
    """Returns a run's folder that names the target, without checkpoints."""
    config = run_config.default_config().to_dict() | {
        "model": {"target": target, **model}
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(run_format.marked(config)))
    return folder


def executed(file):
    return file.with_suffix(".executed").exists()


def code_and_error(capsys, main, *arguments):
    capsys.readouterr()
    code = exit_code.exit_code(lambda: main([str(argument) for argument in arguments]))
    return code, capsys.readouterr().err


COMMANDS = {
    "generate": (generate.main, ["--workdir", "RUN", "--prompt", "x"]),
    "evaluate": (evaluate.main, ["--workdir", "RUN"]),
    "train": (
        train.main,
        [
            "--config",
            "quickstart",
            "--workdir",
            "RUN",
            "--config.init.from_huggingface=x",
        ],
    ),
    "train, its config": (
        train.main,
        ["--config", "RUN/config.json", "--workdir", "OTHER"],
    ),
    "plan, its config": (plan.main, ["--config", "RUN/config.json", "--on", "cpu:1"]),
}


def words(name, run):
    main, arguments = COMMANDS[name]
    return main, [
        w.replace("RUN", str(run)).replace("OTHER", f"{run}_other") for w in arguments
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_executes_what_a_folder_names(
    name, code, tmp_path, capsys, monkeypatch
):
    file = code(tmp_path / "there" / "foreign_model.py")
    for target in (f"{file}:Model", "foreign_model:Model"):
        monkeypatch.syspath_prepend(file.parent)
        main, arguments = words(name, folder_with(tmp_path / "run", target))
        exit_code, error = code_and_error(capsys, main, *arguments)
        assert exit_code == 78
        assert not executed(file)
        assert f"--config.model.target={target!r}, or --trust-code" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--trust-code", "--config.model.target=TARGET"])
@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_a_user_who_trusts_it_says_so(name, flag, code, tmp_path, capsys):
    file = code(tmp_path / "there" / "my_model.py")
    main, arguments = words(name, folder_with(tmp_path / "run", f"{file}:Model"))
    # another spelling of the same
    flag = flag.replace("TARGET", f"{os.path.relpath(file)}:Model")
    # as there are no checkpoints
    assert code_and_error(capsys, main, *arguments, flag)[0] == 77
    assert executed(file)


def test_trust_is_in_the_target_that_was_named_alone(code, tmp_path, capsys):
    file, other = (
        code(tmp_path / "there" / "a_model.py"),
        code(tmp_path / "there" / "b_model.py"),
    )
    main, arguments = words("generate", folder_with(tmp_path / "run", f"{file}:Model"))
    exit_code, error = code_and_error(
        capsys, main, *arguments, f"--config.model.target={other}:Model"
    )
    assert exit_code == 78
    assert not executed(file)
    assert not executed(other)
    assert f"(here: '{other}:Model')" in error


def test_a_logger_that_a_folder_names_is_code_like_a_model(code, tmp_path):
    file = code(tmp_path / "there" / "foreign_logger.py")
    stored = run_config.default_config()
    stored.train.loggers = (f"{file}:Model", "tensorboard")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(
        json.dumps(run_format.marked(json.loads(stored.to_json())))
    )

    def parsed(parser, *flags):
        found = cli.parse(parser, ["--config", f"{run}/config.json", *flags])[
            1
        ].train.loggers
        assert not executed(file), "the command does so as the run begins"
        return found

    def parsed_by_train(*flags):
        return parsed(train._parser(), "--workdir", str(tmp_path / "other"), *flags)

    with pytest.raises(ConfigError, match="--config.train.loggers=.*, or --trust-code"):
        parsed_by_train()
    with pytest.raises(ConfigError, match="--config.train.loggers=.*, or --trust-code"):
        parsed(train._parser(), "--workdir", str(run))
    assert parsed_by_train("--trust-code") == (f"{file}:Model", "tensorboard")
    assert parsed_by_train(f"--config.train.loggers={file}:Model") == (f"{file}:Model",)
    assert parsed_by_train("--config.train.loggers=tensorboard") == ("tensorboard",)
    assert len(parsed(plan._parser(), "--on", "cpu:1")) == 2, "plan makes no logger"
    inside = code(run / "logger_in_run.py")
    with pytest.raises(ConfigError, match="is in the run's folder"):
        parsed(
            train._parser(),
            "--workdir",
            str(run),
            f"--config.train.loggers={inside}:Model",
        )
    workdir.read_config(run)  # to compare with, or to generate text: no logger is made


TRUSTING_FLAGS = pytest.mark.parametrize(
    "flag", ["--trust-code", "--config.model.target=TARGET"]
)
NAMES_OF_A_FILE = pytest.mark.parametrize(
    ("directory", "target"),
    [
        pytest.param("run", "{file}:Model", id="path"),
        pytest.param("run/inside", "model_in_run:Model", id="module"),
        pytest.param("run", "inside.model_in_run:Model", id="module of a package"),
    ],
)


@pytest.fixture
def assert_refused(tmp_path, capsys):
    """Returns a function: runs a command that must execute no model's file."""

    def check(main, arguments):
        exit_code, error = code_and_error(capsys, main, *arguments)
        assert exit_code == 78
        assert "never executed; copy it elsewhere" in error
        assert not list(tmp_path.rglob("*.executed"))

    return check


@TRUSTING_FLAGS
@NAMES_OF_A_FILE
def test_a_file_below_the_run_never_runs(
    directory, target, flag, code, tmp_path, monkeypatch, assert_refused
):
    file = code(tmp_path / "run" / "inside" / "model_in_run.py")
    target = target.format(file=file)
    monkeypatch.chdir(tmp_path / directory)
    main, arguments = words("generate", folder_with(tmp_path / "run", target))
    assert_refused(main, [*arguments, flag.replace("TARGET", target)])


@NAMES_OF_A_FILE
def test_training_in_a_folder_never_runs_a_file_below_it(
    directory, target, code, tmp_path, monkeypatch, assert_refused
):
    file = code(tmp_path / "run" / "inside" / "model_in_run.py")
    target = target.format(file=file)
    monkeypatch.chdir(tmp_path / directory)
    run = folder_with(tmp_path / "run", target)
    named = f"--config.model.target={target}"
    arguments = ["--config", "vit_digits", named, "--workdir", run]
    assert_refused(train.main, arguments)


def link_to_the_file(file, run):
    outside = run.parent / "outside.py"
    outside.symlink_to(file)
    return run, f"{outside}:Model"


def link_from_the_run(file, run):
    elsewhere = run.parent / "elsewhere.py"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    return run, f"{file}:Model"


def link_to_the_run(file, run):
    alias = run.parent / "alias"
    alias.symlink_to(run)
    return alias, f"{file}:Model"


@TRUSTING_FLAGS
@pytest.mark.parametrize(
    "make_link", [link_to_the_file, link_from_the_run, link_to_the_run]
)
def test_a_link_does_not_hide_that_a_file_lies_below_the_run(
    make_link, flag, code, tmp_path, assert_refused
):
    file = code(tmp_path / "run" / "model_in_run.py")
    folder, target = make_link(file, tmp_path / "run")
    main, arguments = words("generate", folder_with(folder, target))
    assert_refused(main, [*arguments, flag.replace("TARGET", target)])


@pytest.mark.parametrize("how", ["named", "in a config.json"])
def test_a_file_below_the_run_to_begin_with_never_runs(how, code, tmp_path, capsys):
    """Of the folder that init.from_run names no file is executed, whatever the
    flags.
    """
    file = code(tmp_path / "source" / "foreign_model.py")
    source, target = folder_with(tmp_path / "source", f"{file}:Model"), f"{file}:Model"
    words = ["--config", "quickstart", f"--config.init.from_run={source}"]
    if how == "in a config.json":
        copy = folder_with(tmp_path / "copy", target)
        stored = json.loads((copy / "config.json").read_text())
        stored["init"]["from_run"] = str(source)
        (copy / "config.json").write_text(json.dumps(run_format.marked(stored)))
        words = ["--config", copy / "config.json"]
    words += [
        f"--config.model.target={target}",
        "--trust-code",
        "--workdir",
        tmp_path / "new",
    ]
    exit_code, error = code_and_error(capsys, train.main, *words)
    assert exit_code == 78
    assert not executed(file)
    assert f"is in the run's folder {source}, whose files are never executed" in error


def test_convert_refuses_before_it_loads_anything(code, tmp_path, capsys):
    file = code(tmp_path / "there" / "converted_model.py")
    run = folder_with(tmp_path / "run", f"{file}:Model")
    arguments = ["--from", run, "--to", tmp_path / "out", "--format", "huggingface"]
    exit_code, error = code_and_error(capsys, convert.main, *arguments)
    assert exit_code == 78
    assert not executed(file)
    assert not (tmp_path / "out").exists()
    assert f"model.target='{file}:Model': required {registry.DEFAULT_TARGET}" in error


def test_a_library_call_trusts_what_is_imported(code, tmp_path):
    file = code(tmp_path / "there" / "imported_model.py")
    run, target = folder_with(tmp_path / "run", f"{file}:Model"), f"{file}:Model"
    with pytest.raises(ConfigError, match="not executed unasked"):
        jaxdist.load_run(run)
    assert not executed(file)
    assert workdir.read_config(run, trust_code=True).model["width"] == 4
    assert executed(file)
    assert workdir.read_config(run, trust_code=None).model["target"] == target
    # a command wants to be told
    with pytest.raises(ConfigError, match="not executed unasked"):
        workdir.read_config(run)


def test_a_resumed_run_with_another_model_says_so(code, tmp_path):
    file = code(tmp_path / "there" / "before_model.py")
    run = folder_with(tmp_path / "run", f"{file}:Model")
    with pytest.raises(
        ConfigError,
        match=r"run has model.target='.*' \(here: 'jaxdist.models.transformer",
    ):
        workdir.check_and_write_config(
            run, run_config.from_config(run_config.default_config())
        )
    assert not executed(file)


@pytest.mark.parametrize(
    "command", [["report"], ["checkpoint", "list"], ["checkpoint", "verify"]]
)
def test_other_commands_import_nothing(command, code, tmp_path):
    file = code(tmp_path / "there" / "unread_model.py")
    run = folder_with(tmp_path / "run", f"{file}:Model")
    subprocess.run(
        [sys.executable, "-m", "jaxdist", *command, str(run)],
        cwd=ROOT,
        capture_output=True,
    )
    assert not executed(file)


def test_the_console_script_looks_here_for_a_model_alone(tmp_path):
    """A file in the current folder, such as a downloaded run, stands in no module's
    place.
    """
    (tmp_path / "colorsys.py").write_text(
        "import pathlib\npathlib.Path('executed').touch()\n"
    )
    script = "import sys; sys.argv[0:] = ['jaxdist', 'report', 'none']; from jaxdist.__main__ import main\n"
    script += (
        "import atexit\ndef look():\n import colorsys\natexit.register(look)\nmain()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", script]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "target",
    [
        3,
        ["a"],
        "",
        ":",
        "a:",
        ".:Model",
        "..x:Model",
        "a b:Model",
        "a\0.py:Model",
        ".x:Model",
        "x.py:A b",
    ],
)
def test_a_target_of_another_shape_is_one_line(target, tmp_path):
    with pytest.raises(ConfigError, match="model.target") as raised:
        workdir.read_config(folder_with(tmp_path / "run", target), trust_code=True)
    assert len(raised.value.faults) == 1


# --- as a config ----------------------------------------------------------------------


def parsed(*arguments):
    return cli.parse(train._parser(), [str(argument) for argument in arguments])


def test_a_run_s_config_is_a_config(tmp_path):
    values = run_config.default_config()
    values.train.steps, values.optimizer.groups = 7, ()
    run = run_config.from_config(values)
    (tmp_path / "config.json").write_text(
        json.dumps(run_format.marked(schema.to_config_dict(run).to_dict()))
    )
    assert parsed("--config", tmp_path / "config.json")[1] == run
    assert (
        parsed("--config", tmp_path / "config.json", "--config.train.steps=9")[
            1
        ].train.steps
        == 9
    )
    stored = workdir.read_stored(tmp_path / "config.json") | {"train": {"step": 3}}
    shutil.copy(tmp_path / "config.json", tmp_path / "other.json")
    (tmp_path / "config.json").write_text(json.dumps(run_format.marked(stored)))
    with pytest.raises(
        ConfigError, match="train.step: no such field. Did you mean train.steps"
    ):
        parsed("--config", tmp_path / "config.json")
    with pytest.raises(ConfigError, match="takes no argument"):
        parsed("--config", f"{tmp_path}/other.json:tiny")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("run", r"is a folder; give its config.json"),
        ("empty", r"is a folder; give a \.py or \.json file"),
        ("run/metrics.jsonl", r"must be a \.py or \.json file"),
        ("run/none.json", "no such file"),
    ],
)
def test_what_is_no_config_is_one_line(name, fault, tmp_path):
    folder_with(tmp_path / "run", registry.DEFAULT_TARGET)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=fault):
        parsed("--config", tmp_path / name)


def test_a_run_s_config_means_that_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.workdir_of(parsed_flags("runs/mine/config.json")) == workdir.Path(
        "runs/mine"
    )


def parsed_flags(config):
    return train._parser().parse_args(["--config", config])
