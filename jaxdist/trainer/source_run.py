"""The run that `init.from_run` names: where it is, and the config that it implies.

Nothing is written, locked or moved there: it may be training still. Its config is data:
no code that it names is imported.
"""

import functools
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.config import ConfigError
from jaxdist.config.extras import MissingExtra
from jaxdist.data import load_tokenizer, tokenizer_config
from jaxdist.data.sources import table
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.models import registry
from jaxdist.models.model_values import for_logits
from jaxdist.storage import run_format
from jaxdist.trainer import run_metadata, workdir
from jaxdist.trainer.run_config import RunConfig, model_defaults
from jaxdist.trainer.weight_source import ImpliedConfig


@dataclass(frozen=True)
class SourceRun:
    """The run that the weights come from."""

    name: str  # as the config says it
    checkpoints: Path
    step: int | None  # None: the newest usable one
    workdir: Path | None  # None: nothing but checkpoints

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The config of its run as a checkpoint has it, unchecked; {} if it has none.

        Raises:
          ConfigError: there is no such step, or none at all.
        """
        return self.config_of(self._metadata())

    def _metadata(self) -> Mapping[str, Any]:
        """Returns that of the step, or of the newest one that has not changed since it
        was sealed.
        """
        fault = ""
        steps = folders.list_steps(self.checkpoints)
        if self.step is not None and self.step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"init.from_run={self.name}: there is no checkpoint of step {self.step} in "
                f"{self.checkpoints}; steps: {known}"
            )
        for step in (
            folders.newest_first(self.checkpoints) if self.step is None else [self.step]
        ):
            try:
                manifest.check(
                    self.checkpoints, step, inside=f"{folders.METADATA_ITEM}/"
                )
                return folders.read_step(self.checkpoints, step).metadata
            except manifest.OtherVersion as error:
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
        """The folder of the files that came with its first weights; None: it has none."""
        kept = self.workdir / tokenizer_config.HUGGINGFACE if self.workdir else None
        return kept if kept is not None and kept.is_dir() else None

    def config_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config that a step's metadata holds, {} if it holds none."""
        config = workdir.tupled(group_of(metadata, run_metadata.CONFIG))
        return config | {"model": group_of(config, "model")}


def locate(name: str) -> SourceRun:
    """Finds the run of FOLDER or FOLDER@STEP: a workdir, its checkpoints, or a step
    in it; also gs://.

    Raises:
      ConfigError: there is no such folder.
    """
    parts = re.fullmatch(r"(?s)(.+)@([0-9]{1,18})", name)
    folder, step = (parts[1], int(parts[2])) if parts else (name, None)
    path = folder if "://" in folder else os.path.expanduser(folder)
    try:
        checkpoints, inside = folders.locate(path)
    except run_format.OtherVersion as error:
        raise run_format.OtherVersion(f"init.from_run={name}: {error}") from error
    except ConfigError as error:
        cure = ""
        parent, config = os.path.split(name)
        if parent == "runs":  # runs/CONFIG, unless a run was told otherwise
            cure = f", or make it: python -m jaxdist.train --config {config}"
        raise ConfigError(
            f"init.from_run={name}: {error}; give the workdir of a run{cure}"
        ) from error
    around = (folders.as_path(path), checkpoints.parent)
    # as every workdir is
    local = [place for place in around if isinstance(place, Path)]
    beside = next(
        (place for place in local if (place / workdir.CONFIG).is_file()), None
    )
    return SourceRun(name, checkpoints, inside if step is None else step, beside)


def refuse_code(name: str, target: str) -> None:
    """Raises ConfigError if a model's file lies in the run that init.from_run names,
    which is data.
    """
    try:
        source = locate(name)
    except (ConfigError, MissingExtra):
        return  # nothing there that can be read; said where it is
    for folder in (source.workdir, source.checkpoints):
        if isinstance(folder, Path):
            registry.refuse_inside(target, folder)


def refuse_own_folder(config: RunConfig, folder: Path) -> None:
    """Raises ConfigError where init.from_run names the run's own workdir or
    checkpoints.
    """
    name = config.init.from_run
    if not name:
        return
    own = workdir.checkpoints_folder(folder, config)
    try:
        source = locate(name)
    except ConfigError:
        return  # what is not there is not this run's; one that goes on needs it no more
    same_workdir = source.workdir is not None and _resolved(
        source.workdir
    ) == _resolved(folder)
    if same_workdir or _resolved(own) == _resolved(source.checkpoints):
        raise ConfigError(
            f"init.from_run={name} is the run's own folder: it resumes by itself; leave the key out, or "
            f"give another --workdir (and checkpoint.folder) to branch from it"
        )


def _resolved(path: Path) -> str:
    return str(path.resolve() if isinstance(path, Path) else path).rstrip("/")


def group_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a group of a config that nobody has checked; {} if it has none."""
    group = config.get(name)
    return dict(group) if isinstance(group, dict) else {}


# --- the config that it implies ------------------------------------------------------


def implied_config(config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
    """Reads the config of the run that a config names; see `WeightSource.config_of`.

    A run whose class is neither this config's nor of this package has no values to
    take; its arrays may fit all the same.

    Raises:
      ConfigError: no run there; its class must be named here; its tokenizer is lost.
    """
    name = config.init.from_run
    source = locate(name)
    stored = source.config["model"]
    target = stored.get("target")
    ours = config.model.get("target", registry.DEFAULT_TARGET)
    nothing = ImpliedConfig({}, config.data.tokenizer)
    if not isinstance(target, str) or target == registry.USER_TARGET:
        return nothing
    if target != ours:
        if "model.target" in set_keys or ours != registry.DEFAULT_TARGET:
            return nothing
        if not registry.is_installed(target):
            raise ConfigError(
                f"init.from_run={name}: its model is {target}, whose code a run's folder cannot make run; if "
                f"you trust it, name it here, too: --config.model.target={target}"
            )
    values = for_logits(model_defaults(target) | stored)
    return ImpliedConfig(values, _tokenizer(source, config, set_keys, values))


def _tokenizer(
    source: SourceRun,
    config: ConfigDict,
    set_keys: Collection[str],
    values: Mapping[str, Any],
) -> str:
    """Returns the data.tokenizer for the source's model: the file that its run keeps,
    or its name.
    """
    here = config.data.tokenizer
    data = group_of(source.config, "data")
    there = str(data.get("tokenizer", here))
    kept = source.workdir / TOKENIZER_FILE if source.workdir else None
    if "data.tokenizer" in set_keys:
        return here
    if kept and kept.is_file():
        return str(kept)
    # The default beside ids that somebody else made: nobody said with which tokenizer.
    is_unknown = there == "bytes" and table.has_ids(str(data.get("source")))
    if there == "bytes" and not is_unknown:
        return there
    if os.path.isfile(os.path.expanduser(there)):
        return there
    source_here = config.data.source
    has_no_texts = table.has_ids(source_here) or table.has_samples(source_here)
    needless = has_no_texts or "vocab_size" not in values
    if not needless and values["vocab_size"] != load_tokenizer("bytes").vocab_size:
        raise ConfigError(
            f"init.from_run={source.name}: its tokenizer ({there}) is not there, and no {TOKENIZER_FILE} "
            f"beside its checkpoints; set data.tokenizer to the path of that file"
        )
    return here
