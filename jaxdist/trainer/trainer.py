"""A training run: check, open, restore or start, train, end.

The loop is `trainer.loop`. What else a run does is a list of callbacks
(`trainer.callbacks`).
"""

import contextlib
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdist.checkpoint.files import CheckpointError
from jaxdist.checkpoint.manager import NotOwner
from jaxdist.data import Dataset, SourceError
from jaxdist.parallel.mesh import build_mesh
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.display import Display
from jaxdist.trainer import (
    batching,
    build,
    elastic,
    extension,
    initial_weights,
    model_flops,
    opening,
    preemption,
    provenance,
    reporting,
    restore,
    validation,
)
from jaxdist.trainer.callbacks import Callback, CallbackList, Run, RunEnd
from jaxdist.trainer.extension import SettledSchedule
from jaxdist.trainer.loop import Trainer, TrainingStopped
from jaxdist.trainer.preemption import Interrupted, Preempted, StopSignals
from jaxdist.trainer.restore import Start, UserInputs
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.saver import Saver, checkpoint_metadata, failure_rate
from jaxdist.trainer.step_log import StepLog
from jaxdist.trainer.weight_source import WeightSource

# Of the step in a run: to compile it ahead; by its first call, where an optimizer's own
# first state may be weakly typed; and by the second, whose state is the step's.
MAX_TRACES = 3


class TrainResult(NamedTuple):
    """A run that has ended."""

    config: RunConfig
    spec: ModelSpec
    built: TrainStep
    state: State
    stopped: str  # by a signal, and that the run is saved; "" if none ended it
    # why it ended before train.steps without a signal: a callback's reason, the time
    reason: str = ""


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
    _, rules, spec = validation.validate(
        config, devices, with_data=inputs.dataset is None, build=inputs.build
    )
    validation.check_served(config, everyone.keys)
    everyone.check(config)
    signals = StopSignals()
    with contextlib.ExitStack() as stack, everyone.entered():
        current = Run(
            config=config,
            folder=folder,
            spec=spec,
            devices=devices,
            note=opening.log,
            say=_lively(opening.log, everyone),
            preempt=lambda reason: signals.hear(signal.SIGTERM),
        )
        try:
            everyone.phase("start")
            opening.open_workdir(current, requested, everyone, stack)
            assert current.store is not None
            mesh = build_mesh(config.mesh, devices)
            origin = provenance.describe(spec.model_class, mesh.devices)
            current.num_chips = origin.get("num_chips", 1)
            everyone.start(current)
            schedule = extension.settle_schedule(config, folder, current.store)
            dataset = opening.open_dataset(config, folder, inputs, current.say)
            built = build.build_step(
                config,
                spec,
                mesh,
                rules,
                max_traces=MAX_TRACES,
                optimizer=inputs.optimizer,
                schedule_steps=schedule.steps,
            )
            reporting.describe(current, built, dataset, origin, schedule)
            current.built = built
            start = _start(current, everyone, dataset, inputs, sources, schedule)
            with _build_display(current) as display:
                if title:
                    display.note(title)
                end = _train(current, everyone, signals, display, schedule, start)
                everyone.end(end)
                if end.error is not None:
                    raise end.error
        except BaseException as error:
            if isinstance(error, Exception):
                everyone.fault(error)
            raise
        return TrainResult(config, spec, built, end.state, end.stopped, end.reason)


def _lively(
    say: Callable[[str], None], callbacks: CallbackList
) -> Callable[[str], None]:
    """Makes a `say` whose lines show callbacks that work goes on."""

    def speak(text: str) -> None:
        callbacks.progress(text)
        say(text)

    return speak


def _start(
    run: Run,
    callbacks: CallbackList,
    dataset: Dataset,
    inputs: UserInputs,
    sources: Sequence[WeightSource],
    schedule: SettledSchedule,
) -> Start:
    """Makes or restores the first state; tells the run's events what cannot be used."""
    assert run.built is not None and run.store is not None
    try:
        start = restore.init_or_restore(
            run.config,
            run.built,
            dataset,
            run.store,
            run.folder,
            callbacks.phase,
            inputs,
            sources,
            schedule.back_to,
        )
    except CheckpointError as error:  # the run never begins, but its events say why
        for step, reason in error.steps.items():
            run.event("bad_checkpoint", step, reason=reason)
        raise
    run.progress = start.progress
    run.dataset = start.dataset
    return start


def _build_display(run: Run) -> Display:
    """Makes what shows the run on the first process; it takes the run's notes."""
    train = run.config.train
    left_s = None
    if train.max_minutes:
        left_s = 60 * train.max_minutes - run.progress.elapsed_s
    display = Display(
        total_steps=train.steps,
        first_step=run.progress.step,
        max_seconds=left_s,
        unit=batching.unit(run.config),
        enabled=opening.is_lead(),
    )
    run.note = display.note
    return display


def _train(
    run: Run,
    callbacks: CallbackList,
    signals: StopSignals,
    display: Display,
    schedule: SettledSchedule,
    start: Start,
) -> RunEnd:
    """Trains to the end; an error that ends the run is an event `stop`."""
    assert run.built is not None and run.store is not None and run.writer is not None
    log = StepLog(
        config=run.config,
        progress=run.progress,
        writer=run.writer,
        display=display,
        throughput=model_flops.throughput(
            run.config, run.spec, run.built.mesh, start.step_flops
        ),
        samples=run.samples,
        callbacks=callbacks,
    )
    run.store.milestones = extension.milestones(run.config, schedule.steps)
    saver = Saver(
        store=run.store,
        views=run.built.views,
        writer=run.writer,
        display=display,
        metadata=partial(checkpoint_metadata, run, schedule.steps, callbacks),
        failures=partial(failure_rate, run),
        on_save=callbacks.save,
    )
    # They may delete in a store what has expired: by now is known what is kept.
    callbacks.load(start.callbacks)
    trainer = Trainer(
        run=run,
        callbacks=callbacks,
        signals=signals,
        display=display,
        log=log,
        saver=saver,
    )
    end = trainer.end_without_steps(start.state)
    if end is not None:
        return end
    reporting.report_start(run, callbacks, saver, schedule.steps)
    try:
        state, reason = trainer.train(start.state)
    except (
        SourceError,
        NotOwner,
        TrainingStopped,
        jax.errors.JaxRuntimeError,
    ) as error:
        _report_stop(run, error)
        if isinstance(error, NotOwner):
            raise TrainingStopped(str(error), error.reason) from error
        raise
    return trainer.finish(state, reason)


def _report_stop(run: Run, error: Exception) -> None:
    """Writes the event of a run that an error ends."""
    if isinstance(error, SourceError):
        cause = "data"
    else:
        cause = getattr(error, "reason", "runtime")
    run.event("stop", run.progress.step, reason=cause, error=str(error))
