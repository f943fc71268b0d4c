"""GPUs, RDMA cards, NCCL's settings and limits of a machine, read without jax.

All files are read below a root, so that the files of any machine can be examined.
Nothing raises: a file that cannot be read counts as absent. Sources: Linux's sysfs ABI
of InfiniBand, and NCCL's source code of 2026.
"""

import contextlib
import ctypes
import functools
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxdist.hardware.chips import platform_of

_AMAZON = "0x1d0f"  # PCI vendor id
_STA_UNSYNC = 0x40
_IPC_LOCK = 14  # the bit of CAP_IPC_LOCK
_RDMA = "/sys/class/infiniband"


class KernelClock(NamedTuple):
    """State of the kernel's clock."""

    is_kept: bool  # whether a time service keeps it right
    max_error_s: float


@dataclass(frozen=True)
class Limits:
    """Limits of a process, and the clock; None means unknown or unlimited."""

    open_files: int | None = None
    open_files_hard: int | None = None
    locked_bytes: int | None = None
    shm_bytes: int | None = None  # size of /dev/shm
    shm_free_bytes: int | None = None
    clock: KernelClock | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Reads the limits of this process, and of the /dev/shm below `root`."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = None
    free = None
    with contextlib.suppress(OSError):
        stat = os.statvfs(root / "dev/shm")
        size = stat.f_frsize * stat.f_blocks
        free = stat.f_frsize * stat.f_bavail
    return Limits(
        open_files=_limit(files),
        open_files_hard=_limit(hard),
        locked_bytes=_limit(locked),
        shm_bytes=size,
        shm_free_bytes=free,
        clock=kernel_clock(),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


class _Timex(ctypes.Structure):
    """The kernel's `struct timex` on 64-bit Linux."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error", ctypes.c_long),
        ("error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    ]


def kernel_clock() -> KernelClock | None:
    """Reads the state of the kernel's clock; None if the kernel does not report it.

    It calls adjtimex, which changes nothing here.
    """
    if ctypes.sizeof(ctypes.c_long) < 8:
        return None
    timex = _Timex()
    try:
        if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
            return None
    except (OSError, AttributeError):  # not Linux
        return None
    max_error_s = timex.max_error / 1e6  # from microseconds
    return KernelClock(not timex.status & _STA_UNSYNC, max_error_s)


@dataclass(frozen=True)
class Machine:
    """GPUs, RDMA cards and NCCL's settings of a machine.

    They are read from the machine's files and a process's environment.
    """

    root: Path  # the folder that stands for /
    environ: Mapping[str, str]

    def read(self, path: str) -> str:
        """Reads the text of a file without surrounding space; "" if it cannot be read.

        It reads at most 64 KiB, and does not wait at a pipe.
        """
        with contextlib.suppress(OSError, ValueError):
            file = os.open(self.at(path), os.O_RDONLY | os.O_NONBLOCK)
            try:
                return os.read(file, 1 << 16).decode(errors="replace").strip()
            finally:
                os.close(file)
        return ""

    def names(self, path: str) -> list[str]:
        """Lists the sorted entries of a folder; [] if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return sorted(os.listdir(self.at(path)))
        return []

    def at(self, path: str) -> Path:
        """Maps an absolute path to its place below the root."""
        return self.root / path.lstrip("/")

    @functools.cached_property
    def gpus(self) -> int:
        """Number of NVIDIA GPUs; 0 if JAX_PLATFORMS names another platform."""
        named = self.environ.get("JAX_PLATFORMS", "").partition(",")[0].strip()
        if named and platform_of(named) != "gpu":
            return 0
        files = [
            name for name in self.names("/dev") if re.fullmatch(r"nvidia\d+", name)
        ]
        return max(len(files), len(self.names("/proc/driver/nvidia/gpus")))

    @functools.cached_property
    def rdma(self) -> list[str]:
        """Names of cards for InfiniBand, RoCE and EFA that have a driver."""
        return self.names(_RDMA)

    @functools.cached_property
    def infiniband(self) -> list[str]:
        """Names of cards for InfiniBand or RoCE: `rdma` without Amazon's EFA."""
        return [
            card
            for card in self.rdma
            if not card.startswith("efa_")
            and self.read(f"{_RDMA}/{card}/device/vendor") != _AMAZON
        ]

    @functools.cached_property
    def nccl(self) -> dict[str, tuple[str, str]]:
        """NCCL's settings as {name: (value, " in FILE" or "")}.

        The environment overrides the user's file, which overrides the system's file.
        """
        users_file = (
            self.environ.get("NCCL_CONF_FILE")
            or f"{self.environ.get('HOME', '')}/.nccl.conf"
        )
        settings: dict[str, tuple[str, str]] = {}
        for file in ("/etc/nccl.conf", users_file):
            for line in self.read(file).splitlines():
                name, equals, value = line.partition("=")
                if equals:
                    settings[name.strip()] = (value.strip(), f" in {file}")
        return settings | {name: (value, "") for name, value in self.environ.items()}

    @functools.cached_property
    def may_lock_memory(self) -> bool:
        """True if the process may exceed limits of locked memory (CAP_IPC_LOCK)."""
        capabilities = re.search(
            r"^CapEff:\s*([0-9a-f]{1,16})$", self.read("/proc/self/status"), re.M
        )
        return bool(capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1)
