"""Measures before a long run: each device's matmul rate, the all-reduces inside and
between hosts, the clocks.

Each rate is compared with the hardware table and with the other devices. What is slow
is printed, with what to check. `python -m jaxdist.operations.launch.preflight`, on the
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

_TRIES = 5  # measurements, of which the best counts
_MATMULS = 16  # in each
_REDUCES = 4
_TIMEOUT_S = 600  # of a measurement, with its compilation

# Share of the table's rate below which a rate is slow. A healthy 8192^3 matmul reaches
# 65 to 85 % of the peak, less on cards with a low power limit, and a ring all-reduce of
# 256 MiB 70 to 90 % of its links. What is broken is far below: NCCL over TCP reaches a
# tenth of InfiniBand, a throttled chip a third of its peak.
OF_TABLE = 0.5
# Share of the devices' median. No healthy chip is a fifth slower than its neighbours.
OF_DEVICES = 0.8
# The same for all-reduces, whose times include how late the processes were.
OF_REDUCES = 0.5
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
        """Formats a rate as a share of the row."""
        return f"{rate / self.rate:.0%} of the {self._table()}"

    def is_slow(self, rate: float) -> bool:
        """Checks whether a rate is far below the row."""
        return rate < OF_TABLE * self.rate

    def below(self, rate: float) -> str:
        """Formats how far a rate is below the row."""
        return f"{self.rate / rate:.1f} x below the {self._table()} row ({self.chip})"

    def _table(self) -> str:
        if self.link:
            return f"{self.rate / 1e9:.3g} GB/s of the table's {self.link}"
        return f"{self.rate / 1e12:.3g} TFLOP/s of the table's matmul"


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
    """Measures, and prints the rates on process 0.

    Returns 0, also if something is slow. A hang ends the process with 76.
    """
    initialize.prepare()
    kind = jax.devices()[0].device_kind
    chip = chips.chip_for(kind)
    size = 8192
    num_bytes = 1 << 28
    dtype = "bfloat16"
    if chip and not chip.peak("bfloat16"):
        dtype = "float16"
    if jax.devices()[0].platform == "cpu":
        size = 512
        num_bytes = 1 << 20
        dtype = "float32"
    with hang_limit("matmuls"):
        local_rates = {
            str(device.id): matmul_rate(device, size, jnp.dtype(dtype))
            for device in jax.local_devices()
        }
    patience_s = 2 * _TIMEOUT_S  # a process that hangs is to say so first
    rates = coordination.gather(local_rates, patience_s)
    reduced = []
    for where, groups, row in spans(jax.devices(), chip):
        with hang_limit(f"the all-reduce {where}", row.link if row else ""):
            rate = all_reduce_rate(groups, num_bytes)
        reduced.append(Reduced(where, coordination.gather(rate, patience_s), row))
    clocks = coordination.clock_offsets(timeout_s=patience_s)
    hosts = coordination.gather(socket.gethostname(), patience_s)
    if jax.process_index() == 0:
        reports = [device_lines(rates, f"{kind}, {dtype} {size}^3", chip, dtype)]
        reports += map(reduce_lines, reduced)
        reports.append(clock_lines(clocks, hosts))
        table = [line for lines, _ in reports for line in lines]
        faults = [line for _, lines in reports for line in lines]
        print("\n".join([*table, *(faults or ["  nothing is slow"])]), flush=True)
    return 0


# --- measuring ------------------------------------------------------------------------


@contextlib.contextmanager
def hang_limit(what: str, link: str = "") -> Iterator[None]:
    """Ends the process with 76 if the body does not end in time: a device that hangs
    never returns.

    Args:
      what: names the measurement.
      link: what joins the devices; "": none, or unknown.
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
    """Measures the FLOP/s of square matmuls on a device."""
    x = jax.device_put(np.full((size, size), 1 / size, dtype), device)
    chain = jax.jit(lambda a, b: lax.fori_loop(0, _MATMULS, lambda _, y: y @ b, a))
    return 2 * size**3 * _MATMULS / _best_s(lambda: chain(x, x))


def all_reduce_rate(groups: Sequence[Sequence[jax.Device]], num_bytes: int) -> float:
    """Measures the bytes/s that each device of this process sends in all-reduces of its
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
    """Builds a program of all-reduces, each of the last one's result.

    Returns:
      The program, and the shape and sharding of its argument.
    """
    mesh = Mesh(np.asarray(groups), ("group", "member"))
    n = len(groups[0])
    each = P(("group", "member"))
    array = jax.ShapeDtypeStruct(
        (len(groups) * n, num_bytes // 4),
        jnp.float32,
        sharding=NamedSharding(mesh, each),
    )

    def mean(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _REDUCES, lambda _, y: lax.psum(y, "member") / n, x)

    program = jax.shard_map(
        mean, mesh=mesh, in_specs=each, out_specs=each, check_vma=False
    )
    return jax.jit(program), array


def _best_s(run: Callable[[], jax.Array]) -> float:
    seconds = []
    for _ in range(_TRIES + 1):  # the first compiles
        began = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


# --- which devices reduce together, and over what -------------------------------------


def spans(devices: Sequence[Any], chip: Chip | None) -> list[Span]:
    """Lists the all-reduces to measure: inside slices (TPU), hosts (GPU) or processes,
    and between them.

    Between them the first devices of all places reduce, the second ones, and so on.
    Places of different sizes reduce all at once, which no row of the table describes.
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
    """Finds the number of a device's slice (TPU; 0 of a lone one), host (GPU) or
    process.
    """
    if device.platform in ("tpu", "gpu"):
        # jax counts the hosts of GPUs so, too
        index = getattr(device, "slice_index", None)
        if index is not None:
            return index
    if device.platform == "tpu":
        return 0
    return device.process_index


