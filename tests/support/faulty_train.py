"""`jaxdist.train` with a ledger of the samples that each step is fed, and with faults
on order.

In the environment: FAULTY_LEDGER, a folder; FAULTY_ORDERS, JSON [[kind, process, step],
...], each of which happens once in a run's life; FAULTY_SAMPLES, JSON, samples that make the loss NaN; FAULTY_WINDOWS,
JSON, windows of batches that are left out from the beginning; FAULTY_CACHE, the folder
of token caches; FAULTY_PACE_S, seconds before each step.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint import folders
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.models.transformer import Transformer
from jaxdist.trainer import start as run_start
from jaxdist.trainer.compose import Composition

RANK = int(os.environ.get("JAXDIST_PROCESS_ID", "0"))
LEDGER = Path(os.environ.get("FAULTY_LEDGER", "."))
WORKDIR = (
    Path(sys.argv[sys.argv.index("--workdir") + 1])
    if "--workdir" in sys.argv
    else Path(".")
)
CHECKPOINTS = WORKDIR / "checkpoints"
ORDERS, SAMPLES, WINDOWS = (
    json.loads(os.environ.get(f"FAULTY_{name}", "[]"))
    for name in ("ORDERS", "SAMPLES", "WINDOWS")
)
PACE_S = float(os.environ.get("FAULTY_PACE_S", "0"))
SICK_STEPS = 12  # that a disk stays full or read-only


# --- kinds of faults ------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def soon(fault: Callable[[], None]) -> None:
    """Does it in some milliseconds, amid what is going on then."""
    threading.Timer(0.03 * np.random.default_rng().random(), fault).start()


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise RuntimeError("a fault on order")


def spin() -> None:
    while True:
        pass


def damage(kind: str, *, steps: int = 1) -> None:
    """Damages the newest checkpoints, leaving one good, and dies."""
    for step in folders.list_steps(CHECKPOINTS)[1:][-steps:]:
        DAMAGE[kind][0](CHECKPOINTS / str(step))
    kill()


def tear() -> None:
    """Leaves half a line in the files of lines, as a power cut may."""
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(WORKDIR / name, "ab") as file:
            file.write(b'{"step": 3, "lo')
    kill()


def cut(*patterns: str) -> None:
    """Cuts files of the caches in half, and dies."""
    roots = [
        Path(os.environ[name]) for name in ("FAULTY_CACHE", "JAX_COMPILATION_CACHE_DIR")
    ]
    files = [
        path for root in roots for pattern in patterns for path in root.rglob(pattern)
    ]
    assert files, "no cache to damage"
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    kill()


def fill() -> None:
    with contextlib.suppress(OSError):  # full sooner than it said
        (CHECKPOINTS / "filler").write_bytes(
            b"x" * max(0, shutil.disk_usage(CHECKPOINTS).free - 4096)
        )


def lock() -> None:
    until = time.monotonic() + 5  # busy while a file is being written
    while remount("ro") and time.monotonic() < until:
        time.sleep(0.01)


def remount(how: str) -> int:
    return subprocess.run(
        ["mount", "-o", f"remount,{how}", CHECKPOINTS], stderr=subprocess.DEVNULL
    ).returncode


def mend_disk() -> None:
    remount("rw")
    (CHECKPOINTS / "filler").unlink(missing_ok=True)


def garble() -> None:
    (WORKDIR / "config.json").write_text('{"seed": ')
    kill()


IN_STEP: dict[str, Callable[[], None]] = {
    "kill -9": kill,
    "kill -9 soon after": lambda: soon(kill),
    "kill -9 of the agent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "SIGTERM": ask,
    "SIGTERM to the agent": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "SIGHUP": lambda: os.kill(os.getpid(), signal.SIGHUP),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "an endless loop": spin,
    "sleep with the interpreter lock": lambda: ctypes.PyDLL(None).sleep(10**6),
    "an exception": fail,
    "a bit of data flipped": lambda: damage("a bit of data"),
    "a bit of metadata flipped": lambda: damage("a bit of metadata"),
    "a checkpoint's file cut": lambda: damage("truncated"),
    "a checkpoint's file emptied": lambda: damage("truncated to nothing"),
    "a checkpoint's file deleted": lambda: damage("a missing file"),
    "a file planted": lambda: damage("a planted file"),
    "no manifest": lambda: damage("no manifest"),
    "an empty step folder": lambda: damage("an empty folder"),
    "two newest steps damaged": lambda: damage("a bit of data", steps=2),
    "torn lines": tear,
    "token cache cut": lambda: cut("tokens.bin"),
    "token cache's table cut": lambda: cut("documents.npy"),
    "compile cache cut": lambda: cut("jit_*-cache"),
    "config.json garbled": garble,
    "checkpoint disk full": fill,
    "checkpoint disk read-only": lock,
}
IN_SAVE = {
    "kill -9 in a save": lambda: soon(kill),
    "SIGTERM in a save": lambda: soon(ask),
}
IN_RESTORE = {"kill -9 in the next restore": kill}
NEED_MOUNT = ("checkpoint disk full", "checkpoint disk read-only")
KINDS = (*IN_STEP, *IN_SAVE, *IN_RESTORE)


class Orders:
    """The faults of this process that have not happened yet."""

    def __init__(self) -> None:
        self._mine = [
            (n, kind, step)
            for n, (kind, rank, step) in enumerate(ORDERS)
            if rank == RANK
        ]

    def due(
        self, kinds: dict[str, Callable[[], None]], step: int, *, mark: str = ""
    ) -> None:
        for number, kind, at in self._mine:
            if kind in kinds and step >= at and self._first(f"fault-{number}{mark}"):
                print(f"fault {number} at {step}: {kind}", flush=True)
                kinds[kind]()

    def _first(self, name: str) -> bool:
        with contextlib.suppress(FileExistsError):
            (LEDGER / name).touch(exist_ok=False)
            return True
        return False


# --- where they happen ----------------------------------------------------------------


class Recorded:
    """A train step that books what it is fed, before it runs, and does what is due
    then.
    """

    def __init__(self, step, orders: Orders):
        self._step, self._orders, self._number, self._next = step, orders, 0, None
        group = os.environ.get("JAXDIST_COORDINATOR", f":{os.getpid()}").rpartition(
            ":"
        )[2]
        agent = os.environ.get("FAULTY_AGENT", os.getppid())
        file = LEDGER / f"{agent}-{group}.{RANK}.fed"
        self._file = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def trace(self, *given):
        return self._step.trace(*given)

    def __call__(self, state, batch):
        self._number = (
            self._number + 1 if state.step is self._next else int(state.step) + 1
        )
        shards = [
            shard
            for shard in batch["sample"].addressable_shards
            if shard.replica_id == 0
        ]
        samples = [str(sample) for shard in shards for sample in np.asarray(shard.data)]
        os.write(
            self._file, f"{time.time()} {self._number} {' '.join(samples)}\n".encode()
        )
        self._do(self._number)
        time.sleep(PACE_S)
        state, metrics = self._step(state, batch)
        self._next = state.step
        return state, metrics

    def _do(self, number: int) -> None:
        for order, (kind, _, step) in enumerate(ORDERS):
            sick = (
                RANK == 0
                and kind in NEED_MOUNT
                and (LEDGER / f"fault-{order}").exists()
            )
            if sick and number >= step + SICK_STEPS:
                mend_disk()
        self._orders.due(IN_STEP, number)
        self._orders.due(dict.fromkeys(IN_RESTORE, kill), number)


def install() -> None:
    """Puts the ledger and the faults where a run passes."""
    orders = Orders()
    build, start_save = Composition.build_step, CheckpointManager._start
    attempt, skipping, head = (
        CheckpointManager._attempt,
        run_start.SkippingDataset,
        Transformer.head,
    )

    def build_step(*given, **options):
        built = build(*given, **options)
        return dataclasses.replace(built, step=Recorded(built.step, orders))

    def start(store, step, *given, **options):
        orders.due(IN_SAVE, step)
        return start_save(store, step, *given, **options)

    def restore(store, *given, **options):
        if any(
            kind in IN_RESTORE and (LEDGER / f"fault-{n}").exists()
            for n, (kind, *_) in enumerate(ORDERS)
        ):
            orders.due(IN_RESTORE, sys.maxsize, mark="-again")
        return attempt(store, *given, **options)

    def sick_head(model, x_BSD, batch):
        sick_B = jnp.isin(batch["sample"], jnp.asarray(SAMPLES, jnp.int32))
        return head(model, jnp.where(sick_B[:, None, None], jnp.nan, x_BSD), batch)

    Composition.build_step = build_step
    CheckpointManager._start, CheckpointManager._attempt = start, restore
    run_start.SkippingDataset = lambda dataset, windows: skipping(
        dataset, windows or WINDOWS
    )
    if SAMPLES:
        Transformer.head = sick_head


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # tests, where support is
    if ORDERS:
        from support.checkpoints import DAMAGE
    install()
    runpy.run_module("jaxdist.train", run_name="__main__", alter_sys=True)
