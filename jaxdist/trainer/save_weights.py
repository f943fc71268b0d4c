"""Weights alone, as a workdir: config.json and one checkpoint, for generate, evaluate
and init.from_run.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, schema
from jaxdist.distributed import coordination
from jaxdist.step.state import State
from jaxdist.trainer import compose, workdir
from jaxdist.trainer.run_config import RunConfig


def save(config: RunConfig, state: State, folder: Path) -> Path:
    """Writes the weights of a run into a new folder, which it returns; every process
    makes the call.

    Args:
      state: flat layers; weights, or the average that stands for them; no optimizer's
        state.

    Raises:
      ConfigError: something is there, or it cannot be written.
    """
    with coordination.raise_on_all():
        if (
            jax.process_index() == 0
            and folder.exists()
            and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise ConfigError(
                f"{folder}: something is there; give a folder that is empty or not there yet"
            )
    overrides = {"train.ema_decay": 0.0, "checkpoint.folder": ""}
    write(compose.with_overrides(config, overrides), state, folder)
    return folder


def write(
    run: RunConfig,
    state: State,
    folder: Path,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a state without an optimizer's as the one checkpoint of a workdir, and its
    config.json.

    Raises:
      CheckpointError: it could not be saved.
    """
    place = workdir.checkpoints_folder(folder, run)
    at_once = dataclasses.replace(run.checkpoint, asynchronous=False)
    with CheckpointManager(place, at_once) as store:
        store.save(
            int(state.step), state, {**(metadata or {}), **workdir.stored_config(run)}
        )
        failed = [saved.error for saved in store.poll() if saved.error]
        if failed:
            raise failed[0]
    if jax.process_index() == 0:
        workdir.write_json(
            folder / workdir.CONFIG, schema.to_config_dict(run).to_dict()
        )
