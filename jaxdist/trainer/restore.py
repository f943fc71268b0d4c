"""Where a run starts: fresh, from its newest checkpoint, or, after a fault, from an
older one.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manager as checkpoints
from jaxdist.checkpoint.files import CheckpointError, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager, Restored
from jaxdist.checkpoint.state_dict import LayoutError
from jaxdist.config import ConfigError, trees
from jaxdist.data import Dataset
from jaxdist.distributed import consistency, coordination, initialize
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.storage import run_format
from jaxdist.storage.untrusted import Malformed, of_kind, read_json
from jaxdist.telemetry.flops import is_uncounted, jaxpr_flops
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import batching, initial_weights, workdir
from jaxdist.trainer.health import SKIPPED_FILE, Diverged, SkippingDataset
from jaxdist.trainer.progress import Progress, progress_of
from jaxdist.trainer.run_config import Build, RunConfig
from jaxdist.trainer.weight_source import WeightSource

_MAX_BATCHES = 2**62
SKIPPED = "skipped_data"  # in a checkpoint's metadata: the windows then known
CALLBACKS = "callbacks"  # in a checkpoint's metadata: what it keeps of each, by name
READER = "data_state"  # in a checkpoint's metadata: the state of a caller's iterator


class UserInputs(NamedTuple):
    """What a caller hands over instead of what the config names; None: the config's."""

    build: Build | None = None
    dataset: Dataset | None = None
    optimizer: optax.GradientTransformation | None = None
    # path -> value that the model begins with
    initial: Mapping[str, np.ndarray] | None = None


class Start(NamedTuple):
    """Where a run starts."""

    state: State
    progress: Progress
    dataset: SkippingDataset
    # of the step's program, all devices together; None: not all of it counts
    step_flops: float | None
    callbacks: dict[str, Any]  # what the checkpoint keeps of callbacks, by name


def init_or_restore(
    config: RunConfig,
    built: TrainStep,
    dataset: Dataset,
    store: CheckpointManager,
    folder: Path,
    phase: Callable[[str, int], None],
    inputs: UserInputs,
    sources: Sequence[WeightSource],
    back_to: int | None = None,
) -> Start:
    """Makes the first state or reads it; the step is compiled.

    The step compiles in one thread, and to restore, the checkpoint library is imported
    in another, while the state is made or read here: a start takes the longest of the
    three, not their sum.

    Args:
      sources: of the initial weights; none: they are random.
      phase: told of "restore" and "compile", each with the step reached.
      back_to: a step to go on from; what was saved after it goes to quarantine. None:
        the newest.
    """
    pool = ThreadPoolExecutor(3)
    try:
        compiled = pool.submit(_compile, config, built)
        if not coordination.broadcast(folders.has_steps(store.folder)):
            events = read_events(folder)
            if coordination.broadcast(
                any(e["event"] == "save" and e.get("ok") for e in events)
            ):
                raise CheckpointError(
                    f"the run in {folder} has saved, but {store.folder} has no checkpoint: put it back "
                    f"(is it mounted?), or begin anew with another --workdir"
                )
            if inputs.initial and not config.init.from_run:
                state = built.init(_placed(inputs.initial, built))
            else:
                if sources:
                    phase("restore", 0)
                state = initial_weights.first_state(
                    config, built, folder, sources, inputs.build
                )
            progress = Progress()
            windows: list[list[int]] = []
            reader = None
            kept: dict[str, Any] = {}
        else:
            phase("restore", 0)
            library = pool.submit(checkpoints.preload)
            prepared = pool.submit(store.prepare, built.views.abstract)
            library.result()
            restored = _restore(config, built, dataset, store, back_to)
            state = built.views.staged(restored.state)
            progress = progress_of(restored.metadata)
            windows = coordination.broadcast(skipped_windows(folder, restored.metadata))
            reader = restored.metadata.get(READER)
            kept = restored.metadata.get(CALLBACKS, {})
            prepared.result()
        phase("compile", progress.step)
        flops = compiled.result()
        consistency.agree(lambda: {"data left out": windows})
        skipping = SkippingDataset(dataset, windows)
        if 0 < progress.step < config.train.steps:
            line = skipping.go_to(progress.step, reader)
            if line and jax.process_index() == 0:
                print(line)
        return Start(state, progress, skipping, flops, kept)
    finally:
        # an error does not wait for the compiler
        pool.shutdown(wait=False, cancel_futures=True)


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


def _restore(
    config: RunConfig,
    built: TrainStep,
    dataset: Dataset,
    store: CheckpointManager,
    back_to: int | None,
) -> Restored:
    """Returns the checkpoint to go on from, which is of this run and its data."""
    try:
        restored = store.restore(trained(built.views.abstract), back_to)
    except LayoutError as error:
        if not error.differing:
            raise ConfigError(error.faults) from error
        part = "model" if error.is_of_model else "optimizer"
        raise ConfigError(
            f"the {part} is another than that of the run in {store.folder}: {error.summary}; give it as it "
            f"was, or train this one in another folder (init.from_run takes weights that fit)"
        ) from error
    if workdir.CONFIG_KEY in restored.metadata:
        workdir.check_stored_config(restored.metadata, config, store.folder)
    workdir.check_data(restored.metadata, dataset)
    if back_to is not None:
        _set_aside(
            store,
            back_to,
            f"the run went back to step {back_to}: train.steps was raised",
        )
    return restored


def _placed(
    initial: Mapping[str, np.ndarray], built: TrainStep
) -> dict[str, jax.Array]:
    """Returns the model's first values on the devices, each laid out as the
    run has it.
    """
    flat = built.views.abstract
    abstract = trees.flatten_names(flat.trainable) | trees.flatten_names(
        flat.model_state
    )
    abstract |= trees.flatten_names(flat.frozen)
    return {
        path: jax.device_put(np.asarray(x), abstract[path].sharding)
        for path, x in initial.items()
    }


def _compile(config: RunConfig, built: TrainStep) -> float | None:
    """Compiles the train step for the run's batches; returns its FLOPs, None where not
    all count.

    The result stays in jax's cache, where the step's first call finds it. (Calling the
    compiled object itself costs the host a fifth more at every step.)
    """
    batch = built.abstract_batch(
        batching.batch_shapes(config, config.batch.global_size)
    )
    traced = built.step.trace(built.abstract_state, batch)
    lowered = traced.lower()
    with initialize.lead_first("step"):
        lowered.compile()
    return None if is_uncounted(traced.jaxpr) else jaxpr_flops(traced.jaxpr)


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
