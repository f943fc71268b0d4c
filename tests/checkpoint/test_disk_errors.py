"""Disks that fail (EIO, EDQUOT) or stall at a file of a run: exit codes, what is said,
what is left.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxdist.checkpoint import folders, integrity
from jaxdist.telemetry.metrics import read_events, read_rows
from support import disk_faults
from support.disk_faults import Fault, Faults
from support.paths import ROOT
from support.runs import command, environment, start_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not disk_faults.available, reason="needs gcc"),
]

SETTINGS = {
    "train__steps": 4,
    "optimizer__schedule": "constant",
    "train__sample_tokens": 0,
}
SETTINGS |= {
    "checkpoint__every_steps": 2,
    "model__num_layers": 1,
    "optimizer__warmup_steps": 0,
}
QUICK = " --xla_backend_optimization_level=0"  # compiles in a sixth of the time
EIO, EDQUOT = "Input/output error", "Disk quota exceeded"


class Case(NamedTuple):
    fault: Fault
    code: int = 0
    said: tuple[str, ...] = ()
    steps: tuple[int, ...] = (2, 4)


def last_save(calls: str, files: str, error: str = "EIO") -> Case:
    text = EDQUOT if error == "EDQUOT" else EIO
    words = (
        "the last checkpoint could not be written",
        "resumes at step 2, steps 3-4 are lost",
        text,
    )
    return Case(
        Fault(calls, f"*/checkpoints/{files}", error),
        1,
        (*words, "/checkpoints/4"),
        (2,),
    )


def at_start(calls: str, files: str, path: str, error: str = "EIO") -> Case:
    return Case(
        Fault(calls, files, error), 78, (path, EDQUOT if error == "EDQUOT" else EIO), ()
    )


CHANGES = ("open", "write", "fsync", "rename")
UNWRITTEN = "/run/metrics.jsonl: cannot be written"
CASES = {
    **{
        f"arrays: {calls}": last_save(calls, "4*state*") for calls in (*CHANGES, "make")
    },
    "arrays: quota": last_save("write", "4*state*", "EDQUOT"),
    "metadata: write": last_save("write", "4*metadata*"),
    **{
        f"manifest: {calls}": last_save(calls, "4/*manifest.json*") for calls in CHANGES
    },
    "manifest: quota": last_save("write", "4/*manifest.json*", "EDQUOT"),
    "folder of the manifest: fsync": last_save("fsync", "4"),
    "mark of a save: open": last_save("open", "4.unfinished"),
    "mark of a save: remove": Case(Fault("remove", "*/checkpoints/4.unfinished")),
    "an earlier save": Case(
        Fault("write", "*/checkpoints/2*state*"),
        0,
        ("checkpoint 2 failed", EIO, "/checkpoints/2"),
        (4,),
    ),
    "metrics.jsonl: open": at_start(
        "open", "*/run/metrics.jsonl", "/run/metrics.jsonl"
    ),
    "metrics.jsonl: write": Case(
        Fault("write", "*/run/metrics.jsonl", first=2),
        0,
        (UNWRITTEN, EIO, "last 3 lines are lost"),
    ),
    "metrics.jsonl: write, for a while": Case(
        Fault("write", "*/run/metrics.jsonl", "EDQUOT", 2, 3), 0, (UNWRITTEN, EDQUOT)
    ),
    "events.jsonl: open": at_start("open", "*/run/events.jsonl", "/run/events.jsonl"),
    "events.jsonl: write": Case(
        Fault("write", "*/run/events.jsonl"),
        0,
        ("/run/events.jsonl: cannot be written", EIO, "are lost"),
    ),
    **{
        f"{name}: {calls}": at_start(calls, f"*/run/*{name}*", f"/run/{name}", error)
        for name in ("config.json", "run.json")
        for calls, error in (("open", "EIO"), ("write", "EDQUOT"), ("rename", "EIO"))
    },
    **{
        f"token cache: {calls}": at_start(calls, "*/cache/*tokens-*", "/cache", error)
        for calls, error in (
            ("open", "EIO"),
            ("write", "EDQUOT"),
            ("rename", "EIO"),
            ("make", "EDQUOT"),
        )
    },
    "lock of the workdir: open": at_start("open", "*/run/.lock", "/run"),
    "folder of checkpoints: make": at_start(
        "make", "*/run/checkpoints", "/run/checkpoints", "EDQUOT"
    ),
    "identity: write": at_start(
        "write", "*/checkpoints/*identity*", "/run/checkpoints"
    ),
    "report.html: write": Case(
        Fault("write", "*/run/*report.html*"), 0, ("no report: ", EIO)
    ),
}


class Runs:
    """A process that makes runs one after the other, with faults on order."""

    def __init__(self, faults: Faults):
        self.faults = faults
        script = [sys.executable, "-m", "support.faulty_disk_runs"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        variables = environment(1) | faults.environment() | {"PYTHONPATH": paths}
        variables["XLA_FLAGS"] += QUICK
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self._process = subprocess.Popen(
            script, env=variables, stdin=-1, stdout=-1, text=True
        )

    def train(self, workdir: Path, *faults: Fault, **settings) -> tuple[int, str]:
        """Returns the exit code of a run and what it printed."""
        arguments = command(workdir, **SETTINGS | settings)
        arguments = arguments[arguments.index("jaxdist.train") + 1 :]
        orders = "\n".join(fault.text() for fault in faults)
        print(json.dumps([orders, arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(name="faults", scope="module")
def faults_fixture(tmp_path_factory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(name="runs", scope="module")
def runs_fixture(faults) -> Iterator[Runs]:
    with contextlib.closing(Runs(faults)) as runs:
        yield runs


@pytest.fixture(name="undisturbed", scope="module")
def undisturbed_fixture(runs, tmp_path_factory) -> dict[str, str]:
    """Returns the fingerprints of the last step of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert runs.train(folder)[0] == 0
    return integrity.read_manifest(folder / "checkpoints" / "4").fingerprints


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_fails_is_said_and_the_older_step_stays(
    runs, tmp_path, undisturbed, name
):
    case, workdir = CASES[name], tmp_path / "run"
    settings = (
        {"data__cache_dir": tmp_path / "cache"} if "/cache/" in case.fault.files else {}
    )
    runs.faults.log.unlink(missing_ok=True)
    code, said = runs.train(workdir, case.fault, **settings)
    print(f"{name}: {code}\n{said}")
    assert runs.faults.met(), "the run made no such call"
    assert code == case.code
    assert "Traceback" not in said
    assert all(words in said for words in case.said)
    assert folders.list_steps(workdir / "checkpoints") == list(case.steps)

    if not case.steps:  # the next start is the first
        return
    code, said = runs.train(workdir, **settings)
    assert code == 0, said
    again = integrity.check(workdir / "checkpoints", 4)
    assert len(again.fingerprints) > 20
    assert again.fingerprints == undisturbed
    if "for a while" in name:  # none is missing
        assert [row["step"] for row in read_rows(workdir).train] == list(range(1, 5))


