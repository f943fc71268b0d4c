"""The clock of a run, by which the core books wall time to buckets.

`Clock` books nothing. `operations.ledger.Ledger` is a clock that keeps the books.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal

# The phases of a run, in the order of a step. In "vote" processes agree on the requests
# of their callbacks.
Phase = Literal[
    "start",
    "restore",
    "compile",
    "data",
    "step",
    "evaluate",
    "vote",
    "save",
    "end",
]
STEP = "step"  # bucket of the phase in which a run trains
# buckets of work within a phase
JOIN = "join"  # joining the process group and finding devices
COMPILE = "compile"
WAIT = "wait"  # waiting for other processes
HOOKS = "hooks"  # callbacks that the loop waits for
MEMORY = "memory"  # saves in memory, as far as training waits for them


class Clock:
    """Clock that books the time of this process to buckets. The base books nothing."""

    def timed(self, bucket: str) -> AbstractContextManager[None]:
        """Books the time of the body to a bucket.

        Args:
          bucket: a bucket of this module; "" = the bucket of the current phase.
        """
        return contextlib.nullcontext()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves seconds that were booked to the wrong bucket."""

    def failures(self) -> tuple[int, float]:
        """Counts the failed starts of this run, and the seconds of all its starts.

        Starts that ended before their first step are not counted.
        """
        return 0, 0.0


_clocks = [Clock()]  # the last one is the current clock


def current() -> Clock:
    """Finds the clock of the run in this process."""
    return _clocks[-1]


@contextlib.contextmanager
def installed(clock: Clock) -> Iterator[None]:
    """Makes `clock` the current clock until the body ends."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)


def timed(bucket: str) -> AbstractContextManager[None]:
    """Books the time of the body to a bucket of the current clock."""
    return current().timed(bucket)
