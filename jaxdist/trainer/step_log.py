"""The log of a run's steps: rows of metrics, the display, and the elapsed time."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxdist.data.loader import Loader
from jaxdist.step.state import Metrics
from jaxdist.telemetry import device_memory
from jaxdist.telemetry.display import Display
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer.callbacks import CallbackList, RowView, Run
from jaxdist.trainer.health import Monitor
from jaxdist.trainer.run_metadata import Progress

# rows of a run, at most about, that include arrays: 2 MB for 48 layers with 128 experts
_ARRAY_ROWS = 50
STEPS_IN_FLIGHT = 3  # steps whose metrics are not read yet, so that no device waits


@dataclass
class MetricsWindow:
    """The counters at the last row of metrics, and the pauses since then."""

    began: float  # time of the row, in monotonic seconds
    step: int
    tokens_seen: int
    data_wait_s: float = 0.0  # the loader's counter
    device_wait_s: float = 0.0  # the monitor's counter
    paused_s: float = 0.0  # seconds of pauses since the row


@dataclass
class StepLog:
    """The log of a run's steps, which also keeps the run's progress up to date.

    A step is recorded a few steps after it was started. A row of metrics covers the
    steps since the previous row. The time of pauses is not training time.
    """

    run: Run
    callbacks: CallbackList
    display: Display
    throughput: Throughput

    def __post_init__(self) -> None:
        config = self.run.config
        self.progress = self.run.progress
        self._monitor = Monitor(
            config.health,
            nonfinite_limit=config.optimizer.nonfinite_limit,
            samples=self.run.samples,
            event=self.run.event,
            note=self.display.note,
        )
        self.paused_s = 0.0  # seconds of all pauses
        self._local_devices = [
            device
            for device in self.run.devices
            if device.process_index == jax.process_index()
        ]
        # Scalars of accelerators are copied to the host all at once. Those of CPUs are
        # there, and the request alone would take longer than to read them.
        self._copies_at_once = any(
            device.platform != "cpu" for device in self._local_devices
        )
        # numbers and metrics of steps that are not recorded yet
        self._pending: deque[tuple[int, Metrics]] = deque()
        # counts of weighted targets that `progress` does not include yet
        self._tokens: list[jax.Array] = []

    def begin(self, loader: Loader) -> None:
        """Starts the clock for the steps after `progress.step`.

        Args:
          loader: the loader of their batches.
        """
        self._pending.clear()
        self._tokens.clear()
        self._loader = loader
        self._window = MetricsWindow(
            began=time.monotonic(),
            step=self.progress.step,
            tokens_seen=self.progress.tokens_seen,
            device_wait_s=self._monitor.waited_s,
        )

    def rewind(self) -> None:
        """Forgets all losses, because the run has rolled back."""
        self._monitor.rewound()

    def end(self) -> None:
        """Reports what the monitor still counts, since the run ends."""
        self._monitor.end_spikes()

    @property
    def data_wait_s(self) -> float:
        """The seconds that this process has waited for batches since `begin`."""
        return self._loader.data_wait_s

    @property
    def device_wait_s(self) -> float:
        """The total seconds that this process has waited for its devices."""
        return self._monitor.waited_s

    def add_wait(self, seconds: float) -> None:
        """Counts a wait for other processes as a wait for devices."""
        self._monitor.waited_s += seconds

    def add_step(self, number: int, metrics: Metrics) -> None:
        """Adds a step that has just been started, and records older steps.

        Raises:
          Diverged: a recorded step has a numerical fault.
        """
        self._pending.append((number, metrics))
        self.drain_metrics(in_flight=STEPS_IN_FLIGHT)

    def drain_metrics(self, in_flight: int = 0) -> None:
        """Waits for steps and records them.

        Args:
          in_flight: number of the newest steps to leave unrecorded.

        Raises:
          Diverged: a recorded step has a numerical fault.
        """
        while len(self._pending) > in_flight:
            number, metrics = self._pending.popleft()
            self._record_step(number, metrics)

    def _record_step(self, number: int, metrics: Metrics) -> None:
        self._monitor.check_step(number, metrics)  # waits until the step is done
        self.callbacks.record(number, metrics)
        self.progress.step = number
        self._tokens.append(metrics["tokens"])
        self.display.step(number)
        train = self.run.config.train
        if number in (1, train.steps) or number % train.log_every == 0:
            self._write_row(number, metrics)

    def _write_row(self, number: int, metrics: Metrics) -> None:
        now = time.monotonic()
        window = self._window
        self._count_tokens()
        tokens_seen = self.progress.tokens_seen
        waited_s = self._monitor.waited_s
        seconds = now - window.began - window.paused_s
        steps = number - window.step
        scalars = {name: x for name, x in metrics.items() if x.ndim == 0}
        row = dict(zip(scalars, self._read(list(scalars.values())), strict=True))
        del row["tokens"]  # `tokens_seen` and the throughput have it
        del row["skipped"]  # the event `nonfinite` has it
        row["tokens_seen"] = tokens_seen
        row |= self.throughput.fields(
            seconds=seconds, steps=steps, tokens=tokens_seen - window.tokens_seen
        )
        row |= device_memory.row_fields(self._local_devices)
        row["data_wait_s"] = (self._loader.data_wait_s - window.data_wait_s) / steps
        self.callbacks.row(
            RowView(
                step=number,
                values=row,
                steps=steps,
                seconds=seconds,
                device_wait_s=waited_s - window.device_wait_s,
            )
        )
        balancer = self._loader.balancer
        if balancer:
            row |= balancer.metrics(number - 1)
        self.progress.elapsed_s += seconds
        self._window = MetricsWindow(
            began=now,
            step=number,
            tokens_seen=tokens_seen,
            data_wait_s=self._loader.data_wait_s,
            device_wait_s=waited_s,
        )
        self.run.writer.write(number, row)
        self.display.row(number, row)
        if self._keeps_arrays(number):
            arrays = {name: x for name, x in metrics.items() if x.ndim}
            self.run.writer.write_arrays(number, jax.device_get(arrays))

    def _keeps_arrays(self, number: int) -> bool:
        """Tests whether the row of a step includes arrays.

        These are the first and the last row, and rows at regular intervals between.
        """
        steps = self.run.config.train.steps
        log_every = self.run.config.train.log_every
        interval = -(-steps // _ARRAY_ROWS)
        if number in (1, steps):
            return True
        return number // interval > (number - log_every) // interval

    def _count_tokens(self) -> None:
        self.progress.tokens_seen += sum(map(int, self._read(self._tokens)))
        self._tokens.clear()

    def _read(self, scalars: Sequence[jax.Array]) -> list[Any]:
        """Reads scalars of the devices as numbers of Python."""
        if self._copies_at_once:
            for x in scalars:
                x.copy_to_host_async()
        return [np.asarray(x).item() for x in scalars]

    def elapsed_s(self) -> float:
        """Computes the seconds of training so far, over all restarts."""
        window = self._window
        return (
            self.progress.elapsed_s + time.monotonic() - window.began - window.paused_s
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[Progress]:
        """Records all steps, yields the progress, and stops the clock for the body."""
        self.drain_metrics()
        began = time.monotonic()
        self._count_tokens()
        yield replace(
            self.progress, elapsed_s=self.elapsed_s(), wall_s=self.run.limit.used_s()
        )
        seconds = time.monotonic() - began
        self._window.paused_s += seconds
        self.paused_s += seconds
