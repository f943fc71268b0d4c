"""Faults drawn at random, through whole runs; each ends with the parameters and the
data of a quiet run.

`pytest -m chaos -s`: six faults a run. CHAOS_SEED=N repeats a campaign, CHAOS_RUNS=N
makes it longer.
"""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty_train import KINDS, NEED_MOUNT
from support.launches import (
    apart,
    assert_fed_once,
    assert_time_adds_up,
    events,
    launched,
    ledger_folder,
    leftovers,
    output,
    parameters,
    same_bits,
)
from support.runs import losses

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))
RUNS = int(os.environ.get("CHAOS_RUNS", "5"))
STEPS, SIZE, FAULTS = 140, 12, 6
# stopped, the agent killed, mended by hand: codes after which a run is begun again
LEGAL = (75, -9, 78)
SETTINGS = {
    "train__steps": STEPS,
    "batch__global_size": SIZE,
    "mesh__fsdp": 1,
    "devices": 1,
    "optimizer__nonfinite_limit": 2,
    "optimizer__schedule": "constant",
    "watchdog__step_s": 10,
    "watchdog__data_s": 10,
    "watchdog__save_s": 20,
}


@pytest.fixture
def disk(tmp_path) -> Iterator[bool]:
    """Gives the run's checkpoints a disk of their own; returns whether that is
    permitted here.
    """
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    mounted = subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
    yield mounted
    if mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def drawn(
    run: int, draw: random.Random, processes: int, *, disk: bool
) -> list[tuple[str, int, int]]:
    """Returns faults (kind, process, step), in the order of their steps; no kind twice
    before all came.
    """
    kinds = [kind for kind in KINDS if disk or kind not in NEED_MOUNT]
    deck = random.Random(SEED).sample(kinds, len(kinds))
    dealt = [deck[n % len(deck)] for n in range(FAULTS * run, FAULTS * (run + 1))]
    steps = sorted(draw.sample(range(18, STEPS - 20), FAULTS))
    return [
        (kind, draw.randrange(processes), step)
        for kind, step in zip(dealt, steps, strict=True)
    ]


def endure(
    workdir: Path, processes: int, variables: dict[str, str], **changes
) -> list[int]:
    """Starts a run again and again, as a scheduler would, until it is done; returns all
    exit codes.
    """
    codes = []
    while not codes or codes[-1] != 0:
        flags = ["--processes", str(processes), "--max-restarts", "20"]
        with launched(
            workdir, *flags, recorded=variables, **SETTINGS, **changes
        ) as agent:
            codes.append(agent.wait(900))
        said = output(workdir)[-6000:]
        assert codes[-1] in (0, *LEGAL), said
        assert len(codes) < 12, said
        if codes[-1] == 78:
            mend(workdir)
        while any(found.startswith("process") for found in leftovers(workdir)):
            time.sleep(0.1)  # what a killed agent had started is about to go
    return codes


def mend(workdir: Path) -> None:
    """Does what the message of exit code 78 asks for."""
    said = output(workdir)[-3000:]
    if "config.json" in said:
        (workdir / "config.json").unlink()
    else:
        assert "Read-only" in said, said
        subprocess.run(
            ["mount", "-o", "remount,rw", workdir / "checkpoints"], check=True
        )


@pytest.mark.parametrize("run", range(RUNS))
def test_a_run_ends_as_if_nothing_had_happened(tmp_path, disk, run):
    draw = random.Random(f"{SEED} {run}")
    processes, workdir, quiet = (
        draw.choice((2, 3)),
        tmp_path / "run",
        tmp_path / "quiet",
    )
    faults = drawn(run, draw, processes, disk=disk)
    # a batch whose loss is NaN, or so many that the run goes back
    first = draw.randrange(30, STEPS - 30)
    policy, many = draw.choice((("stop", 1), ("rollback", 4)))
    samples = [SIZE * batch for batch in range(first, first + many)]
    changes = {"health__nonfinite": policy, "health__spike_sigmas": 0}
    variables = {
        "FAULTY_SAMPLES": json.dumps(samples),
        "FAULTY_CACHE": str(tmp_path / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
    }
    changes["data__cache_dir"] = str(tmp_path / "cache")
    print(
        f"\nseed {SEED}, run {run}: {processes} processes, {policy} after NaN in batches {first} + {many}"
    )

    began = time.time()
    codes = endure(
        workdir, processes, variables | {"FAULTY_ORDERS": json.dumps(faults)}, **changes
    )
    spent = assert_time_adds_up(workdir, began=began, ended=time.time())
    happened = {
        int(mark.name.split("-")[1]) for mark in ledger_folder(workdir).glob("fault-*")
    }
    skipped = workdir / "skipped.json"
    windows = json.loads(skipped.read_text())["windows"] if skipped.exists() else []
    endure(
        quiet, processes, variables | {"FAULTY_WINDOWS": json.dumps(windows)}, **changes
    )

    a, b = parameters(workdir, STEPS), parameters(quiet, STEPS)
    for number, (kind, process, step) in enumerate(faults):
        print(
            f"| {kind} | {process} | {step} | {'' if number in happened else 'not reached'} |"
        )
    lost = [event["why"] for event in events(workdir, "peer_lost")]
    bad = [event["step"] for event in events(workdir, "bad_checkpoint")]
    print(f"exit codes {codes}; lost {lost}; bad checkpoints {bad}; left out {windows}")
    print(
        f"{spent.wall_s:.1f} s: { {name: round(s, 1) for name, s in spent.buckets.items()} }"
    )
    print(f"bits equal: {same_bits(a, b)}, distance {apart(a, b):.2g}")
    assert happened == set(range(FAULTS))
    assert len(events(quiet, "start")) == 1
    assert bool(windows) == (policy == "rollback")
    assert events(workdir, "nonfinite")
    # NaN equals NaN here
    assert same_bits(a, b)
    assert repr(losses(workdir)) == repr(losses(quiet))
    assert_fed_once(workdir, STEPS, SIZE, windows)
    assert_fed_once(quiet, STEPS, SIZE, windows)
    assert not leftovers(workdir)
    shutil.rmtree(tmp_path / "xla", ignore_errors=True)
