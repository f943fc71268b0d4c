"""How often to save: as configured, or as often as loses least, by what saves cost and
how a run fails.
"""

import math
import statistics
from collections import deque
from typing import Any

from jaxdist.checkpoint.config import CheckpointConfig

# 419 unexpected interruptions of 16,384 H100 in 54 days: "The Llama 3 Herd of Models",
# 2024, section 3.3.4.
CHIP_HOURS_PER_FAILURE = 50_000.0
FIRST_S = 60.0  # until the first save of interval=auto, which is measured

_RECENT = 5  # saves whose median counts: the first may wait for imports
_CHANGED = 1.2  # times longer or shorter is told


def checkpoint_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds between saves that lose least, where a save stops training
    for `save_s`.

    Young 1974: sqrt(2 save mtbf), with the higher terms of Daly 2006 (A higher order
    estimate of the optimum checkpoint interval for restart dumps); failures come at
    random, `mtbf_s` apart on average.
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
    """Returns the seconds between failures of a run, and whose word that is.

    Args:
      failures: starts of this run that failed so far.
      seconds: of all its starts.
      chips: that it runs on.
      chip_hours_per_failure: as configured; 0: as the run has failed, and until then as
        others did.
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
    """The seconds between saves by the clock. With several processes, what process 0
    says counts.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._auto = config.interval == "auto"
        # 0: none by the clock
        self.seconds = FIRST_S if self._auto else 60 * config.every_minutes
        self._blocked: deque[float] = deque(maxlen=_RECENT)
        self._written: deque[float] = deque(maxlen=_RECENT)
        self._told = 0.0

    def measured(
        self, blocked_s: float, written_s: float, failures: tuple[float, str]
    ) -> dict[str, Any]:
        """Takes the times of a save and chooses the interval anew; returns what to
        tell, {} if nothing.

        One save after the other: none begins before the one before is written.

        Args:
          blocked_s: seconds that training stood still.
          written_s: until it was committed.
          failures: see `mean_time_between_failures`.
        """
        if not self._auto:
            return {}
        self._blocked.append(blocked_s)
        self._written.append(written_s)
        blocked_s = statistics.median(self._blocked)
        written_s = statistics.median(self._written)
        mtbf_s, source = failures
        self.seconds = max(checkpoint_interval(blocked_s, mtbf_s), written_s, 1.0)
        if self._told and 1 / _CHANGED < self.seconds / self._told < _CHANGED:
            return {}
        self._told = self.seconds
        costs = {"blocked_s": blocked_s, "written_s": written_s}
        return {
            "interval_s": self.seconds,
            **costs,
            "mtbf_s": mtbf_s,
            "mtbf_by": source,
        }
