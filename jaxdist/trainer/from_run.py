"""The weights of another run as initial weights: which step, which arrays, and whether
they fit.

The other run is read as every checkpoint is, by manifest, checksums and fingerprints.
Nothing is written, locked or moved there: it may be training still. Its config is data:
no code that it names is imported.
"""

import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest, state_dict
from jaxdist.checkpoint.files import ArrayInfo, CheckpointError, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, trees
from jaxdist.config.extras import MissingExtra
from jaxdist.data import load_tokenizer, tokenizer_config
from jaxdist.data.sources import MADE_ELSEWHERE, NOT_TEXT
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.models import registry
from jaxdist.models.model_values import (
    POSITIONS,
    differing_values,
    for_logits,
    without_stretch,
)
from jaxdist.step.state import State
from jaxdist.storage import run_format
from jaxdist.trainer import config_json, workdir
from jaxdist.trainer.run_config import RunConfig, model_defaults
from jaxdist.trainer.weight_source import (
    ImpliedConfig,
    LoadedWeights,
    OpenedWeights,
    Target,
)

Parameters = dict[str, jax.ShapeDtypeStruct]

_SHOWN = 12  # faults of a kind that are spelt out
_FLOATS = ("float64", "float32", "bfloat16", "float16")  # what converts into each other
_LORA = ("rank", "alpha", "base")  # what adapters cannot be read without
_ADAPTER = f"{trees.SEPARATOR}lora_a"  # how the path of an adapter's first factor ends
_LOSS_SCALE = "opt_state/loss_scale/"  # how names of its state begin


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
        config = config_json.tupled(_group(metadata, workdir.CONFIG_KEY))
        return config | {"model": _group(config, "model")}


def locate(name: str) -> SourceRun:
    """Returns what FOLDER or FOLDER@STEP means: a workdir, its checkpoints, or a step
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
        made = os.path.split(name)  # runs/CONFIG, unless a run was told otherwise
        cure = (
            f", or make it: python -m jaxdist.train --config {made[1]}"
            if made[0] == "runs"
            else ""
        )
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


def _group(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    group = config.get(name)
    return dict(group) if isinstance(group, dict) else {}


# --- the source -----------------------------------------------------------------------


class AnotherRun:
    """The weights of another run's checkpoint: its moving average, where it has one.

    With init.optimizer they are the weights that the optimizer's state belongs to; an
    average that both runs keep then continues, too.
    """

    key: ClassVar[str] = "init.from_run"
    implies_config: ClassVar[bool] = True

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        """Reads the config of the run; see `WeightSource.config_of`.

        A run whose class is neither this config's nor of this package has no values to
        take; its arrays may fit all the same.

        Raises:
          ConfigError: no run there; its class must be named here; its tokenizer is
            lost.
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

    def open(self, target: Target) -> OpenedWeights:
        """Finds the run and its checkpoints."""
        config = target.config
        source = locate(config.init.from_run)
        source.config  # noqa: B018 (raises where there is no checkpoint)
        store = CheckpointManager(source.checkpoints, config.checkpoint, mode="read")
        load = functools.partial(_load, target, source, store)
        return OpenedWeights(f"run {store.owner()}", load)


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
    data = _group(source.config, "data")
    there = str(data.get("tokenizer", here))
    kept = source.workdir / TOKENIZER_FILE if source.workdir else None
    if "data.tokenizer" in set_keys:
        return here
    if kept and kept.is_file():
        return str(kept)
    # which one, nobody has said
    made_elsewhere = there == "bytes" and data.get("source") in MADE_ELSEWHERE
    if (
        there == "bytes"
        and not made_elsewhere
        or os.path.isfile(os.path.expanduser(there))
    ):
        return there
    needless = (
        config.data.source in (*MADE_ELSEWHERE, *NOT_TEXT) or "vocab_size" not in values
    )
    if not needless and values["vocab_size"] != load_tokenizer("bytes").vocab_size:
        raise ConfigError(
            f"init.from_run={source.name}: its tokenizer ({there}) is not there, and no {TOKENIZER_FILE} "
            f"beside its checkpoints; set data.tokenizer to the path of that file"
        )
    return here


# --- the weights ----------------------------------------------------------------------


