"""The training loop: steps, and between them callbacks, evaluations and checkpoints.

The module docstring of `trainer.training` lists the calls that lead here.

Updates are numbered from 1 (`number`, and `StepView.step`) and batches from 0.
`Progress.step` counts the updates that are done and recorded. Without skipped batches,
update n takes batch n - 1.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import jax

from jaxdist.config import trees
from jaxdist.distributed import coordination
from jaxdist.models import registry
from jaxdist.step.state import Metrics, State
from jaxdist.telemetry import clock
from jaxdist.telemetry.display import Display
from jaxdist.trainer import batching, restore, run_metadata
from jaxdist.trainer.callbacks import CallbackList, Run, RunEnd, StepView
from jaxdist.trainer.health import Diverged, SkippingDataset, describe_window
from jaxdist.trainer.held_out import evaluation_interval, score_held_out
from jaxdist.trainer.preemption import StopSignals
from jaxdist.trainer.saver import Saver
from jaxdist.trainer.step_log import StepLog

# the fix of a numerical fault; its field is the first step to look at
_FIX = "lower optimizer.learning_rate, or look at the data from step {} on"


class TrainingStopped(RuntimeError):
    """Training cannot continue. The message has the reason and the fix."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # reason in the event `stop`


class Trainer:
    """The training loop of a run.

    It reads the metrics of a step only after it has started the next steps. So between
    pauses, no device waits until the host has read metrics. A pause waits for all steps
    started so far: an evaluation, a save, or a callback with `steps` > 0
    (`StepLog.paused`).
    """

    def __init__(
        self,
        run: Run,
        callbacks: CallbackList,
        signals: StopSignals,
        display: Display,
        log: StepLog,
        saver: Saver,
    ) -> None:
        """Prepares the loop. Nothing runs yet."""
        self.run = run
        self.config = run.config
        self.built = run.built
        self.writer = run.writer
        self.progress = run.progress
        self.callbacks = callbacks
        self.signals = signals
        self.display = display
        self.log = log
        self.saver = saver
        # This may read files of the data, which may be gone later. So it runs once.
        self.shardings = batching.batch_shardings(self.config, self.built)
        self._eval_every = evaluation_interval(self.config, self.dataset)
        self._evaluated_at = -1  # step of the last evaluation
        # the step after which all processes vote on train.max_minutes; and on the first
        # process, until the vote, the step of the next such vote
        self._next_look = 0
        self._chosen_look = 0
        # requests of this process's callbacks since the last vote
        self._wants_save = False
        self._wants_stop = ""

    @property
    def dataset(self) -> SkippingDataset:
        """The run's dataset. A rollback replaces it."""
        assert self.run.dataset is not None
        return self.run.dataset

    def train(self, state: State) -> tuple[State, str]:
        """Trains to the last step, or until a signal or a callback stops the run.

        Returns:
          The last state, and why the run stopped early; "" if it did not.

        Raises:
          TrainingStopped: losses stayed non-finite.
          SourceError: the data cannot be read.
        """
        with self.signals:
            return self._train_through_faults(state)

    def end_without_steps(self, state: State) -> RunEnd | None:
        """Ends a run that was finished before; None: it has steps to train."""
        reason = self.run.stop_reason
        if reason:
            text = f"{self.run.folder} stopped at step {self.progress.step}: {reason}. "
            self.display.note(f"{text}{self.run.stop_fix}".rstrip())
            return RunEnd(state, reason=reason, has_trained=False)
        if not self._is_finished():
            return None
        if self.saver.save_restored(state):
            self._require_saved(self.progress.step)
        error = self._fault_of_last_updates(state)
        reason = ""
        if self.progress.step < self.config.train.steps:
            reason = self.run.limit.reason()
        return RunEnd(state, reason=reason, has_trained=False, error=error)

    def _is_finished(self) -> bool:
        """Tests whether no step is left. If so, it prints how to extend the run."""
        train = self.config.train
        step = self.progress.step
        is_fit = self.config.model["target"] == registry.USER_TARGET
        if step >= train.steps and is_fit:
            limit = f"fit's steps, as in steps={2 * step}, or its epochs"
        elif step >= train.steps:
            limit = f"train.steps, as in --config.train.steps={2 * step}"
        elif self.run.limit.was_reached_before:
            limit = f"train.max_minutes (now {train.max_minutes:g})"
        else:
            return False
        folder = "folder" if is_fit else "--workdir"
        self.display.note(
            f"{self.run.folder} is finished at step {step}. To continue, raise {limit}; "
            f"for a new run, give another {folder}."
        )
        return True

    def finish(self, state: State, reason: str) -> RunEnd:
        """Waits for the last save, and writes how the run has ended.

        Args:
          state: the last state.
          reason: why the run stopped before train.steps; "" if it did not.

        Raises:
          TrainingStopped: the last checkpoint could not be written.
        """
        steps = self.config.train.steps
        step = self.progress.step
        self.log.end()
        self._require_saved(step)
        if self.signals.stopping and step < steps:
            self.writer.event("preempted", step)
            stopped = f"stopped after step {step}, saved; run again to resume"
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
        error = self._fault_of_last_updates(state)
        return RunEnd(state, reason=reason, error=error)

    def _require_saved(self, step: int) -> None:
        """Waits for the last save, which must succeed."""
        lost = self.saver.finish(step)
        if lost:
            message = (
                f"the last checkpoint could not be written; {lost}; free the disk and "
                f"run again"
            )
            self.writer.event("stop", step, reason="save_failed", error=message)
            raise TrainingStopped(message, "save_failed")

    def _fault_of_last_updates(self, state: State) -> TrainingStopped | None:
        """Makes the error of a run whose last updates were skipped.

        Its weights are older than its last step. The result is None for other runs.
        """
        skipped = int(state.opt_state.skipped)
        if not skipped:
            return None
        first = self.progress.step - skipped + 1
        return TrainingStopped(
            f"the last {skipped} updates were skipped: loss or gradients were not "
            f"finite; {_FIX.format(first)}",
            "nonfinite",
        )

    # --- the loop ---------------------------------------------------------------------

    def _train_through_faults(self, state: State) -> tuple[State, str]:
        """Trains to the last step, and rolls back after numerical faults.

        Returns:
          The last state, and why the run stopped early; "" if it did not.
        """
        while True:
            try:
                return self._train_until_fault(state)
            except Diverged as error:
                # The frames of the traceback would keep the old state in memory.
                fault = error.with_traceback(None)
            state = self._roll_back(fault)

    def _train_until_fault(self, state: State) -> tuple[State, str]:
        """Trains to the last step.

        Returns:
          The last state, and why the run stopped early; "" if it did not.

        Raises:
          Diverged: a step has a numerical fault.
        """
        done = self.progress.step
        self._next_look = done + 1
        last = self.config.train.steps
        reason = ""
        with batching.train_loader(
            self.run.composition, self.shardings, self.dataset, done
        ) as loader:
            self.log.begin(loader)
            for number in range(done + 1, last + 1):
                self.callbacks.phase("data", number)
                batch = next(loader)
                self.callbacks.phase("step", number)
                state, metrics = self.built.step(state, batch)
                view = self._view(number, state, metrics, last=number == last)
                self.callbacks.step(view)
                self.log.add_step(number, metrics)
                self.saver.after_step(number - done)
                reason = self._between_steps(view)
                if self.signals.finish_step() or reason:
                    break
            self.log.drain_metrics()
            # Only `_between_steps` shows whether the run stops early. So the last step
            # has two views, and both may call, evaluate and save. Three places skip
            # what the first view has done: `Hook._called_at` (callbacks.py),
            # `_evaluated_at` (here) and `CheckpointManager._last_begun`
            # (checkpoint/manager.py). Other callbacks with `steps` > 0 are called
            # twice.
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
        """Calls the callbacks that are due after a step, evaluates and saves.

        Returns:
          Why the run stops after this step; "" if it continues.
        """
        train = self.config.train
        number = view.step
        due = self.callbacks.due(number)
        evaluates = self._eval_every > 0 and number % self._eval_every == 0
        for callback in due:
            with self._paused(view, callback.bucket):
                self.callbacks.paused_step(callback, view)
        if evaluates:
            with self._paused(view, bucket=""):
                self._evaluate(view)
        looks_at_clock = train.max_minutes > 0 and number >= self._next_look
        if looks_at_clock and coordination.is_lead():
            self._look_at_clock(view)
        votes_at_row = self.callbacks.may_request and number % train.log_every == 0
        if due or evaluates or looks_at_clock or votes_at_row:
            self._vote(view)
        else:
            self._keep_for_the_vote(view)
        if view.save_requested or self.saver.decide_by_rules(number):
            self._save(view)
        return view.stop_reason

    def _after_last_step(self, view: StepView) -> None:
        """Calls all callbacks that pause the loop, evaluates and saves."""
        for callback in self.callbacks.pausing():
            with self._paused(view, callback.bucket):
                self.callbacks.paused_step(callback, view)
        if self._eval_every and not view.interrupted:
            with self._paused(view, bucket=""):
                self._evaluate(view)
        self._vote(view)
        self._save(view)

    @contextlib.contextmanager
    def _paused(self, view: StepView, bucket: str) -> Iterator[None]:
        """Records all steps so far, and stops the clock of training during the body.

        Args:
          view: the last step, which receives the progress.
          bucket: bucket of the ledger for the body's time; "" = that of the phase.
        """
        with self.log.paused() as progress, clock.timed(bucket):
            view.progress = progress
            yield

    def _save(self, view: StepView) -> None:
        with self.log.paused() as progress:
            view.progress = progress
            self.callbacks.phase("save", view.step)
            self.saver(view)

    def _keep_for_the_vote(self, view: StepView) -> None:
        """Moves the requests of this process's callbacks from the view to the loop."""
        self._wants_save = self._wants_save or view.save_requested
        self._wants_stop = self._wants_stop or view.stop_reason
        view.save_requested = False
        view.stop_reason = ""

    def _vote(self, view: StepView) -> None:
        """Puts the requests of all processes' callbacks into the view."""
        self._keep_for_the_vote(view)
        # The watchdog must tell a process that waits here from a process that hangs in
        # the step. So the vote is a phase.
        self.callbacks.phase("vote", view.step)
        vote = None
        if self._wants_save or self._wants_stop or self._chosen_look:
            vote = [self._wants_save, self._wants_stop, self._chosen_look]
        began = time.monotonic()
        votes = coordination.votes(vote)
        self.log.add_wait(time.monotonic() - began)
        for wants_save, wants_stop, look in votes:
            view.save_requested = view.save_requested or wants_save
            view.stop_reason = view.stop_reason or wants_stop
            self._next_look = max(self._next_look, look)
        self._wants_save = False
        self._wants_stop = ""
        self._chosen_look = 0

    def _look_at_clock(self, view: StepView) -> None:
        """Ends the run at train.max_minutes, or chooses the next look.

        The clock of the first process decides, and its vote tells the others. Steps are
        started ahead of the devices, so it waits for this one.
        """
        jax.block_until_ready(view.metrics)
        limit = self.run.limit
        view.stop_reason = view.stop_reason or limit.reason()
        self._chosen_look = view.step + limit.steps_to_next_look(view.step)

    def _evaluate(self, view: StepView) -> None:
        """Evaluates the held-out data, at most once for a step."""
        if view.step == self._evaluated_at:
            return
        self._evaluated_at = view.step
        self.display.status("evaluating")
        evaluation = score_held_out(
            self.config,
            self.built,
            view.state,
            self.dataset,
            shardings=self.shardings,
            on_batch=lambda number: self.callbacks.phase("evaluate", view.step),
        )
        row: Mapping[str, float] = evaluation.row
        self.callbacks.evaluate(view, row)
        view.log(view.step, row)
        self.writer.event("evaluate", view.step, **row)
        self.display.evaluation(view.step, row)

    # --- rolling back -----------------------------------------------------------------

    def _roll_back(self, fault: Diverged) -> State:
        """Restores the last good checkpoint, and skips the data that came after it.

        Raises:
          TrainingStopped: the config allows no rollback, or no checkpoint is good.
        """
        self.callbacks.fault(fault)
        self.callbacks.phase("restore", fault.first)
        elapsed_s = self.log.elapsed_s()
        restored = None
        rollbacks = len(self.dataset.windows)
        if self.config.init.data_position:
            rollbacks -= 1  # the first window has the batches that the source has read
        may_go_back = rollbacks < self.config.health.max_rollbacks
        if fault.policy == "rollback" and may_go_back:
            restored = restore.roll_back(self.run, fault)
        self.saver.report()
        if restored is None:
            if fault.kind == "drift":
                fix = "replace the device, then run again"
            else:
                fix = _FIX.format(fault.first)
            raise TrainingStopped(f"{fault}; {fix}", fault.kind)
        state, metadata = restored
        self.progress.go_to(run_metadata.progress_of(metadata))
        self.progress.elapsed_s = elapsed_s
        self.callbacks.load(metadata.get(run_metadata.CALLBACKS, {}))
        self._evaluated_at = -1
        self.log.rewind()
        step = self.progress.step
        skipped_window = self.dataset.windows[-1]
        self.dataset.go_to(step, metadata.get(run_metadata.READER))
        self.writer.event(
            "restore",
            step,
            diverged_at=fault.last,
            reason=str(fault),
            left_out=skipped_window,
        )
        self.display.note(
            f"{fault}: back to step {step}, {describe_window(skipped_window)} skipped"
        )
        return self.built.views.by_stage(state)
