"""Ends a run at a signal: after the step under way, with everything saved."""

from __future__ import annotations

import signal
import threading
from typing import Any

import jax


class StopSignals:
    """While entered, SIGINT and SIGTERM only set `asked`: the step under way is finished and saved.

    For a process on its own. In a group one process must not stop alone: there signals keep their
    meaning. A second SIGINT interrupts at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
