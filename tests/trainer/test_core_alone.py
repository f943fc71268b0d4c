"""A program with the core alone trains, saves and resumes (support/core_alone.py)."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist.checkpoint.folders import list_steps
from jaxdist.telemetry.metrics import read_events
from support.launches import same_bits
from support.paths import SUPPORT
from support.runs import environment, every_loss, final_arrays, last_step, losses

PROGRAM = SUPPORT / "core_alone.py"
STEPS = 40
WINGS = {
    "operations",
    "planner",
    "verification",
    "interop",
    "evaluation",
    "inference",
}


def start(workdir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(workdir)],
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(workdir: Path) -> str:
    """Runs the program to its end; returns what it printed."""
    program = start(workdir)
    output = program.communicate(timeout=300)[0]
    assert program.returncode == 0, output
    return output


def kill_half_way(workdir: Path) -> None:
    program = start(workdir)
    while program.poll() is None and last_step(workdir) < STEPS // 2:
        time.sleep(0.005)
    assert program.poll() is None, "it ended before it could be killed"
    program.send_signal(signal.SIGKILL)
    program.communicate()
    assert program.returncode == -signal.SIGKILL


def test_the_program_imports_no_wing_itself():
    text = PROGRAM.read_text()
    assert "jaxdist.trainer" in text
    assert not any(f"jaxdist.{wing}" in text for wing in WINGS | {"library"})


def check_resumes(killed: Path) -> str:
    """Kills a run, resumes it, and compares the steps done twice.

    Returns what it printed.
    """
    kill_half_way(killed)
    saved = list_steps(killed / "checkpoints")
    assert saved
    assert saved[-1] < STEPS
    output = finish(killed)
    assert "resumed after step" in output
    assert any(event["event"] == "restore" for event in read_events(killed))
    found = every_loss(killed)
    assert list(found) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in found.values())
    return output


def test_the_core_alone_trains_saves_and_resumes(tmp_path):
    output = check_resumes(tmp_path / "killed")
    (line,) = [x for x in output.splitlines() if x.startswith("loaded: ")]
    loaded = set(line.split()[1:])
    assert {"trainer", "step", "checkpoint"} <= loaded
    assert not loaded & WINGS


@pytest.mark.slow
def test_the_core_alone_resumes_bitwise(tmp_path):
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    finish(straight)
    check_resumes(killed)
    assert losses(killed) == losses(straight)
    assert len(losses(straight)) == STEPS
    assert same_bits(final_arrays(killed, STEPS), final_arrays(straight, STEPS))
