"""Config group `telemetry.*`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from jaxdist.config.annotations import Needs, NonNegativeFloat


@dataclass(frozen=True)
class TelemetryConfig:
    """Settings for cost reports and the Prometheus endpoint."""

    # price of a chip hour in any currency, for the costs in status and report; 0 = none
    price_per_chip_hour: NonNegativeFloat = 0.0
    # port of /metrics, for Prometheus, on process 0; 0 = no server
    port: Annotated[
        int,
        Interval(ge=0, le=65535),
        Needs("jaxdist.operations.metrics.serving.MetricsServer"),
    ] = 0
    # address that /metrics listens on; 0.0.0.0 = every network of the machine
    address: str = "127.0.0.1"
