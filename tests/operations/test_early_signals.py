"""Signals to a command that starts or ends, and many of them at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxdist.distributed import stop_signals
from support.paths import ROOT

# Runs a command that gets a signal as it imports a module, and as Python ends.
STARTING = """
import atexit, builtins, os, runpy, signal, sys
name, module, early, late = sys.argv[1:5]
sys.argv[1:] = sys.argv[5:]
load = builtins.__import__

def imported(name, *given, **keywords):
    if name == module and int(early):
        os.kill(os.getpid(), int(early))
    return load(name, *given, **keywords)

if int(late):
    atexit.register(os.kill, os.getpid(), int(late))
builtins.__import__ = imported
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def ended(*arguments: object, program: str = STARTING) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("jaxdist.train", "jax"),
        ("jaxdist.launch", "jaxdist.operations.launch.supervisor"),
    ],
)
def test_a_signal_before_the_imports_ends_a_command_with_75(name, module, number):
    done = ended(name, module, int(number), 0)
    assert done.returncode == 75, done.stderr
    assert done.stdout == "asked to stop: nothing is unsaved\n"
    assert not done.stderr


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1)])
def test_a_signal_at_the_end_of_launch_leaves_its_code(command, code):
    flags = ["--max-restarts", 0, "--", command]
    done = ended("jaxdist.launch", "", 0, int(signal.SIGTERM), *flags)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("jaxdist.train", ["--config", "no_such_config"]),
        ("jaxdist.launch", ["--processes", 0, "--", "true"]),
    ],
)
def test_a_signal_at_the_end_of_a_command_with_a_fault_leaves_78(name, flags):
    """A scheduler would start a command again that ended with 75."""
    done = ended(name, "", 0, int(signal.SIGTERM), *flags)
    assert done.stderr.startswith("error: ")
    assert done.returncode == 78, done.stdout
    assert not done.stdout


ENDING = """
import atexit, os, signal, sys
from jaxdist.config import ConfigError
from jaxdist.trainer import exit_code, preemption

atexit.register(os.kill, os.getpid(), signal.SIGTERM)
how = sys.argv[1]

def main():
    if how == "fault":
        raise ConfigError("of the user")
    return int(how)

if how == "script":
    preemption._keep_exit_codes()
    preemption._listen()
    raise ConfigError("of the user")
with preemption.own_process():
    if how == "error":
        raise ValueError("of the program")
    sys.exit(exit_code.exit_code(main))
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [("fault", 78), ("script", 78), ("error", 1), ("1", 1), ("0", 0)],
)
def test_a_signal_at_the_end_of_a_process_leaves_its_code(how, code):
    done = ended(how, program=ENDING)
    assert done.returncode == code, done.stdout + done.stderr
    assert not done.stdout


RUNNING = """
import os, signal, sys, threading, time
from jaxdist.distributed import stop_signals
stop_signals.leave_at_signals()
from jaxdist.trainer import preemption

def interrupt():
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

with preemption.own_process(), preemption.StopSignals() as stop:
    os.kill(os.getpid(), int(sys.argv[1]))
    assert stop.finish_step(), "the handler of the start was called"
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        time.sleep(60)  # as a save
    finally:
        time.sleep(60)  # as the clean-up after it
"""


def test_ctrl_c_five_times_ends_a_save_in_one_line():
    done = ended(int(signal.SIGTERM), program=RUNNING)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted again: work since the last save is lost\n"


ENDLESS = """
import jax
from jaxdist.distributed import stop_signals

with stop_signals.ended_by_interrupts():
    print("runs", flush=True)
    jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0, 0.0).block_until_ready()
"""


def test_ctrl_c_ends_a_program_that_runs_for_long():
    """Python's own handler of Ctrl-C would wait for the end of the program."""
    child = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "runs\n"
        time.sleep(1)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == -signal.SIGINT
    finally:
        child.kill()
        child.stdout.close()


def test_a_caller_s_own_handler_of_ctrl_c_is_kept():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals.ended_by_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with stop_signals.ended_by_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
