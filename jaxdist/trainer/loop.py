"""The loop of a run: steps; callbacks between them; evaluate; save; roll back."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping

from jaxdist.config import trees
from jaxdist.distributed import coordination
from jaxdist.step.state import Metrics, State
from jaxdist.telemetry import clock
from jaxdist.telemetry.display import Display
from jaxdist.trainer import batching, opening, restore, run_metadata
from jaxdist.trainer.callbacks import CallbackList, Run, RunEnd, StepView
from jaxdist.trainer.health import Diverged, SkippingDataset
from jaxdist.trainer.held_out import score_held_out
from jaxdist.trainer.preemption import StopSignals
from jaxdist.trainer.saver import Saver
from jaxdist.trainer.step_log import StepLog

_CHANGE = "lower optimizer.learning_rate, or look at the data from step {} on"


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what to do."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # in the event `stop`


class Trainer:
    """The loop of a run.

    It reads the metrics of a step only when the next ones are on their way.
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
        """Prepares the loop; nothing runs yet."""
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
        # once: a run outlives its files
        self.shardings = batching.batch_shardings(self.config, self.built)
        self._evaluated_at = -1
        # what callbacks of this process have asked for since the last vote
        self._wants_save = False
        self._wants_stop = ""

    @property
    def dataset(self) -> SkippingDataset:
        """The run's, which changes as the run goes back."""
        assert self.run.dataset is not None
        return self.run.dataset

    def train(self, state: State) -> tuple[State, str]:
        """Trains to the last step, or to the step in which a signal asked to stop.

        Returns:
          The last state, and why it is the last: "" if all steps are done.

        Raises:
          TrainingStopped: losses stayed non-finite.
          SourceError: the data cannot be read.
        """
        with self.signals:
            return self._train_through_faults(state)

    def end_without_steps(self, state: State) -> RunEnd | None:
        """Ends a run that has nothing left to do; None: it has."""
        reason = self.run.stop_reason
        if reason:
            self.display.note(
                f"{self.run.folder} stopped at step {self.progress.step}: {reason}. "
                f"To go on, raise it."
            )
            return RunEnd(state, reason=reason, has_trained=False)
        if not self._is_finished():
            return None
        error = self._fault_of_last_updates(state)
        return RunEnd(state, has_trained=False, error=error)

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

    def finish(self, state: State, reason: str) -> RunEnd:
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
        error = self._fault_of_last_updates(state)
        return RunEnd(state, reason=reason, error=error)

    def _fault_of_last_updates(self, state: State) -> TrainingStopped | None:
        """Returns the error of a run that ends with updates that were left out.

        Its weights are older than its last step.
        """
        skipped = int(state.opt_state.skipped)
        if not skipped:
            return None
        first = self.progress.step - skipped + 1
        return TrainingStopped(
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
        with batching.train_loader(
            self.run.composition, self.shardings, self.dataset, first
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
        has_row = number % train.log_every == 0
        if has_row and not view.stop_reason:
            view.stop(self._time_is_up())
        may_stop = self.callbacks.may_request or train.max_minutes > 0
        if due or evaluates or (has_row and may_stop):
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
        # A place of its own: whoever waits here is ahead of a process that hangs in
        # the step, and the watchdog has to tell the two apart.
        self.callbacks.phase("vote", view.step)
        vote = None
        if self._wants_save or self._wants_stop:
            vote = [self._wants_save, self._wants_stop]
        began = time.monotonic()
        votes = coordination.votes(vote)
        self.log.wait(time.monotonic() - began)
        for wants_save, wants_stop in votes:
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
            restored = restore.roll_back(self.run, fault)
        self.saver.report()
        if restored is None:
            if fault.kind == "drift":
                change = "replace the device, then run again"
            else:
                change = _CHANGE.format(fault.first)
            raise TrainingStopped(f"{fault}; {change}", fault.kind)
        state, metadata = restored
        self.progress.go_to(run_metadata.progress_of(metadata))
        self.progress.elapsed_s = elapsed_s
        self.callbacks.load(metadata.get(run_metadata.CALLBACKS, {}))
        self._evaluated_at = -1
        self.log.rewind()
        step = self.progress.step
        left_out = self.dataset.windows[-1]
        self.dataset.go_to(step, metadata.get(run_metadata.READER))
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
