"""A training run: restore or start; loop; evaluate; save; roll back.

What else a run does is a list of callbacks (`trainer.callbacks`).
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdist.checkpoint.files import CheckpointError
from jaxdist.checkpoint.interval import mean_time_between_failures
from jaxdist.checkpoint.manager import NotOwner
from jaxdist.config import trees
from jaxdist.data import SourceError
from jaxdist.distributed import coordination
from jaxdist.parallel.mesh import build_mesh
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import Metrics, State
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry import clock
from jaxdist.telemetry.display import Display
from jaxdist.telemetry.metrics import EXTENDED
from jaxdist.trainer import (
    build,
    elastic,
    extension,
    opening,
    preemption,
    provenance,
    restore,
    validation,
    workdir,
)
from jaxdist.trainer.callbacks import Callback, CallbackList, Run, RunEnd, StepView
from jaxdist.trainer.extension import SettledSchedule
from jaxdist.trainer.health import Diverged
from jaxdist.trainer.held_out import score_held_out
from jaxdist.trainer.preemption import Interrupted, Preempted, StopSignals
from jaxdist.trainer.progress import progress_of
from jaxdist.trainer.restore import Start, UserInputs
from jaxdist.trainer.run_config import RunConfig, run_fingerprint
from jaxdist.trainer.saver import Saver
from jaxdist.trainer.step_log import StepLog

# Of the step in a run: to compile it ahead; by its first call, where an optimizer's own
# first state may be weakly typed; and by the second, whose state is the step's.
MAX_TRACES = 3

_CHANGE = "lower optimizer.learning_rate, or look at the data from step {} on"


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to do."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason  # in the event `stop`


class TrainResult(NamedTuple):
    """A run that has ended."""

    config: RunConfig
    spec: ModelSpec
    built: TrainStep
    state: State
    stopped: str  # by a signal, and that the run is saved; "" if none ended it
    # why it ended before train.steps without a signal: a callback's reason, the time
    reason: str = ""


def run(config: RunConfig, folder: Path, **options: Any) -> State:
    """Trains to the end, and returns the last state; takes the options of `train`.

    Raises:
      Interrupted: a signal ended it early; Preempted if not by a Ctrl-C to a process
        alone.
    """
    result = train(config, folder, **options)
    if result.stopped:
        if preemption.PROCESS.must_leave:
            raise Preempted(result.stopped)
        raise Interrupted(result.stopped)
    return result.state


def train(
    config: RunConfig,
    folder: Path,
    *,
    title: str = "",
    devices: Sequence[jax.Device] | None = None,
    full_devices: int | None = None,
    inputs: UserInputs | None = None,
    callbacks: Sequence[Callback] = (),
    process_callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Trains to the end, from the newest checkpoint if the workdir has one.

    On other devices than the `full_devices` of an elastic run's config, its layout is
    refitted.

    Args:
      config: of the run.
      folder: the workdir; made if it is missing.
      title: a first line for the display.
      devices: to train on; default: all.
      full_devices: that an elastic run's config was written for.
      inputs: a caller's model, data and optimizer.
      callbacks: what the run does beside training, entered and left with it.
      process_callbacks: the same, which the caller has entered already.

    Raises:
      ConfigError: the config is illegal; nothing was compiled.
      TrainingStopped: losses stayed non-finite, or the last checkpoint could not be
        written.
    """
    preemption.refuse_unjoined()
    everyone = CallbackList(process_callbacks, callbacks)
    if devices is None:
        devices = jax.devices()
    requested = config
    config = elastic.refit(config, devices=len(devices), full_devices=full_devices)
    inputs = inputs or UserInputs()
    _, rules, spec = validation.validate(
        config, devices, with_data=inputs.dataset is None, build=inputs.build
    )
    validation.check_served(config, everyone.keys)
    everyone.check(config)
    signals = StopSignals()
    with contextlib.ExitStack() as stack, everyone.entered():
        current = Run(
            config=config,
            folder=folder,
            spec=spec,
            devices=devices,
            note=opening.log,
            say=_lively(opening.log, everyone),
            preempt=lambda reason: signals.hear(signal.SIGTERM),
            samples=_samples_without_skips(config),
        )
        try:
            everyone.phase("start")
            opening.open_workdir(current, requested, everyone, stack)
            assert current.store is not None
            mesh = build_mesh(config.mesh, devices)
            origin = provenance.describe(spec.model_class, mesh.devices)
            current.num_chips = origin.get("num_chips", 1)
            everyone.start(current)
            schedule = extension.settle_schedule(config, folder, current.store)
            dataset = opening.open_dataset(config, folder, inputs, current.say)
            built = build.build_step(
                config,
                spec,
                mesh,
                rules,
                max_traces=MAX_TRACES,
                optimizer=inputs.optimizer,
                schedule_steps=schedule.steps,
            )
            opening.describe(current, built, dataset, origin, schedule)
            current.built = built
            current.tokenizer = dataset.tokenizer
            start = _start(current, everyone, dataset, inputs, schedule)
            trainer = Trainer(current, everyone, signals, schedule, start)
            with trainer.display:
                if title:
                    trainer.display.note(title)
                end = trainer.train(start.state)
                everyone.end(end)
        except BaseException as error:
            if isinstance(error, Exception):
                everyone.fault(error)
            raise
        return TrainResult(config, spec, built, end.state, end.stopped, end.reason)


