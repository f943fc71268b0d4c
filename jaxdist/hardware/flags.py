"""XLA and libtpu flags for each platform and chip family; imports no jax."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxdist.hardware.chips import (
    CHIPS,
    FAMILIES,
    FAMILY_ALIASES,
    Platform,
    platform_of,
)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A setting that jaxdist makes on a platform, with its reason and source."""

    variable: str  # the environment variable
    name: str  # the flag inside the variable; "" if the variable itself is the setting
    value: str
    why: str
    source: str
    # chip families that it applies to (`Chip.family`); () for the whole platform
    families: tuple[str, ...] = ()
    # flags that work together: a user who sets one of them must set them all
    group: str = ""
    # whether it may be an option of one compilation, not only of a whole process
    compile_option: bool = True

    @property
    def setting(self) -> str:
        """The variable and the flag inside it."""
        return f"{self.variable} {self.name}".strip()


# An unknown flag aborts the process. Each XLA flag was found in the binaries of jaxlib
# and the CUDA 13 plugin, 0.10.2 and 0.12.0. Each libtpu flag compiled a program for
# every TPU in `CHIPS` with libtpu 0.0.42.1. `xla_tpu_enable_async_collective_fusion` is
# omitted on purpose: libtpu 0.0.50.1 refuses it on v5p and v6e, and it is the default
# where it helps.
_TOOLBOX = "NVIDIA JAX Toolbox, "
_MAXTEXT = "MaxText benchmarks/xla_flags_library.py, DATA_PARALLEL_OVERLAP"

_LIBRARY = "MaxText benchmarks/xla_flags_library.py, ENABLE_SPARSECORE_OFFLOADING_FOR_"
_SPARSE_CORE = "collectives on the SparseCore"


def _sparse_core(
    name: str, value: str, why: str, source: str, *, compile_option: bool = True
) -> Flag:
    """Makes a flag that moves collectives from the TensorCore to the SparseCore.

    Collectives on the TensorCore stop its compute. These flags are for v5p and v6e: 7x
    needs none, and v4 and v5e keep collectives on the TensorCore with any flag.
    """
    return Flag(
        variable="LIBTPU_INIT_ARGS",
        name=f"--{name}",
        value=value,
        why=why,
        source=source,
        families=("v5p", "v6e"),
        group=_SPARSE_CORE,
        compile_option=compile_option,
    )


# On 64 chips of a 4x4x4 torus, sums stay reduce-scatters only with nd_reduce_scatter,
# and gathers are asynchronous only with 3d_all_gather.
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_PUBLISHED = "the published configurations of SparseCore collectives have it"
_OFFLOADED = {
    "all_gather": "gathers overlap with compute",
    "2d_all_gather": "gathers over two dims of the torus overlap as well",
    "3d_all_gather": "gathers over three dims of the torus overlap as well",
    "reduce_scatter": "reduce-scatters overlap with compute",
    "nd_reduce_scatter": "reduce-scatters over several dims otherwise become all-reduces, which send twice the bytes",
    "all_reduce": "all-reduces overlap with compute",
}

FLAGS: Mapping[Platform, tuple[Flag, ...]] = {
    "gpu": (
        Flag(
            "XLA_FLAGS",
            "--xla_gpu_enable_latency_hiding_scheduler",
            "true",
            "moves collectives so that they overlap with compute",
            _TOOLBOX + "Environment Variables",
        ),
        Flag(
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            "",
            "0.9",
            "the default (0.75) leaves a quarter of the memory unused, but libraries need only a tenth",
            _TOOLBOX + "Tips for High-Performance LLMs with JAX and XLA",
        ),
    ),
    "tpu": (
        Flag(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_enable_data_parallel_all_reduce_opt",
            "true",
            "optimizes the all-reduces of data parallelism between slices",
            _MAXTEXT,
        ),
        Flag(
            "LIBTPU_INIT_ARGS",
            "--xla_tpu_data_parallel_opt_different_sized_ops",
            "true",
            "pipelines data-parallel collectives across loop iterations",
            _MAXTEXT,
        ),
        *(
            _sparse_core(
                _OFFLOAD + name,
                "true",
                why,
                _LIBRARY + "..., docs/explanation/tpu-overlap.md",
            )
            for name, why in _OFFLOADED.items()
        ),
        _sparse_core(
            "xla_tpu_use_tc_device_shape_on_sc",
            "true",
            _PUBLISHED,
            _LIBRARY + "ALL_REDUCE",
        ),
        _sparse_core(
            "xla_sc_disable_megacore_partitioning",
            "true",
            _PUBLISHED,
            _LIBRARY + "ALL_REDUCE",
        ),
        _sparse_core(
            "xla_sc_enable_instruction_fusion",
            "false",
            _PUBLISHED,
            _LIBRARY + "ALL_REDUCE",
        ),
        _sparse_core(
            "xla_sc_disjoint_spmem",
            "false",
            _PUBLISHED,
            _LIBRARY + "ALL_REDUCE",
            compile_option=False,
        ),
    ),
    "cpu": (),
}


