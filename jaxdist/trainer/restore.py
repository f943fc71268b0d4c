"""The schedule and the checkpoint that a run resumes from.

A start resumes from the newest checkpoint. A rollback resumes from an older one.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import CheckpointError, NotChecked, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager, MakeAbstract, Restored
from jaxdist.checkpoint.state_dict import LayoutError
from jaxdist.config import ConfigError
from jaxdist.data.dataset import Dataset
from jaxdist.distributed import coordination
from jaxdist.optim import schedules
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.metrics import iter_events
from jaxdist.trainer import run_metadata, workdir
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.health import SKIPPED_FILE, Diverged

# --- the schedule ---------------------------------------------------------------------


class SettledSchedule(NamedTuple):
    """The learning-rate schedule of a run, and the checkpoint that it starts from."""

    steps: ScheduleSteps
    back_to: int | None  # step of the checkpoint to resume from; None = the newest
    newest: int  # step of the newest checkpoint; 0 = there is none

    def lines(self, run: Run) -> list[str]:
        """Formats the schedule for the start of a run."""
        config = run.config
        if config.optimizer.name == "given":
            return []
        lines = schedules.describe(
            config.optimizer,
            self.steps,
            train_steps=config.train.steps,
            global_size=config.batch.global_size,
        )
        if self.back_to is not None:
            lines.append(
                f"back to the checkpoint {self.back_to}, where the decay began: "
                f"steps {self.back_to + 1}-{self.newest} are done again, their rows "
                f"replaced, and their checkpoints moved to quarantine as undone"
            )
        return lines

    def milestones(self, run: Run) -> frozenset[int]:
        """Finds the steps whose checkpoints are always saved and kept.

        With a schedule that cools down (wsd), this is the step at which the decay begins.
        A longer run resumes there.
        """
        saves = run.config.checkpoint
        by_rule = saves.interval == "auto" or saves.every_steps or saves.every_minutes
        if not (by_rule or saves.save_at_end):
            return frozenset()
        optimizer = run.config.optimizer
        if not schedules.has_cooldown(optimizer):
            return frozenset()
        if not schedules.depends_on_train_steps(optimizer):
            return frozenset()
        return frozenset({schedules.decay_start(optimizer, self.steps)})


def settle_schedule_and_checkpoint(run: Run) -> SettledSchedule:
    """Settles a run's schedule, and the checkpoint that it resumes from.

    The schedule is that of the newest checkpoint. If `train.steps` was raised, the
    schedule is extended. An extension that began before the newest checkpoint makes the
    run resume from the checkpoint where it began.

    Every process makes the call, and the first process decides.

    Raises:
      ConfigError: the stored schedule is damaged.
    """
    document: Any = None
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            settled = _settle(run)
            document = [settled.steps.to_json(), settled.back_to, settled.newest]
    steps, back_to, newest = coordination.broadcast(document)
    return SettledSchedule(
        ScheduleSteps.from_json(steps), back_to=back_to, newest=newest
    )


def _settle(run: Run) -> SettledSchedule:
    config = run.config
    store = run.store
    metadata = _newest_metadata(store)
    if run_metadata.PROGRESS not in metadata:
        steps = schedules.settle(config.optimizer, config.train.steps)
        return SettledSchedule(steps, back_to=None, newest=0)
    done: int = metadata[run_metadata.PROGRESS]["step"]
    stored = run_metadata.schedule_of(metadata)

    def is_intact(step: int) -> bool:
        with contextlib.suppress(CheckpointError, OSError):
            return step in store.steps() and bool(
                integrity.check(store.folder, step, run=store.run)
            )
        return False

    def back_to(steps: ScheduleSteps) -> int | None:
        for part in steps.extensions:
            if part not in stored.extensions and part.start < done:
                return part.start
        return None

    # run.json may have an extension that no checkpoint has yet.
    recorded = _recorded_steps(run.folder)
    if recorded is not None and recorded.end == config.train.steps:
        known = recorded.extensions[: len(stored.extensions)]
        extends_stored = replace(recorded, extensions=known) == stored
        start = back_to(recorded)
        if extends_stored and (start is None or is_intact(start)):
            return SettledSchedule(recorded, back_to=start, newest=done)
    steps = schedules.extend(
        config.optimizer,
        stored,
        done=done,
        train_steps=config.train.steps,
        saved=is_intact,
    )
    return SettledSchedule(steps, back_to=back_to(steps), newest=done)


def _newest_metadata(store: CheckpointManager) -> dict[str, Any]:
    """Reads the metadata of a run's newest step, in memory or in the folder."""
    metadata = {}
    if store.memory is not None:
        metadata = store.memory.newest_metadata(max(store.steps(), default=-1))
    return metadata or integrity.newest_metadata(store.folder, store.run)


def _recorded_steps(folder: Path) -> ScheduleSteps | None:
    """Reads the schedule in run.json; None if there is none."""
    with contextlib.suppress(OSError, untrusted.Malformed):
        document = untrusted.read_json(folder / run_format.RUN, dict)
        if document.get(run_metadata.SCHEDULE):
            return ScheduleSteps.from_json(document[run_metadata.SCHEDULE])
    return None


# --- the checkpoint -------------------------------------------------------------------


class MemoryLost(CheckpointError):
    """Error of a run whose only steps were in memory, and are not sound."""


