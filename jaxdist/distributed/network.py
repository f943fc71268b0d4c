"""Checks for five documented reasons why runs of several processes are slow or fail.

`doctor` prints each fault of the machine with its fix. Sources: NVIDIA's NCCL user
guide and NCCL's source code, 2026.
"""

import contextlib
import functools
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import ConfigError
from jaxdist.distributed.cluster import ClusterInfo, find_cluster
from jaxdist.hardware.network import Limits, Machine, read_limits
from jaxdist.telemetry.units import gib_text

_NCCL_SHM = 2**30  # NVIDIA's user guide asks for --shm-size=1g in containers
_DOCKER_SHM = 2**26  # docker's default, too little for programs that share memory
# Process 0 has a connection to each process, and NCCL over TCP has one for each channel
# and peer. Some hundred of these use up 1,024, the default of most systems.
_OPEN_FILES = 4096
_OPEN_FILES_OF_FEW = 1024  # enough for a single machine, or processes without GPUs
_FEW_PROCESSES = 100
# NCCL registers far less of the host's memory. Defaults of the kernel and of docker are
# far lower (64 MiB at most), limits that systemd or a site sets are far higher.
_NCCL_LOCKED = 2**32
_MAX_CLOCK_ERROR_S = 1.0  # the limit of `operations/launch/preflight.py`, too
_NOT_ZERO = re.compile(r"-?\d*[1-9]\d*")  # a setting that is on


class Fault(NamedTuple):
    """A fault of a machine."""

    check: str  # a key of CHECKS
    fault: str  # the finding and its effect
    cure: str  # the fix; the name is a field of doctor's JSON


@dataclass(frozen=True)
class _Node(Machine):
    """A machine of a run."""

    limits: Limits

    @functools.cached_property
    def cluster(self) -> ClusterInfo:
        try:
            return find_cluster(self.environ)
        except (ConfigError, KeyError, ValueError):  # the start of the run reports it
            return ClusterInfo()

    @property
    def is_one_of_several(self) -> bool:
        """Checks if other machines have processes of the run."""
        is_alone = (
            self.cluster.launcher == "Slurm"
            and self.environ.get("SLURM_STEP_NUM_NODES") == "1"
        )
        return (
            self.cluster.number > 1
            and not is_alone
            and not _is_loopback(self.cluster.host)
        )

    @property
    def talks_to_hosts(self) -> bool:
        """Checks if NCCL would send to other machines.

        It would in a run of several machines. RDMA cards suggest such a run.
        """
        return self.gpus > 0 and (self.is_one_of_several or bool(self.rdma))


def network_faults(
    root: Path, environ: Mapping[str, str], limits: Limits | None = None
) -> list[Fault]:
    """Lists the faults of this machine for the run that this environment would start.

    A check is silent if it does not apply: checks of NCCL without GPUs, and checks of
    several machines on a single one. The clock is always checked, since a run may
    continue on another machine. Malformed files and variables never raise.

    Args:
      root: the folder that holds /sys, /proc, /etc and /dev.
      environ: the variables of the run.
      limits: limits of a process; None: those of this process.
    """
    if limits is None:
        limits = read_limits(root)
    node = _Node(root, environ, limits)
    faults = []
    for name, check in CHECKS.items():
        faults += [Fault(name, fault, fix) for fault, fix in check(node)]
    return faults


# --- checks: each yields (fault, fix) -------------------------------------------------

Found = Iterator[tuple[str, str]]


def _nccl_socket(node: _Node) -> Found:
    network, network_file = node.nccl.get("NCCL_NET", ("", ""))
    disabled, disabled_file = node.nccl.get("NCCL_IB_DISABLE", ("", ""))
    if node.talks_to_hosts and network.lower() == "socket":
        fault = f"NCCL_NET={network}{network_file}: NCCL sends over TCP"
        if node.rdma:
            fault += f", though {', '.join(node.rdma)} are here"
        yield fault, "unset NCCL_NET"
    elif node.gpus and node.infiniband and _NOT_ZERO.fullmatch(disabled):
        yield (
            f"NCCL_IB_DISABLE={disabled}{disabled_file}: NCCL sends over TCP, "
            f"though {', '.join(node.infiniband)} are here",
            "unset NCCL_IB_DISABLE",
        )


def _shm(node: _Node) -> Found:
    size = node.limits.shm_bytes
    free = node.limits.shm_free_bytes
    if size is None or free is None:
        return
    if node.gpus > 1 or (node.gpus and node.is_one_of_several):
        is_small = free < _NCCL_SHM
        need = "NCCL needs 1 GiB"
    else:
        is_small = size <= _DOCKER_SHM
        need = "data workers need more"
    if not is_small:
        return
    yield (
        f"/dev/shm has {_size(size)}, {_size(free)} free: {need}",
        "docker: --shm-size=1g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm; "
        "or remove what fills it",
    )


def _open_files(node: _Node) -> Found:
    limit = node.limits.open_files
    hard = node.limits.open_files_hard
    has_few = node.cluster.number <= _FEW_PROCESSES and not node.talks_to_hosts
    needed = _OPEN_FILES_OF_FEW if has_few else _OPEN_FILES
    if limit is None or limit >= needed:
        return
    if hard is not None and hard < needed:
        shell_fix = f"ask root for more than the hard limit of {hard}"
    else:
        shell_fix = f"`ulimit -n {min(65_536, hard or 65_536)}` before the run"
    yield (
        f"a process may open {limit} files and sockets; with connections to many processes it needs {needed}",
        f"{shell_fix}; docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536",
    )


def _locked_memory(node: _Node) -> Found:
    limit = node.limits.locked_bytes
    if limit is None or limit >= _NCCL_LOCKED:
        return
    if node.gpus and node.rdma and not node.may_lock_memory:
        yield (
            f"a process may lock {_size(limit)} of memory: RDMA cannot register NCCL's buffers",
            "docker: --ulimit memlock=-1; systemd, so Slurm's slurmd, too: LimitMEMLOCK=infinity; "
            "Kubernetes: the capability IPC_LOCK",
        )


def _clock(node: _Node) -> Found:
    clock = node.limits.clock
    if clock is None or (clock.is_kept and clock.max_error_s <= _MAX_CLOCK_ERROR_S):
        return
    if clock.is_kept:
        state = f"may be {clock.max_error_s:.3g} s off"
    else:
        state = "is kept by no time service"
    yield (
        f"the kernel says that this machine's clock {state}: times of events and leases are compared between "
        f"machines",
        "start chrony or systemd-timesyncd on the machine, not in a container; `launch --preflight` measures "
        "how far the clocks of a run are apart",
    )


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _size(num_bytes: int) -> str:
    return gib_text(num_bytes) if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"


CHECKS: Mapping[str, Callable[[_Node], Found]] = {
    "nccl-socket": _nccl_socket,
    "shm": _shm,
    "open-files": _open_files,
    "locked-memory": _locked_memory,
    "clock": _clock,
}
