"""The export of weights as a workdir: config.json and one checkpoint.

The commands generate and evaluate read it, and so does init.from_run.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.step.state import State
from jaxdist.trainer import compose, workdir
from jaxdist.trainer.run_config import RunConfig, document_of


def save(config: RunConfig, state: State, folder: Path) -> Path:
    """Writes the weights of a run into a new folder. Every process makes the call.

    Args:
      config: the run's config.
      state: the state with flat layers. Its parameters are the weights or their moving
        average. It has no optimizer state.
      folder: the folder, which must be empty or missing.

    Returns:
      The folder.

    Raises:
      ConfigError: the folder is not empty, or cannot be written.
    """
    with coordination.raise_on_all():
        if jax.process_index() == 0 and not _is_free(folder):
            raise ConfigError(
                f"{folder}: something is there; give a folder that is empty or not there yet"
            )
    overrides = {"train.ema_decay": 0.0, "checkpoint.folder": ""}
    write(compose.with_overrides(config, overrides), state, folder)
    return folder


def _is_free(folder: Path) -> bool:
    """Tests whether a folder is empty or missing."""
    if not folder.exists():
        return True
    return folder.is_dir() and not any(folder.iterdir())


def write(
    config: RunConfig,
    state: State,
    folder: Path,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a state as the only checkpoint of a workdir, and config.json.

    Args:
      config: the run's config.
      state: the state with flat layers and without optimizer state.
      folder: the workdir.
      metadata: metadata of the checkpoint in addition to the config.

    Raises:
      CheckpointError: the state could not be saved.
    """
    checkpoints = workdir.checkpoints_folder(folder, config)
    blocking = dataclasses.replace(config.checkpoint, asynchronous=False)
    with CheckpointManager(checkpoints, blocking) as store:
        store.save(
            int(state.step),
            state,
            {**(metadata or {}), **workdir.stored_config(config)},
        )
        errors = [save.error for save in store.poll() if save.error]
        if errors:
            raise errors[0]
    if jax.process_index() == 0:
        workdir.write_json(folder / workdir.CONFIG, document_of(config))
