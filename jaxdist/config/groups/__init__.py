"""Config groups of the wings and of telemetry, importable without jax."""

from jaxdist.config.groups.health import HealthConfig
from jaxdist.config.groups.profile import ProfileConfig
from jaxdist.config.groups.resilience import ResilienceConfig
from jaxdist.config.groups.telemetry import TelemetryConfig
from jaxdist.config.groups.watchdog import WatchdogConfig

__all__ = [
    "HealthConfig",
    "ProfileConfig",
    "ResilienceConfig",
    "TelemetryConfig",
    "WatchdogConfig",
]