# ---- a file system that stalls


LONG = {"train__steps": 100_000, "checkpoint__every_steps": 200, "train__log_every": 20}
SOON = {"checkpoint__patience_s": 0.5, "checkpoint__timeout_s": 25}


def until(
    process: subprocess.Popen, holds: Callable[[], bool], seconds: float = 400
) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.2)


def saves(workdir: Path) -> list[bool]:
    return [e["ok"] for e in read_events(workdir) if e["event"] == "save"]


def last_row(workdir: Path) -> int:
    rows = read_rows(workdir).train
    return rows[-1]["step"] if rows else 0


def start(workdir: Path, faults: Faults, files: str, **settings) -> subprocess.Popen:
    variables = environment(1) | faults.environment(Fault("*", files, error=""))
    run = command(workdir, **SETTINGS | LONG | SOON | settings)
    with said_file(workdir).open("w") as said:
        return subprocess.Popen(run, env=variables, stdout=said, stderr=said)


def said_file(workdir: Path) -> Path:
    return workdir.with_name("said")


@pytest.mark.parametrize("then", ["it returns", "SIGTERM", "the end"])
def test_a_folder_of_checkpoints_that_stalls_does_not_hold_the_run(
    faults, tmp_path, then
):
    workdir, disk = tmp_path / "run", tmp_path / "disk"
    settings = {
        "checkpoint__folder": disk,
        "train__steps": 1000 if then == "the end" else 100_000,
    }
    process = start(workdir, faults, f"{disk}*", **settings)
    try:
        until(process, lambda: True in saves(workdir))
        faults.stall.touch()
        step = last_row(workdir)
        if then == "the end":
            until(process, lambda: last_row(workdir) == 1000)
        else:
            until(
                process,
                lambda: last_row(workdir) >= step + 40 and False in saves(workdir),
            )
        if then == "it returns":
            faults.stall.unlink()
            known = len(saves(workdir))
            until(process, lambda: True in saves(workdir)[known:])
        began = time.monotonic()
        if then != "the end":
            process.send_signal(signal.SIGTERM)
        process.wait(200)
        seconds = time.monotonic() - began
    finally:
        faults.stall.unlink(missing_ok=True)
        process.kill()
    said = said_file(workdir).read_text()
    assert faults.met(), said
    assert "Traceback" not in said
    print(f"{then}: exit code {process.returncode} after {seconds:.1f} s")
    if then == "it returns":
        assert process.returncode == 75, said
        assert folders.all_steps(disk) == folders.list_steps(disk)
        assert len(folders.list_steps(disk)) > 1
    else:
        assert process.returncode == 1, said
        assert seconds < 25 + 10 + 10 + 30, said
        for words in (str(disk), "are lost", "has taken"):
            assert words in said
        assert folders.list_steps(disk)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_workdir_that_stalls_ends_the_run_with_76(faults, tmp_path, processes):
    workdir = tmp_path / "run"
    limits = {"watchdog__step_s": 10, "watchdog__data_s": 10, "mesh__fsdp": 1}
    run = command(workdir, **SETTINGS | LONG | limits | {"checkpoint__every_steps": 0})
    variables = faults.environment(Fault("*", f"{workdir}*", error=""))
    group = start_group(
        ["env", *(f"{k}={v}" for k, v in variables.items()), *run],
        processes,
        1,
        stderr=-2,
    )
    try:
        until(group[0], lambda: last_row(workdir) >= 20)
        faults.stall.touch()
        began = time.monotonic()
        said = [process.communicate(timeout=200)[0] for process in group]
        seconds = time.monotonic() - began
    finally:
        faults.stall.unlink(missing_ok=True)
        for process in group:
            process.kill()
    print(f"{processes} processes: {seconds:.1f} s")
    codes = [process.returncode for process in group]
    # Without the workdir neither hears of the other: the first to end is lost to the
    # second.
    assert 76 in codes, said
    assert set(codes) <= {76, 70}, said
    assert not any("Traceback" in text for text in said), said
    assert any("hang: process 0" in text for text in said), said
