"""Config group `profile.*`."""

from dataclasses import dataclass
from typing import Annotated

from jaxdist.config.annotations import Needs, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class ProfileConfig:
    """Steps to profile."""

    # first profiled step, 2 or more to exclude compilation; 0 = no profile
    start_step: Annotated[
        NonNegativeInt, Needs("jaxdist.trainer.profiling.Profile")
    ] = 0
    num_steps: PositiveInt = 3  # number of profiled steps
