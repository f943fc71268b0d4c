"""`jaxdist.train` with one more callback, which brings a fault on order.

In the environment: CHAOS_ORDERS, JSON, a list of `Order`s as dicts; CHAOS_MARKS, a
folder. A process takes the first order without a mark, so that each happens once, also
under `launch`. A mark is written before the fault and says what it met.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from jaxdist import library, train
from jaxdist.trainer.callbacks import Callback
from jaxdist.trainer.exit_code import exit_code
from jaxdist.trainer.preemption import own_process

RANK = int(os.environ.get("JAXDIST_PROCESS_ID", "0"))
FULL_BYTES = 4096  # that a file may have on a full disk
SICK_STEPS = 3  # between a full disk and what follows


@dataclasses.dataclass(frozen=True)
class Order:
    """A fault, and when it happens."""

    number: int
    kind: str
    rank: int  # the process that it happens to
    # how many signals of which kind
    signal: int
    signals: int
    # the fault happens so long after the phase has begun for this step or a later one
    phase: str
    step: int
    delay_s: float
    # "": there is room; "stays": the disk is full from that moment, and the signal comes
    # some steps later; "passes": there is room again before the signal
    full: str = ""

    def mark(self, folder: Path) -> Path:
        """Returns the file that says that it happened."""
        return folder / f"{self.number}.json"


class Chaos(Callback):
    """Brings the fault of an order, on its process."""

    may_request = False

    def __init__(self, order: Order, marks: Path, workdir: Path) -> None:
        self._order = order
        self._marks = marks
        self._workdir = workdir
        self._now = ("start", 0)
        self._begun = False
        self._full_at = 0  # the step of the save that finds no room

    def on_phase(self, phase, step):
        """Begins the fault once its moment has come."""
        self._now = (phase, step)
        if self._order.rank != RANK:
            return
        due = phase == self._order.phase and step >= self._order.step
        if self._full_at:
            self._go_on_after_full(phase, step)
        elif due and not self._begun:
            self._begin(step)

    def _begin(self, step: int) -> None:
        self._begun = True
        if self._order.full:
            _limit_files(FULL_BYTES)
            self._full_at = step
        elif self._order.delay_s:
            threading.Timer(self._order.delay_s, self._strike).start()
        else:
            self._strike()

    def _go_on_after_full(self, phase: str, step: int) -> None:
        if phase != "step" or step < self._full_at + SICK_STEPS:
            return
        if self._order.full == "passes":
            _limit_files(resource.RLIM_INFINITY)
            # the save after has room
            if step < self._full_at + 3 * SICK_STEPS:
                return
        full_at, self._full_at = self._full_at, 0
        self._strike(full_at)

    def _strike(self, full_at: int = 0) -> None:
        phase, step = self._now
        checkpoints = self._workdir / "checkpoints"
        mark = {
            "pid": os.getpid(),
            "phase": phase,
            "step": step,
            "full_at": full_at,
            "unfinished": [path.name for path in checkpoints.glob("*.unfinished")],
            "time": time.time(),
        }
        self._order.mark(self._marks).write_text(json.dumps(mark))
        for _ in range(self._order.signals):
            os.kill(os.getpid(), self._order.signal)
            time.sleep(0.005)
        if self._order.signal == signal.SIGKILL:
            time.sleep(60)


def _limit_files(num_bytes: int) -> None:
    """Makes each write that lets a file grow beyond a size fail with EFBIG."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def install() -> None:
    """Adds the callback for the order that is due.

    Each process has it, since all must have equally many.
    """
    marks = Path(os.environ["CHAOS_MARKS"])
    workdir = Path(sys.argv[sys.argv.index("--workdir") + 1])
    orders = [Order(**order) for order in json.loads(os.environ["CHAOS_ORDERS"])]
    due = [order for order in orders if not order.mark(marks).exists()]
    if not due:
        return
    callbacks_of_train = library.run_callbacks
    library.run_callbacks = lambda *run: [
        *callbacks_of_train(*run),
        Chaos(due[0], marks, workdir),
    ]


if __name__ == "__main__":
    install()
    with own_process():
        raise SystemExit(exit_code(train.main))
