"""Config group `profile.*`."""

from dataclasses import dataclass

from jaxdist.config.annotations import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class ProfileConfig:
    """Steps to profile."""

    # first profiled step, >= 2 to leave compilation out; 0 = no profile
    start_step: NonNegativeInt = 0
    num_steps: PositiveInt = 3  # profiled steps
