"""The first state of a run, made or restored while the step compiles."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jaxdist.checkpoint import manager
from jaxdist.data.dataset import Dataset
from jaxdist.distributed import consistency, coordination
from jaxdist.step.state import State
from jaxdist.telemetry import clock
from jaxdist.telemetry.traffic import Roofline
from jaxdist.telemetry.units import time_text
from jaxdist.trainer import data_position, restore, run_metadata, step_work
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.data_position import DataPosition
from jaxdist.trainer.health import SkippingDataset
from jaxdist.trainer.run_metadata import InitialState, Progress, progress_of
from jaxdist.trainer.step_work import StepWork


class Start(NamedTuple):
    """The first state of a run, and facts about it."""

    state: State
    # FLOPs of a step on all devices together; None = parts of it cannot be counted
    step_flops: float | None
    roofline: Roofline | None  # what limits the step; None = unknown
    callbacks: dict[str, Any]  # states of callbacks in the checkpoint, by their names


class _FirstState(NamedTuple):
    """A state, and what a checkpoint stores with it."""

    state: State
    progress: Progress
    windows: list[list[int]]  # batches that the run skips
    reader: Any  # state of a caller's iterator; None = there is none
    callbacks: dict[str, Any]  # states of callbacks, by their names


def init_or_restore(
    run: Run,
    dataset: Dataset,
    phase: Callable[[clock.Phase, int], None],
    init: Callable[[], InitialState],
    back_to: int | None = None,
    newest: int = 0,
) -> Start:
    """Makes the first state or restores it, and compiles the step.

    A thread compiles the step, unless the run is finished. Meanwhile this thread makes
    the state or restores it. For a restore, two more threads import Orbax and compile
    what the first save needs. This thread waits for Orbax before it reads the
    checkpoint. In a new run, the saver imports Orbax after the first steps.

    Args:
      run: the run, with its step built and its checkpoints open. It receives progress
        and dataset.
      dataset: the run's data, without skipped batches.
      phase: called with "restore" and "compile" and the step reached.
      init: makes the state of a run that has not saved; see `initial_weights`.
      back_to: the step to resume from; later checkpoints are quarantined. Default: the
        newest intact one.
      newest: the step of the newest checkpoint; 0 = there is none.
    """
    last = run.config.train.steps
    pool = ThreadPoolExecutor(3)
    try:
        # Both may fail, before anything compiles.
        has_saved = restore.has_saved(run)
        if run.config.init.data_position and not has_saved:
            data_position.check_source(run.config, dataset)
        compiled = None
        if newest < last or back_to is not None:
            compiled = _begin_to_compile(run, pool)
        if has_saved:
            phase("restore", 0)
            try:
                first = _restore(run, dataset, back_to, pool)
            except restore.MemoryLost as error:
                run.note(f"the run starts from its first state: {error}")
                first = _new_state(run, dataset, init())
        else:
            first = _new_state(run, dataset, init())
        step = first.progress.step
        if compiled is None and step < last:
            # the newest checkpoint is damaged, and an older one was restored
            compiled = _begin_to_compile(run, pool)
        work = StepWork(flops=None, roofline=None)
        if compiled is not None:
            phase("compile", step)
            work, seconds = compiled.result()
            run.note(f"compiled the step in {time_text(seconds)}")
        if work.roofline is not None:
            run.note(f"the step is {work.roofline.text()}")
        consistency.agree(lambda: {"data skipped": first.windows})
        skipping = SkippingDataset(dataset, first.windows)
        if skipping.position(step) > 0 and step < last:
            line = skipping.go_to(step, first.reader)
            if line and jax.process_index() == 0:
                print(line)
        run.progress = first.progress
        run.limit.resume(first.progress.wall_s)
        run.dataset = skipping
        return Start(
            first.state,
            step_flops=work.flops,
            roofline=work.roofline,
            callbacks=first.callbacks,
        )
    finally:
        # After an error, nobody waits for the compiler.
        pool.shutdown(wait=False, cancel_futures=True)


def _new_state(run: Run, dataset: Dataset, initial: InitialState) -> _FirstState:
    """Adds to a new run's state where its data begin."""
    begin = DataPosition([], reader=None)
    if run.config.init.data_position:
        begin = data_position.position_after(initial.metadata, run.config, dataset)
        run.note(
            f"the data begin at batch {begin.windows[0][1]}, where the source stands"
        )
    return _FirstState(
        initial.state,
        Progress(),
        windows=begin.windows,
        reader=begin.reader,
        callbacks={},
    )


def _restore(
    run: Run, dataset: Dataset, back_to: int | None, pool: ThreadPoolExecutor
) -> _FirstState:
    """Restores the state that a run resumes from.

    Threads of the pool import Orbax and prepare the first save.
    """
    views = run.built.views
    preloaded = pool.submit(manager.preload)
    prepared = pool.submit(run.store.prepare, views.abstract)
    preloaded.result()
    restored = restore.restore_checkpoint(run, dataset, back_to)
    state = views.by_stage(restored.state)
    progress = progress_of(restored.metadata)
    windows = coordination.broadcast(
        run_metadata.skipped_windows(run.folder, restored.metadata)
    )
    prepared.result()
    return _FirstState(
        state,
        progress,
        windows=windows,
        reader=restored.metadata.get(run_metadata.READER),
        callbacks=restored.metadata.get(run_metadata.CALLBACKS, {}),
    )


def _begin_to_compile(
    run: Run, pool: ThreadPoolExecutor
) -> Future[tuple[StepWork, float]]:
    """Lets a thread compile the step."""
    run.note("compiling the step")
    return pool.submit(_compile_in_time, run)


def _compile_in_time(run: Run) -> tuple[StepWork, float]:
    """Compiles the step; returns its work and the seconds that this took."""
    began = time.monotonic()
    work = step_work.compile_step(run)
    return work, time.monotonic() - began
