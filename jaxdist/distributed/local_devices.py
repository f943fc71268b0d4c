"""The devices and ports of the machine that an agent shares out among its processes. No
jax.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.distributed.cluster import LOOPBACK
from jaxdist.hardware import flags as platform_flags


def free_port() -> int:
    """Finds a port of loopback that nothing uses."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return free.getsockname()[1]


def device_environment(
    environ: Mapping[str, str], slot: int, slots: int, devices: int | None
) -> dict[str, str]:
    """Makes the variables that give a process its part of the node's devices.

    CPUs are emulated, `devices` for each process (None: as the environment says). Of
    the visible GPUs slot s has the s-th part: `devices` of them, or an equal share of
    all.

    Raises:
      ConfigError: there are too few GPUs, or several processes would share TPUs.
    """
    platform = platform_flags.detect_platform(environ)
    if platform == "cpu":
        if devices is None:
            return {}
        flags = re.sub(
            r"--xla_force_host_platform_device_count=\d+",
            "",
            environ.get("XLA_FLAGS", ""),
        )
        return {
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        }
    if slots == 1 and devices is None:
        return {}
    if platform == "tpu":
        raise ConfigError(
            "one process has all TPUs of a host: give --processes 1, no --devices-per-process"
        )
    visible = visible_gpus(environ)
    share = devices or len(visible) // slots
    if not 0 < share * slots <= len(visible):
        raise ConfigError(
            f"--processes {slots} x --devices-per-process {devices or 1} need {slots * (devices or 1)} GPUs, "
            f"there are {len(visible)}; lower one of them"
        )
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible[slot * share : (slot + 1) * share])
    }


def visible_gpus(
    environ: Mapping[str, str], folder: Path = Path("/proc/driver/nvidia/gpus")
) -> list[str]:
    """Lists the names of the GPUs that a process here would see: CUDA_VISIBLE_DEVICES,
    or all.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = map(str.strip, environ["CUDA_VISIBLE_DEVICES"].split(","))
        return [name for name in names if name]
    return [str(number) for number, _ in enumerate(folder.glob("*"))]
