"""XLA and libtpu flags per platform, and which platform this is; no jax."""

import dataclasses
import os
from collections.abc import Callable, Mapping

from jaxdist.hardware.chips import Platform, platform_of


@dataclasses.dataclass(frozen=True)
class Flag:
    """One setting a platform starts with, and why."""

    variable: str  # of the environment
    name: str  # of a flag inside it; "" where the variable itself is the setting
    value: str
    why: str
    source: str

    @property
    def setting(self) -> str:
        """The variable, and the flag inside it."""
        return f"{self.variable} {self.name}".strip()


# Each name was found in the binaries of jaxlib and the CUDA 13 plugin, 0.10.2 and 0.12.0, and each
# libtpu flag compiled a program for every TPU above with libtpu 0.0.42.1: an unknown name aborts
# the process. `xla_tpu_enable_async_collective_fusion` is left out on purpose: libtpu 0.0.50.1
# refuses it on v5p and v6e, and it is the default where it helps.
_TOOLBOX = "NVIDIA JAX Toolbox, "
_MAXTEXT = "MaxText benchmarks/xla_flags_library.py, DATA_PARALLEL_OVERLAP"

FLAGS: Mapping[Platform, tuple[Flag, ...]] = {
    "gpu": (
        Flag("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler", "true",
             "moves collectives so that they overlap with compute", _TOOLBOX + "Environment Variables"),
        Flag("XLA_PYTHON_CLIENT_MEM_FRACTION", "", "0.9",
             "the default (0.75) leaves a quarter of the memory unused; libraries need a tenth",
             _TOOLBOX + "Tips for High-Performance LLMs with JAX and XLA"),
    ),
    "tpu": (
        Flag("LIBTPU_INIT_ARGS", "--xla_tpu_enable_data_parallel_all_reduce_opt", "true",
             "optimises the all-reduces of data parallelism between slices", _MAXTEXT),
        Flag("LIBTPU_INIT_ARGS", "--xla_tpu_data_parallel_opt_different_sized_ops", "true",
             "pipelines data-parallel collectives across loop iterations", _MAXTEXT),
    ),
    "cpu": (),
}  # fmt: skip


def flag_environment(platform: Platform, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set: only those that change, each with its full new value.

    A setting that `environ` already holds, as a variable or as a flag inside one, is the user's
    own and stays.
    """
    changed: dict[str, str] = {}
    for flag in FLAGS[platform]:
        present = changed.get(flag.variable, environ.get(flag.variable))
        if not flag.name:
            if present is None:
                changed[flag.variable] = flag.value
        elif flag.name not in {word.partition("=")[0] for word in (present or "").split()}:
            changed[flag.variable] = f"{present or ''} {flag.name}={flag.value}".strip()
    return changed


def flag_table(platform: Platform) -> str:
    """Returns the platform's flags as text: a line for the setting, one for reason and source."""
    lines = (f"{f.setting}={f.value}\n    {f.why} [{f.source}]" for f in FLAGS[platform])
    return "\n".join(lines) or f"{platform}: no flags are set"


def detect_platform(
    environ: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> Platform:
    """Returns the platform that jax will choose, without importing it.

    JAX_PLATFORMS decides if set (its first entry); else a device file does. /dev/vfio alone also
    exists on machines without a TPU, so it counts only with a group in it.
    """
    if named := environ.get("JAX_PLATFORMS", "").partition(",")[0].strip():
        return platform_of(named)
    if any(map(exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd"))):
        return "gpu"
    if any(exists(f"{folder}{i}") for folder in ("/dev/accel", "/dev/vfio/") for i in range(8)):
        return "tpu"
    return "cpu"
