"""Work on a file system that may be slow, or not answer at all: in a thread, with an
end to each wait.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path


class Background:
    """Does one piece of work at a time. One that never ends does not keep the process
    from ending.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        """Args:
        folder: what the work is on, to name it.
        limit_s: seconds that a piece of work may take, before nothing waits for it any
        more.
        """
        self._folder = folder
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None
        self._began = 0.0  # monotonic seconds

    def begin(self, work: Callable[[], object], name: str) -> None:
        """Starts a piece of work; call it only once `wait` has returned True."""
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._began = time.monotonic()
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the work has ended, for `seconds`, or until it has had its limit.

        Returns whether it has ended.
        """
        if self._thread is None:
            return True
        left_s = max(0.0, self._began + self._limit_s - time.monotonic())
        self._thread.join(left_s if seconds is None else min(seconds, left_s))
        return not self._thread.is_alive()

    def delay(self) -> str:
        """Describes work that has not ended."""
        name = self._thread.name if self._thread else ""
        seconds = time.monotonic() - self._began
        return (
            f"{self._folder}: the {name} has taken {seconds:.0f} s and has not ended; a faster disk or fewer "
            f"saves would help, unless the disk is stuck (checkpoint.patience_s, checkpoint.timeout_s)"
        )
