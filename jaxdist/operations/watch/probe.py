"""Probe between steps that names a slow chip, host link or host memory.

All devices end a step together, so the time of a step does not show which one is slow.
Now and then each process times a fixed piece of work on its own devices and its own
host, while nothing else runs. The first process compares the times with their median.
"""

import contextlib
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.distributed import coordination
from jaxdist.hardware import chips
from jaxdist.telemetry import clock
from jaxdist.trainer.callbacks import Callback, RowView, Run, StepView

_TRIES = 3  # the quickest of these counts
_SIZE = 2048  # of the square matmul: 24 MiB of device memory
_MATMULS = 16
_CPU_SIZE = 256
_LINK_BYTES = 4 << 20
_MEMORY_BYTES = 8 << 20
# Times the duration of a probe until the next one. So probes take less than 0.1 % of a
# run, however short its steps are.
_REST = 1000.0
# times the median from which a part is slow
_SLOW = {"chip": 1.5, "link": 2.0, "memory": 2.0}
_NAMES = {"chip": "chip", "link": "host link", "memory": "host memory"}
_IN_A_ROW = 2  # probes in which a part must be slow: a single one may be noise


class Probe(Callback):
    """Callback that times each process's devices and host at an interval of steps."""

    keys = ("health.probe_every",)
    may_request = False

    def on_start(self, run: Run) -> None:
        """Reads the settings of the run.

        A single device is compared with nothing. Emulated devices of a CPU are one: they
        share its cores.
        """
        self._run = run
        self._board = coordination.Board("probe")
        self._judge = Judge(run.event, run.note)
        self._is_posted = False
        self._next_s = 0.0
        self.steps = 0
        devices = distinct_devices(run.devices)
        if len(devices) > 1:
            self.steps = run.config.health.probe_every
            process = jax.process_index()
            self._bench = Bench([x for x in devices if x.process_index == process])

    def on_step(self, view: StepView) -> None:
        """Times this process's parts, unless the last probe was too short ago."""
        if not self.steps or view.step % self.steps:
            return
        if view.last or view.interrupted:
            return
        if time.monotonic() < self._next_s:
            return
        self._bench.prepare()
        began = time.monotonic()
        try:
            seconds = self._bench.measure()
        except jax.errors.JaxRuntimeError as error:
            # The devices have no room. Training goes on, and the probe does not.
            self._next_s = float("inf")
            self._run.note(f"step {view.step}: no probe: {str(error).splitlines()[0]}")
            return
        ended = time.monotonic()
        self._next_s = ended + _REST * (ended - began)
        self._cost_s = ended - began
        host = socket.gethostname()
        self._post({"step": view.step, "host": host, "seconds": seconds})

    def _post(self, post: Mapping[str, Any]) -> None:
        self._own = post
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._board.client is not None:
                self._board.put(post)
            self._is_posted = jax.process_index() == 0

    def on_row(self, row: RowView) -> None:
        """Compares all processes on the first one, at the row after a probe."""
        if not self._is_posted:
            return
        self._is_posted = False
        posts = {0: self._own}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._board.client is not None:
                posts = self._board.values()
        row.values["probe_s"] = self._cost_s
        row.values.update(self._judge.compare(row.step, posts))


