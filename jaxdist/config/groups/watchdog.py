"""Config group `watchdog.*`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from jaxdist.config.annotations import NonNegativeFloat


@dataclass(frozen=True)
class WatchdogConfig:
    """Seconds that each phase may last before the run is ended; 0 = no limit."""

    # from the command to the first compilation, a line of data work
    start_s: NonNegativeFloat = 1800.0
    # compiling and the first step, an evaluation's batch, the end
    compile_s: NonNegativeFloat = 7200.0
    restore_s: NonNegativeFloat = 3600.0  # reading a checkpoint
    data_s: NonNegativeFloat = 600.0  # waiting for the next batch
    step_s: NonNegativeFloat = 600.0  # a step
    save_s: NonNegativeFloat = 1800.0  # what of a save training waits for
    # a step may last this many median steps, if that is longer
    slow_steps: Annotated[float, Ge(1)] = 20.0
