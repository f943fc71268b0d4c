"""The saver of a run, which starts saves when they are due and reports their results."""

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxdist.checkpoint.interval import mean_time_between_failures
from jaxdist.checkpoint.manager import SaveResult
from jaxdist.distributed import coordination
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.step.state import State
from jaxdist.telemetry import clock
from jaxdist.telemetry.units import duration_text, time_text
from jaxdist.trainer import run_metadata, workdir
from jaxdist.trainer.callbacks import CallbackList, Run, StepView
from jaxdist.trainer.run_config import run_fingerprint
from jaxdist.trainer.run_metadata import Progress

# steps of a start after which the first save is prepared
PREPARED_AFTER = 2


def checkpoint_metadata(
    run: Run,
    schedule: ScheduleSteps,
    callbacks: CallbackList,
    progress: Progress,
) -> dict[str, Any]:
    """Collects the metadata of a checkpoint, which `run_metadata` reads."""
    assert run.dataset is not None
    metadata = {
        run_metadata.PROGRESS: asdict(progress),
        run_metadata.FINGERPRINTS: {
            run_metadata.CONFIG: run_fingerprint(run.config),
            run_metadata.DATA: run.dataset.fingerprint,
        },
        **workdir.stored_config(run.config),
        run_metadata.SCHEDULE: schedule.to_json(),
        run_metadata.SKIPPED: run.dataset.windows,
        run_metadata.CALLBACKS: callbacks.state(),
    }
    reader = run.dataset.reader_state(progress.step)
    if reader is not None:
        metadata[run_metadata.READER] = reader
    return metadata


@dataclass
class Saver:
    """The saver of a run. It saves in the background and writes an event for each save."""

    run: Run
    callbacks: CallbackList
    schedule: ScheduleSteps  # the run's learning-rate schedule
    # error of the last save; "" = it succeeded
    failure: str = field(default="", init=False)
    _prepared: Future[None] | None = field(default=None, init=False)
    # seconds that a save in progress has blocked training, by step
    _blocked_s: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.store = self.run.store
        self.views = self.run.built.views
        self.store.metadata = functools.partial(
            checkpoint_metadata, self.run, self.schedule, self.callbacks
        )

    def decide_by_rules(self, step: int) -> bool:
        """Decides whether the rules of `checkpoint.*` ask for a save after this step.

        Every process makes the call, because `decide_save` communicates. The loop makes
        it before it pauses for a save. The call of the saver then decides again: it
        also knows requests and the last step, and its time is that of the save.
        """
        return self.store.decide_save(step, time.monotonic())

    def __call__(self, view: StepView) -> None:
        """Starts a save if one is due, and reports saves that have ended."""
        required = view.interrupted or view.save_requested
        if self.store.decide_save(
            view.step, time.monotonic(), last=view.last, required=required
        ):
            self._save(view)
        self.report(last=view.last)

    def _save(self, view: StepView) -> None:
        metadata = self.store.metadata(view.progress)
        if self._prepared:
            self._prepared.result()
        began = time.monotonic()
        self.store.save(
            view.step, self.views.flat(view.state), metadata, wait=view.last
        )
        # The last save waits for the previous one, so its time would mislead.
        if not view.last:
            self._blocked_s[view.step] = time.monotonic() - began

    def save_restored(self, state: State) -> bool:
        """Starts to save the state of a finished run, if only memory had it.

        Returns:
          Whether a save has begun.
        """
        step = self.run.progress.step
        is_in_folder = self.store.last_sealed >= step
        if is_in_folder or not self.store.config.save_at_end:
            return False
        metadata = self.store.metadata(self.run.progress)
        self.store.save(step, self.views.flat(state), metadata, wait=True)
        return True

    def after_step(self, count: int) -> None:
        """Reports saves that have ended, and prepares the first save in the background.

        The preparation starts only after some steps, so that the first steps do not
        wait for it.

        Args:
          count: number of steps since the start.
        """
        if count == PREPARED_AFTER and self.store.config.saves:
            pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
            self._prepared = pool.submit(self.store.prepare, self.views.abstract)
            pool.shutdown(wait=False)
        self.report()

    def report(self, *, last: bool = False) -> None:
        """Writes an event for each save that has ended since the last report.

        Args:
          last: whether no step follows.
        """
        for save in self.store.poll():
            error = save.error and str(save.error)
            self.run.event(
                "save",
                save.step,
                ok=save.ok,
                error=error,
                seconds=save.seconds,
                bytes=save.bytes,
            )
            if save.ok:
                self.failure = ""
                self._choose_interval(save)
                self.callbacks.save(save.step)
                if error:  # old checkpoints stay, and fill the disk
                    self.run.note(f"checkpoint {save.step}: {error}")
            else:
                self.failure = error or "it failed"
                outcome = "failed" if last else "failed, training continues"
                self.run.note(f"checkpoint {save.step} {outcome}: {error}")
                self._blocked_s.pop(save.step, None)

    def _choose_interval(self, save: SaveResult) -> None:
        """Chooses the interval of saves from the time of a successful save.

        This needs checkpoint.interval=auto.
        """
        blocked_s = self._blocked_s.pop(save.step, None)
        if blocked_s is None or self.store.config.interval == "fixed":
            return
        failures, seconds = clock.current().failures()
        between_failures = mean_time_between_failures(
            failures,
            seconds,
            chips=self.run.num_chips,
            chip_hours_per_failure=self.store.config.chip_hours_per_failure,
        )
        fields = self.store.interval.measured(blocked_s, save.seconds, between_failures)
        if fields:
            self.run.event("save_interval", save.step, **fields)
            self.run.note(
                f"saving every {duration_text(fields['interval_s'])}: a save stops training for "
                f"{time_text(fields['blocked_s'])} and is written in {time_text(fields['written_s'])}, "
                f"failures come every {duration_text(fields['mtbf_s'])} ({fields['mtbf_by']})"
            )

    def report_bad_checkpoints(self) -> None:
        """Tells loggers and the user of each checkpoint that a restore found damaged.

        The restore has written their events.
        """
        for step, reason in self.store.damaged_steps.items():
            self.run.writer.repeat("bad_checkpoint", step, reason=reason)
            self.run.note(f"checkpoint {step} cannot be used: {reason}")

    def finish(self, step: int) -> str:
        """Waits for the save in progress.

        Args:
          step: the last step of the run.

        Returns:
          A description of the steps that are lost, equal on all processes; "" if the
          last save has succeeded.
        """
        ended = self.store.wait()
        self.report(last=True)
        failure = coordination.first_error(
            self.failure if ended else self.store.delay()
        )
        if not failure:
            return ""
        # The store remembers its last sealed step: the disk may not answer.
        sealed = coordination.broadcast(self.store.last_sealed)
        return f"the run resumes at step {sealed}, steps {sealed + 1}-{step} are lost: {failure}"
