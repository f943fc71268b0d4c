"""Measurements before a long run: matmuls, all-reduces and clocks.

Each rate is compared with the hardware table and with the other devices. The report
names slow devices and links, and what to check. `launch --preflight` runs this module
on the processes of a run.
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

_TRIES = 5  # repetitions of a measurement; the best one counts
_MATMULS = 16  # matmuls in a measurement
_REDUCES = 4  # all-reduces in a measurement
_TIMEOUT_S = 600  # most seconds of a measurement, with its compilation

# Share of the table's rate below which a rate is slow. A healthy 8192^3 matmul reaches
# 65 to 85 % of the peak, less on cards with a low power limit. A ring all-reduce of
# 256 MiB reaches 70 to 90 % of its links. Broken parts are far below: NCCL over TCP
# reaches a tenth of InfiniBand, a throttled chip a third of its peak.
OF_TABLE = 0.5
# Share of the devices' median below which a device is slow. No healthy chip is a fifth
# slower than its neighbours.
OF_DEVICES = 0.8
# The same for all-reduces: their times include the delays of late processes.
OF_REDUCES = 0.5
# The watchdog gives others 3 s, by their clocks, to report a process that hangs. The
# ledger's `down` and the order of events are read in seconds.
MAX_CLOCK_OFFSET_S = 1.0

_UNSET = "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE unset"
_DOCTOR = "what `jaxdist doctor` says there under network"
_CHECKS = {  # by link
    "ICI": "the slice's health in the cloud's console; restart or replace it: no program can mend its links",
    "NVLink": f"`nvidia-smi nvlink --status` and `nvidia-smi topo -m` (NV in all places), {_UNSET}",
    "PCIe": f"`nvidia-smi topo -m` (PHB, NODE, SYS go through the CPU, as do all without P2P), {_UNSET}",
    "DCN": "the VMs' network: gVNIC and an MTU of 8,896, other traffic",
}
_CHECK_NETWORK = (
    f"NET/IB or NET/OFI, not NET/Socket, in the lines of NCCL_DEBUG=INFO; {_DOCTOR}"
)
_CHECK_GPU = "`nvidia-smi -q -d PERFORMANCE,POWER,CLOCK` there (heat, power limit), other programs on it"
_CHECK_TPU = "other programs on it; otherwise restart or replace its machine"
_CHECK_CLOCK = (
    "times of events, the ledger's `down`, leases of checkpoint folders and the watchdog's word on who hangs "
    "compare clocks: start chrony or systemd-timesyncd there (`jaxdist doctor` says whether one runs)"
)


class Row(NamedTuple):
    """Rate of one device in the hardware table."""

    chip: str
    # ICI, NVLink, PCIe, DCN or a network; "": the rate is that of matmuls
    link: str
    rate: float  # bytes/s while all devices send, or FLOP/s of matmuls

    def share(self, rate: float) -> str:
        """Formats a rate as a share of the row."""
        return f"{rate / self.rate:.0%} of the {self._rate_text()}"

    def is_slow(self, rate: float) -> bool:
        """Checks if a rate is far below the row."""
        return rate < OF_TABLE * self.rate

    def below(self, rate: float) -> str:
        """Formats the factor between the row and a lower rate."""
        factor = self.rate / rate
        return f"{factor:.1f} x below the {self._rate_text()} row ({self.chip})"

    def _rate_text(self) -> str:
        if self.link:
            return f"{self.rate / 1e9:.3g} GB/s of the table's {self.link}"
        return f"{self.rate / 1e12:.3g} TFLOP/s of the table's matmul"


class Span(NamedTuple):
    """Groups of devices that reduce at the same time."""

    where: str  # describes the groups
    groups: list[list[Any]]  # groups of jax.Device, all of the same length
    row: Row | None  # None: the table has no such row


class Reduced(NamedTuple):
    """Measured rates of an all-reduce."""

    where: str
    rates: Mapping[int, float]  # bytes/s of each device's links, by process
    row: Row | None


def main() -> int:
    """Measures, and prints the report on process 0.

    Returns:
      0, also if something is slow. A hang ends the process with 76.
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
    patience_s = 2 * _TIMEOUT_S  # a process that hangs reports it before this time
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
        if not faults:
            faults = ["  nothing is slow"]
        print("\n".join(table + faults), flush=True)
    return 0


# --- measuring ------------------------------------------------------------------------


