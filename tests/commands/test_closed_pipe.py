"""Commands whose output is closed, as by `| head`, end without a traceback."""

import contextlib
import os
import runpy
import subprocess
import sys

import pytest

from jaxdist.__main__ import COMMANDS
from jaxdist.config import command_line
from jaxdist.distributed import stop_signals
from jaxdist.trainer import preemption


@contextlib.contextmanager
def closed_pipe():
    """Yields a text stream into a pipe that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w")
    yield stream
    with contextlib.suppress(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize("arguments", [["checkpoint", "list", "."], ["--help"]])
def test_a_process_says_nothing(arguments, tmp_path):
    with closed_pipe() as stream:
        command = [sys.executable, "-m", "jaxdist", *arguments]
        done = subprocess.run(
            command, stdout=stream, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
    # 0: it was written as the command had ended
    assert done.stderr == ""
    assert done.returncode in (0, 141)


# of runpy: it is imported already
@pytest.mark.filterwarnings("ignore:'jaxdist:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_quietly(name, monkeypatch, capsys):
    # no signal handlers here
    monkeypatch.setattr(preemption, "own_process", contextlib.nullcontext)
    monkeypatch.setattr(stop_signals, "leave_at_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with closed_pipe() as stream:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "stdout", stream)
            runpy.run_module(f"jaxdist.{name}", run_name="__main__")
        stream.flush()  # as the interpreter does in the end; it would complain
    assert not ended.value.code
    assert capsys.readouterr().err == ""


def test_a_command_that_writes_on_ends_with_the_code_of_a_sigpipe(monkeypatch):
    def endless() -> int:
        while True:
            print("line", flush=True)

    with closed_pipe() as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert command_line.quiet_pipe(endless) == 141
        print("after the end", flush=True)  # to nowhere


def test_a_result_stands_and_another_pipe_is_an_error(monkeypatch):
    def other_pipe() -> int:
        raise BrokenPipeError("of a worker")

    with closed_pipe() as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert command_line.quiet_pipe(lambda: print("last words") or 75) == 75
    with pytest.raises(BrokenPipeError):
        command_line.quiet_pipe(other_pipe)
