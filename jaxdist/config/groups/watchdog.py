"""Config group `watchdog.*`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from jaxdist.config.annotations import NonNegativeFloat


@dataclass(frozen=True)
class WatchdogConfig:
    """Seconds that each phase may last before the run is ended; 0 = no limit."""

    # time from the command to the first compilation; data work that logs a line starts
    # the time anew
    start_s: NonNegativeFloat = 1800.0
    # time to compile and run the first step, to run a batch of an evaluation, or to end
    compile_s: NonNegativeFloat = 7200.0
    restore_s: NonNegativeFloat = 3600.0  # time to read a checkpoint
    data_s: NonNegativeFloat = 600.0  # time to wait for the next batch
    step_s: NonNegativeFloat = 600.0  # time of a step
    save_s: NonNegativeFloat = 1800.0  # time that training waits for a save
    # number of median steps that a step may last, if that is longer than step_s
    slow_steps: Annotated[float, Ge(1)] = 20.0
