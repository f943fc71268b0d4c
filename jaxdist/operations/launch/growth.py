"""When a group that is smaller than it could be stops, to start again with more
processes. No jax.
"""

import math
import time
from collections.abc import Callable

LOOK_S = 2.0  # between looks at the capacity
# that all looks must have found room: a capacity that is back for a moment costs
# nothing
STEADY_S = 10.0


class GrowthTimer:
    """Says when to look for room, and when there has been room for long enough.

    Growing costs a save and a start. So a group runs for the wait first, which doubles
    with each growth that failed.
    """

    def __init__(self, wait_s: float, *, clock: Callable[[], float] = time.monotonic):
        """Begins as `begin` does.

        Args:
          wait_s: seconds that a group runs before it may grow; 0: none grows.
        """
        self.wait_s = self._wait_s = wait_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A group starts: the wait begins."""
        self._next_look = self._clock() + self.wait_s if self.wait_s else math.inf
        self._room_since: float | None = None

    def due(self, larger: Callable[[], int]) -> int:
        """Returns the size to grow to now, or 0. A look every few seconds costs
        something, the rest nothing.

        Args:
          larger: looks for room; returns a larger size that can run, or 0.
        """
        now = self._clock()
        if now < self._next_look:
            return 0
        self._next_look = now + LOOK_S
        if not (size := larger()):
            self._room_since = None
            return 0
        self._room_since = now if self._room_since is None else self._room_since
        return size if now - self._room_since >= STEADY_S else 0

    def failed(self) -> None:
        """The last growth made no progress."""
        self.wait_s *= 2

    def succeeded(self) -> None:
        """The last growth made progress."""
        self.wait_s = self._wait_s
