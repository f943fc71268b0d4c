"""Where a run starts: fresh, or from a checkpoint; its step compiles meanwhile."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.checkpoint import manager as checkpoints
from jaxdist.data import Dataset
from jaxdist.distributed import consistency, coordination, initialize
from jaxdist.step.state import State
from jaxdist.telemetry.flops import is_uncounted, jaxpr_flops
from jaxdist.trainer import initial_weights, restore, run_metadata
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import batch_shapes
from jaxdist.trainer.health import SkippingDataset
from jaxdist.trainer.run_config import Build
from jaxdist.trainer.run_metadata import Progress, progress_of
from jaxdist.trainer.weight_source import WeightSource


class Start(NamedTuple):
    """Where a run starts."""

    state: State
    # of the step's program, all devices together; None: not all of it counts
    step_flops: float | None
    callbacks: dict[str, Any]  # what the checkpoint keeps of callbacks, by name


def init_or_restore(
    run: Run,
    dataset: Dataset,
    phase: Callable[[str, int], None],
    sources: Sequence[WeightSource],
    back_to: int | None = None,
    build: Build | None = None,
    given: Mapping[str, np.ndarray] | None = None,
) -> Start:
    """Makes the first state or reads it; the step is compiled.

    The step compiles in one thread, and to restore, the checkpoint library is imported
    in another, while the state is made or read here: a start takes the longest of the
    three, not their sum.

    Args:
      run: with its step built and its checkpoints open; takes progress and data.
      dataset: the run's, without anything left out.
      phase: told of "restore" and "compile", each with the step reached.
      sources: of the initial weights; none: they are random.
      back_to: a step to go on from; what was saved after it goes to quarantine. None:
        the newest.
      build: makes the model, where a caller has given one.
      given: path -> value that a caller's model begins with.
    """
    built = run.built
    store = run.store
    pool = ThreadPoolExecutor(3)
    try:
        compiled = pool.submit(compile_step, run)
        if not restore.has_checkpoint(run):
            if sources:
                phase("restore", 0)
            state = initial_weights.first_state(
                run.config, built, run.folder, sources, build, given
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
            restored = restore.restore_checkpoint(run, dataset, back_to)
            state = built.views.staged(restored.state)
            progress = progress_of(restored.metadata)
            windows = coordination.broadcast(
                restore.skipped_windows(run.folder, restored.metadata)
            )
            reader = restored.metadata.get(run_metadata.READER)
            kept = restored.metadata.get(run_metadata.CALLBACKS, {})
            prepared.result()
        phase("compile", progress.step)
        flops = compiled.result()
        consistency.agree(lambda: {"data left out": windows})
        skipping = SkippingDataset(dataset, windows)
        if 0 < progress.step < run.config.train.steps:
            line = skipping.go_to(progress.step, reader)
            if line and jax.process_index() == 0:
                print(line)
        run.progress = progress
        run.dataset = skipping
        return Start(state, flops, kept)
    finally:
        # an error does not wait for the compiler
        pool.shutdown(wait=False, cancel_futures=True)


def compile_step(run: Run) -> float | None:
    """Compiles the train step for the run's batches, and counts its FLOPs.

    The result stays in jax's cache, where the step's first call finds it. (Calling the
    compiled object itself costs the host a fifth more at every step.)

    Returns:
      The FLOPs of a step, all devices together; None where not all count.
    """
    built = run.built
    batch = built.abstract_batch(batch_shapes(run.config))
    traced = built.step.trace(built.abstract_state, batch)
    lowered = traced.lower()
    with initialize.lead_first("step"):
        lowered.compile()
    return None if is_uncounted(traced.jaxpr) else jaxpr_flops(traced.jaxpr)
