"""The run that `init.from_run` names: its checkpoints and its config.

The run may still be training, so nothing is written, locked or moved there. Its config
is data: no code that it names is imported.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import ConfigError, schema
from jaxdist.config.extras import MissingExtra
from jaxdist.data import tokenizer_config
from jaxdist.models import registry
from jaxdist.storage import run_format
from jaxdist.storage.paths import is_local
from jaxdist.trainer import run_metadata, workdir
from jaxdist.trainer.run_config import RunConfig


@dataclass(frozen=True)
class SourceRun:
    """The run that the weights come from."""

    name: str  # the value of init.from_run
    checkpoints: Path
    step: int | None  # None = the newest usable step
    workdir: Path | None  # None = there are only checkpoints

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The run's config from a checkpoint, not validated.

        Raises:
          ConfigError: the step does not exist, or the run has no checkpoint.
          CheckpointError: no checkpoint can be used.
        """
        return self.config_of(self.metadata)

    @property
    def trained_with(self) -> dict[str, Any]:
        """The config by key; {} if the run has converted weights, not trained.

        Raises:
          ConfigError: see `config`.
          CheckpointError: no checkpoint can be used.
        """
        if run_metadata.PROGRESS not in self.metadata:
            return {}
        return schema.flatten(self.config)

    @functools.cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Reads the metadata of the step, or of the newest step that is not damaged.

        Raises:
          ConfigError: the step does not exist, or the run has no checkpoint.
          CheckpointError: no checkpoint can be used.
        """
        steps = folders.list_steps(self.checkpoints)
        if self.step is not None and self.step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"init.from_run={self.name}: there is no checkpoint of step {self.step} in "
                f"{self.checkpoints}; steps: {known}"
            )
        candidates: Iterable[int]
        if self.step is None:
            candidates = folders.newest_first(self.checkpoints)
        else:
            candidates = [self.step]
        fault = ""
        for step in candidates:
            try:
                integrity.check(
                    self.checkpoints, step, inside=f"{folders.METADATA_ITEM}/"
                )
                return folders.read_step(self.checkpoints, step).metadata
            except integrity.OtherVersion as error:
                raise CheckpointError(f"init.from_run={self.name}: {error}") from error
            except (CheckpointError, OSError) as error:
                fault = fault or f"step {step}: {error}"
        if fault:
            raise CheckpointError(
                f"init.from_run={self.name}: no usable checkpoint there: {fault}"
            )
        raise ConfigError(
            f"init.from_run={self.name}: no checkpoint in {self.checkpoints}; give the workdir of a run that "
            f"has saved, or its folder of checkpoints"
        )

    @property
    def small_files(self) -> Path | None:
        """The folder of Hugging Face files that the run keeps; None: none."""
        if self.workdir is None:
            return None
        kept = self.workdir / tokenizer_config.HUGGINGFACE
        return kept if kept.is_dir() else None

    def config_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the config in a step's metadata. The group `model` always exists."""
        config: dict[str, Any] = workdir.tupled(group_of(metadata, run_metadata.CONFIG))
        return config | {"model": group_of(config, "model")}


def locate(name: str) -> SourceRun:
    """Finds a run by the value of init.from_run.

    Args:
      name: FOLDER or FOLDER@STEP. The folder is a workdir, its checkpoints, or one step,
        and may be a URL such as gs://...

    Raises:
      ConfigError: the folder does not exist, or is not a run.
    """
    folder = name
    step: int | None = None
    parts = re.fullmatch(r"(?s)(.+)@([0-9]{1,18})", name)
    if parts:
        folder = parts[1]
        step = int(parts[2])
    path = folder if "://" in folder else os.path.expanduser(folder)
    try:
        checkpoints, step_of_folder = folders.locate(path)
    except run_format.OtherVersion as error:
        raise run_format.OtherVersion(f"init.from_run={name}: {error}") from error
    except ConfigError as error:
        fix = ""
        parent, config = os.path.split(name)
        # runs/CONFIG is the default workdir of a config.
        if parent == "runs":
            fix = f", or make it: python -m jaxdist.train --config {config}"
        raise ConfigError(
            f"init.from_run={name}: {error}; give the workdir of a run{fix}"
        ) from error
    if step is None:
        step = step_of_folder
    return SourceRun(
        name=name,
        checkpoints=checkpoints,
        step=step,
        workdir=_workdir_around(folders.as_path(path), checkpoints.parent),
    )


def _workdir_around(*places: Path) -> Path | None:
    """Finds the workdir among some folders; None: it is none of them."""
    for place in places:
        # Workdirs are local.
        if is_local(place) and (place / workdir.CONFIG).is_file():
            return place
    return None


def refuse_code(name: str, target: str) -> None:
    """Checks that a model's code is not stored in the run of init.from_run.

    Raises:
      ConfigError: the code is stored there. That run is data.
    """
    try:
        source = locate(name)
    except (ConfigError, MissingExtra):
        return  # reading the run raises this error again
    for folder in (source.workdir, source.checkpoints):
        if folder is not None and is_local(folder):
            registry.refuse_inside(target, folder)


def refuse_own_folder(config: RunConfig, folder: Path) -> None:
    """Checks that init.from_run does not name the run's own workdir or checkpoints.

    Args:
      config: the run's config.
      folder: the workdir.

    Raises:
      ConfigError: it names one of them.
    """
    name = config.init.from_run
    if not name:
        return
    checkpoints = workdir.checkpoints_folder(folder, config)
    try:
        source = locate(name)
    except ConfigError:
        return  # a run that resumes does not need the source
    same_workdir = source.workdir is not None and _resolved(
        source.workdir
    ) == _resolved(folder)
    if same_workdir or _resolved(checkpoints) == _resolved(source.checkpoints):
        raise ConfigError(
            f"init.from_run={name} is the run's own folder: it resumes by itself; leave the key out, or "
            f"give another --workdir (and checkpoint.folder) to branch from it"
        )


def _resolved(path: Path) -> str:
    return str(path.resolve() if is_local(path) else path).rstrip("/")


def group_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reads a group of a config that is not validated; {} if there is none."""
    group = config.get(name)
    return dict(group) if isinstance(group, dict) else {}
