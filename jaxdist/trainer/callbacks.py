"""Callbacks: what a run does beside training.

A callback is a context manager with methods that the trainer calls. Each method may be
left out. The trainer restores, trains, evaluates, saves and rolls back. All else that a
run does (ledger, watchdog, logging, copies, report) is a callback in a list, and so is
a function of the user (`every`).
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

if TYPE_CHECKING:
    from jaxdist.checkpoint.manager import CheckpointManager
    from jaxdist.protocols.model_spec import ModelSpec
    from jaxdist.step.train_step import TrainStep
    from jaxdist.trainer.compose import Composition
    from jaxdist.trainer.health import SkippingDataset


@dataclass
class Run:
    """A run, as its callbacks see it.

    There is a `store` from `on_start` on, `built` from `load` on.
    """

    composition: Composition
    folder: Path
    devices: Sequence[jax.Device]
    # prints a line for people, on the first process
    note: Callable[[str], None]
    # `note` for work that takes long: each line also shows that it goes on
    say: Callable[[str], None]
    # asks all processes to save and stop, with a reason; from any thread
    preempt: Callable[[str], None]
    num_chips: int = 1  # that have a price; machines, where devices are CPUs
    # code, versions and machines, as run.json has them; {} on other processes
    origin: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    # of rows and events; writes nothing until `on_start`, and on other processes
    writer: MetricsWriter = field(init=False, repr=False)
    store: CheckpointManager = field(init=False, repr=False)
    built: TrainStep = field(init=False, repr=False)
    # without the batches that the run leaves out; None until its first state is known
    dataset: SkippingDataset | None = None
    # why the run ends before its first step; "" if it does not
    stop_reason: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.writer = MetricsWriter(self.folder, enabled=False)

    @property
    def config(self) -> RunConfig:
        """The config, refitted to the devices of an elastic run."""
        return self.composition.config

    @property
    def spec(self) -> ModelSpec:
        """The run's model."""
        return self.composition.spec

    def stop(self, reason: str) -> None:
        """Ends the run before its first step; with "" it goes on."""
        self.stop_reason = self.stop_reason or reason

    def samples(self, step: int) -> tuple[int, int]:
        """Returns the first and the last global sample index that a step takes."""
        size = self.config.batch.global_size
        batch = step - 1
        if self.dataset is not None:
            batch = self.dataset.position(batch)
        return batch * size, (batch + 1) * size - 1

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Appends an event to events.jsonl; any process may."""
        self.writer.event(name, step, **fields)


@dataclass
class StepView:
    """The step that has just been started, as a callback sees it.

    For a callback with `steps` > 0 it is done and recorded, like all before it.
    """

    step: int  # updates finished, this one included
    state: State  # the next step takes its buffers: copy what is to last
    metrics: Metrics  # of this step, on the devices
    progress: Progress  # of the steps recorded so far; elapsed_s leaves out pauses
    last: bool  # whether no step follows
    interrupted: (
        bool  # whether a signal asked to stop: there may be no time for long work
    )
    # adds a row (step, values) to metrics.jsonl and loggers
    log: Callable[[int, Mapping[str, Any]], None]
    # {path: what is trained}, as checkpoints have it
    weights: Callable[[], dict[str, jax.Array]]
    data_wait_s: float = 0.0  # that this process has waited for batches, in all
    device_wait_s: float = 0.0  # that it has waited for its devices, in all
    paused_s: float = 0.0  # that the loop has stood still for callbacks, in all
    save_requested: bool = field(default=False, init=False)
    stop_reason: str = field(default="", init=False)

    def request_save(self) -> None:
        """Requests a checkpoint of this step. All processes save if one requests it."""
        self.save_requested = True

    def stop(self, reason: str) -> None:
        """Ends training as after the last step: it is evaluated and saved.

        All processes stop after the same step, the next one at which they vote: a step
        with an evaluation or a callback that the loop pauses for, or a row of metrics.
        """
        self.stop_reason = reason


@dataclass
class RowView:
    """A row of metrics before it is written; a callback may add values."""

    step: int
    values: dict[str, Any]
    steps: int  # since the row before
    seconds: float  # since the row before, without pauses
    device_wait_s: float  # of them, that this process waited for its devices


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended: `on_end` and `Trainer.train` return it."""

    state: State
    stopped: str = ""  # by a signal, and that the run is saved; "" if none ended it
    # why it ended before train.steps without a signal: a callback's reason, the time
    reason: str = ""
    has_trained: bool = True  # False: the run had been finished before
    # raised after `on_end`: the run is done, but its last updates were left out
    error: Exception | None = None

    @property
    def is_final(self) -> bool:
        """Whether the run has just come to its end, and not to a signal."""
        return self.has_trained and not self.stopped


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended."""

    composition: Composition
    built: TrainStep
    state: State
    stopped: str  # by a signal, and that the run is saved; "" if none ended it
    # why it ended before train.steps without a signal: a callback's reason, the time
    reason: str = ""


class Callback:
    """What a run does beside training. Every method may be left out.

    The trainer calls the methods in the order of the list, but `on_end` and `__exit__`
    in reverse. `__exit__` is called after a failed start too. An error in a method ends
    the run on all processes. Differs from a logger (`telemetry.loggers`): a logger
    takes rows and events in a thread of its own, and cannot end a run.
    """

    # On the first process alone, where it must run no program on devices and talk to no
    # other process. Else on every process, with the same calls at the same steps.
    lead_only = False
    # 0: `on_step` follows each step, while the devices work on the next; it must not
    # wait for them. n: it follows each n-th, and the last, once more if it is one of
    # these, when all steps so far are recorded.
    steps = 0
    # Whether `on_step` of a callback with `steps` = 0 may request a save or the end.
    # Several processes then vote at each row of metrics.
    may_request = True
    # bucket of the ledger for the time of `on_step`, if `steps` > 0
    bucket = clock.HOOKS
    # keys of the config, or groups of them, that do nothing without this callback
    keys: tuple[str, ...] = ()
    # under which a checkpoint keeps `state`
    name = ""

    def __enter__(self) -> Callback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends what the callback began; `error` is what ended the run, if anything."""

    def on_check(self, config: RunConfig) -> None:
        """Follows the checks of the config; nothing has been written yet.

        Raises:
          ConfigError: the callback cannot do what the config wants.
        """

    def on_open(self, run: Run) -> None:
        """Follows the lock of the run's folder; nothing in it has been read yet."""

    def on_start(self, run: Run) -> None:
        """Follows the checks of config and folder; nothing is restored or compiled."""

    def on_phase(self, phase: str, step: int) -> None:
        """Follows the start of a phase.

        The phases are start, restore, compile, data, step, evaluate, vote (processes
        agree on what their callbacks request), save and end.

        Args:
          step: the one that it is for; 0 before the first.
        """

    def on_progress(self, text: str) -> None:
        """Says that work of many seconds goes on, with the line it has printed."""

    def on_step(self, view: StepView) -> None:
        """Follows a step, see `steps`."""

    def on_record(self, step: int) -> None:
        """Says that a step is known to be done."""

    def on_row(self, row: RowView) -> None:
        """Takes a row of metrics before it is written; may add values."""

    def on_evaluate(self, view: StepView, row: Mapping[str, float]) -> None:
        """Takes the row of an evaluation; `view` can request a save or the end."""

    def on_save(self, step: int) -> None:
        """Says that a checkpoint is whole on disk."""

    def on_fault(self, error: Exception) -> None:
        """Says what went wrong; for `Diverged` the run then goes back."""

    def on_end(self, end: RunEnd) -> None:
        """Follows the last step and the last save."""

    def state(self) -> Any:
        """Gives what a checkpoint keeps of the callback, as JSON; None: nothing."""
        return None

    def load(self, state: Any) -> None:
        """Takes back what `state` returned; None where the checkpoint has nothing.

        Raises:
          Malformed: it is something else.
        """