def has_saved(run: Run) -> bool:
    """Tests whether a run has saved, so that it must resume and not begin anew.

    A sound step in memory counts if the run has saved none in the folder. Torn
    checkpoints and those in quarantine count, too: a restore reports that none is
    intact. Every process makes the call.

    Raises:
      CheckpointError: the run has saved, but its checkpoints are gone.
    """
    if coordination.broadcast(folders.has_steps(run.store.folder)):
        return True
    saves = iter_events(run.folder, ["save"])
    has_event = any(line.row is not None and line.row.get("ok") for line in saves)
    if coordination.broadcast(has_event):
        raise CheckpointError(
            f"the run in {run.folder} has saved, but {run.store.folder} has no checkpoint: put it back "
            f"(is it mounted?), or start a new run with another --workdir"
        )
    return run.store.memory is not None and run.store.memory.confirm()


def restore_checkpoint(run: Run, dataset: Dataset, back_to: int | None) -> Restored:
    """Restores the checkpoint that a run resumes from. Every process makes the call.

    Args:
      run: the run, with its step built and its checkpoints open.
      dataset: the run's data, without skipped batches.
      back_to: the step to resume from; later checkpoints are quarantined. None: the
        newest intact one.

    Raises:
      CheckpointError: no checkpoint is intact. An event has the reason for each.
      MemoryLost: no step in memory is sound, and the folder never had one.
      NotChecked: a process could not check steps in memory. A new start may.
      ConfigError: the run's model, optimizer, config or data have changed.
    """
    store = run.store
    try:
        restored = store.restore(
            require_run_metadata(run.built.views.abstract), back_to
        )
    except LayoutError as error:
        if not error.differing:
            raise ConfigError(error.faults) from error
        part = "model" if error.is_of_model else "optimizer"
        raise ConfigError(
            f"the {part} is another than that of the run in {store.folder}: {error.summary}; give it as it "
            f"was, or train this one in another folder (init.from_run takes weights that fit)"
        ) from error
    except NotChecked:
        raise
    except CheckpointError as error:
        _report_damage(run, error.steps)
        if not coordination.broadcast(folders.has_steps(store.folder)):
            raise MemoryLost(str(error)) from error
        raise
    # They are in quarantine now: a later start would not find them again.
    _report_damage(run, store.damaged_steps)
    workdir.check_stored_config(restored.metadata, run.config, store.folder, run.folder)
    check_data(restored.metadata, dataset)
    if back_to is not None:
        _quarantine_undone(
            store,
            back_to,
            f"undone, not damaged: train.steps was raised, so the run went back to step "
            f"{back_to}, where the decay began",
        )
    return restored


def check_data(metadata: Mapping[str, Any], dataset: Dataset) -> None:
    """Checks that a run resumes with the data that it began with.

    Raises:
      ConfigError: the data has changed, so the run's position in it is meaningless.
    """
    known = metadata[run_metadata.FINGERPRINTS][run_metadata.DATA]
    if known != dataset.fingerprint:
        raise ConfigError(
            f"the data has changed: the run has read {known}, {dataset.name} is {dataset.fingerprint} now; "
            f"put the corpus and its settings back, or start a new run with another --workdir"
        )


def _report_damage(run: Run, reasons: Mapping[int, str]) -> None:
    """Writes an event for each damaged step, {step: reason}."""
    for step, reason in reasons.items():
        run.event("bad_checkpoint", step, reason=reason)


def require_run_metadata(abstract: Any) -> MakeAbstract:
    """Makes the argument of a store's `restore` that requires the metadata of a run.

    A step without valid metadata of a run counts as damaged. A `restore` without a named
    step then tries an older one.

    Args:
      abstract: the arrays to read.
    """

    def abstract_if_valid(info: StepInfo) -> Any:
        try:
            run_metadata.check(info.metadata)
        except untrusted.Malformed as error:
            raise CheckpointError(
                f"its metadata is not that of a run in training: {error}"
            ) from error
        return abstract

    return abstract_if_valid


# --- rollback -------------------------------------------------------------------------


def roll_back(run: Run, fault: Diverged) -> Restored | None:
    """Restores the newest intact checkpoint before a fault.

    Newer checkpoints are quarantined. The run's dataset then skips the batches that came
    after the restored one. Every process makes the call.

    Returns:
      The checkpoint; None if none is intact.
    """
    store = run.store
    dataset = run.dataset
    assert dataset is not None
    store.wait()
    before = fault.first
    restored = None
    while restored is None:
        known = [step for step in store.steps() if step < before]
        before = coordination.broadcast(max(known, default=-1))
        if before < 0:
            return None
        try:
            restored = store.restore(
                require_run_metadata(run.built.views.abstract), before
            )
        except CheckpointError as error:
            _report_damage(run, error.steps)
    run.dataset = dataset.without(before + 1, fault.last if fault.skip else before)
    if jax.process_index() == 0:
        # The order matters. If the process dies in between, the run meets the fault
        # again and rolls back again.
        _quarantine_undone(store, before, f"rolled back to step {before}: {fault}")
        windows = {"windows": run.dataset.windows}
        workdir.write_json(run.folder / SKIPPED_FILE, windows)
    return restored


def _quarantine_undone(store: CheckpointManager, after: int, reason: str) -> None:
    """Quarantines the steps after a step, because the run repeats them."""
    if jax.process_index() == 0:
        if store.memory is not None:
            store.memory.leave_branch()
        for step in reversed(folders.all_steps(store.folder)):
            if step > after:
                folders.quarantine(store.folder, step, reason, undone=True)
