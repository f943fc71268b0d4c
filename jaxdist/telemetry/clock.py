"""The clock of a run: code of the core says what its time goes to.

The clock of the core books nothing. `operations.ledger.Ledger` is a clock that does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

STEP = "step"  # bucket of the phase in which a run trains
# buckets within a phase
JOIN = "join"  # joining the process group, and finding devices
COMPILE = "compile"
WAIT = "wait"  # for other processes
HOOKS = "hooks"  # callbacks that the loop pauses for


class Clock:
    """Books the time of this process to buckets. This one books nothing."""

    def timed(self, bucket: str) -> AbstractContextManager[None]:
        """Books the time that the body takes to a bucket of its own.

        Args:
          bucket: one of this module's; "" books it to the phase under way.
        """
        return contextlib.nullcontext()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves seconds from one bucket to another that they turned out to belong to."""

    def failures(self) -> tuple[int, float]:
        """Counts the failed starts of this run, and the seconds of all its starts.

        Starts that ended before their first step count for neither.
        """
        return 0, 0.0


_clocks = [Clock()]  # the last is that of the run this process is in


def current() -> Clock:
    """Returns the clock of the run that this process is in."""
    return _clocks[-1]


@contextlib.contextmanager
def installed(clock: Clock) -> Iterator[None]:
    """Makes `clock` the current one until the body ends."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)


def timed(bucket: str) -> AbstractContextManager[None]:
    """Books the time that the body takes to a bucket of the current clock."""
    return current().timed(bucket)
