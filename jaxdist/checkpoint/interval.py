"""Seconds between saves: as configured, or the interval that loses least time."""

import math
import statistics
from collections import deque
from typing import Any

from jaxdist.checkpoint.config import CheckpointConfig

# 419 unexpected interruptions of 16,384 H100 in 54 days: "The Llama 3 Herd of Models",
# 2024, section 3.3.4.
CHIP_HOURS_PER_FAILURE = 50_000.0
FIRST_S = 60.0  # seconds until the first save of interval=auto, which is measured

# Number of latest saves whose median counts: the first save may wait for imports.
_RECENT = 5
# Factor by which the interval must grow or shrink before it is reported again.
_CHANGED = 1.2


def checkpoint_interval(save_s: float, mtbf_s: float) -> float:
    """Computes the seconds between saves that lose least time in all.

    The formula is that of Young 1974, sqrt(2 save mtbf). It includes the higher terms
    of Daly 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps". Failures come at random.

    Args:
      save_s: seconds that training stands still for a save.
      mtbf_s: mean seconds between failures.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return (
        math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
    )


def mean_time_between_failures(
    failures: int, seconds: float, *, chips: int, chip_hours_per_failure: float
) -> tuple[float, str]:
    """Estimates the seconds between failures of a run, and names the estimate's source.

    Args:
      failures: number of starts of this run that have failed.
      seconds: running time of all starts together.
      chips: number of chips of the run.
      chip_hours_per_failure: the configured value. 0 uses the failures of this run, or,
        if it has had none, `CHIP_HOURS_PER_FAILURE`.

    Returns:
      The seconds, and their source in words.
    """
    if chip_hours_per_failure:
        source = "checkpoint.chip_hours_per_failure"
        return 3600 * chip_hours_per_failure / chips, source
    if failures:
        plural = "s" if failures > 1 else ""
        return seconds / failures, f"{failures} failure{plural} of this run"
    source = f"a failure in {CHIP_HOURS_PER_FAILURE:,.0f} chip hours"
    return 3600 * CHIP_HOURS_PER_FAILURE / chips, source


class SaveInterval:
    """Seconds between saves by the clock, which may adapt to measured saves.

    With several processes, only the value of process 0 counts.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._auto = config.interval == "auto"
        # 0 = no saves by the clock
        self.seconds = FIRST_S if self._auto else 60 * config.every_minutes
        self._blocked: deque[float] = deque(maxlen=_RECENT)
        self._written: deque[float] = deque(maxlen=_RECENT)
        self._reported = 0.0  # the interval that was reported last; 0 = none

    def measured(
        self, blocked_s: float, written_s: float, failures: tuple[float, str]
    ) -> dict[str, Any]:
        """Takes the times of a save and chooses the interval anew.

        The interval is never shorter than a save takes, because saves do not overlap.

        Args:
          blocked_s: seconds that training stood still.
          written_s: seconds until the step was sealed.
          failures: result of `mean_time_between_failures`.

        Returns:
          Fields to report, {} if the interval has hardly changed.
        """
        if not self._auto:
            return {}
        self._blocked.append(blocked_s)
        self._written.append(written_s)
        blocked_s = statistics.median(self._blocked)
        written_s = statistics.median(self._written)
        mtbf_s, source = failures
        self.seconds = max(checkpoint_interval(blocked_s, mtbf_s), written_s, 1.0)
        if self._reported and 1 / _CHANGED < self.seconds / self._reported < _CHANGED:
            return {}
        self._reported = self.seconds
        return {
            "interval_s": self.seconds,
            "blocked_s": blocked_s,
            "written_s": written_s,
            "mtbf_s": mtbf_s,
            "mtbf_by": source,
        }
