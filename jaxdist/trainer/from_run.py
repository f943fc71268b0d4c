"""Another run as initial weights: the config that it implies, and the arrays that fit.

The other run is called the source. Its checkpoints are verified like any others, by
manifest and checksums. `source_run` finds it and reads its config.
"""

import functools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxdist.checkpoint import state_dict
from jaxdist.checkpoint.folders import ArrayInfo, CheckpointError, StepInfo
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, trees
from jaxdist.data.sources import table
from jaxdist.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from jaxdist.models import registry
from jaxdist.models.model_values import (
    POSITIONS,
    differing_values,
    for_logits,
    gets_new_head,
    without_changes,
)
from jaxdist.models.multi_token import belongs_to_modules
from jaxdist.step.state import State
from jaxdist.trainer import fine_tuning, source_run
from jaxdist.trainer.run_config import RunConfig, model_defaults
from jaxdist.trainer.source_run import SourceRun, group_of
from jaxdist.trainer.weight_source import (
    ImpliedConfig,
    LoadedWeights,
    OpenedWeights,
    Target,
)

Parameters = dict[str, jax.ShapeDtypeStruct]

_SHOWN = 12  # faults of a kind that an error lists
_FLOATS = ("float64", "float32", "bfloat16", "float16")  # convertible into each other
_LORA = ("rank", "alpha", "base")  # options of lora that adapters depend on
_ADAPTER = f"{trees.SEPARATOR}lora_a"  # end of the path of an adapter's first factor
# paths of the heads of jaxdist's transformer, by model.head
_SCORE = "score"
_LANGUAGE_HEAD = "output"
_LOSS_SCALE = "opt_state/loss_scale/"  # prefix of the names of the loss scale


# --- the source -----------------------------------------------------------------------


class AnotherRun:
    """The weights of another run's checkpoint: its moving average, if it has one.

    With init.optimizer, they are the weights themselves, to which the optimizer's state
    belongs. A moving average that both runs have then continues.
    """

    key: ClassVar[str] = "init.from_run"
    implies_config: ClassVar[bool] = True

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        """Reads the config of the source; see `WeightSource.config_of`."""
        return _implied_config(config, set_keys)

    def open(self, target: Target) -> OpenedWeights:
        """Finds the source and its checkpoints; see `WeightSource.open`."""
        config = target.config
        source = source_run.locate(config.init.from_run)
        source.config  # noqa: B018 (it raises an error if there is no checkpoint)
        store = CheckpointManager(source.checkpoints, config.checkpoint, mode="read")
        load = functools.partial(_load, target, source, store)
        return OpenedWeights(f"run {store.owner()}", load)


# --- the implied config ---------------------------------------------------------------


