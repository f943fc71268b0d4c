"""Devices and ports of a machine, split among the processes of its agent.

Needs no jax.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.distributed.cluster import LOOPBACK
from jaxdist.hardware import flags as platform_flags

ANY_HOST = ""  # all addresses of this machine


def free_port(host: str = LOOPBACK) -> int:
    """Finds a port of an address of this machine that nothing uses."""
    with socket.socket() as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
    return port


def device_environment(
    environ: Mapping[str, str], slot: int, slots: int, devices: int | None
) -> dict[str, str]:
    """Builds the variables that give a process its part of the node's devices.

    Args:
      environ: the agent's variables.
      slot: index of the process on its node.
      slots: number of processes on the node.
      devices: devices for each process. With None, each process has an equal part of
        the visible GPUs, or as many CPU devices as the environment says.

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
    """Lists the GPUs that a process would see: CUDA_VISIBLE_DEVICES, or all.

    Args:
      environ: the variables of the process.
      folder: the driver's folder with an entry for each GPU.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = map(str.strip, environ["CUDA_VISIBLE_DEVICES"].split(","))
        return [name for name in names if name]
    return [str(number) for number, _ in enumerate(folder.glob("*"))]
