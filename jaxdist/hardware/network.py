"""What a machine has of GPUs, RDMA cards, interfaces and NCCL's settings, and its
limits; no jax.

All is read below a root, so that any machine's files can be examined. Nothing raises:
what cannot be read is absent. Facts: Linux's sysfs ABI of InfiniBand, net and PCI;
NCCL's sources of 2026.
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

_AMAZON, _MELLANOX = "0x1d0f", "0x15b3"  # their PCI vendor ids
_NETWORK, _INFINIBAND = "0x02", "0x0207"  # PCI classes
_PCI = "/sys/bus/pci/devices"
_STA_UNSYNC = 0x40
_IPC_LOCK = 14  # the bit of CAP_IPC_LOCK
# where a loader looks in any case
_LIBRARIES = ("lib", "usr/lib", "lib64", "usr/lib64")
# Where installers put plugins, without telling the loader in every image.
_PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/local/gib/lib64",
)
_PLUGIN = "libnccl-net.so"
_RDMA = "/sys/class/infiniband"


class KernelClock(NamedTuple):
    """What the kernel says of its clock."""

    is_kept: bool  # by a time service
    max_error_s: float


@dataclass(frozen=True)
class Limits:
    """What the kernel tells of a process; None: unknown, or no limit."""

    open_files: int | None = None
    open_files_hard: int | None = None
    locked_bytes: int | None = None
    shm_bytes: int | None = None  # of /dev/shm
    shm_free_bytes: int | None = None
    clock: KernelClock | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Returns the limits of this process, and of the /dev/shm below `root`."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, size, free = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], None, None
    with contextlib.suppress(OSError):
        stat = os.statvfs(root / "dev/shm")
        size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
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
    """`struct timex` of a 64-bit Linux."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        *(
            (name, ctypes.c_long)
            for name in ("offset", "frequency", "max_error", "error")
        ),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    ]


def kernel_clock() -> KernelClock | None:
    """Returns the state of the kernel's clock (adjtimex, which changes nothing); None
    where none tells it.
    """
    timex = _Timex()
    try:
        if (
            ctypes.sizeof(ctypes.c_long) < 8
            or ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0
        ):
            return None
    except (OSError, AttributeError):  # no Linux
        return None
    # microseconds
    return KernelClock(not timex.status & _STA_UNSYNC, timex.max_error / 1e6)


class Port(NamedTuple):
    device: str  # mlx5_0
    number: str
    state: str  # 4: ACTIVE
    physical: str  # 5: LinkUp
    rate: float  # Gbit/s; 0: unknown
    layer: str  # InfiniBand, Ethernet; Unspecified for EFA
    board: str  # kind of card
    slot: str  # which card: its ports may be devices of their own

    def __str__(self) -> str:
        return f"{self.device} port {self.number}"


class Interface(NamedTuple):
    name: str
    is_up: bool
    # of no card: a bridge, a tunnel, a container's end; but for that of the default
    # route
    is_virtual: bool
    number: int  # the kernel's and NCCL's order


