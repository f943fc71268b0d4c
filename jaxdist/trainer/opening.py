"""The opening of a run's workdir and data, before its first step."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxdist.config import ConfigError
from jaxdist.data.dataset import Dataset
from jaxdist.distributed import consistency, coordination
from jaxdist.storage import run_format
from jaxdist.telemetry.display import lively, print_safe
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer import (
    batching,
    compose,
    held_out,
    provenance,
    source_run,
    workdir,
)
from jaxdist.trainer.callbacks import CallbackList, Run
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig, values_of


def log(text: str) -> None:
    """Prints a line on the first process."""
    if coordination.is_lead():
        print_safe(text)


def check_workdir(folder: Path, config: RunConfig) -> None:
    """Checks the workdir's version, and that no link leads out of it.

    It runs before the config is checked. `workdir.check_run_versions` also checks the
    checkpoints.

    Args:
      folder: the workdir.
      config: the run's config.

    Raises:
      OtherVersion: another version of jaxdist has written the workdir. It is raised on
        all processes.
      ConfigError: a run would write or delete files outside of the workdir.
    """
    with coordination.raise_on_all():
        if coordination.is_lead():
            run_format.check_folder(folder)
            workdir.refuse_links(folder, config)


def new_run(
    composition: Composition,
    folder: Path,
    devices: Sequence[jax.Device],
    *,
    on_progress: Callable[[str], None],
    request_stop: Callable[[], None],
) -> Run:
    """Makes the run, which logs on the first process.

    Args:
      composition: model, data format and mesh.
      folder: the workdir.
      devices: devices to train on.
      on_progress: is called with each line of slow work, such as reading data.
      request_stop: asks all processes to save and stop; callable from any thread.
    """
    return Run(
        composition=composition,
        folder=folder,
        devices=devices,
        note=log,
        say=lively(log, on_progress),
        request_stop=request_stop,
    )


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
        limited = held_out.with_auto_limit(config)
        dataset = user_dataset or batching.open_data(limited, folder, say)
    consistency.agree(lambda: {"data": dataset.fingerprint})
    # It raises a ConfigError if an evaluation is required and nothing is held out.
    held_out.evaluation_interval(config, dataset)
    return dataset


def settle_epochs(run: Run, user_dataset: Dataset | None = None) -> None:
    """Replaces train.epochs by the number of steps.

    It opens the data to count it. The run opens them again: callbacks, the schedule and
    the held-out data depend on the number of steps. `run.say` then skips the lines that
    this opening has printed.

    Args:
      run: the run, whose config has train.epochs.
      user_dataset: the caller's data; None: the data of `data.*`.

    Raises:
      ConfigError: the data cannot be counted, or the steps are too many.
    """
    epochs = run.config.train.epochs
    size = run.config.batch.global_size
    lines = _Lines(run.say)
    with coordination.raise_on_all():
        # The held-out data may still be limited, so their size is not printed yet.
        dataset = user_dataset or batching.open_data(
            run.config, run.folder, lines.say, summary=False
        )
    run.say = lines.say_new
    samples = dataset.epoch_samples
    if samples is None:
        raise ConfigError(
            f"train.epochs={epochs:g}: {dataset.name} has no epoch, because its sources "
            f"are mixed by weight; set train.steps"
        )
    steps = math.ceil(epochs * samples / size)
    if steps >= 2**31:
        raise ConfigError(
            f"train.epochs={epochs:g}: these are {steps} steps, required less than 2**31 "
            f"= {2**31}; lower it"
        )
    config = _with_steps(run.config, steps)
    run.composition = dataclasses.replace(run.composition, config=config)


class _Lines:
    """The lines of two openings of the same data, each printed once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Prints a line of the first opening."""
        self._said.add(text)
        self._say(text)

    def say_new(self, text: str) -> None:
        """Prints a line, unless it is one of the first opening."""
        if text not in self._said:
            self._say(text)


def store_steps(run: Run, requested: RunConfig) -> None:
    """Writes the number of steps to config.json, in place of train.epochs.

    It follows the restore, which refuses data that have changed: their number of steps
    must not become the run's.

    Args:
      run: the run, whose config has the steps.
      requested: the config before it was refitted to the devices.

    Raises:
      ConfigError: the file cannot be written.
    """
    config = _with_steps(requested, run.config.train.steps)
    with coordination.raise_on_all():
        if coordination.is_lead():
            workdir.write_config(run.folder, config)


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    return compose.with_overrides(config, {"train.steps": steps, "train.epochs": 0.0})


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
    flat = values_of(config)
    consistency.agree(lambda: flat | consistency.code(run.spec.model_class))
    with coordination.raise_on_all():
        if coordination.is_lead():
            workdir.check_run_versions(run.folder, config)
            source_run.refuse_own_folder(config, run.folder)
            stack.enter_context(workdir.workdir_lock(run.folder))
        callbacks.open(run)
        if coordination.is_lead():
            workdir.check_and_write_config(run.folder, requested)
        run.store = workdir.open_checkpoints(run.folder, config)
    stack.enter_context(run.store)
    run.writer = MetricsWriter(run.folder, enabled=coordination.is_lead())
    stack.enter_context(contextlib.closing(run.writer))
    owner = run.store.owner()
    consistency.agree(
        lambda: {"the checkpoint folder's owner (all need the same folder)": owner}
    )
    mesh = run.composition.mesh(run.devices)
    run.origin = provenance.describe(run.spec.model_class, mesh.devices)
    run.num_chips = run.origin.get("num_chips", 1)
