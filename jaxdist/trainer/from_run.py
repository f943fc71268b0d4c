"""The weights of another run as initial weights: which step, which arrays, and whether
they fit.

The other run is read as every checkpoint is, by manifest, checksums and fingerprints.
`source_run` finds it and reads its config.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxdist.checkpoint import state_dict
from jaxdist.checkpoint.files import ArrayInfo, CheckpointError, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, trees
from jaxdist.models import registry
from jaxdist.models.model_values import (
    POSITIONS,
    differing_values,
    for_logits,
    without_stretch,
)
from jaxdist.step.state import State
from jaxdist.trainer import source_run
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.source_run import SourceRun, group_of
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


# --- the source -----------------------------------------------------------------------


class AnotherRun:
    """The weights of another run's checkpoint: its moving average, where it has one.

    With init.optimizer they are the weights that the optimizer's state belongs to; an
    average that both runs keep then continues, too.
    """

    key: ClassVar[str] = "init.from_run"
    implies_config: ClassVar[bool] = True

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        """Reads the config of the run; see `WeightSource.config_of`."""
        return source_run.implied_config(config, set_keys)

    def open(self, target: Target) -> OpenedWeights:
        """Finds the run and its checkpoints."""
        config = target.config
        source = source_run.locate(config.init.from_run)
        source.config  # noqa: B018 (raises where there is no checkpoint)
        store = CheckpointManager(source.checkpoints, config.checkpoint, mode="read")
        load = functools.partial(_load, target, source, store)
        return OpenedWeights(f"run {store.owner()}", load)


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
    """Checks that the other run has not diverged.

    Raises:
      ConfigError: naming the arrays that hold NaN or infinite values.
    """
    finite = jax.jit(
        lambda arrays: {name: jnp.isfinite(x).all() for name, x in arrays.items()}
    )(arrays)
    bad = [name for name, good in jax.device_get(finite).items() if not good]
    if bad:
        raise ConfigError(
            f"init.from_run={source.name}: NaN or infinite values in {_listed(bad)}; name "
            f"an earlier step (FOLDER@STEP)"
        )


def _listed(names: Sequence[str]) -> str:
    """Joins the first names, and counts the others."""
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text


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
        stored = {}
        for name, x in self.ours.items():
            there = arrays[name]
            stored[name] = jax.ShapeDtypeStruct(
                there.shape, there.dtype, sharding=x.sharding
            )
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
    """Lists the values that adapters cannot be read without, and that differ there."""
    theirs = group_of(stored, "lora")
    faults = []
    for name in _LORA:
        ours = getattr(config.lora, name)
        there = theirs.get(name, ours)
        if there != ours:
            faults.append(f"lora.{name}={ours}, there {there}; set lora.{name}={there}")
    return faults


def _merge_fault(source: SourceRun, stored: Mapping[str, Any]) -> str:
    lora = group_of(stored, "lora")
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
    """Lists the arrays that only one has, or whose shape or kind differs; the first."""
    lines = []
    for path in {**ours, **there}:
        theirs = arrays[there[path]] if path in there else None
        here = None
        if path in ours:
            here = ArrayInfo(tuple(ours[path].shape), str(ours[path].dtype))
        if theirs is None or here is None or not _converts(theirs, here):
            lines.append(
                f"{path}: {theirs or 'nothing'} there, {here or 'nothing'} here"
            )
    if len(lines) > _SHOWN:
        return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more arrays"]
    return lines


def _converts(theirs: ArrayInfo, ours: ArrayInfo) -> bool:
    floats = theirs.dtype in _FLOATS and ours.dtype in _FLOATS
    return theirs.shape == ours.shape and (floats or theirs.dtype == ours.dtype)


def _optimizer_faults(
    arrays: Mapping[str, ArrayInfo], carried: Mapping[str, Any]
) -> list[str]:
    """Lists, in one line, what the other optimizer keeps that this run's does not, and
    what it lacks.
    """
    ours = state_dict.describe(carried)
    there = {
        name
        for name in _by_path(arrays, "opt_state").values()
        if not name.startswith(_LOSS_SCALE)
    }
    missing = {name for name in ours if name not in arrays}
    others = {
        name
        for name in there
        if name not in ours or not _converts(arrays[name], ours[name])
    }
    differing = sorted(missing | others)
    if not differing:
        return []
    return [
        f"its optimizer keeps another state than this run's ({_listed(differing)}); set "
        f"optimizer.* as there, or leave out init.optimizer"
    ]
