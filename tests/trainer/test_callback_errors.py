"""Two processes train, and a method of a callback raises on one of them. The run ends on
both; what it saved before is whole, and it resumes.
"""

import inspect
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxdist.checkpoint import integrity
from jaxdist.checkpoint.folders import list_steps
from jaxdist.config import EXIT_CONFIG, EXIT_PEER_LOST
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer.callbacks import Callback
from support.launches import events, same_bits
from support.paths import SUPPORT
from support.runs import command, every_loss, final_arrays, losses, start_group

STEPS = 12
SETTINGS = {
    "train__steps": STEPS,
    "train__eval_every": 3,
    "data__validation_tokens": 512,
    "checkpoint__every_steps": 4,
    "checkpoint__keep_last": 9,
    "mesh__fsdp": 2,
    # a step that compiles in half of the time
    "model__dropout": 0.0,
    "optimizer__name": "adamw",
}
LIMIT_S = 300  # of a hang; a lost process is missed after 60
# of a process whose peer has failed: ours, or jax's where the coordinator has gone
NOT_AT_FAULT = {EXIT_PEER_LOST, -signal.SIGABRT}

# before the first step: an error is raised on both processes
AT_START = ("__enter__", "on_check", "on_open", "on_start", "on_progress", "load")
# while it trains, from step 6 on
IN_LOOP = (
    "on_phase",
    "on_step",
    "on_step paused",
    "on_record",
    "on_row",
    "on_evaluate",
    "on_save",
    "on_fault",
    "state",
)
AT_END = ("on_end", "__exit__")


class Ended(NamedTuple):
    """What two processes have ended with."""

    codes: list[int]
    output: list[str]


def run(workdir: Path, monkeypatch, method: str, process: str, kind: str = "") -> Ended:
    """Trains in two processes, one of which fails in a method; "": none does."""
    monkeypatch.setenv("FAILING_METHOD", method)
    monkeypatch.setenv("FAILING_PROCESS", process)
    monkeypatch.setenv("FAILING_KIND", kind)
    arguments = command(workdir, **SETTINGS)
    arguments[1:3] = [str(SUPPORT / "failing_train.py")]
    began = time.monotonic()
    group = start_group(arguments, 2, 1, stderr=subprocess.STDOUT)
    try:
        output = [process.communicate(timeout=LIMIT_S)[0] for process in group]
    finally:
        for member in group:
            member.kill()
    codes = [member.returncode for member in group]
    seconds = time.monotonic() - began
    print(f"{method or 'no method'} on {process}: {codes}, {seconds:.0f} s")
    return Ended(codes, output)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def straight(tmp_path_factory, monkeypatch_module) -> Path:
    """A run in which nothing fails."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    ended = run(workdir, monkeypatch_module, "", "")
    assert ended.codes == [0, 0], ended.output
    assert list_steps(workdir / "checkpoints")[-1] == STEPS
    return workdir


@pytest.fixture(scope="module")
def half(tmp_path_factory, monkeypatch_module) -> tuple[Path, Ended]:
    """A run that has ended half way, as `on_step` failed on process 1."""
    workdir = tmp_path_factory.mktemp("half") / "run"
    return workdir, run(workdir, monkeypatch_module, "on_step", "1")


def check_codes(ended: Ended, method: str, number: int, code: int = 1) -> None:
    """Asserts that it failed where it should, and how both processes ended."""
    failed, other = ended.output[number], ended.output[1 - number]
    assert f"process {number} is in {method}" in failed, ended.output
    assert "fault on order" in failed or "refuses on order" in failed, failed
    assert ended.codes[number] == code, ended.output
    assert "on order" not in other or f"process {number}: " in other, other
    if code == EXIT_CONFIG and method in AT_START:
        assert ended.codes[1 - number] == code, ended.output
    else:
        assert ended.codes[1 - number] in NOT_AT_FAULT, ended.output


def check_saved(workdir: Path) -> list[int]:
    """Asserts that what the run has saved is whole; returns the steps."""
    steps = list_steps(workdir / "checkpoints")
    saved = {event["step"] for event in events(workdir, "save") if event["ok"]}
    assert saved <= set(steps)
    for step in saved:
        integrity.check(workdir / "checkpoints", step)
    return steps


def check_resumes(workdir: Path, straight: Path, monkeypatch) -> None:
    """Asserts that the run resumes, and comes to what the one without faults has."""
    saved = check_saved(workdir)
    ended = run(workdir, monkeypatch, "", "")
    assert ended.codes == [0, 0], ended.output
    if saved and saved[-1] < STEPS:
        assert f"resumed after step {saved[-1]}" in ended.output[0], ended.output
    assert losses(workdir) == losses(straight)
    assert len(losses(workdir)) == STEPS
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    finals = [final_arrays(folder, STEPS) for folder in (workdir, straight)]
    assert same_bits(*finals)
    assert read_events(workdir)[-1]["event"] in ("stop", "save")


def test_every_method_of_a_callback_is_tried():
    methods = {name for name, x in vars(Callback).items() if inspect.isfunction(x)}
    tried = {name.split()[0] for name in (*AT_START, *IN_LOOP, *AT_END)}
    assert tried == methods


@pytest.mark.slow
def test_an_error_of_one_process_in_a_step_ends_both_and_what_is_saved_is_whole(half):
    """The tests below resume what this run has left."""
    workdir, ended = half
    check_codes(ended, "on_step", 1)
    assert check_saved(workdir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "number", "kind"),
    [
        (method, number, kind)
        for method in AT_START
        for number in (0, 1)
        for kind in ("", "config")
        if kind == "" or method in ("on_start", "load")
    ],
)
def test_an_error_of_one_process_at_the_start_is_raised_on_both(
    straight, half, tmp_path, monkeypatch, method, number, kind
):
    """The run had been half way; what it has saved stays, and it resumes."""
    workdir = tmp_path / "run"
    shutil.copytree(half[0], workdir)
    saved = check_saved(workdir)
    assert saved
    ended = run(workdir, monkeypatch, method, str(number), kind)
    check_codes(ended, method, number, EXIT_CONFIG if kind else 1)
    # the other says whose error it is; but jax ends it where the coordinator goes first
    if ended.codes[1 - number] != -signal.SIGABRT:
        assert f"error: process {number}: " in ended.output[1 - number], ended.output
    assert check_saved(workdir) == saved
    check_resumes(workdir, straight, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("method", [*IN_LOOP, *AT_END])
def test_an_error_of_one_process_ends_both_and_the_run_resumes(
    straight, tmp_path, monkeypatch, method, number
):
    workdir = tmp_path / "run"
    ended = run(workdir, monkeypatch, method, str(number))
    check_codes(ended, method, number)
    if method in AT_END:
        assert check_saved(workdir)[-1] == STEPS
    elif method != "state":  # which fails in the second save, maybe amid the first
        assert check_saved(workdir)
    check_resumes(workdir, straight, monkeypatch)
