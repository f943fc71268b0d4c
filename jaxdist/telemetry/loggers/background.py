"""A logger in a thread of its own: whether it raises, sleeps or hangs, the run
goes on.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.telemetry.loggers.logger import Logger

# calls that wait; of a logger that is slower for long, the newest are dropped
ROOM = 10_000

_Call = tuple[str, tuple, dict[str, Any]]  # method, its arguments


class BackgroundLogger:
    """Hands the calls of a run to a logger over a bounded queue; reports its first
    fault, by an event.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        report: Callable[..., None],
        *,
        room: int = ROOM,
        close_s: float,
    ) -> None:
        """Starts the thread, which makes the logger.

        Args:
          report: called once at most, with the name of the event, its step and fields,
            from any thread.
          room: calls that may wait.
          close_s: seconds that `close` waits.
        """
        self._name = name
        self._report = report
        self._close_s = close_s
        self._calls: queue.Queue[_Call | None] = queue.Queue(room)
        self._step: int | None = None
        # taken by the first who reports, and never released
        self._reported = threading.Lock()
        self._thread = threading.Thread(
            target=self._work, args=(make,), name=f"logger-{name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Hands over a row; the values are on the host."""
        self._step = step
        self._put(("write", (step, dict(values)), {}))

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Hands over an event."""
        self._put(("event", (name, step), fields))

    def close(self) -> None:
        """Waits, for a limited time, until the logger has had all calls and is
        closed.
        """
        deadline = time.monotonic() + self._close_s
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=self._close_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(
                f"it has not ended within {self._close_s:g} s; {self._calls.qsize()} calls are lost"
            )

    def _put(self, call: _Call) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(
                f"{self._calls.maxsize} calls wait for it; new ones are dropped while it is so slow"
            )

    def _fail(self, error: str) -> None:
        if self._reported.acquire(blocking=False):
            self._report("logger_failed", self._step, logger=self._name, error=error)

    def _work(self, make: Callable[[], Logger]) -> None:
        logger = self._try(make)
        while call := self._calls.get():
            method, arguments, fields = call
            if logger is not None:
                self._try(lambda: getattr(logger, method)(*arguments, **fields))  # noqa: B023
        if logger is not None:
            self._try(logger.close)

    def _try(self, function: Callable[[], Any]) -> Any:
        """Calls a function of the logger; returns None if it raises."""
        try:
            return function()
        except BaseException as error:
            # also what would end a process: this thread is not the run
            words = " ".join(str(error).split())
            self._fail(f"{type(error).__name__}: {words[:300]}")
            return None
