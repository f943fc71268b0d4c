"""A training run from start to end: check, open, restore, train, end.

The calls from the command to the loop over steps, outermost first:

    train.main                    train.py               parses the command
    library.run                   library.py             lists the callbacks
    training.run                  trainer/training.py    raises if a signal came
    training.train                trainer/training.py    checks, opens, restores, ends
    run_loop.train_to_end         trainer/run_loop.py    makes the loop's log and saver
    Trainer.train                 trainer/loop.py        handles signals
    Trainer._train_through_faults trainer/loop.py        rolls back after faults
    Trainer._train_until_fault    trainer/loop.py        loops over the steps

`library.fit` calls `training.train` directly, with the caller's model and data. All other
work of a run is done by callbacks (`trainer.callbacks`).
"""

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist.step.state import State
from jaxdist.trainer import (
    elastic,
    first_weights,
    initial_weights,
    opening,
    preemption,
    reporting,
    restore,
    run_events,
    run_loop,
    validation,
)
from jaxdist.trainer.callbacks import Callback, CallbackList, TrainResult
from jaxdist.trainer.compose import UserInputs
from jaxdist.trainer.preemption import Interrupted, Preempted, StopSignals
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.run_metadata import InitialState
from jaxdist.trainer.start import init_or_restore
from jaxdist.trainer.weight_source import WeightSource

# A run may trace its step three times: to compile it ahead; in the first call, because
# an optimizer's first state may be weakly typed; and in the second call, which takes
# the state that a step has returned.
MAX_TRACES = 3


def run(config: RunConfig, folder: Path, **options: Any) -> State:
    """Trains to the end and returns the last state.

    Args:
      config: the run's config.
      folder: the workdir.
      **options: further options of `train`.

    Raises:
      Interrupted: a signal ended the run early. It is a Preempted unless the signal was
        a Ctrl-C to a process that runs alone.
    """
    result = train(config, folder, **options)
    if result.stopped:
        if preemption.PROCESS.must_leave:
            raise Preempted(result.stopped)
        raise Interrupted(result.stopped)
    return result.state


def train(
    config: RunConfig,
    folder: Path,
    *,
    title: str = "",
    devices: Sequence[jax.Device] | None = None,
    full_devices: int | None = None,
    inputs: UserInputs | None = None,
    callbacks: Sequence[Callback] = (),
    process_callbacks: Sequence[Callback] = (),
    weight_sources: Sequence[WeightSource] = (),
) -> TrainResult:
    """Trains to the end, starting from the newest checkpoint of the workdir.

    Args:
      config: the run's config.
      folder: the workdir; it is created if it is missing.
      title: first line of the display; "" = none.
      devices: devices to train on; default: all.
      full_devices: number of devices that the config of an elastic run was written for.
        On any other number, the layout is refitted. Default: the run is not elastic.
      inputs: the caller's model, data and optimizer, in place of those of the config.
      callbacks: callbacks that this function enters and exits.
      process_callbacks: callbacks that the caller has entered. They are called first.
      weight_sources: sources of initial weights in addition to those of the core, such
        as jaxdist.interop.WEIGHT_SOURCES.

    Raises:
      ConfigError: the config is invalid, or another version of jaxdist wrote the
        workdir. Nothing was compiled.
      TrainingStopped: losses stayed non-finite, or the last checkpoint could not be
        written.
    """
    preemption.refuse_unjoined()
    all_callbacks = CallbackList(process_callbacks, callbacks)
    sources = initial_weights.chosen_sources(config, weight_sources)
    opening.check_workdir(folder, config)
    if devices is None:
        devices = jax.devices()
    requested = config
    config = elastic.refit(config, devices=len(devices), full_devices=full_devices)
    inputs = inputs or UserInputs()
    composition = validation.validate(
        config, devices, with_data=inputs.dataset is None, build=inputs.build
    )
    first_weights.check(config, folder, weight_sources)
    all_callbacks.check(config)
    signals = StopSignals()
    with contextlib.ExitStack() as stack, all_callbacks.enter_others():
        this_run = opening.new_run(
            composition,
            folder,
            devices,
            on_progress=all_callbacks.progress,
            request_stop=lambda: signals.hear(signal.SIGTERM),
        )
        has_begun = False
        try:
            all_callbacks.phase("start")
            opening.open_workdir(this_run, requested, all_callbacks, stack)
            if config.train.epochs:
                opening.settle_epochs(this_run, inputs.dataset)
                composition = this_run.composition
                config = this_run.config
            all_callbacks.start(this_run)
            schedule = restore.settle_schedule_and_checkpoint(this_run)
            dataset = opening.open_run_data(
                config, folder, inputs.dataset, this_run.say
            )
            this_run.limit.start()
            built = composition.build_step(
                devices,
                max_traces=MAX_TRACES,
                optimizer=inputs.optimizer,
                schedule_steps=schedule.steps,
            )
            reporting.describe(this_run, built, dataset, schedule)
            this_run.built = built

            def first_state() -> InitialState:
                """Makes the state of a run that has not saved."""
                if sources:
                    all_callbacks.phase("restore", 0)
                return first_weights.init(
                    this_run,
                    dataset,
                    sources,
                    weight_sources,
                    inputs,
                    on_batch=lambda: all_callbacks.phase("evaluate", 0),
                )

            start = init_or_restore(
                this_run,
                dataset,
                all_callbacks.phase,
                first_state,
                back_to=schedule.back_to,
                newest=schedule.newest,
            )
            first_weights.attach(this_run, dataset)
            if requested.train.epochs:
                opening.store_steps(this_run, requested)
            has_begun = True
            with run_loop.build_display(this_run) as display:
                if title:
                    display.note(title)
                end = run_loop.train_to_end(
                    this_run, all_callbacks, signals, display, schedule, start
                )
                all_callbacks.end(end)
                if end.error is not None:
                    raise end.error
        except BaseException as error:
            if isinstance(error, Exception):
                if not has_begun:
                    run_events.failed_to_start(this_run, error)
                all_callbacks.fault(error)
            raise
        return TrainResult(
            composition=composition,
            built=built,
            state=end.state,
            stopped=end.stopped,
            reason=end.reason,
        )
