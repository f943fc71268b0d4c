"""Config group `resilience.*`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxdist.config.annotations import Needs


@dataclass(frozen=True)
class ResilienceConfig:
    """Source of preemption notices."""

    # cloud whose preemption notices are watched; auto = the cloud that the machine's
    # firmware names; none = no watch
    preemption_notice: Annotated[
        Literal["none", "auto", "aws", "gcp", "azure"],
        Needs("jaxdist.operations.watch.notices.PreemptionNotices"),
    ] = "none"
