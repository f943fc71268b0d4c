"""The start and the end of the training loop, with its display, log and saver."""

import jax

from jaxdist.checkpoint.manager import NotOwner
from jaxdist.data.dataset import SourceError
from jaxdist.distributed import coordination
from jaxdist.telemetry.display import Display
from jaxdist.trainer import compose, model_flops, run_events
from jaxdist.trainer.callbacks import CallbackList, Run, RunEnd
from jaxdist.trainer.loop import Trainer, TrainingStopped
from jaxdist.trainer.preemption import StopSignals
from jaxdist.trainer.restore import SettledSchedule
from jaxdist.trainer.saver import Saver
from jaxdist.trainer.start import Start
from jaxdist.trainer.step_log import StepLog


def build_display(run: Run) -> Display:
    """Makes the display of a run on the first process, which then shows its notes."""
    train = run.config.train
    display = Display(
        total_steps=train.steps,
        first_step=run.progress.step,
        max_seconds=run.limit.left_s(),
        unit=compose.unit(run.config),
        enabled=coordination.is_lead(),
    )
    run.note = display.note
    return display


def train_to_end(
    run: Run,
    callbacks: CallbackList,
    signals: StopSignals,
    display: Display,
    schedule: SettledSchedule,
    start: Start,
) -> RunEnd:
    """Trains from the first state to the end.

    An error that ends the run is also written as the event `stop`.

    Args:
      run: the run, with its step built and its checkpoints and files open.
      callbacks: the run's callbacks, already started.
      signals: the signals that stop the run.
      display: the display of the run.
      schedule: the schedule of the learning rate.
      start: the first state.

    Raises:
      TrainingStopped: losses stayed non-finite, or a checkpoint could not be written.
      SourceError: the data cannot be read.
    """
    throughput = model_flops.throughput(
        run.composition, run.built.mesh, start.step_flops
    )
    log = StepLog(run, callbacks, display, throughput)
    run.store.milestones = schedule.milestones(run)
    saver = Saver(run, callbacks, schedule.steps)
    # From here on, the callback of checkpoint.copy_to may delete expired steps from the
    # store of copies. It keeps milestones, so they are chosen first.
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
    callbacks.phase("data", run.progress.step + 1)
    run_events.started(run, saver, schedule, start)
    try:
        state, reason = trainer.train(start.state)
    except (
        SourceError,
        NotOwner,
        TrainingStopped,
        jax.errors.JaxRuntimeError,
    ) as error:
        run_events.stopped(run, error)
        if isinstance(error, NotOwner):
            raise TrainingStopped(str(error), error.reason) from error
        raise
    return trainer.finish(state, reason)
