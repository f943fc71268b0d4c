"""The opening of a run's workdir and data, before its first step."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from jaxdist.config import schema
from jaxdist.data import Dataset
from jaxdist.distributed import consistency, coordination
from jaxdist.storage import run_format
from jaxdist.telemetry.display import print_safe
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer import batching, provenance, source_run, workdir
from jaxdist.trainer.callbacks import CallbackList, Run
from jaxdist.trainer.run_config import RunConfig


def is_lead() -> bool:
    """Tests whether this is the first process, which writes the run's files.

    Only the tokenizer's files are written by every process.
    """
    return jax.process_index() == 0


def log(text: str) -> None:
    """Prints a line on the first process."""
    if is_lead():
        print_safe(text)


def check_workdir_version(folder: Path) -> None:
    """Checks that no other version of jaxdist has written the workdir.

    It runs before the config is checked. `workdir.check_run_versions` also checks the
    checkpoints.

    Raises:
      OtherVersion: another version has. It is raised on all processes.
    """
    with coordination.raise_on_all():
        if is_lead():
            run_format.check_folder(folder)


def open_run_data(
    config: RunConfig,
    folder: Path,
    user_dataset: Dataset | None,
    say: Callable[[str], None],
) -> Dataset:
    """Opens the run's data: the caller's, or that of `data.*`.

    All processes compare the fingerprint of the data.

    Args:
      config: the run's config.
      folder: the workdir.
      user_dataset: the caller's data; None: the data of `data.*`.
      say: receives lines of progress.

    Raises:
      ConfigError: processes have different data, or an evaluation has no held-out data.
      SourceError: this process cannot read the data.
      PeerFailed: another process cannot read the data.
    """
    with coordination.raise_on_all():
        dataset = user_dataset or batching.open_data(config, folder, say)
    consistency.agree(lambda: {"data": dataset.fingerprint})
    if config.train.eval_every:
        # It raises a ConfigError if nothing is held out.
        dataset.num_validation_batches(config.batch.global_size)
    return dataset


def open_workdir(
    run: Run,
    requested: RunConfig,
    callbacks: CallbackList,
    stack: contextlib.ExitStack,
) -> None:
    """Locks the run's folder, and opens its checkpoints, rows and events.

    It also sets the run's `origin`: source, versions and machines.

    Args:
      run: the run.
      requested: the config before it was refitted to the devices.
      callbacks: the run's callbacks.
      stack: closes what this function opens.

    Raises:
      ConfigError: processes differ in config, code or folder; another process uses the
        workdir; or the config does not fit the run in the workdir.
    """
    config = run.config
    flat = schema.flatten(schema.to_config_dict(config))
    consistency.agree(lambda: flat | consistency.code(run.spec.model_class))
    with coordination.raise_on_all():
        if is_lead():
            workdir.check_run_versions(run.folder, config)
            source_run.refuse_own_folder(config, run.folder)
            stack.enter_context(workdir.workdir_lock(run.folder))
        callbacks.open(run)
        if is_lead():
            workdir.check_and_write_config(run.folder, requested)
        run.store = workdir.open_checkpoints(run.folder, config)
    stack.enter_context(run.store)
    run.writer = MetricsWriter(run.folder, enabled=is_lead())
    stack.enter_context(contextlib.closing(run.writer))
    owner = run.store.owner()
    consistency.agree(
        lambda: {"the checkpoint folder's owner (all need the same folder)": owner}
    )
    mesh = run.composition.mesh(run.devices)
    run.origin = provenance.describe(run.spec.model_class, mesh.devices)
    run.num_chips = run.origin.get("num_chips", 1)
