"""A training run from its first check to its last file: restore or start, step, log,
evaluate, save.
"""

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint.files import CheckpointError
from jaxdist.checkpoint.interval import mean_time_between_failures
from jaxdist.checkpoint.manager import CheckpointManager, NotOwner
from jaxdist.config import EXIT_PREEMPTED, trees
from jaxdist.data import SourceError
from jaxdist.distributed import coordination
from jaxdist.operations.copies import step_copies
from jaxdist.operations.ledger import compile_time, ledger
from jaxdist.operations.watch import preemption_notice
from jaxdist.operations.watch.watchdog import Watchdog
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.parallel.mesh import build_mesh
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import Metrics, State
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.display import Display, print_safe
from jaxdist.telemetry.metrics import EXTENDED, MetricsWriter
from jaxdist.telemetry.profile import ProfileWindow
from jaxdist.trainer import (
    build,
    elastic,
    extension,
    loggers,
    opening,
    preemption,
    provenance,
    restore,
    validation,
    workdir,
)
from jaxdist.trainer.best import best_rule
from jaxdist.trainer.final_outputs import write_final_outputs
from jaxdist.trainer.health import Diverged, SkippingDataset
from jaxdist.trainer.held_out import score_held_out
from jaxdist.trainer.hooks import Hook, StepView, check_hooks, every
from jaxdist.trainer.preemption import Interrupted, Preempted, StopSignals
from jaxdist.trainer.restore import Progress, TrainResult, UserInputs
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


def run(config: RunConfig, folder: Path, **options: Any) -> State:
    """Returns the last state of `train`.

    Raises:
      Interrupted: a signal ended it early; Preempted if not by a Ctrl-C to a process
        alone.
    """
    result = train(config, folder, **options)
    if result.stopped:
        raise (Preempted if preemption.PROCESS.must_leave else Interrupted)(
            result.stopped
        )
    return result.state


def train(
    config: RunConfig,
    folder: Path,
    *,
    title: str = "",
    devices: Sequence[jax.Device] | None = None,
    full_devices: int | None = None,
    inputs: UserInputs | None = None,
    watch: Watchdog | None = None,
    hooks: Sequence[Hook] = (),
) -> TrainResult:
    """Trains to the end, from the newest checkpoint if the workdir has one; returns how
    it ended.

    On other devices than the `full_devices` of an elastic run's config, its layout is
    refitted.

    Raises:
      ConfigError: the config is illegal, or the workdir another version's; nothing was
        compiled.
      TrainingStopped: losses stayed non-finite, or the last checkpoint could not be
        written.
    """
    preemption.refuse_unjoined()
    check_hooks(hooks)
    opening.refuse_other_version(folder)
    devices = jax.devices() if devices is None else devices
    requested, config = (
        config,
        elastic.refit(config, devices=len(devices), full_devices=full_devices),
    )
    inputs = inputs or UserInputs()
    _, rules, spec = validation.validate(
        config, devices, with_data=inputs.dataset is None, build=inputs.build
    )
    found = loggers.find(config.train, lead=opening.is_lead())
    with contextlib.ExitStack() as stack:
        # a command's is on already
        watch = watch or stack.enter_context(Watchdog(config.watchdog, folder))
        stack.enter_context(compile_time.booked(watch.ledger))
        watch.at("start")
        store = opening.open_workdir(config, requested, folder, spec, stack, watch)
        served = opening.serve_metrics(config, devices, stack, watch)
        schedule = extension.settle_schedule(config, folder, store)
        dataset = opening.open_dataset(config, folder, inputs, watch)
        mesh = build_mesh(config.mesh, devices)
        given = {"optimizer": inputs.optimizer, "schedule_steps": schedule.steps}
        built = build.build_step(
            config, spec, mesh, rules, max_traces=MAX_TRACES, **given
        )
        opening.describe(
            config, spec, built, dataset, folder, store.run, schedule, watch
        )
        try:
            start = restore.init_or_restore(
                config, built, dataset, store, folder, watch, inputs, schedule.back_to
            )
        except CheckpointError as error:  # the run never begins, but its events say why
            restore.write_bad_checkpoints(error, folder)
            raise
        state, progress, skipping, flops = start
        trainer = Trainer(
            config,
            folder,
            spec,
            built,
            skipping,
            store,
            progress,
            watch,
            hooks,
            schedule.steps,
            found,
            flops,
        )
        for view in served:
            trainer.writer.attach(view)
        with contextlib.closing(trainer.writer), trainer.display:
            if title:
                trainer.display.note(title)
            early = True
            try:
                state = trainer.train(state)
                early = bool(trainer.stopped)
            finally:
                trainer.saver.finish_copies(trainer.progress.step, stopped=early)
            if config.checkpoint.copy_to:
                # leaving, others wait for process 0 for two minutes only
                coordination.barrier()
            if line := watch.ledger.summary():
                trainer.display.note(line)
        return TrainResult(config, spec, built, state, trainer.stopped, trainer.reason)


