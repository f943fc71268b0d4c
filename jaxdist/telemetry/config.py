"""Fields of `telemetry.*`."""

from dataclasses import dataclass

from jaxdist.config.annotations import NonNegativeFloat


@dataclass(frozen=True)
class TelemetryConfig:
    """What is told of a run beside its metrics."""

    price_per_chip_hour: NonNegativeFloat = 0.0  # in any money; status and report say what the run costs
