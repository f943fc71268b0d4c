"""Timer that decides when a reduced group of processes restarts with more.

Needs no jax.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

from jaxdist.storage import untrusted

_MAX_BYTES = 4096  # bytes of the largest capacity file
LOOK_S = 2.0  # seconds between two checks of the capacity
# Seconds for which all checks must find room. Capacity that returns only for a moment
# then costs nothing.
STEADY_S = 10.0


class GrowthTimer:
    """Timer that checks for room, and gives the size to which a group grows.

    Growing costs a save and a start. So a group first runs for some time, which doubles
    with each growth that failed.
    """

    def __init__(
        self,
        wait_s: float,
        *,
        steady_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins the wait of the first group.

        Args:
          wait_s: seconds that a group runs before it may grow; 0 = it never grows.
          steady_s: seconds for which all checks must find room, if less than STEADY_S.
          clock: gives the seconds of a steady clock.
        """
        self._steady_s = steady_s
        self.wait_s = wait_s
        self._first_wait_s = wait_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begins the wait of a group that starts."""
        self._next_look = math.inf
        if self.wait_s:
            self._next_look = self._clock() + self.wait_s
        self._room_since: float | None = None

    def due(self, larger: Callable[[], int]) -> int:
        """Decides the size to grow to now; 0 = none.

        Calls cost almost nothing: the capacity is checked once in `LOOK_S`.

        Args:
          larger: finds a larger size that can run, or 0.
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
        if now - self._room_since >= min(self._steady_s, STEADY_S):
            return size
        return 0

    def failed(self) -> None:
        """Doubles the wait after a growth without progress."""
        self.wait_s *= 2

    def succeeded(self) -> None:
        """Resets the wait after a growth with progress."""
        self.wait_s = self._first_wait_s


def read_capacity(file: Path) -> int:
    """Reads the number of processes, or of machines, that can run now.

    Raises:
      OSError, ValueError: the file has no whole number.
    """
    return int(untrusted.read_bytes(file, max_bytes=_MAX_BYTES))
