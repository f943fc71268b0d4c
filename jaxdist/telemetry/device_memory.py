"""Memory of devices in a row of metrics, as their runtime counts it."""

import contextlib
from collections.abc import Mapping, Sequence

import jax

# field of a row -> key of a device's `memory_stats`; all are bytes
FIELDS = {
    "device_memory_bytes": "bytes_in_use",
    "device_memory_peak_bytes": "peak_bytes_in_use",  # since the process began
    "device_memory_limit_bytes": "bytes_limit",
}


def statistics(device: jax.Device) -> Mapping[str, int]:
    """Reads the memory statistics of a device; empty if its backend has none."""
    with contextlib.suppress(RuntimeError):
        return device.memory_stats() or {}
    return {}


def row_fields(devices: Sequence[jax.Device]) -> dict[str, int]:
    """Reads the memory of this process's devices for a row of metrics.

    Args:
      devices: any; those of other processes are left out.

    Returns:
      The largest number of bytes in use and at the peak, and the smallest limit. Fields
      that the backend does not know are left out: CPU devices have none.
    """
    process = jax.process_index()
    found = [
        statistics(device) for device in devices if device.process_index == process
    ]
    fields = {}
    for field, key in FIELDS.items():
        values = [stats[key] for stats in found if key in stats]
        if values:
            choose = min if key == "bytes_limit" else max
            fields[field] = choose(values)
    return fields