class Hook(Callback):
    """A function of the user as a callback; see `every`."""

    def __init__(
        self, steps: int, function: Callable[[StepView], None], *, at_end: bool
    ) -> None:
        self.steps = steps
        self._function = function
        self._at_end = at_end
        self._called_at = -1  # the last step that it was called after

    def on_step(self, view: StepView) -> None:
        """Calls the function if the step is due; at most once for a step.

        The loop calls this once more after the last step.
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

    Before the call, the steps so far are done and recorded, so a small number costs the
    devices their queue. All processes make the same calls, so the function may run
    programs on all devices.

    Args:
      steps: updates between two calls; 0: never.
      function: takes the step's `StepView`.
      at_end: also call it after the last step. A run that a signal ends does not wait
        for the function.
    """
    return Hook(steps, function, at_end=at_end)


class CallbackList:
    """The callbacks of a run, called as one."""

    def __init__(self, entered: Sequence[Callback], others: Sequence[Callback]) -> None:
        """Takes the callbacks; `entered` enters those that are not entered yet.

        Args:
          entered: the caller's own, from before it joined the process group.
          others: entered and left with the run.

        Raises:
          ConfigError: one of them is no callback.
        """
        everyone = [*entered, *others]
        check_callbacks(everyone)
        lead = jax.process_index() == 0
        self.keys = {key for callback in everyone for key in callback.keys}
        self._here = [item for item in everyone if lead or not item.lead_only]
        self._others = others
        self._everyone = everyone
        self._started: list[Callback] = []
        self.may_request = any(
            callback.may_request
            and callback.steps == 0
            and type(callback).on_step is not Callback.on_step
            for callback in everyone
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the callbacks in order, and leaves them in reverse.

        An error on one process is raised on all, but where the run has ended by another.
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
        """Calls `on_check`; an error on one process is raised on all.

        Raises:
          ConfigError: a key of the config needs a callback that the run lacks.
        """
        check_served(config, self.keys)
        with coordination.raise_on_all():
            for callback in self._here:
                callback.on_check(config)

    def open(self, run: Run) -> None:
        """Calls `on_open`; the caller raises its error on all processes."""
        for callback in self._here:
            callback.on_open(run)

    def start(self, run: Run) -> None:
        """Calls `on_start`; an error on one process is raised on all."""
        for callback in self._everyone:
            with coordination.raise_on_all():
                if callback in self._here:
                    callback.on_start(run)
                    self._started.append(callback)

    def phase(self, phase: str, step: int = 0) -> None:
        """Calls `on_phase`."""
        for callback in self._here:
            callback.on_phase(phase, step)

    def progress(self, text: str) -> None:
        """Calls `on_progress`."""
        for callback in self._here:
            callback.on_progress(text)

    def step(self, view: StepView) -> None:
        """Calls `on_step` of those that follow each step."""
        for callback in self._here:
            if callback.steps == 0:
                callback.on_step(view)

    def due(self, step: int) -> list[Callback]:
        """Lists those that the loop pauses for after a step; 0: after the last.

        The list is empty on all processes, or on none.
        """
        return [
            callback
            for callback in self._everyone
            if callback.steps > 0 and step % callback.steps == 0
        ]

    def paused_step(self, callback: Callback, view: StepView) -> None:
        """Calls `on_step` of one that the loop pauses for."""
        if callback in self._here:
            callback.on_step(view)

    def record(self, step: int) -> None:
        """Calls `on_record`."""
        for callback in self._here:
            callback.on_record(step)

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
        """Calls `on_fault` of those that have started."""
        for callback in self._started:
            callback.on_fault(error)

    def end(self, end: RunEnd) -> None:
        """Calls `on_end` in reverse order; an error of a `lead_only` one is raised on
        all.
        """
        for callback in reversed(self._everyone):
            if callback.lead_only:
                with coordination.raise_on_all():
                    if callback in self._here:
                        callback.on_end(end)
            else:
                callback.on_end(end)

    def state(self) -> dict[str, Any]:
        """Collects what a checkpoint keeps of all callbacks, by name."""
        kept = {item.name: item.state() for item in self._here if item.name}
        return {name: state for name, state in kept.items() if state is not None}

    def load(self, states: Mapping[str, Any]) -> None:
        """Hands each callback what a checkpoint has kept of it.

        An error on one process is raised on all.
        """
        with coordination.raise_on_all():
            for callback in self._here:
                if callback.name:
                    callback.load(states.get(callback.name))


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Checks that all are callbacks.

    Raises:
      ConfigError: one line for each that is none.
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


def check_served(run: RunConfig, keys: Collection[str]) -> None:
    """Checks that no key of a config is set in vain.

    Args:
      run: the config.
      keys: that the run's callbacks serve; a group stands for its keys.

    Raises:
      ConfigError: one line for each key that needs a callback which the run lacks.
    """
    faults = []
    for key, fact in schema.schema_of(RunConfig).items():
        value = attrgetter(key)(run)
        group = key.partition(".")[0]
        if not fact.callback or key in keys or group in keys:
            continue
        if value != fact.default:
            faults.append(
                f"{key}={value}: nothing in this run does that. The key needs the "
                f"callback {fact.callback}. Pass it in callbacks=[...], or leave the "
                f"key out."
            )
    if faults:
        raise ConfigError(faults)
