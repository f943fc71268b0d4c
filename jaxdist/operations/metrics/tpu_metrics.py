"""Metrics of libtpu about this machine's chips, for Prometheus."""

import contextlib
from collections.abc import Iterator

from libtpu.sdk import tpumonitoring

# name in libtpu -> name in Prometheus, help text, factor between the units
_METRICS = {
    "duty_cycle_pct": (
        "jaxdist_tpu_duty_cycle_ratio",
        "Share of the time that the chip was busy.",
        0.01,
    ),
    "tensorcore_util": (
        "jaxdist_tpu_tensorcore_ratio",
        "Use of the chip's TensorCores.",
        0.01,
    ),
    "hbm_capacity_usage": (
        "jaxdist_tpu_memory_used_bytes",
        "Bytes of the chip's memory in use.",
        1.0,
    ),
    "hbm_capacity_total": (
        "jaxdist_tpu_memory_bytes",
        "Bytes of the chip's memory.",
        1.0,
    ),
    "tpu_throttle_score": (
        "jaxdist_tpu_throttle",
        "0 = not throttled, 1 to 10 = by that number of tenths.",
        1.0,
    ),
}


def read() -> Iterator[tuple[str, str, list[float]]]:
    """Yields (name, help text, a value for each chip) of the available metrics."""
    supported = set(tpumonitoring.list_supported_metrics())
    for metric, (name, text, factor) in _METRICS.items():
        if metric not in supported:
            continue
        values: list[float] = []
        # a metric may have no value yet, or text that is no number
        with contextlib.suppress(RuntimeError, ValueError):
            values = [
                factor * float(value)
                for value in tpumonitoring.get_metric(metric).data()
            ]
        if values:
            yield name, text, values