@dataclass
class Trainer:
    """The loop of a run: it reads the metrics of a step only when the next ones are on
    their way.
    """

    config: RunConfig
    folder: Path
    spec: ModelSpec
    built: TrainStep
    dataset: SkippingDataset
    store: CheckpointManager
    progress: Progress
    watch: Watchdog
    hooks: Sequence[Hook]
    schedule: ScheduleSteps
    logger_classes: Mapping[str, loggers.Make]
    step_flops: float | None
    stopped: str = field(default="", init=False)  # by which signal the run ended early
    # why it ended before train.steps without a signal
    reason: str = field(default="", init=False)

    def __post_init__(self) -> None:
        train, first_step, lead = (
            self.config.train,
            self.progress.step,
            opening.is_lead(),
        )
        # once: a run outlives its files
        self.shardings = build.batch_shardings(self.config, self.built)
        self.writer = writer = MetricsWriter(self.folder, enabled=lead)
        left_s = (
            60 * train.max_minutes - self.progress.elapsed_s
            if train.max_minutes
            else None
        )
        self.display = display = Display(
            total_steps=train.steps,
            first_step=first_step,
            max_seconds=left_s,
            unit=build.unit(self.config),
            enabled=lead,
        )
        throughput = workdir.throughput(
            self.config, self.spec, self.built.mesh, self.step_flops
        )
        self.log = StepLog(
            self.config,
            self.progress,
            writer,
            display,
            throughput,
            self._samples,
            self.watch.ledger,
        )
        self.store.milestones = extension.milestones(self.config, self.schedule)
        self.best_rule = best_rule(self.config)
        if self.best_rule:
            self.best_rule.check(self.config, self.built)
            if "step" in self.progress.best:
                self.store.best.append(self.progress.best["step"])
        metadata, failures = self._checkpoint_metadata, self._failures
        # It deletes in the store what has expired: what is kept must be known by now.
        copier = step_copies.copier(self.config, self.folder, self.store)
        self.saver = Saver(
            self.store, self.built.views, writer, display, metadata, failures, copier
        )
        evaluation = every(train.eval_every, self._evaluate, at_end=True)
        evaluation.bucket = ""  # its time is that of its phases
        # the saver comes after them: it saves what a hook requests
        self.hooks = [*self.hooks, evaluation]

    def train(self, state: State) -> State:
        """Returns the state after the last step, or after the step in which a signal
        asked to stop.

        Raises:
          TrainingStopped: losses stayed or ended non-finite, the last checkpoint could
            not be written.
          SourceError: the data cannot be read.
        """
        train, progress = self.config.train, self.progress
        if self.best_rule and (reason := self.best_rule.exhausted(progress.best)):
            self.reason = reason
            self.display.note(
                f"{self.folder} stopped at step {progress.step}: {reason}. To go on, raise it."
            )
            return state
        if (
            progress.step >= train.steps
            or 0 < 60 * train.max_minutes <= progress.elapsed_s
        ):
            raised = f"train.max_minutes (now {train.max_minutes:g})"
            if progress.step >= train.steps:
                raised = f"train.steps, as in --config.train.steps={2 * progress.step}"
            self.display.note(
                f"{self.folder} is finished at step {progress.step}. To go on, raise {raised}; "
                f"to start anew, give another --workdir."
            )
            self._check_last_updates(state)
            self.watch.ledger.withdraw()
            return state
        self._log_start()
        try:
            with StopSignals() as signals, self._hearing_notices(signals):
                state, reason = self._train_through_faults(state, signals)
        except (
            SourceError,
            TrainingStopped,
            NotOwner,
            jax.errors.JaxRuntimeError,
        ) as error:
            cause = (
                "data"
                if isinstance(error, SourceError)
                else getattr(error, "reason", "runtime")
            )
            self.writer.event("stop", progress.step, reason=cause, error=str(error))
            if isinstance(error, NotOwner):
                raise TrainingStopped(str(error), error.reason) from error
            raise
        if lost := self.saver.finish(progress.step):
            message = f"the last checkpoint could not be written; {lost}; free the disk and run again"
            self.writer.event(
                "stop", progress.step, reason="save_failed", error=message
            )
            raise TrainingStopped(message, "save_failed")
        if signals.stopping and progress.step < train.steps:
            self.writer.event("preempted", progress.step)
            self.watch.ledger.end_with(EXIT_PREEMPTED)
            self.stopped = (
                f"stopped after step {progress.step}, saved; run again to go on"
            )
            return state
        skipped = int(state.opt_state.skipped)
        self.reason = reason if progress.step < train.steps else ""
        self.writer.event(
            "stop",
            progress.step,
            reason="nonfinite" if skipped else reason or "finished",
        )
        if self.reason:
            self.display.note(
                f"stopped after step {progress.step} of {train.steps}: {self.reason}"
            )
        self._enter_phase("end", progress.step)
        generate = build.text_generator(self.config, self.spec, self.built)
        flat, tokenizer = self.built.views.flat(state), self.dataset.tokenizer
        write_final_outputs(
            self.config, self.folder, flat, self.display, tokenizer, generate
        )
        self._check_last_updates(state)
        return state

    def _check_last_updates(self, state: State) -> None:
        """Raises TrainingStopped if a run ends with updates that were left out: its
        weights are older.
        """
        if skipped := int(state.opt_state.skipped):
            text = f"the last {skipped} updates were left out: loss or gradients were not finite"
            first = self.progress.step - skipped + 1
            raise TrainingStopped(f"{text}; {_CHANGE.format(first)}", "nonfinite")

    def _train_through_faults(
        self, state: State, signals: StopSignals
    ) -> tuple[State, str]:
        """Returns the state after the steps that are left, and why it is the last: see
        the event `stop`.
        """
        window, lead = self.config.profile, opening.is_lead()
        profile = ProfileWindow(
            self.folder, window.start_step, window.num_steps, enabled=lead
        )
        with contextlib.closing(profile):
            while True:
                try:
                    return self._train_until_fault(state, signals, profile)
                except Diverged as error:
                    fault = error.with_traceback(None)  # whose frames hold a state
                state = self._roll_back(fault)

    def _train_until_fault(
        self, state: State, signals: StopSignals, profile: ProfileWindow
    ) -> tuple[State, str]:
        """Returns the state after the last step, and why it is the last.

        Raises:
          Diverged: a step went wrong.
        """
        first, last, reason = self.progress.step, self.config.train.steps, ""
        with build.train_loader(
            self.config, self.built.rules, self.shardings, self.dataset, first
        ) as loader:
            self.log.begin(loader)
            for number in range(first + 1, last + 1):
                self._enter_phase("data", number)
                batch = next(loader)
                self._enter_phase("step", number)
                state, metrics = self.built.step(state, batch)
                self.log.add_step(number, state, metrics)
                self.saver.after_step(number - first)
                profile.step(number, metrics)
                reason = self._call_hooks(number, state, metrics, last=number == last)
                if not reason and self._is_time_up(number):
                    reason = (
                        f"train.max_minutes={self.config.train.max_minutes:g} are over"
                    )
                if signals.reached() or reason:
                    break
            self.log.drain_metrics()
            self._call_hooks(number, state, metrics, last=True, signals=signals)
        return state, reason

    def _call_hooks(
        self,
        number: int,
        state: State,
        metrics: Metrics,
        *,
        last: bool,
        signals: StopSignals | None = None,
    ) -> str:
        """Calls the hooks that are due after a step; returns why one of them stops the
        run, else "".

        Args:
          signals: once no further step follows; then all hooks are called.
        """
        interrupted, log = bool(signals and signals.stopping), self.writer.write
        view = StepView(
            number,
            state,
            metrics,
            self.progress,
            last,
            interrupted,
            log,
            lambda: self._weights(state),
        )
        for hook in self.hooks:
            if signals or hook.is_due(number):
                with (
                    self.log.paused() as view.progress,
                    self.watch.ledger.aside(hook.bucket),
                ):
                    hook(view)
        if signals or view.save_requested or self.saver.is_due(number):
            with self.log.paused() as view.progress:
                self._enter_phase("save", number)
                self.saver(view)
        return view.stop_reason

    def _weights(self, state: State) -> dict[str, jax.Array]:
        return trees.flatten_names(self.built.views.flat(state).trainable)

    def _evaluate(self, view: StepView) -> None:
        self.display.status("evaluating")
        result = score_held_out(
            self.config,
            self.built,
            view.state,
            self.dataset,
            shardings=self.shardings,
            over=lambda batches: self.watch.over(
                batches, "evaluate", view.step, view.step
            ),
        )
        row = result.row
        self._judge(view, row)
        view.log(view.step, row)
        self.writer.event("evaluate", view.step, **row)
        self.display.evaluation(view.step, row)

    def _judge(self, view: StepView, row: Mapping[str, float]) -> None:
        """Requests a checkpoint of the best evaluation so far; stops the run where none
        was for long.
        """
        if self.best_rule is None:
            return
        best = self.progress.best = self.best_rule.judged(
            self.progress.best, view.step, row
        )
        if self.best_rule.keeps and best.get("step") == view.step:
            self.store.best.append(view.step)
            view.save()
        if reason := self.best_rule.exhausted(best):
            view.stop(reason)

    def _roll_back(self, fault: Diverged) -> State:
        """Returns the state of the last good checkpoint, and leaves out the data since.

        Raises:
          TrainingStopped: by the policy, or because there is none.
        """
        self._enter_phase("restore", fault.first)
        elapsed_s, restored = self.log.elapsed_s(), None
        if (
            fault.policy == "rollback"
            and len(self.dataset.windows) < self.config.health.max_rollbacks
        ):
            abstract = self.built.views.abstract
            restored = restore.roll_back(
                self.store, self.folder, abstract, self.dataset, fault
            )
        self.saver.report()
        if restored is None:
            drift = fault.kind == "drift"
            change = (
                "replace the device, then run again"
                if drift
                else _CHANGE.format(fault.first)
            )
            raise TrainingStopped(f"{fault}; {change}", fault.kind)
        (state, metadata), self.dataset = restored
        vars(self.progress).update(metadata["progress"] | {"elapsed_s": elapsed_s})
        self.log.rewind()
        step, left_out = self.progress.step, self.dataset.windows[-1]
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

    def _checkpoint_metadata(self, progress: Progress) -> dict[str, Any]:
        fingerprints = {
            "config": run_fingerprint(self.config),
            "data": self.dataset.fingerprint,
        }
        skipped, stored = (
            {restore.SKIPPED: self.dataset.windows},
            workdir.stored_config(self.config),
        )
        stored[extension.SCHEDULE_KEY] = self.schedule.to_json()
        state = self.dataset.reader_state(progress.step)
        reader = {} if state is None else {restore.READER: state}
        return {
            "progress": asdict(progress),
            "fingerprints": fingerprints,
            **stored,
            **skipped,
            **reader,
        }

    def _failures(self) -> tuple[float, str]:
        """Returns the seconds between failures of this run, for the interval of its
        saves.
        """
        lives, devices = ledger.read_lives(self.folder), self.built.mesh.devices
        chips = provenance.count_chips(devices, machines=jax.process_count())
        given = self.config.checkpoint.chip_hours_per_failure
        return mean_time_between_failures(
            lives, chips=chips, chip_hours_per_failure=given
        )

    def _hearing_notices(
        self, signals: StopSignals
    ) -> contextlib.AbstractContextManager[None]:
        """Saves and stops the run while entered, once the cloud says that it takes this
        machine back.
        """

        def stop(notice: str) -> None:
            print_safe(notice)  # of any process: each hears of its own machine
            self.writer.event("preemption_notice", self.progress.step, notice=notice)
            signals.hear(signal.SIGTERM)

        return preemption_notice.heard(self.config.resilience, stop, say=print_safe)

    def _samples(self, number: int) -> tuple[int, int]:
        """Returns the first and the last global sample index that a step takes."""
        size = self.config.batch.global_size
        first = self.dataset.position(number - 1) * size
        return first, first + size - 1

    def _enter_phase(self, phase: str, number: int) -> None:
        """Tells the watchdog what begins."""
        self.watch.at(
            phase,
            number,
            done=self.progress.step,
            sample=self._samples(max(number, 1))[0],
        )

    def _log_start(self) -> None:
        step, report = self.progress.step, self.writer.event
        for view in loggers.start(
            self.logger_classes,
            self.folder,
            self.config,
            first_step=step,
            report=report,
        ):
            self.writer.attach(view)
        if resized := elastic.resized(self.folder, self.config, jax.device_count()):
            self.writer.event("resize", step, **resized)
        self.writer.event(
            "start", step, devices=jax.device_count(), processes=jax.process_count()
        )
        self.saver.report_bad_checkpoints()
        for part in self.schedule.extensions:
            if part.start == step:
                self.writer.write(step, {EXTENDED: part.end})
        if step:
            self.writer.event("restore", step)
            self.display.note(f"resumed after step {step}")

    def _is_time_up(self, number: int) -> bool:
        """Returns whether the run's time is over; all processes agree."""
        minutes = self.config.train.max_minutes
        if not minutes or number % self.config.train.log_every:
            return False
        return coordination.broadcast(self.log.elapsed_s() >= 60 * minutes)
