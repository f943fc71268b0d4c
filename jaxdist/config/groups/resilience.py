"""Config group `resilience.*`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxdist.config.annotations import Needs


@dataclass(frozen=True)
class ResilienceConfig:
    """Source of preemption notices."""

    # what cloud's word that it takes a machine back is listened for; auto: that of the
    # machine's firmware
    preemption_notice: Annotated[
        Literal["none", "auto", "aws", "gcp", "azure"],
        Needs("jaxdist.operations.watch.notices.PreemptionNotices"),
    ] = "none"
