"""Before a long run: each device's matmul rate, the all-reduces inside and between
hosts, the clocks.

What is measured is held against the hardware table and against the other devices; what
is slow is said, with what to check. `python -m jaxdist.operations.launch.preflight`, on the
processes of a run; `launch --preflight` starts it.
"""

import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import EXIT_HANG
from jaxdist.distributed import coordination, initialize
from jaxdist.distributed.coordination import ClockOffset
from jaxdist.hardware import chips
from jaxdist.hardware.chips import NETWORKS, Chip

# measurements, of which the best counts; what runs in each
_TRIES, _MATMULS, _REDUCES = 5, 16, 4
_TIMEOUT_S = 600  # of a measurement, with its compilation

# Shares of the table's rate, and of the others' median, from which on nothing is said.
# Of the table: a healthy 8192^3 matmul reaches 65 to 85 % of the peak, less on cards
# with a low power limit, and a ring all-reduce of 256 MiB 70 to 90 % of its links. What
# is broken is far below: NCCL over TCP reaches a tenth of InfiniBand, a throttled chip
# a third of its peak. The others: no healthy chip is a fifth slower than its
# neighbours; an all-reduce also has in its time by how much the processes were late.
OF_TABLE, OF_DEVICES, OF_REDUCES = 0.5, 0.8, 0.5
# The watchdog gives others 3 s to speak for a process that hangs, by their clocks;
# `down` of the ledger and the order of events are read in seconds.
MAX_CLOCK_OFFSET_S = 1.0

_UNSET = "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE unset"
_DOCTOR = "what `jaxdist doctor` says there under network"
_CHECKS = {  # by what joins the devices
    "ICI": "the slice's health in the cloud's console; restart or replace it: no program can mend its links",
    "NVLink": f"`nvidia-smi nvlink --status` and `nvidia-smi topo -m` (NV in all places), {_UNSET}",
    "PCIe": f"`nvidia-smi topo -m` (PHB, NODE, SYS go through the CPU, as do all without P2P), {_UNSET}",
    "DCN": "the VMs' network: gVNIC and an MTU of 8,896, other traffic",
}
_CHECK_NETWORK = (
    f"NET/IB or NET/OFI, not NET/Socket, in the lines of NCCL_DEBUG=INFO; {_DOCTOR}"
)
_CHECK_GPU = "`nvidia-smi -q -d PERFORMANCE,POWER,CLOCK` there (heat, power limit), other programs on it"
_CHECK_TPU = "other programs on it; else restart or replace its machine"
_CHECK_CLOCK = (
    "times of events, the ledger's `down`, leases of checkpoint folders and the watchdog's word on who hangs "
    "compare clocks: start chrony or systemd-timesyncd there (`jaxdist doctor` says whether one runs)"
)


class Row(NamedTuple):
    """A rate of one device, by the hardware table."""

    chip: str
    # ICI, NVLink, PCIe, DCN or a network, while all devices send; "": of matmuls
    link: str
    rate: float  # bytes/s, or FLOP/s of matmuls

    def share(self, rate: float) -> str:
        """Returns which share of the row a rate is."""
        return f"{rate / self.rate:.0%} of the {self._table()}"

    def below(self, rate: float) -> str:
        """Returns how far below the row a rate is."""
        return f"{self.rate / rate:.1f} x below the {self._table()} row ({self.chip})"

    def _table(self) -> str:
        number = (
            f"{self.rate / 1e9:.3g} GB/s"
            if self.link
            else f"{self.rate / 1e12:.3g} TFLOP/s"
        )
        return f"{number} of the table's {self.link}".rstrip() + (
            "" if self.link else " matmul"
        )


class Span(NamedTuple):
    """Groups of devices that reduce at the same time."""

    where: str
    groups: list[list[Any]]  # of jax.Device, all of one length
    row: Row | None  # None: the table has none


class Reduced(NamedTuple):
    """An all-reduce that was measured."""

    where: str
    rates: Mapping[int, float]  # bytes/s of each device's links, by process
    row: Row | None


def main() -> int:
    """Prints what was measured on process 0; returns 0, also where something is slow;
    hangs end with 76.
    """
    initialize.prepare()
    kind, is_cpu = jax.devices()[0].device_kind, jax.devices()[0].platform == "cpu"
    chip = chips.chip_for(kind)
    half = "float16" if chip and not chip.peak("bfloat16") else "bfloat16"
    size, num_bytes, dtype = (
        (512, 1 << 20, "float32") if is_cpu else (8192, 1 << 28, half)
    )
    with hang_limit("matmuls"):
        mine = {
            str(d.id): matmul_rate(d, size, jnp.dtype(dtype))
            for d in jax.local_devices()
        }
    patience_s = 2 * _TIMEOUT_S  # a process that hangs is to say so first
    rates, reduced = coordination.gather(mine, patience_s), []
    for where, groups, row in spans(jax.devices(), chip):
        with hang_limit(f"the all-reduce {where}", row.link if row else ""):
            rate = all_reduce_rate(groups, num_bytes)
        reduced.append(Reduced(where, coordination.gather(rate, patience_s), row))
    clocks = coordination.clock_offsets(timeout_s=patience_s)
    hosts = coordination.gather(socket.gethostname(), patience_s)
    if jax.process_index() == 0:
        table, faults = device_lines(rates, f"{kind}, {dtype} {size}^3", chip, dtype)
        for found in (
            *(reduce_lines(each) for each in reduced),
            clock_lines(clocks, hosts),
        ):
            table, faults = table + found[0], faults + found[1]
        print("\n".join([*table, *(faults or ["  nothing is slow"])]), flush=True)
    return 0