@dataclass(frozen=True)
class Machine:
    """What a machine's files and a process's environment say; files of `root`, as if
    that were /.
    """

    root: Path
    environ: Mapping[str, str]

    def read(self, path: str) -> str:
        """Returns the text of a file without the space around it; "" if it cannot be
        read.
        """
        return _read(self.at(path))

    def names(self, path: str) -> list[str]:
        """Returns what is in a folder, sorted; [] if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return sorted(os.listdir(self.at(path)))
        return []

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    @functools.cached_property
    def gpus(self) -> int:
        """NVIDIA's, of which NCCL joins several; 0 where jax is told to use others."""
        named = self.environ.get("JAX_PLATFORMS", "").partition(",")[0].strip()
        if named and platform_of(named) != "gpu":
            return 0
        files = [
            name for name in self.names("/dev") if re.fullmatch(r"nvidia\d+", name)
        ]
        return max(len(files), len(self.names("/proc/driver/nvidia/gpus")))

    @functools.cached_property
    def rdma(self) -> list[str]:
        """Cards for InfiniBand, RoCE and EFA that have a driver."""
        return self.names(_RDMA)

    @functools.cached_property
    def efa(self) -> list[str]:
        """Those of `rdma` that are EFA; udev may have renamed efa_0 to rdmap16s27."""
        return [
            card
            for card in self.rdma
            if card.startswith("efa_")
            or self.read(f"{_RDMA}/{card}/device/vendor") == _AMAZON
        ]

    @functools.cached_property
    def efa_cards(self) -> list[str]:
        """EFA cards on the PCI bus, with a driver or without."""
        cards = [
            name
            for name in self.names(_PCI)
            if self.read(f"{_PCI}/{name}/vendor") == _AMAZON
        ]
        return [
            name
            for name in cards
            if self.read(f"{_PCI}/{name}/device").startswith("0xefa")
        ]

    @functools.cached_property
    def rdma_cards(self) -> list[str]:
        """InfiniBand cards, and all of Mellanox, on the PCI bus, with a driver or
        without.
        """
        kinds = {name: self.read(f"{_PCI}/{name}/class") for name in self.names(_PCI)}
        return [
            name
            for name, kind in kinds.items()
            if kind.startswith(_INFINIBAND)
            or (
                kind.startswith(_NETWORK)
                and self.read(f"{_PCI}/{name}/vendor") == _MELLANOX
            )
        ]

    @functools.cached_property
    def ports(self) -> list[Port]:
        """Ports of all cards in `rdma`."""
        at = [
            (card, number)
            for card in self.rdma
            for number in self.names(f"{_RDMA}/{card}/ports")
        ]
        return [self._port(card, number) for card, number in at]

    def _port(self, card: str, number: str) -> Port:
        at = f"{_RDMA}/{card}"
        state, physical, rate, layer = (
            self.read(f"{at}/ports/{number}/{name}")
            for name in ("state", "phys_state", "rate", "link_layer")
        )
        ids = f"{self.read(f'{at}/device/vendor')} {self.read(f'{at}/device/device')}"
        gbits = re.match(r"(\d{1,6}(\.\d{1,3})?) Gb/sec", rate)
        board = self.read(f"{at}/board_id") or ids
        # without the PCI function
        slot = re.sub(r"\.\d$", "", os.path.realpath(self.at(f"{at}/device")))
        return Port(
            card,
            number,
            state,
            physical,
            float(gbits[1]) if gbits else 0.0,
            layer,
            board,
            slot,
        )

    @functools.cached_property
    def interfaces(self) -> list[Interface]:
        found = [self._interface(name) for name in self.names("/sys/class/net")]
        return sorted(found, key=lambda interface: interface.number)

    def _interface(self, name: str) -> Interface:
        at = f"/sys/class/net/{name}"
        flags = re.fullmatch(r"0x([0-9a-f]{1,8})", self.read(f"{at}/flags"))
        is_up = self.read(f"{at}/operstate") in ("up", "unknown") and (
            not flags or int(flags[1], 16) & 1
        )
        parts = self.names(at)
        is_above_a_card = "bridge" not in parts and any(
            part.startswith("lower_") for part in parts
        )
        is_virtual = (
            "/devices/virtual/" in os.path.realpath(self.at(at))
            and "bonding" not in parts
        )
        routes = (line.split() for line in self.read("/proc/net/route").splitlines())
        # of a pod, its veth
        is_way_out = any(words[:2] == [name, "00000000"] for words in routes)
        number = re.fullmatch(r"\d{1,9}", self.read(f"{at}/ifindex"))
        is_virtual = is_virtual and not is_above_a_card and not is_way_out
        return Interface(name, bool(is_up), is_virtual, int(number[0]) if number else 0)

    @functools.cached_property
    def nccl(self) -> dict[str, tuple[str, str]]:
        """{name: (value, " in FILE" or "")} of settings; the environment wins, then the
        user's file.
        """
        home = (
            self.environ.get("NCCL_CONF_FILE")
            or f"{self.environ.get('HOME', '')}/.nccl.conf"
        )
        found: dict[str, tuple[str, str]] = {}
        for file in ("/etc/nccl.conf", home):
            pairs = (line.partition("=") for line in self.read(file).splitlines())
            found |= {
                name.strip(): (value.strip(), f" in {file}")
                for name, equals, value in pairs
                if equals
            }
        return found | {name: (value, "") for name, value in self.environ.items()}

    @functools.cached_property
    def plugin(self) -> str | None:
        """NCCL's network plugin as the loader finds it; None if it finds none."""
        asked = [
            name
            for name in self.nccl.get("NCCL_NET_PLUGIN", ("", ""))[0].split(",")
            if name
        ]
        names = [
            form for name in asked for form in (name, f"libnccl-net-{name}.so")
        ] or [_PLUGIN]
        folders = [
            folder
            for folder in self.environ.get("LD_LIBRARY_PATH", "").split(":")
            if folder
        ]
        cache = _read(self.at("/etc/ld.so.cache"), 1 << 24) + "\0"
        for path in names:
            folder, _, name = path.rpartition("/")
            there = [
                f
                for f in ([folder] if folder else [*folders, *_LIBRARIES])
                if name in self.names(f)
            ]
            if there or (not folder and f"{name}\0" in cache):
                return path
        return None

    @functools.cached_property
    def plugin_folders(self) -> list[str]:
        """Where installers have put a plugin, whether or not the loader looks there."""
        return [folder for folder in _PLUGIN_FOLDERS if _PLUGIN in self.names(folder)]

    @functools.cached_property
    def may_lock_memory(self) -> bool:
        """Whether limits of locked memory do not count for this process
        (CAP_IPC_LOCK).
        """
        capabilities = re.search(
            r"^CapEff:\s*([0-9a-f]{1,16})$", self.read("/proc/self/status"), re.M
        )
        return bool(capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1)

    @functools.cached_property
    def own_address(self) -> tuple[str, str]:
        """The machine's name, and the address that /etc/hosts gives it, or ""."""
        name = self.read("/proc/sys/kernel/hostname")
        lines = [
            line.partition("#")[0].split()
            for line in self.read("/etc/hosts").splitlines()
        ]
        return name, next(
            (words[0] for words in lines if name and name in words[1:]), ""
        )


def _read(path: Path, limit: int = 1 << 16) -> str:
    """Returns the text of a file without the space around it; "" if it cannot
    be read.
    """
    with contextlib.suppress(OSError, ValueError):
        # a pipe, too, answers at once
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(number, limit).decode(errors="replace").strip()
        finally:
            os.close(number)
    return ""