def _load(target: Target, source: SourceRun, store: CheckpointManager) -> LoadedWeights:
    """Reads the weights of a run's step, each array into its shards.

    Raises:
      ConfigError: the arrays are not those of this run's model: the first are named; or
        they have NaN or infinite values.
      CheckpointError: no checkpoint can be used.
    """
    match: Match | None = None

    def wanted(info: StepInfo) -> dict[str, Any]:
        nonlocal match
        match = _match(target, source, info)
        return match.as_stored(info.arrays)

    with store:
        try:
            restored = store.restore(wanted, source.step, partial=True)
        except CheckpointError as error:
            raise CheckpointError(f"init.from_run={source.name}: {error}") from error
    assert match is not None
    arrays = match.converted(trees.flatten_names(restored.state))
    _refuse_non_finite(source, {name: arrays[name] for name in match.names.values()})
    step = int(arrays["step"])
    weights = LoadedWeights(
        {path: target.store(path, arrays[name]) for path, name in match.names.items()},
        note=f"init.from_run={source.name}: {match.summary} of step {step}{match.stretched}",
        small_files=source.small_files,
    )
    if match.carried is None:
        return weights
    carried = state_dict.from_canonical(
        {name: arrays[name] for name in state_dict.to_canonical(match.carried)},
        match.carried,
    )
    return weights._replace(opt_state=carried.opt_state, ema=carried.ema)


def _refuse_non_finite(source: SourceRun, arrays: Mapping[str, jax.Array]) -> None:
    """Raises ConfigError naming the arrays that hold NaN or infinite values: that run
    has diverged.
    """
    finite = jax.jit(
        lambda arrays: {name: jnp.isfinite(x).all() for name, x in arrays.items()}
    )(arrays)
    if bad := [name for name, good in jax.device_get(finite).items() if not good]:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ConfigError(
            f"init.from_run={source.name}: NaN or infinite values in {', '.join(bad[:_SHOWN])}{more}; name "
            f"an earlier step (FOLDER@STEP)"
        )


