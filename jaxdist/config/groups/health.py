"""Config group `health.*`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxdist.config.annotations import Needs, NonNegativeFloat, NonNegativeInt


@dataclass(frozen=True)
class HealthConfig:
    """Checks of losses and replicated values, and the response to a failed check."""

    # response to more than optimizer.nonfinite_limit nonfinite steps in a row, and to
    # replicated values that differ (compare_every)
    nonfinite: Literal["stop", "rollback"] = "stop"
    spike: Literal["report", "rollback"] = "report"  # response to a spike of the loss
    # height of a spike, in robust deviations above the recent median; 0 = no spikes
    spike_sigmas: NonNegativeFloat = 10.0
    # number of rollbacks of a run; after that many, a fault stops it
    max_rollbacks: NonNegativeInt = 5
    # number of steps between comparisons of replicated values; 0 = never
    compare_every: Annotated[
        NonNegativeInt, Needs("jaxdist.operations.watch.replica_check.ReplicaCheck")
    ] = 1000
    # steps between probes that time each chip, host link and host memory; 0 = never.
    # Probes are rarer if they would take more than 0.1 % of the time.
    probe_every: Annotated[
        NonNegativeInt, Needs("jaxdist.operations.watch.probe.Probe")
    ] = 1000
