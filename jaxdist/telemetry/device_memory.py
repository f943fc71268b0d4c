"""Memory of devices in a row of metrics, as their runtime counts it.

It imports no jax, because `status` reads the names of the fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """Reads the memory of devices for a row of metrics.

    Args:
      devices: of this process.

    Returns:
      The largest number of bytes in use and at the peak, and the smallest limit. Fields
      that the backend does not know are left out: CPU devices have none.
    """
    found = [statistics(device) for device in devices]
    fields = {}
    for field, key in FIELDS.items():
        values = [stats[key] for stats in found if key in stats]
        if values:
            choose = min if key == "bytes_limit" else max
            fields[field] = choose(values)
    return fields
