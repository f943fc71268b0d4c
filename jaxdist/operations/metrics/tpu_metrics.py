"""What libtpu says of the chips of this machine, for Prometheus."""

import contextlib
from collections.abc import Iterator

from libtpu.sdk import tpumonitoring

# libtpu's name -> ours, what it is, and the factor between the units.
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
        "0 = not throttled, 1 to 10 = by so many tenths.",
        1.0,
    ),
}


def read() -> Iterator[tuple[str, str, list[float]]]:
    """Yields (name, what it is, a value for each chip) of the metrics that libtpu has
    now.
    """
    known = set(tpumonitoring.list_supported_metrics())
    for metric, (name, text, factor) in _METRICS.items():
        if metric not in known:
            continue
        values: list[float] = []
        # not yet, or text that is no number
        with contextlib.suppress(RuntimeError, ValueError):
            values = [
                factor * float(value)
                for value in tpumonitoring.get_metric(metric).data()
            ]
        if values:
            yield name, text, values
