"""Finds the process that holds up the others."""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxdist.distributed import coordination
from jaxdist.telemetry import clock
from jaxdist.trainer.callbacks import Callback, RowView, Run
from jaxdist.trainer.health import Diverged

_ROWS = 20  # of metrics that a pace is measured over
_ENOUGH = 5  # rows, and seconds, before a process can lag
_ENOUGH_S = 1.0


class Stragglers(Callback):
    """Adds to each row which process is slowest; one that lags makes an event."""

    def on_start(self, run: Run) -> None:
        """Begins to measure."""
        self._pace = Pace(run.event)

    def on_fault(self, error: Exception) -> None:
        """Begins anew: the loop does so after a rollback."""
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
    """Finds at each row of metrics which process has held up the others, from their own
    clocks.

    A process that is late waits less for its devices than those that wait for it. So
    its time outside that wait counts: data, host work, an interpreter that was not
    running. A slow chip does not show, since all devices end together.
    """

    def __init__(self, event: Callable[..., None]) -> None:
        self.event = event
        self._last = -1  # the last that lagged
        # of the last row's seconds: what this process waited for one that lags
        self.held_s = 0.0
        self._board = coordination.Board("pace")
        self._begun = False
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_ROWS)

    def row(
        self, step: int, *, steps: int, seconds: float, waited_s: float
    ) -> dict[str, Any]:
        """Posts this process's pace, and compares it with the others on process 0.

        The others' pace may be a row old, since nobody waits. A process that lags makes
        an event.

        Args:
          step: the newest of the row.
          steps, seconds: since the row before.
          waited_s: seconds of them that this process waited for its devices.

        Returns:
          Fields for the row; {} on other processes and of a lone one.
        """
        self.held_s = 0.0
        # the first steps of a program are no measure
        if self._board.client is None or not self._begun:
            self._begun = True
            return {}
        # Rows come in bursts, when a pause looks at all steps under way. So several
        # together are compared.
        self._recent.append((steps, seconds, seconds - waited_s))
        columns = zip(*self._recent, strict=True)
        number, time_s, busy_s = (sum(column) for column in columns)
        busy_s_of: Mapping[int, float] = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._board.put(busy_s / number)
            if jax.process_index() == 0:
                busy_s_of = self._board.values()
        if not busy_s_of:
            return {}
        fields = slowest(busy_s_of)
        process = fields["slowest_process"]
        excess_s = fields["slowest_busy_s"] - fields["median_busy_s"]
        is_known = len(self._recent) >= _ENOUGH and time_s >= _ENOUGH_S
        lags = is_known and excess_s > 0.2 * time_s / number
        if lags and process != self._last:
            self.event("straggler", step, process=process, **fields)
        self._last = process if lags else -1
        if lags and process != jax.process_index():
            behind_s = fields["slowest_busy_s"] - busy_s / number
            self.held_s = min(waited_s, steps * max(0.0, behind_s))
        return fields


def slowest(busy_s: Mapping[int, float]) -> dict[str, Any]:
    """Finds the process that was busy longest, its seconds per step, and the (lower)
    median.
    """
    process = max(busy_s, key=lambda number: busy_s[number])
    median = sorted(busy_s.values())[(len(busy_s) - 1) // 2]
    return {
        "slowest_process": process,
        "slowest_busy_s": busy_s[process],
        "median_busy_s": median,
    }
