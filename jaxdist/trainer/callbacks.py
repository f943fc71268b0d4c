"""Callbacks, which do everything in a run that is not training itself.

A callback is a context manager with methods that the trainer calls. Every method is
optional. The trainer restores, trains, evaluates, saves and rolls back. Ledger,
watchdog, logging, copies and report are callbacks, and so is a function of the user
(`every`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.distributed import coordination
from jaxdist.step.state import Metrics, State
from jaxdist.telemetry import clock
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.run_metadata import Progress
from jaxdist.trainer.time_limit import TimeLimit

if TYPE_CHECKING:
    from jaxdist.checkpoint.manager import CheckpointManager
    from jaxdist.protocols.model_spec import ModelSpec
    from jaxdist.step.train_step import TrainStep
    from jaxdist.trainer.compose import Composition
    from jaxdist.trainer.health import SkippingDataset


@dataclass
class Run:
    """A run, as its callbacks see it.

    `store` exists from `on_start` on, and `built` from `load` on.
    """

    composition: Composition
    folder: Path  # the workdir
    devices: Sequence[jax.Device]
    # prints a line on the first process
    note: Callable[[str], None]
    # prints a line of slow work, and tells the callbacks that the work makes progress
    say: Callable[[str], None]
    # asks all processes to save and stop; callable from any thread
    request_stop: Callable[[], None]
    num_chips: int = 1  # chips that cost money; if the devices are CPUs, machines
    # source, versions and machines, as in run.json; {} on processes but the first
    origin: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    # writer of rows and events; it writes only on the first process, from `on_start` on
    writer: MetricsWriter = field(init=False, repr=False)
    store: CheckpointManager = field(init=False, repr=False)
    built: TrainStep = field(init=False, repr=False)
    limit: TimeLimit = field(init=False, repr=False)  # train.max_minutes
    # data without the batches that the run skips; None until the first state exists
    dataset: SkippingDataset | None = None
    # why the run ends before its first step; "" = it does not
    stop_reason: str = field(default="", init=False)
    stop_fix: str = field(default="", init=False)  # how it would go on

    def __post_init__(self) -> None:
        self.writer = MetricsWriter(self.folder, enabled=False)
        self.limit = TimeLimit(self.config.train.max_minutes)

    @property
    def config(self) -> RunConfig:
        """The run's config, refitted to the devices of an elastic run."""
        return self.composition.config

    @property
    def spec(self) -> ModelSpec:
        """The run's model."""
        return self.composition.spec

    def stop(self, reason: str, fix: str = "") -> None:
        """Ends the run before its first step. The first reason counts.

        Args:
          reason: why it ends; "" = it does not.
          fix: a sentence that says how the run would go on.
        """
        if reason and not self.stop_reason:
            self.stop_reason = reason
            self.stop_fix = fix

    def samples(self, step: int) -> tuple[int, int]:
        """Computes the first and the last global sample index of a step's batch."""
        size = self.config.batch.global_size
        batch = step - 1
        if self.dataset is not None:
            batch = self.dataset.position(batch)
        return batch * size, (batch + 1) * size - 1

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Appends an event to events.jsonl. Any process may call it."""
        self.writer.event(name, step, **fields)


@dataclass
class StepView:
    """A step that has just been started, as a callback sees it.

    For a callback with `steps` > 0, the step and all earlier ones are done and recorded.
    """

    step: int  # number of updates, including this one
    state: State  # donated to the next step: copy arrays that you keep
    metrics: Metrics  # metrics of this step, on the devices
    progress: Progress  # progress of the recorded steps
    last: bool  # whether no step follows
    # whether a signal asked to stop, so that there may be no time for long work
    interrupted: bool
    # adds a row (step, values) to metrics.jsonl and loggers
    log: Callable[[int, Mapping[str, Any]], None]
    # returns the trained parameters by path, in the layout of checkpoints
    weights: Callable[[], dict[str, jax.Array]]
    # seconds that this process has waited for batches since the start or a rollback
    data_wait_s: float = 0.0
    # total seconds that this process has waited for its devices
    device_wait_s: float = 0.0
    paused_s: float = 0.0  # total seconds that callbacks have paused the loop
    save_requested: bool = field(default=False, init=False)
    stop_reason: str = field(default="", init=False)

    def request_save(self) -> None:
        """Requests a checkpoint. All processes save if one requests it.

        The checkpoint is of this step if the callback pauses the loop, or at an
        evaluation. The request of a callback with `steps` = 0 is held back until the next
        vote (see `stop`), so the checkpoint may be of a later step.
        """
        self.save_requested = True

    def stop(self, reason: str) -> None:
        """Ends training, with an evaluation and a checkpoint as after the last step.

        All processes stop after the same step: the next step at which they vote. They
        vote after an evaluation, after a callback that pauses the loop, at a row of
        metrics, and after the last step.
        """
        self.stop_reason = reason


@dataclass
class RowView:
    """A row of metrics before it is written. A callback may add values."""

    step: int
    values: dict[str, Any]
    steps: int  # number of steps since the previous row
    seconds: float  # seconds since the previous row, without pauses
    # part of `seconds` that this process waited for its devices
    device_wait_s: float


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as `on_end` receives it."""

    state: State
    stopped: str = ""  # message of a run that a signal stopped; "" = no signal
    # why the run ended before train.steps without a signal; "" = it did not
    reason: str = ""
    has_trained: bool = True  # False = the run had finished in an earlier start
    # raised after `on_end`, if the last updates of the run were skipped
    error: Exception | None = None

    @property
    def is_final(self) -> bool:
        """Tests whether the run has trained and no signal stopped it."""
        return self.has_trained and not self.stopped


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    composition: Composition
    built: TrainStep
    state: State
    stopped: str  # message of a run that a signal stopped; "" = no signal
    # why the run ended before train.steps without a signal; "" = it did not
    reason: str = ""


