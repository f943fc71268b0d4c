"""What a run does before its first step: it takes its workdir and its data, and says
what it will do.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, extras, schema
from jaxdist.data import Dataset
from jaxdist.distributed import consistency, coordination
from jaxdist.operations.copies import step_copies
from jaxdist.operations.watch.watchdog import Watchdog
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep
from jaxdist.storage import run_format
from jaxdist.telemetry.display import print_safe
from jaxdist.trainer import build, from_run, pipeline_report, provenance, workdir
from jaxdist.trainer.extension import SettledSchedule
from jaxdist.trainer.restore import UserInputs
from jaxdist.trainer.run_config import RunConfig


def is_lead() -> bool:
    """Returns whether this process writes the run's files."""
    return jax.process_index() == 0


def _log(text: str) -> None:
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
    config: RunConfig, folder: Path, inputs: UserInputs, watch: Watchdog
) -> Dataset:
    """Returns the run's data.

    Raises:
      ConfigError: processes differ in it, or nothing is held out.
      SourceError: it cannot be read. PeerFailed: by another process.
    """
    with coordination.raise_on_all():
        dataset = inputs.dataset or build.open_data(config, folder, watch.lively(_log))
    consistency.agree(lambda: {"data": dataset.fingerprint})
    if config.train.eval_every:
        dataset.num_validation_batches(config.batch.global_size)
    return dataset


def open_workdir(
    config: RunConfig,
    requested: RunConfig,
    folder: Path,
    spec: ModelSpec,
    stack: contextlib.ExitStack,
    watch: Watchdog,
) -> CheckpointManager:
    """Returns the checkpoints to write, with the workdir locked and its ledger open;
    the stack closes all.

    Raises:
      ConfigError: processes differ in config, code or folder; another process uses the
        workdir; the config does not fit the run in it; its copies cannot be read.
    """
    flat = schema.flatten(schema.to_config_dict(config))
    consistency.agree(lambda: flat | consistency.code(spec.model_class))
    with coordination.raise_on_all():
        if is_lead():
            workdir.refuse_other_version(folder, config)
            from_run.refuse_own_folder(config, folder)
            stack.enter_context(workdir.workdir_lock(folder))
            step_copies.fetch_missing(config, folder, watch.lively(_log))
            workdir.check_resume_config(folder, requested)
        store = workdir.open_checkpoints(folder, config)
    stack.enter_context(store)
    if is_lead():
        store.fetch = step_copies.fetcher(
            config, folder, store, watch.lively(_log, "restore")
        )
        stack.enter_context(watch.ledger.published(folder))
    consistency.agree(
        lambda: {
            "the checkpoint folder's owner (all need the same folder)": store.owner()
        }
    )
    return store


def serve_metrics(
    config: RunConfig,
    devices: Sequence[jax.Device],
    stack: contextlib.ExitStack,
    watch: Watchdog,
) -> list[Any]:
    """Returns the views of rows and events that are served on process 0; the stack ends
    them.

    A run that goes on without anybody looking (`launch`) is not lost for a port that
    another has taken.

    Raises:
      ConfigError: on all processes, at a run's first start: nothing can listen there.
    """
    if not config.telemetry.port:
        return []
    with coordination.raise_on_all():
        if not is_lead():
            return []
        # here: few runs need its half second
        prometheus = extras.load("jaxdist.operations.metrics.prometheus")
        own = [
            device for device in devices if device.process_index == jax.process_index()
        ]
        chips = None
        if own[0].platform == "tpu":
            with contextlib.suppress(ImportError):  # a libtpu without that module
                chips = extras.load("jaxdist.operations.metrics.tpu_metrics").read
        view = prometheus.RunMetrics(watch.ledger, own, chips=chips)
        try:
            port = stack.enter_context(prometheus.served(config.telemetry, view))
        except ConfigError as error:
            if len(watch.ledger.lives()) == 1:
                watch.ledger.withdraw()  # or the next start would not be the first
                raise
            _log(f"warning: no metrics: {error}")
            return []
    address = config.telemetry.address
    _log(
        f"metrics: http://{f'[{address}]' if ':' in address else address}:{port}/metrics"
    )
    return [view]


def describe(
    config: RunConfig,
    spec: ModelSpec,
    built: TrainStep,
    dataset: Dataset,
    folder: Path,
    identity: str | None,
    schedule: SettledSchedule,
    watch: Watchdog,
) -> None:
    """Writes run.json and prints what the run will do."""
    rules, devices = built.rules, built.mesh.devices
    origin = provenance.describe(spec.model_class, built.mesh.devices)
    if is_lead():
        watch.ledger.runs_on(origin["num_chips"])
        description = origin | workdir.describe_run(
            config, spec, built, dataset, schedule.steps
        )
        description[workdir.IDENTITY_KEY] = identity
        workdir.write_json(
            folder / workdir.RUN,
            description | pipeline_report.describe(config, spec, rules),
        )
    counts = build.counts(config, spec)
    _log(
        f"mesh: {rules.shape} ({devices.size} x {devices.flat[0].device_kind}); {counts}"
    )
    step = [
        *build.step_lines(config, spec, built),
        *build.balancer(config, rules, dataset).lines(),
    ]
    for line in (
        *step,
        *pipeline_report.lines(config, spec, rules),
        *schedule.lines(config),
    ):
        _log(line)