def _inside(chip: Chip, devices: Sequence[Any]) -> Row | None:
    """Looks up the links inside a slice or host in the table; None for a single chip."""
    links = float(chip.num_links)
    if chip.torus_dims:
        coords = np.array([device.coords for device in devices])
        shape = tuple(int(n) for n in np.ptp(coords, axis=0) + 1)[: chip.torus_dims]
        rings = zip(shape, chip.wraps(shape), strict=True)
        of_chip = sum(2 if is_ring else 1 for n, is_ring in rings if n > 1)
        links = of_chip / chip.devices_per_chip
    if not links:
        return None
    return Row(chip.name, chip.link, links * chip.link_bytes_per_s)


# --- reports --------------------------------------------------------------------------

Lines = tuple[list[str], list[str]]  # the table's, and those of faults


def device_lines(
    rates: Mapping[int, Mapping[str, float]], what: str, chip: Chip | None, dtype: str
) -> Lines:
    """Lists a line for each device, and one for each that is slow.

    Args:
      rates: FLOP/s by process and device.
      what: names the measurement, in `dtype`.
    """
    median = statistics.median(
        rate for devices in rates.values() for rate in devices.values()
    )
    table = [f"preflight: {what}, median {median / 1e12:.3g} TFLOP/s"]
    slow = []
    fix = ""
    peak = None
    if chip:
        fix = f": check {_CHECK_TPU if chip.torus_dims else _CHECK_GPU}"
        peak = chip.peak(dtype)
    row = Row(chip.name, "", peak) if chip and peak else None
    most_are_slow = row is not None and row.is_slow(median)
    if row is None:
        table.append(
            "  the hardware table has no row for it: devices are compared with each other alone"
        )
    elif most_are_slow:
        text = f"at least half of the devices: {median / 1e12:.3g} TFLOP/s"
        slow.append(f"slow: {text}, {row.below(median)}{fix}")
    for process, devices in sorted(rates.items()):
        for device, rate in devices.items():
            text = f"process {process} device {device}: {rate / 1e12:.3g} TFLOP/s"
            beside = ""
            is_below = False
            if row is not None:
                is_below = row.is_slow(rate)
                beside = f", {row.below(rate) if is_below else row.share(rate)}"
            table.append(f"  {text}{f', {row.share(rate)}' if row else ''}")
            if rate < OF_DEVICES * median or (is_below and not most_are_slow):
                share = f"{rate / median:.0%} of the median"
                slow.append(f"slow: {text}{beside}, {share}{fix}")
    return table, slow


def reduce_lines(reduced: Reduced) -> Lines:
    """Lists the line of an all-reduce, and one if it is slow; without a row of the
    table none is.
    """
    where, rates, row = reduced
    process = min(rates, key=rates.__getitem__)
    rate = rates[process]
    median = statistics.median(rates.values())
    text = f"all-reduce {where}: {rate / 1e9:.3g} GB/s a device"
    if row is None:
        return [f"  {text}"], []
    # All GPUs of a host together are bound by its CPUs over PCIe, often below half of
    # their links.
    is_below = row.link != "PCIe" and row.is_slow(rate)
    is_behind = rate < OF_REDUCES * median
    if not is_below and not is_behind:
        return [f"  {text}, {row.share(rate)}"], []
    report = f"slow: {text}, {row.below(rate) if is_below else row.share(rate)}"
    if is_behind:
        report += f", {rate / median:.0%} of the median, in process {process}"
    slow = [f"{report}: check {_check(row.link, rate)}"]
    return [f"  {text}, {row.share(rate)}"], slow


def _check(link: str, rate: float) -> str:
    """Names what to check if a link is slow; between hosts, also the networks for which
    its rate is healthy.
    """
    if link in _CHECKS:
        return _CHECKS[link]
    slower = [
        name
        for name, network in NETWORKS.items()
        if rate >= OF_TABLE * network.bytes_per_s
    ]
    text = _CHECK_NETWORK
    if slower:
        text += f"; it would be healthy on {', '.join(slower)}"
    return text


def clock_lines(clocks: Mapping[int, ClockOffset], hosts: Mapping[int, str]) -> Lines:
    """Lists the line of the clocks, and one for each that is certainly too far from
    process 0's.

    Args:
      clocks: of the other processes; a lone process has none, and no lines.
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