class Match(NamedTuple):
    """Which arrays of a checkpoint a run begins with."""

    names: dict[str, str]  # path of a parameter or model state of ours -> name there
    ours: dict[str, jax.ShapeDtypeStruct]  # name there -> as the run has it
    # with init.optimizer: of the run's abstract state what goes on, None for the rest
    carried: State | None
    summary: str
    stretched: str = ""  # which values of rotary positions are others

    def as_stored(self, arrays: Mapping[str, ArrayInfo]) -> dict[str, Any]:
        """Returns the abstract arrays to read: as they are there, laid out as the run
        has them.
        """
        places = {name: x.sharding for name, x in self.ours.items()}
        stored = {
            name: jax.ShapeDtypeStruct(
                arrays[name].shape, arrays[name].dtype, sharding=place
            )
            for name, place in places.items()
        }
        return trees.unflatten_names(stored)

    def converted(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the arrays in the run's dtypes."""
        return {name: x.astype(self.ours[name].dtype) for name, x in arrays.items()}


def _match(target: Target, source: SourceRun, info: StepInfo) -> Match:
    """Chooses the arrays that a run takes of a step.

    Raises:
      ConfigError: another model, other adapters or, with init.optimizer, another
        optimizer.
    """
    config = target.config
    flat = target.abstract
    carries = config.init.optimizer
    averaged = any(name.startswith("ema/") for name in info.arrays)
    # where a path is in two, the last one counts
    groups = ["frozen", "trainable"]
    if not carries:
        groups.append("ema")
    there = {
        path: name
        for group in groups
        for path, name in _by_path(info.arrays, group).items()
    }
    own = trees.flatten_names(flat.trainable) | trees.flatten_names(flat.frozen)
    adapters = any(path.endswith(_ADAPTER) for path in own)
    adapters_there = any(path.endswith(_ADAPTER) for path in there)
    wanted = own if adapters == adapters_there else target.parameters
    state = trees.flatten_names(flat.model_state)
    state_there = _by_path(info.arrays, "model_state")
    stored = source.config_of(info.metadata)
    faults = _model_faults(config, stored)
    if adapters_there and not adapters:
        faults.append(_merge_fault(source, stored))
    else:
        faults += _adapter_faults(config, stored) if adapters_there else []
        faults += _misfits(info.arrays, there | state_there, wanted | state)
    carried = None
    if carries:
        average = flat.ema if averaged else None
        optimizer = flat.opt_state._replace(loss_scale=None)  # a run finds its own
        carried = State(None, None, None, None, optimizer, average)  # type: ignore[arg-type]
        faults += _optimizer_faults(info.arrays, state_dict.to_canonical(carried))
    if faults:
        raise ConfigError(f"init.from_run={source.name}: {fault}" for fault in faults)
    names = {path: (there | state_there)[path] for path in wanted | state}
    ours = {name: (wanted | state)[path] for path, name in names.items()} | {
        "step": flat.step
    }
    what = "the weights"
    if carries:
        what = "the weights and the optimizer's state"
    elif averaged:
        what = "the moving average of the weights"
    return Match(
        names,
        ours | (state_dict.to_canonical(carried) if carried else {}),
        carried,
        what,
        _stretched(config, stored),
    )


def _by_path(arrays: Iterable[str], group: str) -> dict[str, str]:
    """Returns {path: name} of the arrays in a group: trainable, frozen, ema,
    model_state, opt_state.
    """
    prefix = group + trees.SEPARATOR
    return {
        name.removeprefix(prefix): name for name in arrays if name.startswith(prefix)
    }


def _model_faults(config: RunConfig, stored: Mapping[str, Any]) -> list[str]:
    """Lists the values of the model that differ there: shapes do not show all of
    them.
    """
    model = stored["model"]
    ours = config.model["target"]
    if model.get("target", ours) != ours or ours == registry.USER_TARGET:
        return []
    values = for_logits(config.model_options)
    return differing_values(values, without_stretch(model, values))


def _stretched(config: RunConfig, stored: Mapping[str, Any]) -> str:
    """Describes the rotary positions that the new run has changed; "" if none."""
    ours = {name: value for name, value in config.model.items() if name in POSITIONS}
    changes = sorted(differing_values(ours, stored["model"]))
    return f", with other positions: {', '.join(changes)}" if changes else ""


def _adapter_faults(config: RunConfig, stored: Mapping[str, Any]) -> list[str]:
    there = _group(stored, "lora")
    return [
        f"lora.{name}={ours}, there {there[name]}; set lora.{name}={there[name]}"
        for name in _LORA
        if there.get(name, ours := getattr(config.lora, name)) != ours
    ]


def _merge_fault(source: SourceRun, stored: Mapping[str, Any]) -> str:
    lora = _group(stored, "lora")
    like = " ".join(
        f"--config.lora.{name}={lora[name]}" for name in _LORA if name in lora
    )
    return (
        f"it has adapters, and this run has none; train them on ({like or 'set lora.* as there'}), or merge "
        f"them: jaxdist convert --from {source.workdir or 'WORKDIR'} --to MERGED --format huggingface, then "
        f"init.from_huggingface=MERGED"
    )


def _misfits(
    arrays: Mapping[str, ArrayInfo], there: Mapping[str, str], ours: Parameters
) -> list[str]:
    """Returns a line for each array that only one has, or whose shape or kind differs;
    the first ones.
    """
    lines = []
    for path in {**ours, **there}:
        theirs = arrays[there[path]] if path in there else None
        here = (
            ArrayInfo(tuple(ours[path].shape), str(ours[path].dtype))
            if path in ours
            else None
        )
        if theirs is None or here is None or not _converts(theirs, here):
            lines.append(
                f"{path}: {theirs or 'nothing'} there, {here or 'nothing'} here"
            )
    return (
        lines
        if len(lines) <= _SHOWN
        else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more arrays"]
    )


def _converts(theirs: ArrayInfo, ours: ArrayInfo) -> bool:
    same = (
        theirs.dtype == ours.dtype or theirs.dtype in _FLOATS and ours.dtype in _FLOATS
    )
    return same and theirs.shape == ours.shape


def _optimizer_faults(
    arrays: Mapping[str, ArrayInfo], carried: Mapping[str, Any]
) -> list[str]:
    """Returns a line if what the optimizer keeps is not what this run's optimizer
    keeps.
    """
    ours = state_dict.describe(carried)
    there = {
        name
        for name in _by_path(arrays, "opt_state").values()
        if not name.startswith(_LOSS_SCALE)
    }
    differ = {n for n in ours if n in there and not _converts(arrays[n], ours[n])}
    if faults := sorted(
        differ | ((ours.keys() | there) - {n for n in ours if n in arrays})
    ):
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        return [
            f"its optimizer keeps another state than this run's ({', '.join(faults[:_SHOWN])}{more}); set "
            f"optimizer.* as there, or leave out init.optimizer"
        ]
    return []
