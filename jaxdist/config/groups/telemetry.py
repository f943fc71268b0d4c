"""Config group `telemetry.*`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from jaxdist.config.annotations import Needs, NonNegativeFloat


@dataclass(frozen=True)
class TelemetryConfig:
    """Settings for cost reports and the Prometheus endpoint."""

    # in any money; status and report say what the run costs
    price_per_chip_hour: NonNegativeFloat = 0.0
    # of /metrics, for Prometheus, on process 0; 0 = none
    port: Annotated[
        int,
        Interval(ge=0, le=65535),
        Needs("jaxdist.operations.metrics.serving.MetricsServer"),
    ] = 0
    # where it listens; 0.0.0.0 = on every network of the machine
    address: str = "127.0.0.1"
