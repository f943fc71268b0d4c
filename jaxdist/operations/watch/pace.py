"""Detection of a process that is slower than the others."""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxdist.distributed import coordination
from jaxdist.telemetry import clock
from jaxdist.trainer.callbacks import Callback, RowView, Run
from jaxdist.trainer.health import Diverged

_ROWS = 20  # most rows of metrics that a pace is measured over
# fewest rows, and seconds, before a process can be a straggler
_MIN_ROWS = 5
_MIN_S = 1.0


class Stragglers(Callback):
    """Callback that adds the slowest process to each row, and reports stragglers."""

    def on_start(self, run: Run) -> None:
        """Starts to measure."""
        self._pace = Pace(run.event)

    def on_fault(self, error: Exception) -> None:
        """Starts again after a rollback."""
        if isinstance(error, Diverged):
            self._pace = Pace(self._pace.event)

    def on_row(self, row: RowView) -> None:
        """Compares the processes over the steps of a row."""
        row.values.update(
            self._pace.row(
                row.step,
                steps=row.steps,
                seconds=row.seconds,
                waited_s=row.device_wait_s,
            )
        )
        clock.current().move(clock.STEP, clock.WAIT, self._pace.held_s)


class Pace:
    """Comparison of the processes' paces at each row of metrics.

    A process that is late waits less for its devices than the processes that wait for
    it. So its busy time counts, which is all time outside that wait: data, host work,
    an interpreter that did not run. A slow chip does not show, since all devices end
    together.
    """

    def __init__(self, event: Callable[..., None]) -> None:
        self.event = event
        self._straggler = -1  # process of the last event while it lags; -1: none lags
        # seconds of the last row that this process waited for a straggler
        self.held_s = 0.0
        self._board = coordination.Board("pace")
        self._has_begun = False
        # (steps, seconds, busy seconds) of the last rows
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_ROWS)

    def row(
        self, step: int, *, steps: int, seconds: float, waited_s: float
    ) -> dict[str, Any]:
        """Posts this process's pace; process 0 compares it with the others' paces.

        The other paces may be a row old, since no process waits. A process that starts
        to lag makes an event.

        Args:
          step: the newest step of the row.
          steps: number of steps since the previous row.
          seconds: seconds since the previous row.
          waited_s: seconds of them in which this process waited for its devices.

        Returns:
          Fields for the row; {} on other processes and for a lone process.
        """
        self.held_s = 0.0
        # the first steps of a program do not show the pace
        if self._board.client is None or not self._has_begun:
            self._has_begun = True
            return {}
        # Rows come in bursts after a pause of the loop: several are compared at once.
        self._recent.append((steps, seconds, seconds - waited_s))
        columns = zip(*self._recent, strict=True)
        num_steps, time_s, busy_s = (sum(column) for column in columns)
        busy_by_process: Mapping[int, float] = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._board.put(busy_s / num_steps)
            if jax.process_index() == 0:
                busy_by_process = self._board.values()
        if not busy_by_process:
            return {}
        fields = slowest(busy_by_process)
        process = fields["slowest_process"]
        excess_s = fields["slowest_busy_s"] - fields["median_busy_s"]
        is_known = len(self._recent) >= _MIN_ROWS and time_s >= _MIN_S
        lags = is_known and excess_s > 0.2 * time_s / num_steps
        if lags and process != self._straggler:
            self.event("straggler", step, process=process, **fields)
        self._straggler = process if lags else -1
        if lags and process != jax.process_index():
            behind_s = fields["slowest_busy_s"] - busy_s / num_steps
            self.held_s = min(waited_s, steps * max(0.0, behind_s))
        return fields


def slowest(busy_s: Mapping[int, float]) -> dict[str, Any]:
    """Finds the process that was busy longest.

    Args:
      busy_s: busy seconds per step, by process.

    Returns:
      The process, its seconds, and the (lower) median, as fields of a row.
    """
    process = max(busy_s, key=lambda number: busy_s[number])
    median = sorted(busy_s.values())[(len(busy_s) - 1) // 2]
    return {
        "slowest_process": process,
        "slowest_busy_s": busy_s[process],
        "median_busy_s": median,
    }
