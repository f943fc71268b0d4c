"""Runs under `launch` for tests: started, watched, killed; what they were fed, and what
they leave.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxdist.data.dataset import Dataset
from jaxdist.operations.ledger import run_lives as ledgers
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer.health import SkippingDataset
from support.paths import SUPPORT
from support.runs import command, environment, final_arrays

RECORDED = SUPPORT / "faulty_train.py"  # jaxdist.train with a ledger

STEPS = 50
SETTINGS = {
    "train__steps": STEPS,
    "optimizer__name": "adamw",
    "checkpoint__every_steps": 5,
    "mesh__fsdp": 2,
    "train__sample_tokens": 0,
    "optimizer__learning_rate": 1e-3,
}


def start(
    workdir: Path,
    *flags: str,
    devices: int = 2,
    recorded: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **changes,
) -> subprocess.Popen:
    """Starts the agent of a run.

    Args:
      recorded: variables of `faulty_train.py`, which then trains; its ledger is beside
        the workdir.
      prefix: a command that runs the agent's.
    """
    own = [
        *prefix,
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--devices-per-process",
        str(devices),
        *flags,
        "--",
    ]
    train, variables = command(workdir, **(SETTINGS | changes)), environment(1)
    if recorded is not None:
        ledger_folder(workdir).mkdir(exist_ok=True)
        train[1:3] = [str(RECORDED)]
        variables |= {"FAULTY_LEDGER": str(ledger_folder(workdir)), **recorded}
    # a pipe that nobody reads would fill up
    output = open(workdir.parent / f"{workdir.name}.log", "a")
    return subprocess.Popen([*own, *train], env=variables, stdout=output, stderr=output)


def output(workdir: Path) -> str:
    return (workdir.parent / f"{workdir.name}.log").read_text()


@contextlib.contextmanager
def launched(workdir: Path, *flags: str, **changes) -> Iterator[subprocess.Popen]:
    """Yields the agent of a run, and ends it."""
    with ended(start(workdir, *flags, **changes)) as agent:
        yield agent


@contextlib.contextmanager
def ended(agent: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Ends the agent in the end, with all that it started."""
    try:
        yield agent
    finally:
        agent.terminate()
        try:
            agent.wait(60)
        except subprocess.TimeoutExpired:
            agent.kill()


def finish(agent: subprocess.Popen, workdir: Path, code: int = 0) -> None:
    assert agent.wait(300) == code, output(workdir)[-4000:]


def wait_for_step(
    agent: subprocess.Popen, workdir: Path, step: int, since: int = 0
) -> None:
    """Waits until the metrics show the step, after `since` bytes of them."""
    until = time.monotonic() + 200
    while not any(row >= step for row in steps_after(workdir, since)):
        assert agent.poll() is None, output(workdir)[-4000:]
        assert time.monotonic() < until, output(workdir)[-4000:]
        time.sleep(0.005)


def steps_after(workdir: Path, since: int) -> list[int]:
    metrics = workdir / "metrics.jsonl"
    if not metrics.exists():
        return []
    lines = metrics.read_bytes()[since:].splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]


def processes(agent: subprocess.Popen) -> dict[int, int]:
    """Returns {process number: process id} of what the agent has started."""
    found = {}
    for child in (
        Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    ):
        variables = []
        # gone meanwhile
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        known = dict(v.decode().partition("=")[::2] for v in variables)
        if "PYTHONUNBUFFERED" in known:  # not the guard
            found[int(known.get("JAXDIST_PROCESS_ID", "0"))] = int(child)
    return found


def kill(agent: subprocess.Popen, number: int, workdir: Path) -> int:
    """Kills a process -9; returns the size of the metrics then."""
    size = (workdir / "metrics.jsonl").stat().st_size
    os.kill(processes(agent)[number], signal.SIGKILL)
    return size


def events(workdir: Path, name: str) -> list[dict]:
    return [event for event in read_events(workdir) if event["event"] == name]


def listeners() -> dict[str, str]:
    """Returns {socket's number: address} of all that listens here, addresses as /proc
    has them.
    """
    rows = [
        row.split() for kind in ("tcp", "tcp6") for row in open(f"/proc/net/{kind}")
    ]
    return {row[9]: row[1].partition(":")[0] for row in rows if row[3] == "0A"}


def listening(pid: int) -> dict[str, str]:
    """Returns those of `listeners` that a process has; none if it has gone."""
    links, all_ = [], listeners()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(link))
    return {
        number: where for number, where in all_.items() if f"socket:[{number}]" in links
    }


# --- what a run leaves ----------------------------------------------------------------


