"""What a run does before its first step: it takes its workdir and its data, and says
what it will do.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import schema
from jaxdist.data import Dataset
from jaxdist.distributed import consistency, coordination
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.step.train_step import TrainStep
from jaxdist.storage import run_format
from jaxdist.telemetry.display import print_safe
from jaxdist.telemetry.metrics import EXTENDED, MetricsWriter
from jaxdist.trainer import batching, build, elastic, from_run, pipeline_report, workdir
from jaxdist.trainer.callbacks import CallbackList, Run
from jaxdist.trainer.extension import SettledSchedule
from jaxdist.trainer.restore import UserInputs
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.saver import Saver


def is_lead() -> bool:
    """Returns whether this process writes the run's files."""
    return jax.process_index() == 0


def log(text: str) -> None:
    """Prints a line on the first process."""
    if is_lead():
        print_safe(text)


def refuse_other_version(folder: Path) -> None:
    """Checks, before anything is written, that no other version has written the run.

    Raises:
      OtherVersion: on all processes: one has.
    """
    with coordination.raise_on_all():
        if is_lead():
            run_format.check_folder(folder)


def open_dataset(
    config: RunConfig,
    folder: Path,
    inputs: UserInputs,
    say: Callable[[str], None],
) -> Dataset:
    """Opens the run's data.

    Args:
      say: takes lines of progress.

    Raises:
      ConfigError: processes differ in it, or nothing is held out.
      SourceError: it cannot be read. PeerFailed: by another process.
    """
    with coordination.raise_on_all():
        dataset = inputs.dataset or batching.open_data(config, folder, say)
    consistency.agree(lambda: {"data": dataset.fingerprint})
    if config.train.eval_every:
        dataset.num_validation_batches(config.batch.global_size)
    return dataset


def open_workdir(
    run: Run,
    requested: RunConfig,
    callbacks: CallbackList,
    stack: contextlib.ExitStack,
) -> None:
    """Locks the run's folder, and opens its checkpoints, rows and events.

    Args:
      requested: the config before it was refitted to the devices.
      stack: closes all.

    Raises:
      ConfigError: processes differ in config, code or folder; another process uses the
        workdir; the config does not fit the run in it; its copies cannot be read.
    """
    config = run.config
    flat = schema.flatten(schema.to_config_dict(config))
    consistency.agree(lambda: flat | consistency.code(run.spec.model_class))
    with coordination.raise_on_all():
        if is_lead():
            workdir.refuse_other_version(run.folder, config)
            from_run.refuse_own_folder(config, run.folder)
            stack.enter_context(workdir.workdir_lock(run.folder))
        callbacks.open(run)
        if is_lead():
            workdir.check_resume_config(run.folder, requested)
        run.store = workdir.open_checkpoints(run.folder, config)
    stack.enter_context(run.store)
    run.writer = MetricsWriter(run.folder, enabled=is_lead())
    stack.enter_context(contextlib.closing(run.writer))
    owner = run.store.owner()
    consistency.agree(
        lambda: {"the checkpoint folder's owner (all need the same folder)": owner}
    )


def describe(
    run: Run,
    built: TrainStep,
    dataset: Dataset,
    origin: Mapping[str, Any],
    schedule: SettledSchedule,
) -> None:
    """Writes run.json and prints what the run will do.

    Args:
      origin: what `provenance.describe` says of the run.
    """
    config = run.config
    spec = run.spec
    rules = built.rules
    devices = built.mesh.devices
    if is_lead():
        assert run.store is not None
        description = dict(origin) | workdir.describe_run(
            config, spec, built, dataset, schedule.steps
        )
        description[workdir.IDENTITY_KEY] = run.store.run
        workdir.write_json(
            run.folder / workdir.RUN,
            description | pipeline_report.describe(config, spec, rules),
        )
    counts = build.counts(config, spec)
    log(
        f"mesh: {rules.shape} ({devices.size} x {devices.flat[0].device_kind}); {counts}"
    )
    step = [
        *build.step_lines(config, spec, built),
        *batching.balancer(config, rules, dataset).lines(),
    ]
    for line in (
        *step,
        *pipeline_report.lines(config, spec, rules),
        *schedule.lines(config),
    ):
        log(line)


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
