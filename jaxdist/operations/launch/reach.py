"""Check that a machine reaches process 0 over the network. Needs no jax.

A machine can be cut off from the others while the folder of the agents still answers.
Its processes would wait for minutes to join, and nothing would name it.
"""

import contextlib
import socket
import time
from collections.abc import Callable

_TIMEOUT_S = 0.5  # seconds of a try
PATIENCE_S = 30.0  # seconds of tries after process 0 listens
_FAILING_S = 5.0  # seconds of tries before their failure counts


def is_reachable(address: str, port: int, *, listens: bool) -> bool:
    """Tests whether a machine answers.

    Args:
      address: host of the machine.
      port: port to connect to.
      listens: a process of the machine listens on the port. A refusal is then no answer,
        as firewalls refuse, too.
    """
    try:
        with socket.create_connection((address, port), timeout=_TIMEOUT_S):
            return True
    except ConnectionRefusedError:
        return not listens
    except OSError:
        return False


class Reach:
    """Tries to reach the port of process 0, until one try succeeds."""

    def __init__(
        self, address: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins without a try.

        Args:
          address: host of process 0.
          port: port of process 0; 0 = there is a single machine, nothing is tried.
          clock: gives the seconds of a steady clock.
        """
        self._address = address
        self._port = port
        self._clock = clock
        self._since: float | None = None  # when process 0 was first known to listen
        self._failed_s = 0.0  # seconds between the first and the last try that failed
        self.succeeded = not port

    @property
    def is_failing(self) -> bool:
        """Tests whether tries have failed for a while since process 0 listens.

        A single try may fail because the machine is busy, or process 0 has just ended.
        """
        return not self.succeeded and self._failed_s >= _FAILING_S

    def attempt(self, *, listens: bool) -> bool:
        """Tries once if no try has succeeded.

        Args:
          listens: the machine of process 0 says that the port is open.

        Returns:
          True if tries have failed for too long since the port is open.
        """
        if self.succeeded:
            return False
        with contextlib.suppress(OSError):
            target = (self._address, self._port)
            with socket.create_connection(target, timeout=_TIMEOUT_S):
                self.succeeded = True
                return False
        if not listens:
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
        self._failed_s = now - self._since
        return self._failed_s > PATIENCE_S