def _lively(
    say: Callable[[str], None], callbacks: CallbackList
) -> Callable[[str], None]:
    """Makes a `say` whose lines show callbacks that work goes on."""

    def speak(text: str) -> None:
        callbacks.progress(text)
        say(text)

    return speak


def _samples_without_skips(config: RunConfig) -> Callable[[int], tuple[int, int]]:
    """Makes `Run.samples` for the time before the run knows what data it leaves out."""
    size = config.batch.global_size
    return lambda step: ((step - 1) * size, step * size - 1)


def _start(
    run: Run,
    callbacks: CallbackList,
    dataset: Any,
    inputs: UserInputs,
    schedule: SettledSchedule,
) -> Start:
    """Makes or restores the first state; tells the run's events what cannot be used."""
    assert run.built is not None and run.store is not None
    try:
        start = restore.init_or_restore(
            run.config,
            run.built,
            dataset,
            run.store,
            run.folder,
            callbacks.phase,
            inputs,
            schedule.back_to,
        )
    except CheckpointError as error:  # the run never begins, but its events say why
        for step, reason in error.steps.items():
            run.event("bad_checkpoint", step, reason=reason)
        raise
    run.progress = start.progress
    return start


class Trainer:
    """The loop of a run.

    It reads the metrics of a step only when the next ones are on their way.
    """

    def __init__(
        self,
        run: Run,
        callbacks: CallbackList,
        signals: StopSignals,
        schedule: SettledSchedule,
        start: Start,
    ):
        """Prepares the loop; `start` is where it begins."""
        assert run.built is not None
        assert run.store is not None
        assert run.writer is not None
        self.run = run
        self.config = run.config
        self.built = run.built
        self.store = run.store
        self.writer = run.writer
        self.progress = run.progress
        self.callbacks = callbacks
        self.signals = signals
        self.schedule = schedule.steps
        self.dataset = start.dataset
        # once: a run outlives its files
        self.shardings = build.batch_shardings(self.config, self.built)
        self.display = self._build_display()
        run.note = self.display.note
        run.say = _lively(self.display.note, callbacks)
        run.samples = self._samples
        self.log = StepLog(
            config=self.config,
            progress=self.progress,
            writer=self.writer,
            display=self.display,
            throughput=workdir.throughput(
                self.config, run.spec, self.built.mesh, start.step_flops
            ),
            samples=self._samples,
            callbacks=callbacks,
        )
        self.store.milestones = extension.milestones(self.config, self.schedule)
        self.saver = Saver(
            store=self.store,
            views=self.built.views,
            writer=self.writer,
            display=self.display,
            metadata=self._checkpoint_metadata,
            failures=self._failures,
            on_save=callbacks.save,
        )
        # It may delete in a store what has expired: by now is known what is kept.
        callbacks.load(start.callbacks)
        self._evaluated_at = -1
        # what callbacks of this process have asked for since the last vote
        self._wants_save = False
        self._wants_stop = ""

    def _build_display(self) -> Display:
        train = self.config.train
        left_s = None
        if train.max_minutes:
            left_s = 60 * train.max_minutes - self.progress.elapsed_s
        return Display(
            total_steps=train.steps,
            first_step=self.progress.step,
            max_seconds=left_s,
            unit=build.unit(self.config),
            enabled=opening.is_lead(),
        )

    def train(self, state: State) -> RunEnd:
        """Trains to the last step, or to the step in which a signal asked to stop.

        Raises:
          TrainingStopped: losses stayed or ended non-finite, the last checkpoint could
            not be written.
          SourceError: the data cannot be read.
        """
        if self.run.stop_reason:
            self.display.note(
                f"{self.run.folder} stopped at step {self.progress.step}: "
                f"{self.run.stop_reason}. To go on, raise it."
            )
            return RunEnd(state, reason=self.run.stop_reason, has_trained=False)
        if self._is_finished():
            self._check_last_updates(state)
            return RunEnd(state, has_trained=False)
        try:
            self._report_start()
            with self.signals:
                state, reason = self._train_through_faults(state)
        except (
            SourceError,
            TrainingStopped,
            NotOwner,
            jax.errors.JaxRuntimeError,
        ) as error:
            self._report_stop(error)
            if isinstance(error, NotOwner):
                raise TrainingStopped(str(error), error.reason) from error
            raise
        return self._finish(state, reason)

    def _is_finished(self) -> bool:
        """Prints how to extend the run if nothing is left of it."""
        train = self.config.train
        step = self.progress.step
        if step >= train.steps:
            limit = f"train.steps, as in --config.train.steps={2 * step}"
        elif 0 < 60 * train.max_minutes <= self.progress.elapsed_s:
            limit = f"train.max_minutes (now {train.max_minutes:g})"
        else:
            return False
        self.display.note(
            f"{self.run.folder} is finished at step {step}. To go on, raise {limit}; "
            f"to start anew, give another --workdir."
        )
        return True

    def _report_start(self) -> None:
        """Writes the events of a start."""
        step = self.progress.step
        devices = jax.device_count()
        self.callbacks.phase("data", step + 1)
        resized = elastic.resized(self.run.folder, self.config, devices)
        if resized:
            self.writer.event("resize", step, **resized)
        self.writer.event("start", step, devices=devices, processes=jax.process_count())
        self.saver.report_bad_checkpoints()
        for part in self.schedule.extensions:
            if part.start == step:
                self.writer.write(step, {EXTENDED: part.end})
        if step:
            self.writer.event("restore", step)
            self.display.note(f"resumed after step {step}")

    def _report_stop(self, error: Exception) -> None:
        """Writes the event of a run that an error ends."""
        if isinstance(error, SourceError):
            cause = "data"
        else:
            cause = getattr(error, "reason", "runtime")
        self.writer.event("stop", self.progress.step, reason=cause, error=str(error))

    def _finish(self, state: State, reason: str) -> RunEnd:
        """Waits for the last save, and writes how the run has ended.

        Args:
          reason: why it ends before train.steps, "" if it does not.
        """
        steps = self.config.train.steps
        step = self.progress.step
        lost = self.saver.finish(step)
        if lost:
            message = (
                f"the last checkpoint could not be written; {lost}; free the disk and "
                f"run again"
            )
            self.writer.event("stop", step, reason="save_failed", error=message)
            raise TrainingStopped(message, "save_failed")
        if self.signals.stopping and step < steps:
            self.writer.event("preempted", step)
            stopped = f"stopped after step {step}, saved; run again to go on"
            return RunEnd(state, stopped=stopped)
        if int(state.opt_state.skipped):
            event_reason = "nonfinite"
        else:
            event_reason = reason or "finished"
        self.writer.event("stop", step, reason=event_reason)
        if step >= steps:
            reason = ""
        if reason:
            self.display.note(f"stopped after step {step} of {steps}: {reason}")
        self.callbacks.phase("end", step)
        self._check_last_updates(state)
        return RunEnd(state, reason=reason)

    def _check_last_updates(self, state: State) -> None:
        """Checks that a run does not end with updates that were left out.

        Raises:
          TrainingStopped: it does: its weights are older.
        """
        skipped = int(state.opt_state.skipped)
        if skipped:
            first = self.progress.step - skipped + 1
            raise TrainingStopped(
                f"the last {skipped} updates were left out: loss or gradients were not "
                f"finite; {_CHANGE.format(first)}",
                "nonfinite",
            )

    # --- the loop ---------------------------------------------------------------------

    def _train_through_faults(self, state: State) -> tuple[State, str]:
        """Trains to the last step, and goes back after a numerical fault.

        Returns:
          The last state, and why it is the last: "" if all steps are done.
        """
        while True:
            try:
                return self._train_until_fault(state)
            except Diverged as error:
                fault = error.with_traceback(None)  # whose frames hold a state
            state = self._roll_back(fault)

    def _train_until_fault(self, state: State) -> tuple[State, str]:
        """Trains to the last step.

        Returns:
          The last state, and why it is the last: "" if all steps are done.

        Raises:
          Diverged: a step went wrong.
        """
        first = self.progress.step
        last = self.config.train.steps
        reason = ""
        with build.train_loader(
            self.config, self.built.rules, self.shardings, self.dataset, first
        ) as loader:
            self.log.begin(loader)
            for number in range(first + 1, last + 1):
                self.callbacks.phase("data", number)
                batch = next(loader)
                self.callbacks.phase("step", number)
                state, metrics = self.built.step(state, batch)
                view = self._view(number, state, metrics, last=number == last)
                self.callbacks.step(view)
                self.log.add_step(number, metrics)
                self.saver.after_step(number - first)
                reason = self._between_steps(view)
                if self.signals.reached() or reason:
                    break
            self.log.drain_metrics()
            self._after_last_step(self._view(number, state, metrics, last=True))
        return state, reason

    def _view(
        self, number: int, state: State, metrics: Metrics, *, last: bool
    ) -> StepView:
        return StepView(
            step=number,
            state=state,
            metrics=metrics,
            progress=self.progress,
            last=last,
            interrupted=self.signals.stopping,
            log=self.writer.write,
            weights=lambda: trees.flatten_names(self.built.views.flat(state).trainable),
            data_wait_s=self.log.data_wait_s,
            device_wait_s=self.log.device_wait_s,
            paused_s=self.log.paused_s,
        )

    def _between_steps(self, view: StepView) -> str:
        """Calls the callbacks that are due, evaluates and saves.

        Returns:
          Why the run stops after this step, "" if it goes on.
        """
        train = self.config.train
        number = view.step
        due = self.callbacks.due(number)
        evaluates = train.eval_every > 0 and number % train.eval_every == 0
        for callback in due:
            with self._paused(view, callback.bucket):
                self.callbacks.paused_step(callback, view)
        if evaluates:
            with self._paused(view, bucket=""):
                self._evaluate(view)
        if number % train.log_every == 0 and not view.stop_reason:
            view.stop(self._time_is_up())
        if due or evaluates or number % train.log_every == 0:
            self._vote(view)
        else:
            self._keep_for_the_vote(view)
        if view.save_requested or self.saver.is_due(number):
            self._save(view)
        return view.stop_reason

    def _after_last_step(self, view: StepView) -> None:
        """Calls all callbacks that the loop pauses for, evaluates and saves."""
        for callback in self.callbacks.due(0):
            with self._paused(view, callback.bucket):
                self.callbacks.paused_step(callback, view)
        if self.config.train.eval_every and not view.interrupted:
            with self._paused(view, bucket=""):
                self._evaluate(view)
        self._vote(view)
        self._save(view)

    @contextlib.contextmanager
    def _paused(self, view: StepView, bucket: str) -> Iterator[None]:
        """Records all steps so far, and stops the clock of training for the body."""
        with self.log.paused() as view.progress, clock.timed(bucket):
            yield

    def _save(self, view: StepView) -> None:
        with self.log.paused() as view.progress:
            self.callbacks.phase("save", view.step)
            self.saver(view)

    def _keep_for_the_vote(self, view: StepView) -> None:
        """Keeps what this process's callbacks have asked for."""
        self._wants_save = self._wants_save or view.save_requested
        self._wants_stop = self._wants_stop or view.stop_reason
        view.save_requested = False
        view.stop_reason = ""

    def _vote(self, view: StepView) -> None:
        """Lets all processes do what the callbacks of any of them have asked for."""
        self._keep_for_the_vote(view)
        vote = None
        if self._wants_save or self._wants_stop:
            vote = [self._wants_save, self._wants_stop]
        for wants_save, wants_stop in coordination.votes(vote):
            view.save_requested = view.save_requested or wants_save
            view.stop_reason = view.stop_reason or wants_stop
        self._wants_save = False
        self._wants_stop = ""

    def _time_is_up(self) -> str:
        """Returns that train.max_minutes are over, by the clock of the first process."""
        minutes = self.config.train.max_minutes
        if not minutes or not opening.is_lead():
            return ""
        if self.log.elapsed_s() < 60 * minutes:
            return ""
        return f"train.max_minutes={minutes:g} are over"

    def _evaluate(self, view: StepView) -> None:
        """Scores the held-out data, at most once for a step."""
        if view.step == self._evaluated_at:
            return
        self._evaluated_at = view.step
        self.display.status("evaluating")

        def with_phase(batches: Iterable) -> Iterator:
            for batch in batches:
                self.callbacks.phase("evaluate", view.step)
                yield batch

        row: Mapping[str, float] = score_held_out(
            self.config,
            self.built,
            view.state,
            self.dataset,
            shardings=self.shardings,
            over=with_phase,
        ).row
        self.callbacks.evaluate(view, row)
        view.log(view.step, row)
        self.writer.event("evaluate", view.step, **row)
        self.display.evaluation(view.step, row)

    # --- going back -------------------------------------------------------------------

    def _roll_back(self, fault: Diverged) -> State:
        """Restores the last good checkpoint, and leaves out the data since.

        Raises:
          TrainingStopped: by the policy, or because there is none.
        """
        self.callbacks.fault(fault)
        self.callbacks.phase("restore", fault.first)
        elapsed_s = self.log.elapsed_s()
        restored = None
        may_go_back = len(self.dataset.windows) < self.config.health.max_rollbacks
        if fault.policy == "rollback" and may_go_back:
            restored = restore.roll_back(
                self.store,
                self.run.folder,
                self.built.views.abstract,
                self.dataset,
                fault,
            )
        self.saver.report()
        if restored is None:
            if fault.kind == "drift":
                change = "replace the device, then run again"
            else:
                change = _CHANGE.format(fault.first)
            raise TrainingStopped(f"{fault}; {change}", fault.kind)
        (state, metadata), self.dataset = restored
        self.progress.go_to(progress_of(metadata))
        self.progress.elapsed_s = elapsed_s
        self.callbacks.load(metadata.get(restore.CALLBACKS, {}))
        self._evaluated_at = -1
        self.log.rewind()
        step = self.progress.step
        left_out = self.dataset.windows[-1]
        self.dataset.go_to(step, metadata.get(restore.READER))
        self.writer.event(
            "restore",
            step,
            diverged_at=fault.last,
            reason=str(fault),
            left_out=left_out,
        )
        self.display.note(
            f"{fault}: back to step {step}, batches {left_out} are left out"
        )
        return self.built.views.staged(state)

    # --- what the parts of a run ask for ----------------------------------------------

    def _checkpoint_metadata(self, progress: Any) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside its arrays."""
        metadata = {
            "progress": asdict(progress),
            "fingerprints": {
                "config": run_fingerprint(self.config),
                "data": self.dataset.fingerprint,
            },
            **workdir.stored_config(self.config),
            extension.SCHEDULE_KEY: self.schedule.to_json(),
            restore.SKIPPED: self.dataset.windows,
            restore.CALLBACKS: self.callbacks.state(),
        }
        reader = self.dataset.reader_state(progress.step)
        if reader is not None:
            metadata[restore.READER] = reader
        return metadata

    def _failures(self) -> tuple[float, str]:
        """Returns the seconds between failures of this run, and whose word that is."""
        failures, seconds = clock.current().failures()
        return mean_time_between_failures(
            failures,
            seconds,
            chips=self.run.num_chips,
            chip_hours_per_failure=self.config.checkpoint.chip_hours_per_failure,
        )

    def _samples(self, number: int) -> tuple[int, int]:
        """Returns the first and the last global sample index that a step takes."""
        size = self.config.batch.global_size
        first = self.dataset.position(number - 1) * size
        return first, first + size - 1
