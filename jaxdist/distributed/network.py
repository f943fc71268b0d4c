"""What slows or breaks the network of a run on this machine, each fault with its cure;
`doctor` prints them.

Facts: NVIDIA's NCCL user guide and NCCL's sources of 2026; gloo, as jax 0.10.2 has it
(tried with a name in /etc/hosts).
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
from jaxdist.hardware.network import Limits, Machine
from jaxdist.telemetry.units import gib_text

# NVIDIA's user guide asks for --shm-size=1g in containers; docker's default, 64 MiB, is
# too little for any program that shares memory.
_NCCL_SHM, _DOCKER_SHM = 2**30, 2**26
# Process 0 has a connection to each process, and NCCL over TCP one for each channel and
# peer: 1,024, the default of most systems, is used up by some hundred. Fewer processes
# without GPUs need no more than that, nor does a machine that is alone.
_OPEN_FILES, _OPEN_FILES_OF_FEW, _FEW = 4096, 1024, 100
# What NCCL registers of the host's memory is far below this; limits of a share of the
# memory, as systemd and sites set them, are far above, the kernel's and docker's of at
# most 64 MiB far below.
_NCCL_LOCKED = 2**32
_MAX_CLOCK_ERROR_S = 1.0  # as between machines, see `operations/launch/preflight.py`


class Fault(NamedTuple):
    """One fault of a machine."""

    check: str  # a key of CHECKS
    fault: str  # what is so, and what follows from it
    cure: str


@dataclass(frozen=True)
class _Node(Machine):
    """A machine in a run."""

    limits: Limits

    @functools.cached_property
    def cluster(self) -> ClusterInfo:
        try:
            return find_cluster(self.environ)
        except (ConfigError, KeyError, ValueError):  # said by what starts a run
            return ClusterInfo()

    @property
    def is_one_of_several(self) -> bool:
        """Whether other machines have processes of the run."""
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
        """Whether NCCL would send to other machines: there are some, or a network for
        it.
        """
        return self.gpus > 0 and (self.is_one_of_several or bool(self.rdma))


def network_faults(
    root: Path, environ: Mapping[str, str], limits: Limits
) -> list[Fault]:
    """Returns what is wrong for the run that this environment would start; [] where all
    is well.

    A check is silent where it does not apply: those of NCCL without GPUs, of several
    machines on a lone one (but for the clock: a run may go on on another).

    Args:
      root: below which /sys, /proc, /etc, /dev and /opt lie; no tree and no environment
        raises.
    """
    node = _Node(root, environ, limits)
    return [
        Fault(check, *found) for check, find in CHECKS.items() for found in find(node)
    ]


# --- checks: each yields (what is wrong, cure) ----------------------------------------

Found = Iterator[tuple[str, str]]


def _is_on(node: _Node, name: str) -> str:
    """Returns a setting that is a number other than 0, as "NAME=1 in FILE"; else ""."""
    value, where = node.nccl.get(name, ("", ""))
    return f"{name}={value}{where}" if re.fullmatch(r"-?\d*[1-9]\d*", value) else ""


def _nccl_ib_disabled(node: _Node) -> Found:
    others = [device for device in node.rdma if device not in node.efa]
    if node.gpus and others and (setting := _is_on(node, "NCCL_IB_DISABLE")):
        yield (
            f"{setting}: NCCL leaves {_few(others)} alone and sends over TCP",
            "unset NCCL_IB_DISABLE",
        )


def _nccl_socket(node: _Node) -> Found:
    value, where = node.nccl.get("NCCL_NET", ("", ""))
    if node.talks_to_hosts and value.lower() == "socket":
        fabric = f", though {_few(node.rdma)} are here" if node.rdma else ""
        yield f"NCCL_NET={value}{where}: NCCL sends over TCP{fabric}", "unset NCCL_NET"


def _nccl_p2p_disabled(node: _Node) -> Found:
    if node.gpus > 1 and (setting := _is_on(node, "NCCL_P2P_DISABLE")):
        yield (
            f"{setting}: the {node.gpus} GPUs do not use NVLink or PCIe between each other, but memory of "
            f"the host",
            "unset NCCL_P2P_DISABLE",
        )


def _nccl_shm_disabled(node: _Node) -> Found:
    if node.gpus > 1 and (setting := _is_on(node, "NCCL_SHM_DISABLE")):
        yield (
            f"{setting}: GPUs of this machine without NVLink or P2P between them talk over the network",
            "unset NCCL_SHM_DISABLE, and give /dev/shm 1 GiB",
        )


def _nccl_interface(node: _Node) -> Found:
    """As NCCL matches names: prefixes, or whole names after "="; "^" takes all others,
    loopback too.
    """
    value, where = node.nccl.get("NCCL_SOCKET_IFNAME", ("", ""))
    if (
        len(value) < 2
        or not node.interfaces
        or not (node.gpus > 1 or node.talks_to_hosts)
    ):
        return
    text = value.removeprefix("^")
    words, is_exact = text.removeprefix("=").split(","), text.startswith("=")

    def matches(name: str) -> bool:
        return any(
            name == word if is_exact else name.startswith(word)
            for word in words
            if word
        )

    taken = [i for i in node.interfaces if matches(i.name) != value.startswith("^")]
    others = [i.name for i in node.interfaces if i.is_up and i.name != "lo"]
    cure = f"name the one that reaches the other hosts: {_few(others) or 'none is up'}"
    setting = f"NCCL_SOCKET_IFNAME={value}{where}"
    if not taken:
        yield (
            f"{setting} matches no interface of this machine: NCCL does not start",
            cure,
        )
    elif not any(i.is_up for i in taken):
        yield (
            f"{setting}: {_few([i.name for i in taken])} is down: NCCL does not start",
            cure,
        )
    elif node.is_one_of_several and any(i.name == "lo" for i in taken):
        yield (
            f"{setting} takes loopback (lo), over which no other host is reached",
            cure,
        )


def _nccl_interface_unset(node: _Node) -> Found:
    """NCCL takes those named ib*, else all but docker*, lo and virbr*; beside RDMA
    cards the first alone.
    """
    if (
        not node.talks_to_hosts
        or len(node.nccl.get("NCCL_SOCKET_IFNAME", ("", ""))[0]) > 1
    ):
        return
    skipped = ("docker", "lo", "virbr")
    taken = [i for i in node.interfaces if i.is_up and not i.name.startswith(skipped)]
    virtual = [i.name for i in (taken[:1] if node.rdma else taken) if i.is_virtual]
    cards = [i.name for i in taken if not i.is_virtual]
    if virtual and cards and not any(i.name.startswith("ib") for i in taken):
        yield (
            f"NCCL_SOCKET_IFNAME is not set, and NCCL may take {_few(virtual)}, of no card: it hangs where "
            f"no other host can reach that",
            f"set NCCL_SOCKET_IFNAME on all hosts to what joins them: {_few(cards)}",
        )


def _rdma_missing(node: _Node) -> Found:
    cards = node.rdma_cards
    if (
        node.gpus
        and node.is_one_of_several
        and cards
        and not node.rdma
        and node.plugin is None
    ):
        yield (
            f"RDMA cards ({_few(cards)}) have no driver (/sys/class/infiniband), and NCCL has no network "
            f"plugin: it sends to other hosts over TCP",
            "install the driver (`ibv_devinfo` then lists the cards), or the cloud's NCCL plugin",
        )


def _rdma_container(node: _Node) -> Found:
    given = [
        name for name in node.names("/dev/infiniband") if name.startswith("uverbs")
    ]
    if node.gpus and node.rdma and not given:
        yield (
            f"{_few(node.rdma)} are here, but /dev/infiniband/uverbs* are not: NCCL sends over TCP",
            "give them to the container: docker run --device=/dev/infiniband, Kubernetes: a device plugin "
            "for RDMA or EFA; without a container: modprobe ib_uverbs",
        )


def _efa_driver(node: _Node) -> Found:
    if node.gpus and node.efa_cards and not node.efa:
        yield (
            f"EFA cards ({_few(node.efa_cards)}) have no driver: NCCL sends to other hosts over TCP",
            "install the EFA driver (aws-efa-installer), and modprobe efa",
        )


def _nccl_plugin(node: _Node) -> Found:
    if not node.talks_to_hosts or node.plugin:
        return
    folders = [
        folder for folder in node.plugin_folders if node.efa or "ofi-nccl" not in folder
    ]
    path = f"LD_LIBRARY_PATH={folders[0]}:$LD_LIBRARY_PATH" if folders else ""
    asked = "".join(node.nccl.get("NCCL_NET_PLUGIN", ("", "")))
    if node.efa:
        what = f"NCCL_NET_PLUGIN={asked}" if asked else "libnccl-net.so of aws-ofi-nccl"
        fault = f"the loader does not find {what}: NCCL sends over TCP and not over EFA"
        yield (
            fault,
            f"{path or 'install aws-ofi-nccl'}; NCCL_DEBUG=INFO then says NET/OFI",
        )
    elif path:
        yield (
            f"NCCL's network plugin lies in {folders[0]}, where the loader does not look",
            f"{path}, and what its installer says to set",
        )


def _ib_port(node: _Node) -> Found:
    """A card with one active port is in order. Ethernet cards, and all of a lone
    machine, may be unused: not one among its like.
    """
    active = [port for port in node.ports if port.state.startswith("4:")]
    working = {port.slot for port in active}
    boards = {port.board for port in active}
    bad = [
        port
        for port in node.ports
        if port.slot not in working
        and port.state
        and (
            port.board in boards
            or (node.is_one_of_several and port.layer != "Ethernet")
        )
    ]
    if bad:
        states = ", ".join(
            f"{port} is {port.state} ({port.physical})" for port in bad[:8]
        )
        yield (
            f"RDMA ports are not active: {states}{' ...' if len(bad) > 8 else ''}",
            "DOWN: cable, switch; INIT, ARMED: the subnet manager does not answer; or leave it out of "
            "NCCL_IB_HCA",
        )


def _ib_rate(node: _Node) -> Found:
    """Beside ports of the same kind of card: storage has others."""
    best: dict[tuple[str, str], float] = {}
    active = [port for port in node.ports if port.state.startswith("4:") and port.rate]
    for port in active:
        best[port.board, port.layer] = max(
            port.rate, best.get((port.board, port.layer), 0)
        )
    slow = [port for port in active if port.rate < best[port.board, port.layer]]
    if slow:
        rates = ", ".join(f"{port} has {port.rate:g}" for port in slow[:8])
        most = max(best[port.board, port.layer] for port in slow)
        yield (
            f"RDMA ports are slower than others of the same card: {rates} of {most:g} Gbit/s",
            "cable, transceiver or the switch's port: `mlxlink -d DEVICE` says what they agreed on",
        )


def _shm(node: _Node) -> Found:
    size, free = node.limits.shm_bytes, node.limits.shm_free_bytes
    joins = node.gpus > 1 or (node.gpus and node.is_one_of_several)
    if (
        size is None
        or free is None
        or not (free < _NCCL_SHM if joins else size <= _DOCKER_SHM)
    ):
        return
    need = "NCCL needs 1 GiB" if joins else "data workers need more"
    yield (
        f"/dev/shm has {_size(size)}, {_size(free)} free: {need}",
        "docker: --shm-size=1g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm; "
        "or remove what fills it",
    )


def _open_files(node: _Node) -> Found:
    limit, hard = node.limits.open_files, node.limits.open_files_hard
    is_few = node.cluster.number <= _FEW and not node.talks_to_hosts
    least = _OPEN_FILES_OF_FEW if is_few else _OPEN_FILES
    if limit is None or limit >= least:
        return
    here = f"`ulimit -n {min(65_536, hard or 65_536)}` before the run"
    if hard is not None and hard < least:
        here = f"ask root for more than the hard limit of {hard}"
    yield (
        f"a process may open {limit} files and sockets; with connections to many processes it needs {least}",
        f"{here}; docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536",
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
    what = (
        f"may be {clock.max_error_s:.3g} s off"
        if clock.is_kept
        else "is kept by no time service"
    )
    yield (
        f"by the kernel's word this machine's clock {what}: times of events and leases are compared between "
        f"machines",
        "start chrony or systemd-timesyncd on the machine, not in a container; `launch --preflight` measures "
        "how far the clocks of a run are apart",
    )


def _hostname_loopback(node: _Node) -> Found:
    """Only collectives of CPUs (gloo) listen on what the name resolves to."""
    name, address = node.own_address
    is_cpu = not node.gpus and node.cluster.launcher != "a multi-host TPU"
    if node.is_one_of_several and is_cpu and _is_loopback(address):
        yield (
            f"/etc/hosts says that {name}, this machine, is {address}: collectives of CPUs listen there, and "
            f"no other host reaches them",
            f"give {name} its address in the network in /etc/hosts, or remove it there",
        )


def _coordinator_loopback(node: _Node) -> Found:
    cluster = node.cluster
    if (
        cluster.launcher == "its environment"
        and cluster.number > 1
        and _is_loopback(cluster.host)
    ):
        yield (
            f"{cluster.number} agents meet at {cluster.host}: those of other machines look for it on their "
            f"own",
            "JAXDIST_AGENTS_AT: the first machine's address in the network; nothing, if all are on this one",
        )


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _size(num_bytes: int) -> str:
    return gib_text(num_bytes) if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )


CHECKS: Mapping[str, Callable[[_Node], Found]] = {
    "nccl-ib-disabled": _nccl_ib_disabled,
    "nccl-socket": _nccl_socket,
    "nccl-p2p-disabled": _nccl_p2p_disabled,
    "nccl-shm-disabled": _nccl_shm_disabled,
    "nccl-interface": _nccl_interface,
    "nccl-interface-unset": _nccl_interface_unset,
    "nccl-plugin": _nccl_plugin,
    "rdma-missing": _rdma_missing,
    "rdma-container": _rdma_container,
    "efa-driver": _efa_driver,
    "ib-port": _ib_port,
    "ib-rate": _ib_rate,
    "shm": _shm,
    "open-files": _open_files,
    "locked-memory": _locked_memory,
    "clock": _clock,
    "hostname-loopback": _hostname_loopback,
    "coordinator-loopback": _coordinator_loopback,
}
