"""Callback that saves recent steps in the memory of the hosts.

The folder stays the truth. After a crash the run resumes from memory if every part of a
newer step is there. Otherwise it resumes from the folder (`checkpoint.memory_tier`).
"""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jaxdist.checkpoint import memory_store, state_dict
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.interval import SaveInterval, mean_time_between_failures
from jaxdist.checkpoint.memory_tier import Decision, MemorySave, MemoryTier
from jaxdist.checkpoint.peers import CLEARTEXT_NOTE
from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.storage import run_format
from jaxdist.storage.digest import digest
from jaxdist.telemetry import clock
from jaxdist.telemetry.units import bytes_text, time_text
from jaxdist.trainer.callbacks import Callback, Run, RunEnd, StepView

# steps until the first save of memory_every_steps=0, which is measured
FIRST_STEPS = 10
# After a failed save the next one comes twice as late, and so on, up to this factor.
MOST_WAITED = 16
# Seconds that the end of a run waits for a save. After an error another process may be
# lost, and its answer with it. After a signal the folder has the last step.
_LAST_WAIT_S = 5.0


class MemorySaves(Callback):
    """Callback that saves in memory, and lets the run resume from there."""

    may_request = False
    keys = ("checkpoint.memory_folder",)
    name = "memory"
    bucket = clock.MEMORY
    _run: Run

    def __init__(self) -> None:
        self._tier: MemoryTier | None = None
        self._has_started = False
        self._has_saved = False  # whether the run saved in memory before this start
        self._prepared: Future[None] | None = None
        self._interval: SaveInterval | None = None  # of memory_every_steps=0
        self._is_measured = False  # whether a save has told the interval its time
        self._last = (0, 0.0)  # step and time of the last call of `on_step`
        self._step_s = 0.0  # seconds of a step since that call
        self._failures = 0  # saves that have failed since the last complete one
        self._wait_until = 0  # step before which no save begins, after failures
        self._has_skipped = False  # whether a line has told of a skipped save

    def on_start(self, run: Run) -> None:
        """Opens the tier, so that the run can be restored from it.

        Raises:
          ConfigError: the folder cannot be used.
        """
        config = run.config.checkpoint
        if not config.memory_folder:
            # Steps in memory would be those of another history once it is set again.
            if coordination.is_lead():
                (run.folder / run_format.MEMORY).unlink(missing_ok=True)
            return
        self._run = run
        if coordination.is_lead():
            self._leave_if_set_back()
        # A copy of a workdir has the identity of its run, and trains on its own.
        own = digest(run.store.run, run.folder.absolute())
        identity = coordination.broadcast(own)
        try:
            self._tier = MemoryTier(
                config.memory_folder,
                identity,
                run.folder / run_format.MEMORY,
                config.timeout_s,
                config.memory_peers,
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        if self._tier.peers is not None and not self._tier.peers.is_on_one_machine:
            run.note(CLEARTEXT_NOTE)
        self._has_saved = bool(self._tier.store.branch)
        self._tier.look()
        run.store.memory = self._tier
        self.steps = config.memory_every_steps or FIRST_STEPS
        if not config.memory_every_steps:
            self._interval = SaveInterval(replace(config, interval="auto"))

    def _leave_if_set_back(self) -> None:
        """Makes the steps in memory invalid if the folder was set back by hand."""
        run = self._run
        file = run.folder / run_format.MEMORY
        branch = memory_store.read_branch(file)
        is_set_back = False
        # The restore reports a folder that cannot be read.
        with contextlib.suppress(CheckpointError, OSError):
            is_set_back = branch is not None and branch.is_set_back(run.store.folder)
        if branch is None or not is_set_back:
            return
        file.unlink(missing_ok=True)
        run.event("memory_left", branch.sealed)
        run.note(
            f"steps in memory do not count: step {branch.sealed} was removed from "
            f"{run.store.folder}, so the run goes back"
        )

    def load(self, state: Any) -> None:
        """Begins or continues the history whose steps count.

        It is called after the start and after each rollback.

        Raises:
          ConfigError: the memory of a host does not hold the steps.
        """
        tier = self._tier
        if tier is None:
            return
        self._report_bad(tier)
        abstract = state_dict.to_canonical(self._run.built.views.abstract)
        if not self._has_started and not self._has_room(tier, abstract):
            tier.close(delete=True, seconds=0)
            self._run.store.memory = None  # a rollback finds nothing there
            self._tier = None
            return
        if self._has_started or tier.restored is None:
            self._begin_branch(tier)
        else:
            tier.continue_branch(self._run.store.last_sealed)
            self._run.event(
                "memory_restore", tier.restored.step, bytes=tier.restored_bytes
            )
            self._run.note(
                f"step {tier.restored.step} came from memory "
                f"({bytes_text(tier.restored_bytes)} read by this process)"
            )
        if not self._has_started:
            self._prepare(tier, abstract)
        self._has_started = True
        self._last = (self._run.progress.step, time.monotonic())

    def _has_room(self, tier: MemoryTier, abstract: dict[str, Any]) -> bool:
        """Checks that the memory of every host holds the steps.

        A restart of a run that has saved in memory goes on without such saves, and
        without its steps there: what fills the memory now must not end the run.

        Raises:
          ConfigError: it does not, and the run has not saved in memory before.
        """
        config = self._run.config.checkpoint
        fault = tier.require_room(
            abstract,
            copies=1 + config.memory_peers,
            # that of a save in memory, and that of a save to the folder beside it
            staged=2 if config.asynchronous else 1,
        )
        if fault and not self._has_saved:
            raise ConfigError(fault)
        faults = [fault for fault in coordination.votes(fault) if fault]
        if not faults:
            return True
        step = self._run.progress.step
        self._run.event("memory_save", step, ok=False, error=faults[0])
        self._run.note(f"no step is saved in memory until the next start: {faults[0]}")
        return False

    def _begin_branch(self, tier: MemoryTier) -> None:
        try:
            tier.begin_branch(self._run.store.last_sealed)
        except CheckpointError as error:
            raise ConfigError(f"{error}. Free the disk of the workdir.") from error

    def _prepare(self, tier: MemoryTier, abstract: dict[str, Any]) -> None:
        """Prepares the first save in a thread, so that training does not wait for it."""
        run = self._run

        def prepare() -> None:
            run.store.prepare(run.built.views.abstract)
            tier.prepare(abstract)

        pool = ThreadPoolExecutor(1, thread_name_prefix="prepare-memory")
        self._prepared = pool.submit(prepare)
        pool.shutdown(wait=False)

    def on_step(self, view: StepView) -> None:
        """Saves the step, unless the folder gets it as the last one."""
        tier = self._tier
        if tier is None or view.last:
            return
        began = time.monotonic()
        self._measure_step(view.step, began)
        self._report(tier)
        decision = tier.decide(
            allowed=not view.interrupted and view.step >= self._wait_until,
            sealed=self._run.store.last_sealed,
            metadata=self._run.store.metadata(view.progress),
            interval=self._next_interval(),
        )
        if decision.begins:
            self._save(tier, view, decision)
        elif not view.interrupted and view.step >= self._wait_until:
            self._skip(view.step)
        self._last = (view.step, time.monotonic())
        self.steps = decision.interval or self.steps

    def _save(self, tier: MemoryTier, view: StepView, decision: Decision) -> None:
        if self._prepared:
            self._prepared.result()
            self._prepared = None
        flat = self._run.built.views.flat(view.state)
        tier.save(view.step, state_dict.to_canonical(flat), decision)

    def _skip(self, step: int) -> None:
        self._run.event(
            "memory_save",
            step,
            ok=False,
            error="skipped: the previous save has not ended",
        )
        if not self._has_skipped:
            self._has_skipped = True
            self._run.note(
                f"step {step} is not saved in memory: the previous save has not ended; "
                f"raise checkpoint.memory_every_steps if this repeats"
            )

    def _wait_after_failure(self, step: int, error: str) -> None:
        """Lets the next save come later. Whatever failed probably fails again.

        Args:
          step: the step whose save has failed.
          error: why.
        """
        self._failures += 1
        intervals = min(2**self._failures, MOST_WAITED)
        self._wait_until = step + intervals * self.steps
        if self._failures == 1:  # each one has its event
            self._run.note(
                f"step {step} is not saved in memory, training continues: {error}; "
                f"until a save succeeds, each one comes later, up to {MOST_WAITED} "
                f"intervals"
            )

    def _measure_step(self, step: int, now: float) -> None:
        last_step, last_time = self._last
        if step > last_step:
            self._step_s = (now - last_time) / (step - last_step)

    def _next_interval(self) -> int:
        """Computes the steps between saves; 0 = as before."""
        if self._interval is None or not self._is_measured or not self._step_s:
            return 0
        return max(1, round(self._interval.seconds / self._step_s))

    def on_save(self, step: int) -> None:
        """Remembers the newest step of the folder, see `_leave_if_set_back`."""
        if self._tier is not None:
            self._tier.record_sealed(step)

    def on_record(self, step: int, metrics: Any) -> None:
        """Reports saves that have ended."""
        if self._tier is not None:
            self._report(self._tier)

    def _report(self, tier: MemoryTier) -> None:
        for save in tier.poll():
            fields: dict[str, object] = {}
            if tier.peers is not None:
                fields["copied"] = tier.copied
            self._run.event(
                "memory_save",
                save.step,
                ok=not save.error,
                error=save.error or None,
                seconds=save.seconds,
                blocked_s=save.blocked_s,
                bytes=save.bytes,
                **fields,
            )
            for failure in save.failed_copies:
                self._run.event("memory_copy_failed", save.step, error=failure)
            if save.error:
                self._wait_after_failure(save.step, save.error)
                continue
            self._failures = 0
            self._wait_until = 0
            self._choose_interval(save)

    def _choose_interval(self, save: MemorySave) -> None:
        if self._interval is None:
            return
        failures, seconds = clock.current().failures()
        between_failures = mean_time_between_failures(
            failures,
            seconds,
            chips=self._run.num_chips,
            chip_hours_per_failure=self._run.config.checkpoint.chip_hours_per_failure,
        )
        self._is_measured = True
        fields = self._interval.measured(save.blocked_s, save.seconds, between_failures)
        if fields:
            self._run.event("memory_interval", save.step, **fields)
            self._run.note(
                f"saving in memory every {time_text(fields['interval_s'])}: a save stops "
                f"training for {time_text(fields['blocked_s'])}"
            )

    def _report_bad(self, tier: MemoryTier) -> None:
        """Writes an event for each file in memory that could not be used."""
        for copy in tier.bad:
            self._run.event(
                "bad_memory_copy",
                copy.step,
                owner=copy.owner,
                place=copy.place,
                reason=copy.reason,
            )
            self._run.note(
                f"the copy of step {copy.step} in memory ({copy.place}, part "
                f"{copy.owner}) cannot be used: {copy.reason}"
            )
        tier.bad.clear()

    def on_end(self, end: RunEnd) -> None:
        """Deletes the steps in memory if the folder has what they hold."""
        if self._tier is None:
            return
        sealed = self._run.store.last_sealed
        is_saved = sealed >= self._run.progress.step
        self._tier.wait(_LAST_WAIT_S if is_saved else None)
        self._report(self._tier)
        saves = self._run.config.checkpoint.save_at_end
        is_in_folder = sealed >= max(self._tier.complete, default=0)
        gives_up = end.is_final and not end.reason and not saves
        delete = coordination.broadcast(is_in_folder or gives_up)
        self._tier.close(delete=delete, seconds=0)
        self._tier = None

    def __exit__(self, *_: object) -> None:
        """Waits a moment for the running save. Its step stays in memory."""
        if self._tier is not None:
            self._tier.close(delete=False, seconds=_LAST_WAIT_S)
            self._tier = None