def _implied_config(config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
    """Reads the config that init.from_run implies; see `WeightSource.config_of`.

    A source implies no values if its model's class is neither the config's nor one of
    jaxdist. Its arrays may still fit.

    Raises:
      ConfigError: the run does not exist, its class must be named in the config, or its
        tokenizer is missing.
    """
    name = config.init.from_run
    source = source_run.locate(name)
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


# --- the weights ----------------------------------------------------------------------


def _load(target: Target, source: SourceRun, store: CheckpointManager) -> LoadedWeights:
    """Reads the weights of the source, each array with the sharding of this run.

    Raises:
      ConfigError: the arrays do not fit this run's model, or have non-finite values.
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
    note = (
        f"init.from_run={source.name}: {match.summary} of step {step}{match.stretched}"
    )
    for line in fine_tuning.batch_warnings(target.config, source.trained_with):
        note += f"\nwarning: {line}"
    weights = LoadedWeights(
        values={
            path: target.store(path, arrays[name]) for path, name in match.names.items()
        },
        note=note,
        small_files=source.small_files,
        metadata=restored.metadata,
    )
    if match.continued is None:
        return weights
    continued = state_dict.from_canonical(
        {name: arrays[name] for name in state_dict.to_canonical(match.continued)},
        match.continued,
    )
    return weights._replace(opt_state=continued.opt_state, ema=continued.ema)


def _refuse_non_finite(source: SourceRun, arrays: Mapping[str, jax.Array]) -> None:
    """Checks that the source has not diverged.

    Raises:
      ConfigError: some arrays have NaN or infinite values.
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
    """Joins the first names and counts the others."""
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text


class Match(NamedTuple):
    """The arrays of a checkpoint that a run begins with."""

    # path of this run's parameter or model state -> name of the array in the checkpoint
    names: dict[str, str]
    # name of the array in the checkpoint -> the array as this run has it
    arrays: dict[str, jax.ShapeDtypeStruct]
    # With init.optimizer: the abstract state with the parts that continue, and None for
    # all others. Otherwise None.
    continued: State | None
    summary: str  # description for the user
    stretched: str = ""  # description of rotary positions that differ; "" = none do

    def as_stored(self, stored: Mapping[str, ArrayInfo]) -> dict[str, Any]:
        """Describes the arrays to read: stored shapes and dtypes, shardings of the run.

        Args:
          stored: the arrays of the checkpoint, by name.
        """
        abstract = {
            name: jax.ShapeDtypeStruct(
                stored[name].shape, stored[name].dtype, sharding=x.sharding
            )
            for name, x in self.arrays.items()
        }
        return trees.unflatten_names(abstract)

    def converted(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Converts arrays of the checkpoint to the dtypes of the run."""
        return {name: x.astype(self.arrays[name].dtype) for name, x in arrays.items()}


def _match(target: Target, source: SourceRun, info: StepInfo) -> Match:
    """Chooses the arrays of a checkpoint that a run begins with.

    Raises:
      ConfigError: the source has another model, other adapters or, with init.optimizer,
        another optimizer.
    """
    config = target.config
    with_optimizer = config.init.optimizer
    has_average = any(name.startswith("ema/") for name in info.arrays)
    # If a path is in two groups, the last group counts.
    groups = ["frozen", "trainable"]
    if not with_optimizer:
        groups.append("ema")
    stored_parameters: dict[str, str] = {}
    for group in groups:
        stored_parameters |= _by_path(info.arrays, group)
    stored_names = stored_parameters | _by_path(info.arrays, "model_state")

    abstract = target.abstract
    parameters = trees.flatten_names(abstract.trainable)
    parameters |= trees.flatten_names(abstract.frozen)
    has_adapters = any(path.endswith(_ADAPTER) for path in parameters)
    source_has_adapters = any(path.endswith(_ADAPTER) for path in stored_parameters)
    if has_adapters != source_has_adapters:
        parameters = target.parameters
    wanted = parameters | trees.flatten_names(abstract.model_state)

    stored_config = source.config_of(info.metadata)
    without_source, wanted, stored_names = _in_both(
        target, stored_config["model"], wanted, stored_names
    )
    faults = _model_faults(config, stored_config)
    if source_has_adapters and not has_adapters:
        faults.append(_merge_fault(source, stored_config))
    else:
        if source_has_adapters:
            faults += _adapter_faults(config, stored_config)
        faults += _misfits(info.arrays, stored_names, wanted)
    continued = None
    continued_arrays: dict[str, Any] = {}
    if with_optimizer:
        continued = _continued_state(abstract, with_average=has_average)
        continued_arrays = state_dict.to_canonical(continued)
        faults += _optimizer_faults(info.arrays, continued_arrays)
    if faults:
        raise ConfigError(f"init.from_run={source.name}: {fault}" for fault in faults)

    names = {path: stored_names[path] for path in wanted}
    arrays: dict[str, Any] = {name: wanted[path] for path, name in names.items()}
    arrays["step"] = abstract.step
    arrays |= continued_arrays
    summary = "the weights"
    if with_optimizer:
        summary = "the weights and the optimizer's state"
    elif has_average:
        summary = "the moving average of the weights"
    summary = ", ".join([summary, *without_source])
    return Match(
        names=names,
        arrays=arrays,
        continued=continued,
        summary=summary,
        stretched=_stretched(config, stored_config),
    )


def _in_both(
    target: Target,
    stored_model: Mapping[str, Any],
    wanted: Mapping[str, Any],
    stored_names: Mapping[str, str],
) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Leaves out the parts that a run may have without its source, or the reverse.

    These are the score of a reward model, which replaces a language model's head, and
    modules of multi-token prediction.

    Args:
      target: the run.
      stored_model: options of the source's model.
      wanted: arrays of the run by path.
      stored_names: names of the checkpoint's arrays by path.

    Returns:
      What is left out, in words, and both mappings without it.
    """
    left_out = []
    dropped = set()
    if gets_new_head(target.config.model_options, stored_model):
        left_out.append("a random score")
        dropped = {
            path
            for path in stored_names
            if path.partition(trees.SEPARATOR)[0] == _LANGUAGE_HEAD
        }
        dropped.add(_SCORE)
    modules = {path for path in (*wanted, *stored_names) if belongs_to_modules(path)}
    if modules & (wanted.keys() - stored_names.keys()):
        left_out.append("random modules of multi-token prediction")
    if modules & (stored_names.keys() - wanted.keys()):
        left_out.append("without its modules of multi-token prediction")
    dropped |= modules - (wanted.keys() & stored_names.keys())
    return (
        left_out,
        {path: x for path, x in wanted.items() if path not in dropped},
        {path: name for path, name in stored_names.items() if path not in dropped},
    )


def _continued_state(abstract: State, *, with_average: bool) -> State:
    """Selects the parts of a state that continue with init.optimizer.

    The loss scale does not continue, because each run finds its own.
    """
    nothing: Any = None
    return State(
        step=nothing,
        trainable=None,
        frozen=None,
        model_state=None,
        opt_state=abstract.opt_state._replace(loss_scale=None),
        ema=abstract.ema if with_average else None,
    )


def _by_path(arrays: Iterable[str], group: str) -> dict[str, str]:
    """Selects the arrays of a group, and returns their names by path.

    Args:
      arrays: names of arrays in a checkpoint.
      group: trainable, frozen, ema, model_state or opt_state.
    """
    prefix = group + trees.SEPARATOR
    return {
        name.removeprefix(prefix): name for name in arrays if name.startswith(prefix)
    }


def _model_faults(config: RunConfig, stored: Mapping[str, Any]) -> list[str]:
    """Lists the values of the model that differ from those of the source.

    Not all of them change the shapes of arrays.
    """
    model = stored["model"]
    target = config.model["target"]
    if model.get("target", target) != target or target == registry.USER_TARGET:
        return []
    values = for_logits(config.model_options)
    return differing_values(values, without_changes(model, values))


def _stretched(config: RunConfig, stored: Mapping[str, Any]) -> str:
    """Describes the rotary positions that the run has changed; "" if there are none."""
    positions = {
        name: value for name, value in config.model.items() if name in POSITIONS
    }
    changes = sorted(differing_values(positions, stored["model"]))
    return f", with other positions: {', '.join(changes)}" if changes else ""


def _adapter_faults(config: RunConfig, stored: Mapping[str, Any]) -> list[str]:
    """Lists the options of adapters that differ from those of the source."""
    source_lora = group_of(stored, "lora")
    faults = []
    for name in _LORA:
        value = getattr(config.lora, name)
        source_value = source_lora.get(name, value)
        if source_value != value:
            faults.append(
                f"lora.{name}={value}, there {source_value}; "
                f"set lora.{name}={source_value}"
            )
    return faults


def _merge_fault(source: SourceRun, stored: Mapping[str, Any]) -> str:
    lora = group_of(stored, "lora")
    flags = " ".join(
        f"--config.lora.{name}={lora[name]}" for name in _LORA if name in lora
    )
    return (
        f"it has adapters, and this run has none; train them on ({flags or 'set lora.* as there'}), or merge "
        f"them: jaxdist convert --from {source.workdir or 'WORKDIR'} --to MERGED --format huggingface, then "
        f"init.from_huggingface=MERGED"
    )


def _misfits(
    stored: Mapping[str, ArrayInfo],
    stored_names: Mapping[str, str],
    wanted: Parameters,
) -> list[str]:
    """Lists the arrays that only one run has, or whose shape or dtype differs.

    Args:
      stored: the arrays of the checkpoint, by name.
      stored_names: the names of arrays in the checkpoint, by path.
      wanted: the arrays of this run, by path.
    """
    lines = []
    for path in {**wanted, **stored_names}:
        there = stored[stored_names[path]] if path in stored_names else None
        here = None
        if path in wanted:
            here = ArrayInfo(tuple(wanted[path].shape), str(wanted[path].dtype))
        if there is None or here is None or not _converts(there, here):
            lines.append(
                f"{path}: {there or 'nothing'} there, {here or 'nothing'} here"
            )
    if len(lines) > _SHOWN:
        return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more arrays"]
    return lines


def _converts(stored: ArrayInfo, wanted: ArrayInfo) -> bool:
    """Tests whether a stored array can be converted to an array of the run."""
    if stored.shape != wanted.shape:
        return False
    both_floats = stored.dtype in _FLOATS and wanted.dtype in _FLOATS
    return both_floats or stored.dtype == wanted.dtype


def _optimizer_faults(
    stored: Mapping[str, ArrayInfo], continued: Mapping[str, Any]
) -> list[str]:
    """Lists the differences between two optimizers' states, in one line.

    Args:
      stored: the arrays of the checkpoint, by name.
      continued: the optimizer's state of this run, by name.
    """
    wanted = state_dict.describe(continued)
    stored_names = {
        name
        for name in _by_path(stored, "opt_state").values()
        if not name.startswith(_LOSS_SCALE)
    }
    missing = {name for name in wanted if name not in stored}
    others = {
        name
        for name in stored_names
        if name not in wanted or not _converts(stored[name], wanted[name])
    }
    differing = sorted(missing | others)
    if not differing:
        return []
    return [
        f"its optimizer keeps another state than this run's ({_listed(differing)}); set "
        f"optimizer.* as there, or leave out init.optimizer"
    ]
