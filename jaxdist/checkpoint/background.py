"""Background thread for work on a file system that may be slow or not answer at all."""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

Work = Callable[[], object]


class Background:
    """Daemon thread that runs one piece of work at a time.

    Work that never ends does not keep the process from ending.

    The thread stays between two pieces of work. To start a thread takes tens of
    milliseconds while Orbax's threads hold the interpreter's lock, and training waits.
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
        self._work = queue.SimpleQueue[Work | None]()  # None ends the thread
        self._ended = threading.Event()  # whether no work is running
        self._ended.set()
        self._name = ""  # name of the last piece of work
        self._began = 0.0  # monotonic seconds

    def begin(self, work: Work, name: str) -> None:
        """Starts a piece of work. Call it only after `wait` has returned True."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="checkpoints", daemon=True
            )
            self._thread.start()
        self._name = name
        self._began = time.monotonic()
        self._ended.clear()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:  # even SystemExit must not end the thread
                traceback.print_exc()
            finally:
                self._ended.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the running work, and returns True if it has ended.

        Args:
          seconds: longest wait. None waits until the work has taken `limit_s`.
        """
        left_s = max(0.0, self._began + self._limit_s - time.monotonic())
        return self._ended.wait(left_s if seconds is None else min(seconds, left_s))

    def delay(self) -> str:
        """Describes work that has not ended."""
        seconds = time.monotonic() - self._began
        return (
            f"{self._folder}: the {self._name} has taken {seconds:.0f} s and has not ended. Unless the disk is stuck, "
            f"a faster disk or fewer saves help (checkpoint.patience_s, checkpoint.timeout_s)."
        )

    def close(self) -> None:
        """Ends the thread. Call it only after `wait` has returned True."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
