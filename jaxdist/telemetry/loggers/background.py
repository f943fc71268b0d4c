"""Logger in a background thread: if it raises or hangs, the run continues."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.telemetry.loggers.logger import Logger

# most calls that wait; if a logger stays slower than the run, new calls are dropped
ROOM = 10_000

# (method, positional arguments, keyword arguments)
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class BackgroundLogger:
    """Logger that passes its calls to another one over a bounded queue.

    It reports the first fault by an event.
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
          name: name of the logger, for the event.
          make: makes the logger.
          report: writes an event, given its name, step and fields. It is called at most
            once, from any thread.
          room: number of calls that may wait.
          close_s: seconds that `close` waits.
        """
        self._name = name
        self._report = report
        self._close_s = close_s
        self._calls: queue.Queue[_Call | None] = queue.Queue(room)
        self._step: int | None = None
        # acquired by the first report, and never released
        self._reported = threading.Lock()
        self._thread = threading.Thread(
            target=self._work, args=(make,), name=f"logger-{name}", daemon=True
        )
        self._thread.start()

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Queues a row, whose values are on the host."""
        self._step = step
        self._put(("write", (step, dict(values)), {}))

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Queues an event."""
        self._put(("event", (name, step), fields))

    def close(self) -> None:
        """Waits, for `close_s` at most, until the logger is closed after all calls."""
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
            # SystemExit and KeyboardInterrupt, too: they must not end the thread
            one_line = " ".join(str(error).split())
            self._fail(f"{type(error).__name__}: {one_line[:300]}")
            return None
