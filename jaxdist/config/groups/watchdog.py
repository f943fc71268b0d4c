"""Config group `watchdog.*`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from jaxdist.config.annotations import NonNegativeFloat


@dataclass(frozen=True)
class WatchdogConfig:
    """Seconds that each phase may last before the run is ended; 0 = no limit."""

    # limit for the time from the command to the first compilation; each progress line
    # of data preparation restarts it
    start_s: NonNegativeFloat = 1800.0
    # limit for compiling with the first step, for a batch of an evaluation, and for the
    # end
    compile_s: NonNegativeFloat = 7200.0
    restore_s: NonNegativeFloat = 3600.0  # limit for reading a checkpoint
    data_s: NonNegativeFloat = 600.0  # limit for the wait for the next batch
    step_s: NonNegativeFloat = 600.0  # limit for a step
    # limit for the part of a save that blocks training
    save_s: NonNegativeFloat = 1800.0
    # number of median steps that a step or a batch may last, if that is a longer time
    slow_steps: Annotated[float, Ge(1)] = 20.0