def leftovers(workdir: Path) -> list[str]:
    """Returns what a run that has ended should not leave: processes that name it,
    unfinished files.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if str(workdir).encode() in words and int(entry.name) != os.getpid():
                found.append(
                    f"process {entry.name}: {words[:200].decode(errors='replace')}"
                )
    for path in workdir.rglob("*"):
        unfinished = path.name.endswith((".unfinished", ".part")) or "tmp" in path.name
        if unfinished or (path.name.startswith(".") and path.name != ".lock"):
            found.append(str(path))
    return found


def parameters(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint: weights, the optimizer's state, counters."""
    return final_arrays(workdir, step)


def apart(
    one: dict[str, np.ndarray], other: dict[str, np.ndarray], under: str = ""
) -> float:
    """Returns the largest relative L2 distance between leaves of the same name, of
    those under a path.
    """
    names = [name for name in one if name.startswith(under)]
    assert one.keys() == other.keys()
    assert len(names) > 10

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        size = float(np.linalg.norm(b))
        return (
            float(np.linalg.norm(a - b)) / size if size else float(np.abs(a - b).max())
        )

    return max(distance(one[name], other[name]) for name in names)


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    assert one.keys() == other.keys()
    assert len(one) > 20
    return all(one[name].tobytes() == other[name].tobytes() for name in one)


def assert_time_adds_up(
    workdir: Path, *, began: float, ended: float
) -> ledgers.Account:
    """Asserts that the buckets of a run's lives are its wall time to 10 ms; returns
    them.

    Buckets are of a steady clock, the wall time is of the clock on the wall.

    Args:
      began, ended: seconds since 1970 when the test started the first process, and when
      the last had ended.
    """
    lives = ledgers.read_lives(workdir)
    found = ledgers.account(lives)
    idle_s = sum(b.began - a.written for a, b in itertools.pairwise(lives) if a.done)
    wall_s = lives[-1].written - lives[0].began - idle_s
    assert abs(found.wall_s - wall_s) <= 0.010, (found, wall_s)
    assert min(found.buckets.values()) >= 0, found
    assert {"down", "lost", "start", "step"} <= found.buckets.keys()
    assert began - 0.02 <= lives[0].began, (began, lives)
    assert lives[-1].written <= ended + 0.02, (ended, lives)
    assert all(a.written <= b.began + 0.02 for a, b in itertools.pairwise(lives)), lives
    return found


def ledger_folder(workdir: Path) -> Path:
    return workdir.parent / f"{workdir.name}.ledger"


def ledger(workdir: Path) -> dict[int, list[int]]:
    """Returns {step: samples} of the last attempt at each step, as all processes were
    fed.

    A start goes on after a checkpoint's step: what was fed after that step before is
    void. So is, within a start, what was fed after the step to which the run went back.
    """
    starts: dict[str, list[list[list[float]]]] = {}
    for file in ledger_folder(workdir).glob("*.fed"):  # of a start and process
        rows = [
            [float(x) for x in line.split()] for line in file.read_text().splitlines()
        ]
        if rows:
            starts.setdefault(file.name.partition(".")[0], []).append(rows)
    committed: dict[int, list[int]] = {}
    for processes_ in sorted(
        starts.values(), key=lambda fed: min(rows[0][0] for rows in fed)
    ):
        first = min(int(row[1]) for rows in processes_ for row in rows)
        committed = {step: fed for step, fed in committed.items() if step < first}
        for rows in processes_:
            own: dict[int, list[int]] = {}
            for _, number, *samples in rows:
                step = int(number)
                own = {known: fed for known, fed in own.items() if known < step}
                own[step] = [int(sample) for sample in samples]
            for step, fed in own.items():
                committed[step] = sorted(committed.get(step, []) + fed)
    return dict(sorted(committed.items()))


def expected_ledger(
    steps: int, size: int, windows: Sequence[Sequence[int]] = ()
) -> dict[int, list[int]]:
    """Returns {step: samples} that a run of `size` samples a step must be fed, but for
    left out batches.
    """
    order = SkippingDataset(object.__new__(Dataset), windows)
    firsts = {step: order.position(step - 1) * size for step in range(1, steps + 1)}
    return {step: list(range(first, first + size)) for step, first in firsts.items()}


def assert_fed_once(
    workdir: Path, steps: int, size: int, windows: Sequence[Sequence[int]] = ()
) -> None:
    """Asserts that each global sample was consumed exactly once over the committed
    steps, in order.
    """
    assert ledger(workdir) == expected_ledger(steps, size, windows)
