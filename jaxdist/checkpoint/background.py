"""Background thread for work on a file system that may be slow or not answer at all."""

import threading
import time
from collections.abc import Callable
from pathlib import Path


class Background:
    """Daemon thread that runs one piece of work at a time.

    Work that never ends does not keep the process from ending.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        """Prepares to run work; no thread starts yet.

        Args:
          folder: folder of the work, for messages.
          limit_s: seconds after which nothing waits for a piece of work any longer.
        """
        self._folder = folder
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None
        self._began = 0.0  # monotonic seconds

    def begin(self, work: Callable[[], object], name: str) -> None:
        """Starts a piece of work. Call it only after `wait` has returned True."""
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._began = time.monotonic()
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the running work, and returns True if it has ended.

        Args:
          seconds: longest wait. None waits until the work has taken `limit_s`.
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
            f"{self._folder}: the {name} has taken {seconds:.0f} s and has not ended. Unless the disk is stuck, "
            f"a faster disk or fewer saves help (checkpoint.patience_s, checkpoint.timeout_s)."
        )