class Callback:
    """Work of a run that is not training itself. Every method is optional.

    The trainer calls each method of all callbacks in the order of the list, but `on_end`
    and `__exit__` in reverse order. `__exit__` is also called after a failed start. An
    error in a method ends the run on all processes. A logger (`telemetry.loggers`)
    differs: it receives rows and events in a thread, and cannot end a run.
    """

    # Whether only the first process has the callback. It must then run no program on
    # devices and exchange nothing with other processes. Otherwise every process makes
    # the same calls at the same steps.
    lead_only = False
    # Interval of `on_step`. With 0, it follows each step while the devices compute the
    # next one, and must not wait for them (`every(0, ...)` makes no calls instead).
    # With n, it follows each n-th step, when all steps so far are recorded. It also
    # follows the last step, in an additional call.
    steps = 0
    # Whether `on_step` of a callback with `steps` = 0 may request a save or the end.
    # All processes then exchange votes at each row of metrics. It is True by default
    # since a request would otherwise wait for the next evaluation or the end of the
    # run. A callback that only watches saves the exchange with False; its requests are
    # errors.
    may_request = True
    # bucket of the ledger for the time of `on_step`, if `steps` > 0
    bucket = clock.HOOKS
    # keys or groups of the config that have no effect without this callback
    keys: tuple[str, ...] = ()
    # name under which a checkpoint stores `state`; "" = it stores nothing
    name = ""

    def __enter__(self) -> Callback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases the callback's resources; `error` is the error that ended the run."""

    def on_check(self, config: RunConfig) -> None:
        """Runs after the checks of the config. Nothing has been written yet.

        Raises:
          ConfigError: the callback cannot do what the config requires.
        """

    def on_open(self, run: Run) -> None:
        """Runs once the run's folder is locked, before its checkpoints are opened.

        Only the versions of its files have been checked.
        """

    def on_start(self, run: Run) -> None:
        """Runs after the checks, before anything is restored or compiled."""

    def on_phase(self, phase: clock.Phase, step: int) -> None:
        """Runs as a phase starts.

        Args:
          phase: the phase.
          step: the step that the phase is for; 0 before the first step.
        """

    def on_progress(self, text: str) -> None:
        """Runs as slow work makes progress; `text` is the line that it has printed."""

    def on_step(self, view: StepView) -> None:
        """Runs after a step, at the interval `steps`."""

    def on_record(self, step: int, metrics: Metrics) -> None:
        """Runs once a step is known to be done, in order of the steps.

        This is 3 steps after `on_step` of the step: `on_step` of the 4th step after it is
        the first that knows it. All steps are recorded before an evaluation, a save and
        the end.

        Args:
          step: the step.
          metrics: arrays on the devices, as in `StepView.metrics`. The step is done, so
            `float(metrics["loss"])` waits for no device.
        """

    def on_row(self, row: RowView) -> None:
        """Runs before a row of metrics is written, and may add values to it."""

    def on_evaluate(self, view: StepView, row: Mapping[str, float]) -> None:
        """Runs after an evaluation. `view` can request a save or the end."""

    def on_save(self, step: int) -> None:
        """Runs after a save: on the first process once the checkpoint is sealed.

        On the other processes it runs once the arrays of all processes are written. The
        first process may still be sealing the checkpoint then, and may fail.
        """

    def on_fault(self, error: Exception) -> None:
        """Runs when the run fails. After a `Diverged` the run may roll back."""

    def on_end(self, end: RunEnd) -> None:
        """Runs after the last step and the last save."""

    def state(self) -> Any:
        """Gives the callback's state for checkpoints, as JSON; None = no state."""
        return None

    def load(self, state: Any) -> None:
        """Restores the state that `state` returned; None if the checkpoint has none.

        Raises:
          Malformed: the state is damaged.
        """