def flags_for(platform: Platform, family: str = "") -> tuple[Flag, ...]:
    """Lists the flags of a chip family; for an unknown family (""), those for all."""
    return tuple(f for f in FLAGS[platform] if not f.families or family in f.families)


def flag_environment(
    platform: Platform, environ: Mapping[str, str], *, family: str = ""
) -> dict[str, str]:
    """Lists the environment variables to change, each with its full new value.

    A setting that `environ` already has belongs to the user and stays as it is. If the
    user set one flag of a group, the whole group stays.
    """
    changed: dict[str, str] = {}
    users_groups = {flag.group for flag in _users(platform, environ, family)} - {""}
    for flag in flags_for(platform, family):
        present = changed.get(flag.variable, environ.get(flag.variable))
        if not flag.name:
            if present is None:
                changed[flag.variable] = flag.value
        elif flag.group not in users_groups and flag.name not in _names(present):
            changed[flag.variable] = f"{present or ''} {flag.name}={flag.value}".strip()
    return changed


def left_to_the_user(
    platform: Platform, environ: Mapping[str, str], *, family: str = ""
) -> list[str]:
    """Reports groups of flags that jaxdist does not set because the user set one.

    There is a line for each incomplete group. A complete group gets none; a parent
    process may have set it.
    """
    users: dict[str, list[str]] = {}
    for flag in _users(platform, environ, family):
        users.setdefault(flag.group, []).append(flag.name)
    lines = []
    for group in filter(None, users):
        missing = [
            f.name
            for f in flags_for(platform, family)
            if f.group == group and f.name not in users[group]
        ]
        if missing:
            lines.append(
                f"{group}: you set {' '.join(users[group])}, so the {len(missing)} other flags that jaxdist "
                f"would set are left to you ({' '.join(missing)})"
            )
    return lines


def _users(
    platform: Platform, environ: Mapping[str, str], family: str
) -> Iterator[Flag]:
    """Yields the flags that the environment already holds."""
    for flag in flags_for(platform, family):
        if flag.name and flag.name in _names(environ.get(flag.variable)):
            yield flag


def _names(words: str | None) -> set[str]:
    return {word.partition("=")[0] for word in (words or "").split()}


def flag_table(platform: Platform, family: str = "") -> str:
    """Formats flags as text: a line for each setting, and one for reason and source."""
    flags = flags_for(platform, family)
    lines = (f"{f.setting}={f.value}\n    {f.why} [{f.source}]" for f in flags)
    return "\n".join(lines) or f"{platform}: no flags are set"


def detect_platform(
    environ: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> Platform:
    """Predicts the platform that jax will choose, without importing it.

    The first entry of JAX_PLATFORMS decides if it is set; otherwise device files do.
    /dev/vfio also exists on machines without a TPU, so it counts only with a group in
    it.

    Args:
      environ: the environment variables.
      exists: checks whether a path exists.
    """
    named = environ.get("JAX_PLATFORMS", "").partition(",")[0].strip()
    if named:
        return platform_of(named)
    if any(map(exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd"))):
        return "gpu"
    if any(exists(f"/dev/accel{i}") or exists(f"/dev/vfio/{i}") for i in range(8)):
        return "tpu"
    return "cpu"


_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # PCI vendor id


def detect_family(
    environ: Mapping[str, str], *, pci_devices: Path = _PCI_DEVICES
) -> str:
    """Finds the family of this machine's TPUs ("v5p"); "" if there are none or unknown.

    Google Cloud's machine type (TPU_ACCELERATOR_TYPE=v5p-128) decides if it is set;
    otherwise the ids of devices on the PCI bus do, as in jax.

    Args:
      environ: the environment variables.
      pci_devices: the folder of PCI devices.
    """
    if detect_platform(environ) != "tpu":
        return ""
    named = environ.get("TPU_ACCELERATOR_TYPE", "").lower().partition("-")[0]
    named = FAMILY_ALIASES.get(named, named)
    if named in FAMILIES:
        return named
    families = {chip.pci_device_id: chip.family for chip in CHIPS if chip.pci_device_id}
    for vendor in sorted(pci_devices.glob("*/vendor")):
        with contextlib.suppress(OSError):
            device = (vendor.parent / "device").read_text().strip()
            if vendor.read_text().strip() == _GOOGLE and device in families:
                return families[device]
    return ""
