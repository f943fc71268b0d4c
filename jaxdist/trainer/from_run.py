"""A run that begins with another run's weights: which step, what of it, and whether it
fits.

The other run is read as every checkpoint is, by manifest, checksums and fingerprints.
Nothing is written, locked or moved there: it may be training still. Its config is data:
no code that it names is imported.
"""

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxdist import interop
from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest, state_dict
from jaxdist.checkpoint.files import ArrayInfo, CheckpointError, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, trees
from jaxdist.config.extras import MissingExtra
from jaxdist.data import load_tokenizer
from jaxdist.data.sources import MADE_ELSEWHERE, NOT_TEXT
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.distributed import consistency
from jaxdist.models import registry
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.storage import run_format
from jaxdist.trainer import config_json, workdir
from jaxdist.trainer.run_config import RunConfig, model_defaults

Parameters = dict[str, jax.ShapeDtypeStruct]
Quantise = Callable[[str, jax.Array], Any]

_SHOWN = 12  # faults of a kind that are spelt out
_FLOATS = ("float64", "float32", "bfloat16", "float16")  # what converts into each other
_LORA = ("rank", "alpha", "base")  # what adapters cannot be read without
_ADAPTER = f"{trees.SEPARATOR}lora_a"  # how the path of an adapter's first factor ends
_LOSS_SCALE = "opt_state/loss_scale/"  # how names of its state begin


@dataclass(frozen=True)
class Source:
    """Where the weights come from."""

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

    def config_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config that a step's metadata holds, {} if it holds none."""
        config = config_json.tupled(_group(metadata, workdir.CONFIG_KEY))
        return config | {"model": _group(config, "model")}


def locate(name: str) -> Source:
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
    return Source(name, checkpoints, inside if step is None else step, beside)


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


# --- what the new run's config takes over ---------------------------------------------


def model_values(
    name: str, config: ConfigDict, chosen: Collection[str]
) -> tuple[dict[str, Any], str]:
    """Returns model.* and data.tokenizer of the run that init.from_run names, for a run
    of this config.

    Of a run whose class is neither this config's nor of this package there are no
    values to take; its arrays may fit all the same.

    Raises:
      ConfigError: no run there; its class must be named here; its tokenizer is lost.
    """
    source = locate(name)
    stored = source.config["model"]
    target, ours = (
        stored.get("target"),
        config.model.get("target", registry.DEFAULT_TARGET),
    )
    if not isinstance(target, str) or target == registry.USER_TARGET:
        return {}, config.data.tokenizer
    if target != ours:
        if "model.target" in chosen or ours != registry.DEFAULT_TARGET:
            return {}, config.data.tokenizer
        if not registry.is_installed(target):
            raise ConfigError(
                f"init.from_run={name}: its model is {target}, whose code a run's folder cannot make run; if "
                f"you trust it, name it here, too: --config.model.target={target}"
            )
    values = {
        n: v
        for n, v in (model_defaults(target) | stored).items()
        if n not in interop.TRAINING
    }
    return values, _tokenizer(source, config, chosen, values)


def _tokenizer(
    source: Source,
    config: ConfigDict,
    chosen: Collection[str],
    values: Mapping[str, Any],
) -> str:
    """Returns the data.tokenizer for the source's model: the file that its run keeps,
    or its name.
    """
    here, data = config.data.tokenizer, _group(source.config, "data")
    there = str(data.get("tokenizer", here))
    kept = source.workdir / TOKENIZER_FILE if source.workdir else None
    if "data.tokenizer" in chosen:
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


# --- the first state ------------------------------------------------------------------