@contextlib.contextmanager
def hang_limit(measurement: str, link: str = "") -> Iterator[None]:
    """Ends the process with 76 if the body does not end in time.

    A call to a device that hangs never returns.

    Args:
      measurement: name of the measurement.
      link: link between the devices; "" = none, or unknown.
    """

    def give_up() -> None:
        place = f"process {jax.process_index()} on {socket.gethostname()}"
        check = _CHECKS.get(link, _CHECK_NETWORK if link else _DOCTOR)
        print(
            f"hang: {measurement} has not ended after {_TIMEOUT_S} s, {place}: check {check}",
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
    """Measures the bytes/s that a device sends in ring all-reduces of its group.

    Args:
      groups: groups of equal length that contain all devices. They reduce at the same
        time.
      num_bytes: bytes of each device's array.
    """
    reduces, array = reduces_of(groups, num_bytes)
    ones = jax.jit(
        lambda: jnp.ones(array.shape, array.dtype), out_shardings=array.sharding
    )()
    n = len(groups[0])
    bytes_sent = 2 * (n - 1) / n * num_bytes * _REDUCES
    return bytes_sent / _best_s(lambda: reduces(ones))


def reduces_of(
    groups: Sequence[Sequence[jax.Device]], num_bytes: int
) -> tuple[jax.stages.Wrapped, jax.ShapeDtypeStruct]:
    """Builds a program of all-reduces, each of the previous one's result.

    Args:
      groups: groups of equal length that contain all devices.
      num_bytes: bytes of each device's array.

    Returns:
      The program, and the shape and sharding of its argument.
    """
    mesh = Mesh(np.asarray(groups), ("group", "member"))
    n = len(groups[0])
    spec = P(("group", "member"))
    array = jax.ShapeDtypeStruct(
        (len(groups) * n, num_bytes // 4),
        jnp.float32,
        sharding=NamedSharding(mesh, spec),
    )

    def reduce_once(_: int, x: jax.Array) -> jax.Array:
        total: jax.Array = lax.psum(x, "member")
        return total / n

    def mean(x: jax.Array) -> jax.Array:
        result: jax.Array = lax.fori_loop(0, _REDUCES, reduce_once, x)
        return result

    program = jax.shard_map(
        mean, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(program), array


def _best_s(run: Callable[[], jax.Array]) -> float:
    seconds = []
    for _ in range(_TRIES + 1):  # the first compiles
        began = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


# --- groups of devices that reduce together, and their links --------------------------


def spans(devices: Sequence[Any], chip: Chip | None) -> list[Span]:
    """Lists the all-reduces to measure: inside and between groups of devices.

    A group is a slice (TPU), a host (GPU) or a process. Between groups, the first
    devices of all groups reduce, the second ones, and so on. If the groups differ in
    size, all devices reduce at once. No row of the table describes that.

    Args:
      devices: all devices of the run.
      chip: row of the hardware table; None = unknown.
    """
    name = {"tpu": "slice", "gpu": "host"}.get(devices[0].platform, "process")
    by_group: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: device.id):
        by_group.setdefault(_group_index(device), []).append(device)
    groups = list(by_group.values())
    if len({len(group) for group in groups}) > 1:
        return [Span("of all devices", [list(devices)], None)]
    to_measure = []
    if len(groups[0]) > 1:
        where = f"inside each {name}" if len(groups) > 1 else f"inside the {name}"
        to_measure.append(
            Span(where, groups, _link_row(chip, groups[0]) if chip else None)
        )
    if len(groups) > 1:
        where = f"between {len(groups)} {name}{'es' if name == 'process' else 's'}"
        across = [list(members) for members in zip(*groups, strict=True)]
        rate = chip.network_bytes_per_s if chip else None
        row = Row(chip.name, chip.network, rate) if chip and rate else None
        to_measure.append(Span(where, across, row))
    return to_measure


def _group_index(device: Any) -> int:
    """Finds the index of a device's slice (TPU), host (GPU) or process."""
    if device.platform in ("tpu", "gpu"):
        # jax gives hosts of GPUs a slice index, too
        slice_index: int | None = getattr(device, "slice_index", None)
        if slice_index is not None:
            return slice_index
    if device.platform == "tpu":
        return 0  # a single slice
    process_index: int = device.process_index
    return process_index


def _link_row(chip: Chip, devices: Sequence[Any]) -> Row | None:
    """Looks up the links inside a slice or host; None for a single chip."""
    links = float(chip.num_links)
    if chip.torus_dims:
        coords = np.array([device.coords for device in devices])
        shape = tuple(int(n) for n in np.ptp(coords, axis=0) + 1)[: chip.torus_dims]
        rings = zip(shape, chip.wraps(shape), strict=True)
        links_per_chip = sum(2 if is_ring else 1 for n, is_ring in rings if n > 1)
        links = links_per_chip / chip.devices_per_chip
    if not links:
        return None
    return Row(chip.name, chip.link, links * chip.link_bytes_per_s)


# --- reports --------------------------------------------------------------------------

Lines = tuple[list[str], list[str]]  # (lines of the table, lines of faults)


def device_lines(
    rates: Mapping[int, Mapping[str, float]],
    measurement: str,
    chip: Chip | None,
    dtype: str,
) -> Lines:
    """Formats a line for each device, and one for each that is slow.

    Args:
      rates: FLOP/s by process and device.
      measurement: name of the measurement.
      chip: row of the hardware table; None = unknown.
      dtype: dtype of the matmuls.
    """
    median = statistics.median(
        rate for devices in rates.values() for rate in devices.values()
    )
    table = [f"preflight: {measurement}, median {median / 1e12:.3g} TFLOP/s"]
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
            "  the hardware table has no row for it: devices are only compared with each other"
        )
    elif most_are_slow:
        text = f"at least half of the devices: {median / 1e12:.3g} TFLOP/s"
        slow.append(f"slow: {text}, {row.below(median)}{fix}")
    for process, devices in sorted(rates.items()):
        for device, rate in devices.items():
            text = f"process {process} device {device}: {rate / 1e12:.3g} TFLOP/s"
            comparison = ""
            is_below = False
            if row is None:
                table.append(f"  {text}")
            else:
                table.append(f"  {text}, {row.share(rate)}")
                is_below = row.is_slow(rate)
                comparison = f", {row.below(rate) if is_below else row.share(rate)}"
            if rate < OF_DEVICES * median or (is_below and not most_are_slow):
                share = f"{rate / median:.0%} of the median"
                slow.append(f"slow: {text}{comparison}, {share}{fix}")
    return table, slow


def reduce_lines(reduced: Reduced) -> Lines:
    """Formats the line of an all-reduce, and a second one if it is slow.

    Without a row of the table, no all-reduce is slow.
    """
    where, rates, row = reduced
    process = min(rates, key=rates.__getitem__)
    rate = rates[process]
    median = statistics.median(rates.values())
    text = f"all-reduce {where}: {rate / 1e9:.3g} GB/s a device"
    if row is None:
        return [f"  {text}"], []
    table = [f"  {text}, {row.share(rate)}"]
    # Over PCIe, the CPUs of a host limit all its GPUs together, often to less than half
    # of their links.
    is_below = row.link != "PCIe" and row.is_slow(rate)
    is_behind = rate < OF_REDUCES * median
    if not is_below and not is_behind:
        return table, []
    report = f"slow: {text}, {row.below(rate) if is_below else row.share(rate)}"
    if is_behind:
        report += f", {rate / median:.0%} of the median, in process {process}"
    return table, [f"{report}: check {_check(row.link, rate)}"]


def _check(link: str, rate: float) -> str:
    """Describes what to check if a link is slow.

    Between hosts, the text also names networks for which the rate would be healthy.
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
    """Formats the line of the clocks, and one for each clock that is certainly wrong.

    Args:
      clocks: offsets of the other processes from process 0. There are none, and no
        lines, for a lone process.
      hosts: names of machines, by process.
    """
    if not clocks:
        return [], []
    worst = max(clocks.values(), key=lambda clock: abs(clock.ahead_s))
    line = f"  clocks: at most {abs(worst.ahead_s):.3g} s from process 0's (known to {worst.within_s:.2g} s)"
    wrong = []
    for process, (ahead_s, within_s) in sorted(clocks.items()):
        if abs(ahead_s) - within_s <= MAX_CLOCK_OFFSET_S:
            continue
        side = "ahead of" if ahead_s > 0 else "behind"
        wrong.append(
            f"clock: process {process} on {hosts[process]} is {abs(ahead_s):.3g} s "
            f"{side} process 0 on {hosts[0]}: {_CHECK_CLOCK}"
        )
    return [line], wrong


if __name__ == "__main__":
    sys.exit(main())
