"""Decides when a group of processes that is smaller than it could be stops, to restart
with more. No jax.
"""

import math
import time
from collections.abc import Callable

LOOK_S = 2.0  # between looks at the capacity
# for which all looks must find room, so that a capacity that is back for a moment costs
# nothing
STEADY_S = 10.0


class GrowthTimer:
    """Decides when to look for room, and when there has been room for long enough.

    Growing costs a save and a start. So a group runs for a wait first, which doubles
    with each growth that failed.
    """

    def __init__(
        self, wait_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins as `begin` does.

        Args:
          wait_s: seconds that a group runs before it may grow; 0: none grows.
        """
        self.wait_s = wait_s
        self._first_wait_s = wait_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begins the wait: a group starts."""
        self._next_look = math.inf
        if self.wait_s:
            self._next_look = self._clock() + self.wait_s
        self._room_since: float | None = None

    def due(self, larger: Callable[[], int]) -> int:
        """Returns the size to grow to now, or 0. Calls cost nothing but for a look
        every few seconds.

        Args:
          larger: looks for room; returns a larger size that can run, or 0.
        """
        now = self._clock()
        if now < self._next_look:
            return 0
        self._next_look = now + LOOK_S
        size = larger()
        if not size:
            self._room_since = None
            return 0
        if self._room_since is None:
            self._room_since = now
        if now - self._room_since >= STEADY_S:
            return size
        return 0

    def failed(self) -> None:
        """Doubles the wait: the last growth made no progress."""
        self.wait_s *= 2

    def succeeded(self) -> None:
        """Resets the wait: the last growth made progress."""
        self.wait_s = self._first_wait_s