class Hook(Callback):
    """A callback that calls a function of the user; see `every`."""

    def __init__(
        self, steps: int, function: Callable[[StepView], None], *, at_end: bool
    ) -> None:
        self.steps = steps
        self._function = function
        self._at_end = at_end
        self._called_at = -1  # the last step after which the function was called

    def on_step(self, view: StepView) -> None:
        """Calls the function if the step is due, at most once for a step.

        The loop calls this method an additional time after the last step.
        """
        if self.steps == 0 or view.interrupted or view.step == self._called_at:
            return
        at_end = self._at_end and view.last
        if at_end or view.step % self.steps == 0:
            self._function(view)
            self._called_at = view.step


def every(
    steps: int, function: Callable[[StepView], None], *, at_end: bool = False
) -> Hook:
    """Makes a callback that calls `function` after each `steps` updates.

    The loop waits for the devices before each call, so a small interval slows training.
    All processes make the same calls, so the function may run programs on all devices.

    Args:
      steps: updates between two calls; 0 = no calls.
      function: called with the step's `StepView`.
      at_end: whether to call it after the last step, too. It is not called if a signal
        ends the run.
    """
    return Hook(steps, function, at_end=at_end)


class CallbackList:
    """The callbacks of a run, called together."""

    def __init__(
        self, already_entered: Sequence[Callback], others: Sequence[Callback]
    ) -> None:
        """Takes the callbacks of a run.

        Args:
          already_entered: callbacks that the caller has entered, before it joined the
            process group.
          others: callbacks that `enter_others` enters and exits.

        Raises:
          ConfigError: an item is no callback.
        """
        everyone = [*already_entered, *others]
        check_callbacks(everyone)
        lead = jax.process_index() == 0
        self.keys = {key for callback in everyone for key in callback.keys}
        # callbacks that run on this process
        self._here = [item for item in everyone if lead or not item.lead_only]
        # those of them that do something at each step
        self._of_phases = _overriding(self._here, "on_phase")
        self._of_steps = _overriding(self._here, "on_step")
        self._of_records = _overriding(self._here, "on_record")
        self._others = others
        self._everyone = everyone
        self._started: list[Callback] = []
        # whether a callback that follows each step may request a save or the end
        self.may_request = any(
            callback.may_request
            and callback.steps == 0
            and type(callback).on_step is not Callback.on_step
            for callback in everyone
        )

    @contextlib.contextmanager
    def enter_others(self) -> Iterator[None]:
        """Enters the other callbacks in order, and exits them in reverse order.

        An error on one process is raised on all, unless another error ended the run.
        """
        with contextlib.ExitStack() as stack:
            for callback in self._others:
                with coordination.raise_on_all():
                    if callback in self._here:
                        stack.enter_context(callback)
            yield
            with coordination.raise_on_all():
                stack.close()

    def check(self, config: RunConfig) -> None:
        """Calls `on_check`. An error on one process is raised on all.

        Raises:
          ConfigError: a key of the config needs a callback that the run lacks.
        """
        check_served(config, self.keys)
        with coordination.raise_on_all():
            for callback in self._here:
                callback.on_check(config)

    def open(self, run: Run) -> None:
        """Calls `on_open`. The caller must raise an error on all processes."""
        for callback in self._here:
            callback.on_open(run)

    def start(self, run: Run) -> None:
        """Calls `on_start`. An error on one process is raised on all."""
        for callback in self._everyone:
            with coordination.raise_on_all():
                if callback in self._here:
                    callback.on_start(run)
                    self._started.append(callback)

    def phase(self, phase: clock.Phase, step: int = 0) -> None:
        """Calls `on_phase`."""
        for callback in self._of_phases:
            callback.on_phase(phase, step)

    def progress(self, text: str) -> None:
        """Calls `on_progress`."""
        for callback in self._here:
            callback.on_progress(text)

    def step(self, view: StepView) -> None:
        """Calls `on_step` of the callbacks that follow each step.

        Raises:
          RuntimeError: a callback requests something without `may_request`.
        """
        for callback in self._of_steps:
            if callback.steps > 0:
                continue
            before = (view.save_requested, view.stop_reason)
            callback.on_step(view)
            has_requested = (view.save_requested, view.stop_reason) != before
            if has_requested and not callback.may_request:
                raise RuntimeError(
                    f"{type(callback).__name__} requests a save or the end of the run, "
                    f"but declares may_request = False. So no vote would come in time. "
                    f"Set may_request = True."
                )

    def due(self, step: int) -> list[Callback]:
        """Lists the callbacks that pause the loop after a step.

        The list is the same on all processes, including callbacks of the first process.

        Args:
          step: the step, from 1.
        """
        return [item for item in self.pausing() if step % item.steps == 0]

    def pausing(self) -> list[Callback]:
        """Lists all callbacks that may pause the loop, as `due` does."""
        return [callback for callback in self._everyone if callback.steps > 0]

    def paused_step(self, callback: Callback, view: StepView) -> None:
        """Calls `on_step` of a callback that pauses the loop."""
        if callback in self._here:
            callback.on_step(view)

    def record(self, step: int, metrics: Metrics) -> None:
        """Calls `on_record`."""
        for callback in self._of_records:
            callback.on_record(step, metrics)

    def row(self, row: RowView) -> None:
        """Calls `on_row`."""
        for callback in self._here:
            callback.on_row(row)

    def evaluate(self, view: StepView, row: Mapping[str, float]) -> None:
        """Calls `on_evaluate`."""
        for callback in self._here:
            callback.on_evaluate(view, row)

    def save(self, step: int) -> None:
        """Calls `on_save`."""
        for callback in self._here:
            callback.on_save(step)

    def fault(self, error: Exception) -> None:
        """Calls `on_fault` of the callbacks that have started."""
        for callback in self._started:
            callback.on_fault(error)

    def end(self, end: RunEnd) -> None:
        """Calls `on_end` in reverse order.

        An error of a `lead_only` callback is raised on all processes.
        """
        for callback in reversed(self._everyone):
            if not callback.lead_only:
                callback.on_end(end)
                continue
            with coordination.raise_on_all():
                if callback in self._here:
                    callback.on_end(end)

    def state(self) -> dict[str, Any]:
        """Collects the states of callbacks for a checkpoint, by name."""
        states = {item.name: item.state() for item in self._here if item.name}
        return {name: state for name, state in states.items() if state is not None}

    def load(self, states: Mapping[str, Any]) -> None:
        """Restores the states of callbacks. An error on one process is raised on all."""
        with coordination.raise_on_all():
            for callback in self._here:
                if callback.name:
                    callback.load(states.get(callback.name))