def distinct_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Lists the devices without those that share a processor with an earlier one."""
    if devices[0].platform != "cpu":
        return list(devices)
    first_by_process: dict[int, jax.Device] = {}
    for device in devices:
        first_by_process.setdefault(device.process_index, device)
    return list(first_by_process.values())


class Bench:
    """Fixed work on this process's devices and its host."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._is_cpu = devices[0].platform == "cpu"
        chip = chips.chip_for(devices[0].device_kind)
        dtype = "bfloat16"
        if self._is_cpu:
            dtype = "float32"
        elif chip is not None and not chip.peak("bfloat16"):
            dtype = "float16"
        size = _CPU_SIZE if self._is_cpu else _SIZE
        self._matrix = np.full((size, size), 1 / size, jnp.dtype(dtype))
        self._chain = jax.jit(
            lambda a: lax.fori_loop(0, _MATMULS, lambda _, y: y @ a, a)
        )
        self._is_prepared = False

    def prepare(self) -> None:
        """Compiles the work and allocates host memory, once."""
        if self._is_prepared:
            return
        self._is_prepared = True
        self._sent = np.ones(_LINK_BYTES // 4, np.float32)
        self._source = np.ones(_MEMORY_BYTES // 4, np.float32)
        self._target = np.zeros_like(self._source)
        # `measure` reports the error
        with (
            clock.timed(clock.COMPILE),
            contextlib.suppress(jax.errors.JaxRuntimeError),
        ):
            self.measure()

    def measure(self) -> dict[str, dict[str, float]]:
        """Times the work.

        Returns:
          {part: {device: seconds}}. The device of host memory is "". Devices of a CPU
          have no host link.

        Raises:
          jax.errors.JaxRuntimeError: a device has no memory for it, or has failed.
        """
        seconds: dict[str, dict[str, float]] = {"chip": {}, "link": {}, "memory": {}}
        for device in self._devices:
            name = str(device.id)
            matrix = jax.device_put(self._matrix, device)
            matrix.block_until_ready()

            def multiply(matrix: jax.Array = matrix) -> None:
                self._chain(matrix).block_until_ready()

            seconds["chip"][name] = _best_s(multiply)
            if not self._is_cpu:

                def send(device: jax.Device = device) -> None:
                    # a new array each time: jax keeps the copy that a host has read
                    np.asarray(jax.device_put(self._sent, device))

                seconds["link"][name] = _best_s(send)
        seconds["memory"][""] = _best_s(lambda: np.copyto(self._target, self._source))
        return seconds


def _best_s(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class SlowPart(NamedTuple):
    """A part that takes longer than the median of its kind."""

    process: int
    host: str
    device: str  # its id; "" for host memory
    part: str  # chip, link or memory
    times: float  # its time over the median

    def __str__(self) -> str:
        device = f", device {self.device}" if self.device else ""
        return (
            f"process {self.process} (host {self.host}){device}: {_NAMES[self.part]} "
            f"{self.times:.1f} times slower than the median"
        )


class Judge:
    """Comparison of all processes' times, and the report of slow parts."""

    def __init__(self, event: Callable[..., None], note: Callable[[str], None]) -> None:
        """Begins without a slow part.

        Args:
          event: writes an event, given its name, step and fields.
          note: prints a line.
        """
        self._event = event
        self._note = note
        # (process, device, part) -> probes in a row in which it was slow
        self._suspects: Counter[tuple[int, str, str]] = Counter()
        self._steps: dict[int, int] = {}  # step of each process's last probe

    def compare(
        self, step: int, posts: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, float]:
        """Compares the times; an event names the slow parts whenever they change.

        Args:
          step: the newest step of the row.
          posts: the step, host and seconds of each process's last probe.

        Returns:
          Fields of a row: the largest ratio to the median of each kind of part.
        """
        ratios = list(compare_parts(posts))
        slow = [item for item in ratios if item.times >= _SLOW[item.part]]
        before = self._reported()
        self._count(slow, posts)
        if self._reported() != before:
            self._report_change(step, slow)
        fields: dict[str, float] = {}
        for item in ratios:
            name = f"probe_{item.part}"
            fields[name] = max(item.times, fields.get(name, 0.0))
        return fields

    def _count(
        self, slow: Sequence[SlowPart], posts: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Counts the probes in a row in which parts were slow."""
        steps = {process: post["step"] for process, post in posts.items()}
        counts: Counter[tuple[int, str, str]] = Counter()
        for item in slow:
            is_new = steps[item.process] != self._steps.get(item.process)
            counts[_key(item)] = self._suspects[_key(item)] + is_new
        self._suspects = counts
        self._steps = steps

    def _report_change(self, step: int, slow: Sequence[SlowPart]) -> None:
        keys = self._reported()
        reported = [item for item in slow if _key(item) in keys]
        parts = [item._asdict() | {"text": str(item)} for item in reported]
        self._event("slow_parts", step, parts=parts)
        for item in reported:
            self._note(f"step {step}: {item}")
        if not reported:
            self._note(f"step {step}: no chip, link or memory is slow any more")

    def _reported(self) -> set[tuple[int, str, str]]:
        return {key for key, count in self._suspects.items() if count >= _IN_A_ROW}


def _key(item: SlowPart) -> tuple[int, str, str]:
    return item.process, item.device, item.part


def compare_parts(posts: Mapping[int, Mapping[str, Any]]) -> Iterator[SlowPart]:
    """Yields each part with its time over the (lower) median of its kind.

    A kind with a single part has no median to compare with.

    Args:
      posts: the host and the seconds of each process.
    """
    for part in _SLOW:
        times = {
            (process, device): seconds
            for process, post in sorted(posts.items())
            for device, seconds in post["seconds"][part].items()
        }
        if len(times) < 2:
            continue
        median = statistics.median_low(times.values())
        for (process, device), seconds in times.items():
            host = posts[process]["host"]
            yield SlowPart(process, host, device, part, seconds / max(median, 1e-9))