# --- measuring ------------------------------------------------------------------------


@contextlib.contextmanager
def hang_limit(what: str, link: str = "") -> Iterator[None]:
    """Ends the process with 76 if the body does not end in time: a device that hangs
    never returns.

    Args:
      what: is measured, for people.
      link: what joins the devices; "": none, or it is not known.
    """

    def give_up() -> None:
        place = f"process {jax.process_index()} on {socket.gethostname()}"
        check = _CHECKS.get(link, _CHECK_NETWORK if link else _DOCTOR)
        print(
            f"hang: {what} has not ended after {_TIMEOUT_S} s, {place}: check {check}",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(EXIT_HANG)

    timer = threading.Timer(_TIMEOUT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def matmul_rate(device: jax.Device, size: int, dtype: jnp.dtype) -> float:
    """Returns the FLOP/s of square matmuls on a device."""
    x = jax.device_put(np.full((size, size), 1 / size, dtype), device)
    chain = jax.jit(lambda a, b: lax.fori_loop(0, _MATMULS, lambda _, y: y @ b, a))
    return 2 * size**3 * _MATMULS / _best_s(lambda: chain(x, x))


def all_reduce_rate(groups: Sequence[Sequence[jax.Device]], num_bytes: int) -> float:
    """Returns the bytes/s that each device of this process sends in all-reduces of its
    group, as a ring.

    Args:
      groups: of equal length, all devices in one of them; they reduce at the same time.
      num_bytes: of each device's array.
    """
    reduces, array = reduces_of(groups, num_bytes)
    ones = jax.jit(
        lambda: jnp.ones(array.shape, array.dtype), out_shardings=array.sharding
    )()
    n = len(groups[0])
    return 2 * (n - 1) / n * num_bytes * _REDUCES / _best_s(lambda: reduces(ones))


def reduces_of(
    groups: Sequence[Sequence[jax.Device]], num_bytes: int
) -> tuple[jax.stages.Wrapped, jax.ShapeDtypeStruct]:
    """Returns a program of all-reduces, each of the result of the last, and what it
    takes.
    """
    mesh, n = Mesh(np.asarray(groups), ("group", "member")), len(groups[0])
    each = P(("group", "member"))
    array = jax.ShapeDtypeStruct(
        (len(groups) * n, num_bytes // 4),
        jnp.float32,
        sharding=NamedSharding(mesh, each),
    )

    def mean(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _REDUCES, lambda _, y: lax.psum(y, "member") / n, x)

    return jax.jit(
        jax.shard_map(mean, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    ), array


def _best_s(run: Callable[[], jax.Array]) -> float:
    seconds = []
    for _ in range(_TRIES + 1):  # the first compiles
        began = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


# --- which devices reduce together, and over what -------------------------------------


def spans(devices: Sequence[Any], chip: Chip | None) -> list[Span]:
    """Returns the all-reduces to measure: inside slices (TPU), hosts (GPU) or
    processes, and between them.

    Between them the first devices of all reduce, the second ones, and so on. Places of
    different sizes reduce all at once, which no row of the table describes.
    """
    name = {"tpu": "slice", "gpu": "host"}.get(devices[0].platform, "process")
    places: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda d: d.id):
        places.setdefault(_place(device), []).append(device)
    groups = list(places.values())
    size = len(groups[0])
    if len({len(group) for group in groups}) > 1:
        return [Span("of all devices", [list(devices)], None)]
    found = []
    if size > 1:
        where = f"inside each {name}" if len(groups) > 1 else f"inside the {name}"
        found.append(Span(where, groups, _inside(chip, groups[0]) if chip else None))
    if len(groups) > 1:
        where = f"between {len(groups)} {name}{'es' if name == 'process' else 's'}"
        rate = chip.network_bytes_per_s if chip else None
        row = Row(chip.name, chip.network, rate) if chip and rate else None
        found.append(
            Span(where, [list(members) for members in zip(*groups, strict=True)], row)
        )
    return found


def _place(device: Any) -> int:
    """Returns the number of a device's slice (TPU: 0 where there is one alone), host
    (GPU) or process.
    """
    if device.platform not in ("tpu", "gpu"):
        return device.process_index
    index = getattr(device, "slice_index", None)  # jax counts the hosts of GPUs so, too
    return (
        index
        if index is not None
        else device.process_index
        if device.platform == "gpu"
        else 0
    )


def _inside(chip: Chip, devices: Sequence[Any]) -> Row | None:
    """Returns what the table has of the links inside a slice or host; None for a single
    chip.
    """
    links = float(chip.num_links)
    if chip.torus_dims:
        coords = np.array([device.coords for device in devices])
        shape = tuple(int(n) for n in np.ptp(coords, axis=0) + 1)[: chip.torus_dims]
        rings = zip(shape, chip.wraps(shape), strict=True)
        links = (
            sum(2 if is_ring else 1 for n, is_ring in rings if n > 1)
            / chip.devices_per_chip
        )
    return Row(chip.name, chip.link, links * chip.link_bytes_per_s) if links else None


# --- what is said ---------------------------------------------------------------------

Lines = tuple[list[str], list[str]]  # the table's, and those of faults


def device_lines(
    rates: Mapping[int, Mapping[str, float]], what: str, chip: Chip | None, dtype: str
) -> Lines:
    """Returns a line for each device, and one for each that is slow.

    Args:
      rates: FLOP/s by process and device.
      what: was measured, in `dtype`.
    """
    peak = chip.peak(dtype) if chip else None
    row = Row(chip.name, "", peak) if chip and peak else None
    median = statistics.median(
        rate for devices in rates.values() for rate in devices.values()
    )
    cure = f": check {_CHECK_TPU if chip.torus_dims else _CHECK_GPU}" if chip else ""
    out, slow = [f"preflight: {what}, median {median / 1e12:.3g} TFLOP/s"], []
    if row is None:
        out.append(
            "  the hardware table has no row for it: devices are compared with each other alone"
        )
    all_are = row is not None and median < OF_TABLE * row.rate
    if row and all_are:
        text = f"at least half of the devices: {median / 1e12:.3g} TFLOP/s"
        slow.append(f"slow: {text}, {row.below(median)}{cure}")
    for process, devices in sorted(rates.items()):
        for device, rate in devices.items():
            text = f"process {process} device {device}: {rate / 1e12:.3g} TFLOP/s"
            out.append(f"  {text}" + (f", {row.share(rate)}" if row else ""))
            is_below = row is not None and rate < OF_TABLE * row.rate
            if rate < OF_DEVICES * median or (is_below and not all_are):
                table = (
                    f", {row.below(rate) if is_below else row.share(rate)}"
                    if row
                    else ""
                )
                slow.append(
                    f"slow: {text}{table}, {rate / median:.0%} of the median{cure}"
                )
    return out, slow


def reduce_lines(reduced: Reduced) -> Lines:
    """Returns the line of an all-reduce, and one if it is slow; without a row of the
    table none is.
    """
    where, rates, row = reduced
    process = min(rates, key=rates.__getitem__)
    rate, median = rates[process], statistics.median(rates.values())
    text = f"all-reduce {where}: {rate / 1e9:.3g} GB/s a device"
    if row is None:
        return [f"  {text}"], []
    # What all GPUs of a host reach over PCIe at once is up to its CPUs, often below
    # half of their links.
    is_below, one_is = (
        row.link != "PCIe" and rate < OF_TABLE * row.rate,
        rate < OF_REDUCES * median,
    )
    who = f", {rate / median:.0%} of the median, in process {process}" if one_is else ""
    said = f"{text}, {row.below(rate) if is_below else row.share(rate)}{who}"
    slow = (
        [f"slow: {said}: check {_check(row.link, rate)}"] if is_below or one_is else []
    )
    return [f"  {text}, {row.share(rate)}"], slow


def _check(link: str, rate: float) -> str:
    """Returns what to look at where a link is slow; of hosts, also the networks on
    which it would not be.
    """
    if link in _CHECKS:
        return _CHECKS[link]
    others = [
        name
        for name, network in NETWORKS.items()
        if rate >= OF_TABLE * network.bytes_per_s
    ]
    return _CHECK_NETWORK + (
        f"; it would be healthy on {', '.join(others)}" if others else ""
    )


def clock_lines(clocks: Mapping[int, ClockOffset], hosts: Mapping[int, str]) -> Lines:
    """Returns the line of the clocks, and one for each that is certainly too far from
    process 0's.

    Args:
      clocks: of the other processes; with none there is nothing to say.
      hosts: names of machines, by process.
    """
    if not clocks:
        return [], []
    worst = max(clocks.values(), key=lambda clock: abs(clock.ahead_s))
    line = f"  clocks: at most {abs(worst.ahead_s):.3g} s from process 0's (known to {worst.within_s:.2g} s)"
    wrong = [
        f"clock: process {process} on {hosts[process]} is {abs(ahead_s):.3g} s "
        f"{'ahead of' if ahead_s > 0 else 'behind'} process 0 on {hosts[0]}: {_CHECK_CLOCK}"
        for process, (ahead_s, within_s) in sorted(clocks.items())
        if abs(ahead_s) - within_s > MAX_CLOCK_OFFSET_S
    ]
    return [line], wrong


if __name__ == "__main__":
    sys.exit(main())