def _overriding(callbacks: Iterable[Callback], method: str) -> list[Callback]:
    """Selects the callbacks that have a method of their own in place of Callback's."""
    inherited = getattr(Callback, method)
    return [
        callback
        for callback in callbacks
        if getattr(type(callback), method, None) is not inherited
        or method in vars(callback)
    ]


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Checks that all items are callbacks.

    Raises:
      ConfigError: some are not. It has a line for each.
    """
    wrong = [item for item in callbacks if not isinstance(item, Callback)]
    if wrong:
        raise ConfigError(
            [
                f"callbacks: {item!r:.60} is no callback. Each must be a "
                f"jaxdist.Callback. Write jaxdist.every(100, function)."
                for item in wrong
            ]
        )


def check_served(config: RunConfig, keys: Collection[str]) -> None:
    """Checks that every key that needs a callback has one.

    Args:
      config: the run's config.
      keys: keys that the run's callbacks serve. A group stands for all its keys.

    Raises:
      ConfigError: a key has a value, and the run lacks its callback. It has a line for
        each such key.
    """
    faults = []
    for key, field_of_key in schema.schema_of(RunConfig).items():
        value = attrgetter(key)(config)
        group = key.partition(".")[0]
        if not field_of_key.callback or key in keys or group in keys:
            continue
        # 0 and its like turn the callback's work off, which a run without it does.
        if value and value != field_of_key.default:
            faults.append(
                f"{key}={value}: nothing in this run does that. The key needs the "
                f"callback {field_of_key.callback}. Pass it in callbacks=[...], or "
                f"leave the key out."
            )
    if faults:
        raise ConfigError(faults)
