"""The checkpoints that a run goes on from: at its start the newest, after a fault an
older one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manager as checkpoints
from jaxdist.checkpoint.files import CheckpointError, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager, Restored
from jaxdist.checkpoint.state_dict import LayoutError
from jaxdist.config import ConfigError
from jaxdist.data import Dataset
from jaxdist.distributed import coordination
from jaxdist.storage import run_format
from jaxdist.storage.untrusted import Malformed, of_kind, read_json
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.health import SKIPPED_FILE, Diverged, SkippingDataset
from jaxdist.trainer.progress import progress_of

_MAX_BATCHES = 2**62
SKIPPED = "skipped_data"  # in a checkpoint's metadata: the windows then known
CALLBACKS = "callbacks"  # in a checkpoint's metadata: what it keeps of each, by name
READER = "data_state"  # in a checkpoint's metadata: the state of a caller's iterator


def has_checkpoint(run: Run) -> bool:
    """Tells whether a run can be resumed. Every process makes the call.

    Raises:
      CheckpointError: the run has saved, but its checkpoints are gone.
    """
    assert run.store is not None
    if coordination.broadcast(folders.has_steps(run.store.folder)):
        return True
    events = read_events(run.folder)
    has_saved = any(event["event"] == "save" and event.get("ok") for event in events)
    if coordination.broadcast(has_saved):
        raise CheckpointError(
            f"the run in {run.folder} has saved, but {run.store.folder} has no checkpoint: put it back "
            f"(is it mounted?), or begin anew with another --workdir"
        )
    return False


def restore_checkpoint(run: Run, dataset: Dataset, back_to: int | None) -> Restored:
    """Restores the checkpoint that a run resumes from. Every process makes the call.

    Args:
      run: with its step built and its checkpoints open.
      dataset: the run's, without anything left out.
      back_to: a step to resume from; what was saved after it goes to quarantine. None:
        the newest.

    Raises:
      CheckpointError: none can be used; the run's events say why of each.
      ConfigError: its model, optimizer, config or data are others.
    """
    store = run.store
    assert run.built is not None
    assert store is not None
    try:
        restored = store.restore(trained(run.built.views.abstract), back_to)
    except LayoutError as error:
        if not error.differing:
            raise ConfigError(error.faults) from error
        part = "model" if error.is_of_model else "optimizer"
        raise ConfigError(
            f"the {part} is another than that of the run in {store.folder}: {error.summary}; give it as it "
            f"was, or train this one in another folder (init.from_run takes weights that fit)"
        ) from error
    except CheckpointError as error:
        for step, reason in error.steps.items():
            run.event("bad_checkpoint", step, reason=reason)
        raise
    if workdir.CONFIG_KEY in restored.metadata:
        workdir.check_stored_config(restored.metadata, run.config, store.folder)
    workdir.check_data(restored.metadata, dataset)
    if back_to is not None:
        _set_aside(
            store,
            back_to,
            f"the run went back to step {back_to}: train.steps was raised",
        )
    return restored


def trained(abstract: Any) -> checkpoints.Wanted:
    """Returns what a store's `restore` asks of a step: `abstract`, if the step is one
    of a run in training.

    A step that is not counts as damaged: an older one is tried.
    """

    def wanted(info: StepInfo) -> Any:
        try:
            progress_of(info.metadata)
            of_kind(
                info.metadata.get("fingerprints", {}).get("data"),
                str,
                "the data's fingerprint",
            )
            _checked(info.metadata.get(SKIPPED, []))
            of_kind(info.metadata.get(CALLBACKS, {}), dict, CALLBACKS)
        except Malformed as error:
            raise CheckpointError(
                f"its metadata is not that of a run in training: {error}"
            ) from error
        return abstract

    return wanted


# --- going back -----------------------------------------------------------------------


def skipped_windows(folder: Path, metadata: Mapping[str, Any]) -> list[list[int]]:
    """Returns the windows of batches that the run of a workdir leaves out.

    The workdir's file knows all, also those found after the checkpoint; a checkpoint
    that was taken elsewhere has its own list.

    Raises:
      ConfigError: the file is damaged, or another version's.
    """
    file = folder / SKIPPED_FILE
    try:
        document = run_format.unmarked(read_json(file, dict), file)
        return _checked(document.get("windows"))
    except FileNotFoundError:
        return metadata.get(SKIPPED, [])
    except Malformed as error:
        raise ConfigError(f"{file} is damaged ({error}); put it back") from error


def _checked(windows: object) -> list[list[int]]:
    """Returns what is a list of windows; raises Malformed if it is none."""
    for window in of_kind(windows, list, "windows"):
        if not _is_window(window):
            raise Malformed(f"{window!r:.40} is no [first, end] of batches")
    return windows  # type: ignore[return-value]


def _is_window(value: Any) -> bool:
    whole = isinstance(value, list) and [type(n) for n in value] == [int, int]
    return whole and 0 <= value[0] <= value[1] < _MAX_BATCHES


def roll_back(
    store: CheckpointManager,
    folder: Path,
    abstract: Any,
    dataset: SkippingDataset,
    fault: Diverged,
) -> tuple[Restored, SkippingDataset] | None:
    """Returns the newest good checkpoint before the fault, and the dataset without what
    came since.

    Newer checkpoints go to quarantine. None if no checkpoint can be used. Each process
    makes the call.
    """
    store.wait()
    before, restored = fault.first, None
    while restored is None:
        known = [step for step in store.steps() if step < before]
        before = coordination.broadcast(max(known, default=-1))
        if before < 0:
            return None
        try:
            restored = store.restore(trained(abstract), before)
        except CheckpointError:
            continue
    without = dataset.without(before + 1, fault.last if fault.skip else before)
    if jax.process_index() == 0:
        # In this order: should we die in between, the next start does the same again.
        _set_aside(store, before, f"rolled back to step {before}: {fault}")
        workdir.write_json(folder / SKIPPED_FILE, {"windows": without.windows})
    return restored, without


def _set_aside(store: CheckpointManager, after: int, reason: str) -> None:
    """Moves the steps after one to quarantine: another way leads on from it."""
    if jax.process_index() == 0:
        for step in reversed([n for n in folders.all_steps(store.folder) if n > after]):
            folders.quarantine(store.folder, step, reason, undone=True)
