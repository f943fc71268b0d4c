"""What a run says of itself at its start: run.json, lines for people, events."""

import jax

from jaxdist.data import Dataset
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.metrics import EXTENDED
from jaxdist.trainer import (
    batching,
    elastic,
    opening,
    pipeline_report,
    step_lines,
    workdir,
)
from jaxdist.trainer.callbacks import CallbackList, Run
from jaxdist.trainer.description import describe_run
from jaxdist.trainer.extension import SettledSchedule
from jaxdist.trainer.saver import Saver


def describe(
    run: Run,
    built: TrainStep,
    dataset: Dataset,
    schedule: SettledSchedule,
) -> None:
    """Writes run.json and prints what the run will do."""
    composition = run.composition
    devices = built.mesh.devices
    if opening.is_lead():
        assert run.store is not None
        description = dict(run.origin) | describe_run(
            composition, built, dataset, schedule.steps
        )
        description[workdir.IDENTITY_KEY] = run.store.run
        workdir.write_json(
            run.folder / workdir.RUN,
            description | pipeline_report.describe(composition),
        )
    counts = step_lines.counts(composition)
    opening.log(
        f"mesh: {composition.shape} ({devices.size} x {devices.flat[0].device_kind}); {counts}"
    )
    step = [
        *step_lines.step_lines(composition, built),
        *batching.balancer(composition, dataset).lines(),
    ]
    for line in (
        *step,
        *pipeline_report.lines(composition),
        *schedule.lines(run.config),
    ):
        opening.log(line)


def report_start(
    run: Run, callbacks: CallbackList, saver: Saver, schedule: ScheduleSteps
) -> None:
    """Writes the events of a start; loggers begin with them."""
    assert run.writer is not None
    step = run.progress.step
    devices = jax.device_count()
    callbacks.phase("data", step + 1)
    resized = elastic.resized(run.folder, run.config, devices)
    if resized:
        run.event("resize", step, **resized)
    run.event("start", step, devices=devices, processes=jax.process_count())
    saver.report_bad_checkpoints()
    for part in schedule.extensions:
        if part.start == step:
            run.writer.write(step, {EXTENDED: part.end})
    if step:
        run.event("restore", step)
        run.note(f"resumed after step {step}")
