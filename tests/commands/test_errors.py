"""Errors of all commands: lines that begin with `error:`, a code, no traceback."""

import contextlib
import errno
import runpy
import sys

import pytest

from jaxdist import config
from jaxdist.__main__ import COMMANDS
from jaxdist.config import command_line
from jaxdist.distributed import stop_signals
from jaxdist.trainer import preemption

LONG = "x" * 300  # a name that no file can have

# command -> flags with a path of that name
PATHS = {
    "train": ["--config", "quickstart", "--workdir", LONG],
    "plan": ["--config", "quickstart", "--workdir", LONG, "--on", "v5e:2x2"],
    "verify": ["--config", f"{LONG}.py"],
    "launch": ["--", LONG],
    "checkpoint": ["list", LONG],
    "convert": ["--format", "huggingface", "--from", LONG, "--to", LONG],
    "generate": ["--workdir", LONG, "--prompt", "x"],
    "evaluate": ["--workdir", LONG],
    "report": [LONG],
    "runs": [LONG],
    "status": [LONG],
}


# of runpy: a command is imported already
IMPORTED = pytest.mark.filterwarnings("ignore:'jaxdist:RuntimeWarning")


@pytest.fixture
def ended(monkeypatch, tmp_path, capsys):
    """Returns a function that runs a command: its code, and its lines of errors."""
    monkeypatch.setattr(preemption, "own_process", contextlib.nullcontext)
    monkeypatch.setattr(stop_signals, "leave_at_signals", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(name: str, flags: list[str]) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"jaxdist.{name}", run_name="__main__")
        lines = capsys.readouterr().err.splitlines()
        # what the agent does is no error
        lines = [line for line in lines if not line.startswith("launch: ")]
        return ended.value.code, lines

    return run


def of_errors(lines: list[str]) -> bool:
    return bool(lines) and all(line.startswith("error: ") for line in lines)


@IMPORTED
@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_is_none_is_an_error(name, ended):
    code, lines = ended(name, ["--no-such-flag"])
    assert code == 78
    assert of_errors(lines), lines


@IMPORTED
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"doctor"}))
def test_a_name_that_no_file_can_have_is_an_error(name, ended, tmp_path):
    code, lines = ended(name, PATHS[name])
    assert code == 78
    assert of_errors(lines), lines
    assert LONG[:100] in " ".join(lines)
    assert not list(tmp_path.iterdir())


@IMPORTED
def test_a_page_that_cannot_be_written_is_an_error(ended, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "file").touch()
    code, lines = ended("report", [".", "--out", "file/page.html"])
    assert code == 1
    assert of_errors(lines), lines
    assert ended("report", [".", "--out", LONG])[0] == 78


@IMPORTED
def test_a_command_that_is_none_is_an_error(ended):
    code, lines = ended("__main__", ["no-such-command"])
    assert code == 78
    assert lines[0].startswith("error: jaxdist no-such-command: no such command")


def test_every_fault_has_its_line(capsys):
    command_line.print_faults(config.ConfigError(["one", "two"]))
    command_line.print_faults(OSError(errno.ENOSPC, "full"))
    assert of_errors(capsys.readouterr().err.splitlines())


def test_a_ctrl_c_is_no_traceback(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert command_line.quiet_pipe(interrupted) == 130
    assert not capsys.readouterr().err
