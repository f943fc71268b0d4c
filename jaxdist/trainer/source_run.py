"""The run that `init.from_run` names, and the config that it implies.

The run may still be training, so nothing is written, locked or moved there. Its config
is data: no code that it names is imported.
"""

import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import ConfigError, schema
from jaxdist.config.extras import MissingExtra
from jaxdist.data import tokenizer_config
from jaxdist.data.sources import table
from jaxdist.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from jaxdist.models import registry
from jaxdist.models.model_values import for_logits
from jaxdist.storage import run_format
from jaxdist.storage.paths import is_local
from jaxdist.trainer import run_metadata, workdir
from jaxdist.trainer.run_config import RunConfig, model_defaults
from jaxdist.trainer.weight_source import ImpliedConfig


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


# --- the implied config ---------------------------------------------------------------


def implied_config(config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
    """Reads the config that init.from_run implies; see `WeightSource.config_of`.

    A source implies no values if its model's class is neither the config's nor one of
    jaxdist. Its arrays may still fit.

    Raises:
      ConfigError: the run does not exist, its class must be named in the config, or its
        tokenizer is missing.
    """
    name = config.init.from_run
    source = locate(name)
    stored = source.config["model"]
    target = stored.get("target")
    config_target = config.model.get("target", registry.DEFAULT_TARGET)
    nothing = ImpliedConfig({}, config.data.tokenizer, source.trained_with)
    if not isinstance(target, str) or target == registry.USER_TARGET:
        return nothing
    if target != config_target:
        if "model.target" in set_keys or config_target != registry.DEFAULT_TARGET:
            return nothing
        if not registry.is_installed(target):
            raise ConfigError(
                f"init.from_run={name}: its model is {target}, whose code a run's folder cannot make run; if "
                f"you trust it, name it here, too: --config.model.target={target}"
            )
    values = for_logits(model_defaults(target) | stored)
    tokenizer = _tokenizer(source, config, set_keys, values)
    return ImpliedConfig(values, tokenizer, source.trained_with)


def _tokenizer(
    source: SourceRun,
    config: ConfigDict,
    set_keys: Collection[str],
    values: Mapping[str, Any],
) -> str:
    """Chooses the value of data.tokenizer for the source's model.

    Args:
      source: the source.
      config: the config of the new run.
      set_keys: keys that the user has set.
      values: the values of the source's model.

    Raises:
      ConfigError: the source's tokenizer is missing, and the new run needs it.
    """
    own_tokenizer: str = config.data.tokenizer
    data = group_of(source.config, "data")
    source_tokenizer = str(data.get("tokenizer", own_tokenizer))
    if "data.tokenizer" in set_keys:
        return own_tokenizer
    kept = source.workdir / TOKENIZER_FILE if source.workdir else None
    if kept and kept.is_file():
        return str(kept)
    # If the source's data has token ids, the default tokenizer says nothing: the ids
    # come from an unknown tokenizer.
    is_unknown = source_tokenizer == "bytes" and table.has_ids(str(data.get("source")))
    if source_tokenizer == "bytes" and not is_unknown:
        return source_tokenizer
    if os.path.isfile(os.path.expanduser(source_tokenizer)):
        return source_tokenizer
    data_source = config.data.source
    has_no_texts = table.has_ids(data_source) or table.has_samples(data_source)
    needs_tokenizer = not has_no_texts and "vocab_size" in values
    if needs_tokenizer and values["vocab_size"] != load_tokenizer("bytes").vocab_size:
        raise ConfigError(
            f"init.from_run={source.name}: its tokenizer ({source_tokenizer}) is not there, and no {TOKENIZER_FILE} "
            f"beside its checkpoints; set data.tokenizer to the path of that file"
        )
    return own_tokenizer
