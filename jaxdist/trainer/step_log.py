"""What a run records of its steps: metrics that wait on the devices, rows, the display,
elapsed time.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from jaxdist.data.loader import Loader
from jaxdist.step.state import Metrics
from jaxdist.telemetry.display import Display
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer.callbacks import CallbackList, RowView, Run
from jaxdist.trainer.health import Monitor
from jaxdist.trainer.run_metadata import Progress

_ARRAY_ROWS = 50  # about so many of a run: of 48 layers with 128 experts 2 MB


@dataclass
class MetricsWindow:
    """The time since the last row of metrics; the waits are counters as they were when
    it began.
    """

    began: float  # monotonic seconds
    step: int  # updates finished then
    tokens_seen: int  # by then
    data_wait_s: float = 0.0  # the loader's
    device_wait_s: float = 0.0  # the monitor's
    paused_s: float = 0.0  # spent in pauses since


@dataclass
class StepLog:
    """Records steps in order, each a few steps after it was started; keeps `progress`
    up to date.

    A row of metrics covers the steps since the row before. Time in `paused` is not
    training time.
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
        self.paused_s = 0.0  # in all pauses so far
        self._pending: deque[tuple[int, Metrics]] = deque()  # of steps under way
        # weighted targets of the steps recorded since the last row
        self._tokens: list[jax.Array] = []

    def begin(self, loader: Loader) -> None:
        """Starts the clock for the steps after `progress.step`, which take the loader's
        batches.
        """
        self._pending.clear()
        self._tokens.clear()
        self._loader = loader
        progress = self.progress
        waited_s = self._monitor.waited_s
        self._window = MetricsWindow(
            time.monotonic(),
            progress.step,
            progress.tokens_seen,
            device_wait_s=waited_s,
        )

    def rewind(self) -> None:
        """Forgets the losses after `progress.step`, to which the run has gone back."""
        self._monitor.rewound()

    @property
    def data_wait_s(self) -> float:
        """Seconds that this process has waited for batches, since `begin`."""
        return self._loader.data_wait_s

    @property
    def device_wait_s(self) -> float:
        """Seconds that this process has waited for its devices, in all."""
        return self._monitor.waited_s

    def wait(self, seconds: float) -> None:
        """Counts time that this process has waited for others as for its devices."""
        self._monitor.waited_s += seconds

    def add_step(self, number: int, metrics: Metrics) -> None:
        """Takes the outputs of a step that has just been started, and records the steps
        long done.

        Raises:
          Diverged: one of those went wrong.
        """
        self._pending.append((number, metrics))
        # so that the device never waits for the host to read metrics
        self.drain_metrics(under_way=3)

    def drain_metrics(self, under_way: int = 0) -> None:
        """Waits for all steps but the newest so many, and records each.

        Raises:
          Diverged: one of them went wrong.
        """
        while len(self._pending) > under_way:
            self._record_step(*self._pending.popleft())

    def _record_step(self, number: int, metrics: Metrics) -> None:
        self._monitor.look(number, metrics)  # waits until the step is done
        self.callbacks.record(number)
        self.progress.step = number
        self._tokens.append(metrics["tokens"])
        self.display.step(number)
        if (
            number in (1, self.run.config.train.steps)
            or number % self.run.config.train.log_every == 0
        ):
            self._write_row(number, metrics)

    def _write_row(self, number: int, metrics: Metrics) -> None:
        now = time.monotonic()
        window = self._window
        self._count_tokens()
        seen = self.progress.tokens_seen
        waited_s = self._monitor.waited_s
        seconds = now - window.began - window.paused_s
        steps = number - window.step
        scalars = {name: x for name, x in metrics.items() if x.ndim == 0}
        values = {name: x.item() for name, x in jax.device_get(scalars).items()}
        del values["tokens"], values["skipped"]
        row = values | {"tokens_seen": seen}
        row |= self.throughput.fields(
            seconds=seconds, steps=steps, tokens=seen - window.tokens_seen
        )
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
            now, number, seen, self._loader.data_wait_s, waited_s
        )
        self.run.writer.write(number, row)
        self.display.row(number, row)
        if self._keeps_arrays(number):
            self.run.writer.write_arrays(
                number, jax.device_get({n: x for n, x in metrics.items() if x.ndim})
            )

    def _keeps_arrays(self, number: int) -> bool:
        """Tests whether the row of a step has its arrays written too: the first, the
        last, some between.
        """
        steps = self.run.config.train.steps
        log_every = self.run.config.train.log_every
        every = -(-steps // _ARRAY_ROWS)
        return number in (1, steps) or number // every > (number - log_every) // every

    def _count_tokens(self) -> None:
        self.progress.tokens_seen += sum(
            int(count) for count in jax.device_get(self._tokens)
        )
        self._tokens.clear()

    def elapsed_s(self) -> float:
        """Returns the seconds that the run has trained, restarts included."""
        window = self._window
        return (
            self.progress.elapsed_s + time.monotonic() - window.began - window.paused_s
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[Progress]:
        """Records all steps, yields how far the run has come, and stops the clock
        meanwhile.
        """
        self.drain_metrics()
        began = time.monotonic()
        self._count_tokens()
        yield replace(self.progress, elapsed_s=self.elapsed_s())
        seconds = time.monotonic() - began
        self._window.paused_s += seconds
        self.paused_s += seconds
