"""A training run: check, open, restore or start, train, end.

The loop is `trainer.loop`. What else a run does is a list of callbacks
(`trainer.callbacks`).
"""

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist.step.state import State
from jaxdist.telemetry.display import lively
from jaxdist.trainer import (
    elastic,
    initial_weights,
    opening,
    preemption,
    reporting,
    restore,
    run_loop,
    validation,
)
from jaxdist.trainer.callbacks import Callback, CallbackList, Run, TrainResult
from jaxdist.trainer.preemption import Interrupted, Preempted, StopSignals
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.start import init_or_restore
from jaxdist.trainer.user_model import UserInputs
from jaxdist.trainer.weight_source import WeightSource

# Of the step in a run: to compile it ahead; by its first call, where an optimizer's own
# first state may be weakly typed; and by the second, whose state is the step's.
MAX_TRACES = 3


def run(config: RunConfig, folder: Path, **options: Any) -> State:
    """Trains to the end, and returns the last state; takes the options of `train`.

    Raises:
      Interrupted: a signal ended it early; Preempted if not by a Ctrl-C to a process
        alone.
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
    """Trains to the end, from the newest checkpoint if the workdir has one.

    On other devices than the `full_devices` of an elastic run's config, its layout is
    refitted.

    Args:
      config: of the run.
      folder: the workdir; made if it is missing.
      title: a first line for the display.
      devices: to train on; default: all.
      full_devices: that an elastic run's config was written for.
      inputs: a caller's model, data and optimizer.
      callbacks: what the run does beside training, entered and left with it.
      process_callbacks: the same, which the caller has entered already.
      weight_sources: sources of initial weights beside those of the core, e.g.
        jaxdist.interop.WEIGHT_SOURCES.

    Raises:
      ConfigError: the config is illegal, or the workdir another version's; nothing was
        compiled.
      TrainingStopped: losses stayed non-finite, or the last checkpoint could not be
        written.
    """
    preemption.refuse_unjoined()
    everyone = CallbackList(process_callbacks, callbacks)
    sources = initial_weights.chosen_sources(config, weight_sources)
    opening.refuse_other_version(folder)
    if devices is None:
        devices = jax.devices()
    requested = config
    config = elastic.refit(config, devices=len(devices), full_devices=full_devices)
    inputs = inputs or UserInputs()
    composition = validation.validate(
        config, devices, with_data=inputs.dataset is None, build=inputs.build
    )
    everyone.check(config)
    signals = StopSignals()
    with contextlib.ExitStack() as stack, everyone.entered():
        current = Run(
            composition=composition,
            folder=folder,
            devices=devices,
            note=opening.log,
            say=lively(opening.log, everyone.progress),
            preempt=lambda reason: signals.hear(signal.SIGTERM),
        )
        try:
            everyone.phase("start")
            opening.open_workdir(current, requested, everyone, stack)
            everyone.start(current)
            schedule = restore.settle_schedule(current)
            dataset = opening.open_dataset(config, folder, inputs.dataset, current.say)
            built = composition.build_step(
                devices,
                max_traces=MAX_TRACES,
                optimizer=inputs.optimizer,
                schedule_steps=schedule.steps,
            )
            reporting.describe(current, built, dataset, schedule)
            current.built = built
            start = init_or_restore(
                current,
                dataset,
                everyone.phase,
                sources,
                back_to=schedule.back_to,
                build=inputs.build,
                given=inputs.initial,
            )
            with run_loop.build_display(current) as display:
                if title:
                    display.note(title)
                end = run_loop.train_to_end(
                    current, everyone, signals, display, schedule, start
                )
                everyone.end(end)
                if end.error is not None:
                    raise end.error
        except BaseException as error:
            if isinstance(error, Exception):
                everyone.fault(error)
            raise
        return TrainResult(composition, built, end.state, end.stopped, end.reason)