def read_state(
    config: RunConfig,
    built: TrainStep,
    base: Parameters,
    quantise: Quantise,
    folder: Path,
) -> State:
    """Returns the first state of a run: the weights of init.from_run, and all else as
    in a new run.

    The weights are the moving average, where there is one. With init.optimizer they are
    those that the optimizer's state belongs to; an average that both runs keep then
    goes on, too. What goes with the model is copied into the workdir `folder`, for
    exports.

    Args:
      base: the parameters of the model without adapters, by path.
      quantise: makes what a quantised base keeps of one of them.

    Raises:
      ConfigError: no run there, or its arrays are not those of this run's model: the
        first are named.
      CheckpointError: none of its checkpoints can be used.
    """
    source, store = _open(config)
    match: Match | None = None

    def wanted(info: StepInfo) -> dict[str, Any]:
        nonlocal match
        match = _match(config, source, info, built.views.abstract, base)
        return match.as_stored(info.arrays)

    with store:
        try:
            restored = store.restore(wanted, source.step, partial=True)
        except CheckpointError as error:
            raise CheckpointError(f"init.from_run={source.name}: {error}") from error
    assert match is not None
    arrays = match.converted(trees.flatten_names(restored.state))
    _refuse_non_finite(source, {name: arrays[name] for name in match.names.values()})
    if jax.process_index() == 0:
        print(
            f"init.from_run={source.name}: {match.summary} of step {int(arrays['step'])}{match.stretched}"
        )
        if source.workdir and (kept := source.workdir / interop.KEPT).is_dir():
            interop.copy_small_files(kept, folder / interop.KEPT)
    state = built.init(
        {path: quantise(path, arrays[name]) for path, name in match.names.items()}
    )
    if match.carried is None:
        return state
    flat, names = built.views.flat(state), state_dict.to_canonical(match.carried)
    parts = state_dict.from_canonical(
        {name: arrays[name] for name in names}, match.carried
    )
    average = flat.ema if parts.ema is None else parts.ema
    optimizer = parts.opt_state._replace(loss_scale=flat.opt_state.loss_scale)
    return built.views.staged(flat._replace(opt_state=optimizer, ema=average))


def _open(config: RunConfig) -> tuple[Source, CheckpointManager]:
    """Returns the source and its checkpoints to read; raises the same on all
    processes.
    """
    fault = owner = None
    try:
        source = locate(config.init.from_run)
        source.config  # noqa: B018 (raises where there is no checkpoint)
        store = CheckpointManager(source.checkpoints, config.checkpoint, mode="read")
        owner = store.owner()
    except (ConfigError, CheckpointError) as error:
        fault = error
    consistency.agree(lambda: {"init.from_run": fault or f"run {owner}"})
    if fault:
        raise fault
    return source, store


def _refuse_non_finite(source: Source, arrays: Mapping[str, jax.Array]) -> None:
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


def _match(
    config: RunConfig, source: Source, info: StepInfo, flat: State, base: Parameters
) -> Match:
    """Returns what a run takes of a step.

    Raises:
      ConfigError: another model, other adapters or, with init.optimizer, another
        optimizer.
    """
    carries, averaged = (
        config.init.optimizer,
        any(name.startswith("ema/") for name in info.arrays),
    )
    # where a path is in two, the last one counts
    groups = ["frozen", "trainable"] + ["ema"] * (not carries)
    there = {
        path: name
        for group in groups
        for path, name in _by_path(info.arrays, group).items()
    }
    own = trees.flatten_names(flat.trainable) | trees.flatten_names(flat.frozen)
    adapters, adapters_there = (
        any(path.endswith(_ADAPTER) for path in some) for some in (own, there)
    )
    wanted = own if adapters == adapters_there else base
    state, state_there = (
        trees.flatten_names(flat.model_state),
        _by_path(info.arrays, "model_state"),
    )
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
    what = "the weights and the optimizer's state" if carries else "the weights"
    what = "the moving average of the weights" if averaged and not carries else what
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
    """Returns which values of the model are others there, as shapes do not tell all of
    them.
    """
    model = stored["model"]
    there, ours = model.get("target", config.model["target"]), config.model["target"]
    if there != ours or ours == registry.USER_TARGET:
        return []
    ours = {
        name: value
        for name, value in config.model_options.items()
        if name not in interop.TRAINING
    }
    return interop.different(ours, interop.settled(model, ours))


def _stretched(config: RunConfig, stored: Mapping[str, Any]) -> str:
    """Returns what to say of rotary positions that are other ones now, as a run may
    choose.
    """
    ours = {
        name: value for name, value in config.model.items() if name in interop.POSITIONS
    }
    changes = interop.different(ours, stored["model"])
    return f", with other positions: {', '.join(sorted(changes))}" if changes else ""


def _adapter_faults(config: RunConfig, stored: Mapping[str, Any]) -> list[str]:
    there = _group(stored, "lora")
    return [
        f"lora.{name}={ours}, there {there[name]}; set lora.{name}={there[name]}"
        for name in _LORA
        if there.get(name, ours := getattr(config.lora, name)) != ours
    ]


def _merge_fault(source: Source, stored: Mapping[str, Any]) -> str:
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
