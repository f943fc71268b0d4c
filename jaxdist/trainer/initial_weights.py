"""The weights that a run starts from: random weights, or those of a source.

The core reads the weights of another run (`init.from_run`). The caller passes further
sources as `weight_sources`: `jaxdist.interop.WEIGHT_SOURCES` reads Hugging Face and
PEFT files.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import ConfigError, schema, trees
from jaxdist.config.annotations import NamesWeights
from jaxdist.data import tokenizer_config
from jaxdist.distributed import consistency
from jaxdist.models.model_values import (
    POSITIONS,
    differing_values,
    for_logits,
    gets_new_head,
)
from jaxdist.step.first_state import MODULES
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer.from_run import AnotherRun
from jaxdist.trainer.run_config import Build, RunConfig, model_defaults
from jaxdist.trainer.run_metadata import InitialState
from jaxdist.trainer.weight_source import (
    ImpliedConfig,
    LoadedWeights,
    OpenedWeights,
    Target,
    WeightSource,
    named_place,
)

CORE_SOURCES: tuple[WeightSource, ...] = (AnotherRun(),)


def weight_keys() -> list[str]:
    """Lists the keys that name initial weights. A source serves each of them."""
    fields = schema.schema_of(RunConfig)
    return [path for path, field in fields.items() if field.mark(NamesWeights)]


def chosen_sources(
    config: RunConfig | ConfigDict, weight_sources: Sequence[WeightSource] = ()
) -> list[WeightSource]:
    """Finds the sources of the weights that a config names.

    Args:
      config: the config, which may be invalid.
      weight_sources: sources in addition to those of the core.

    Returns:
      The sources; empty if the weights are random.

    Raises:
      ConfigError: a key is set and no source serves it.
    """
    by_key = {source.key: source for source in (*CORE_SOURCES, *weight_sources)}
    named = [key for key in weight_keys() if named_place(config, key)]
    unserved = [key for key in named if key not in by_key]
    if unserved:
        raise ConfigError(
            f"{key}={named_place(config, key)} cannot be read: this program was given no source of such "
            f"weights. The core reads init.from_run alone; jaxdist.interop reads Hugging Face and PEFT "
            f"files. Pass weight_sources=jaxdist.interop.WEIGHT_SOURCES."
            for key in unserved
        )
    return [by_key[key] for key in named]


# --- before validation ----------------------------------------------------------------


def apply_config(
    config: ConfigDict,
    sources: Sequence[WeightSource],
    set_keys: Collection[str] = (),
    before: RunConfig | None = None,
) -> Mapping[str, Any]:
    """Sets model.* and data.tokenizer of a config to those of its initial weights.

    Args:
      config: the config to change.
      sources: the sources that `chosen_sources` found for it.
      set_keys: keys that the user has set. Their values stay and must agree with the
        weights. Only values that stretch rotary positions may differ, and a new head.
      before: the config of the run to resume. Its values stand for those of the source,
        which is not read again. Default: the run is new.

    Returns:
      The config that the weights were trained with, by key; {} if it is unknown.

    Raises:
      ConfigError: the weights are missing, are not supported, disagree with a key that
        the user has set, or have no tokenizer.
    """
    candidates = [source for source in sources if source.implies_config]
    if len(candidates) != 1:
        return {}  # The validation reports several sources.
    (source,) = candidates
    place = named_place(config, source.key)
    user_values = {
        name: value
        for name, value in schema.flatten(config.model).items()
        if f"model.{name}" in set_keys
    }
    changed: dict[str, object] = {}
    if before is not None and named_place(before, source.key) == place:
        trained_with = schema.flatten(schema.to_config_dict(before))
        implied = ImpliedConfig(
            for_logits(before.model), before.data.tokenizer, trained_with
        )
    else:
        implied = source.config_of(config, set_keys)
        # A new run may learn longer sequences, or to score.
        changed = {
            name: value
            for name, value in user_values.items()
            if name in POSITIONS and name in implied.model
        }
        if gets_new_head(user_values, implied.model):
            changed["head"] = user_values["head"]
    model_values = implied.model | changed
    faults = differing_values(user_values, model_values)
    if faults:
        raise ConfigError(
            f"{fault} ({source.key}={place}); leave it out" for fault in faults
        )
    with config.unlocked(), config.ignore_type():
        target = model_values.get("target", config.model.target)
        if target != config.model.target:
            config.model = model_defaults(target)
        config.model.update(model_values)
        if "data.tokenizer" not in set_keys:
            config.data.tokenizer = implied.tokenizer
    return implied.trained_with


# --- before the first step ------------------------------------------------------------


def init_from_sources(
    config: RunConfig,
    built: TrainStep,
    folder: Path,
    sources: Sequence[WeightSource],
    build: Build | None = None,
    initial: Mapping[str, np.ndarray] | None = None,
    module_values: Mapping[str, Any] | None = None,
) -> InitialState:
    """Makes the state of a new run: from weights of sources, or from random ones.

    Every process makes the call.

    Args:
      config: the run's config.
      built: the run's step.
      folder: the workdir, which receives small files that belong to the weights.
      sources: the sources that `chosen_sources` found; empty = random weights.
      build: makes the caller's model; default: the config names the model.
      initial: initial values of the caller's model by path.
      module_values: values of frozen modules on the devices, as `modules/NAME/PATH`.

    Raises:
      ConfigError: the weights cannot be read, or belong to another model.
      CheckpointError: no checkpoint of init.from_run can be used.
    """
    given = dict(initial or {})
    if given and not config.init.from_run:
        return InitialState(built.init(on_devices(given, built)))
    target = Target(config, built.views.abstract, build)
    opened = [_open(source, target) for source in sources]
    loaded = [weights.load() for weights in opened]
    values: dict[str, Any] = dict(module_values or {})
    metadata: dict[str, Any] = {}
    if built.abstract_state.modules:
        # the model's own values are those of the source
        prefix = f"{MODULES}/"
        frozen = {path: x for path, x in given.items() if path.startswith(prefix)}
        values |= on_devices(frozen, built)
    for weights in loaded:
        values |= weights.values
        metadata |= weights.metadata
        if jax.process_index() == 0:
            _keep_small_files(weights, folder)
    state = built.init(values)
    for weights in loaded:
        if weights.opt_state is not None:
            state = _with_optimizer(state, built, weights)
    return InitialState(state, metadata)


def on_devices(
    initial: Mapping[str, np.ndarray], built: TrainStep
) -> dict[str, jax.Array]:
    """Copies initial values to the devices, each with the sharding of the run."""
    flat = built.views.abstract
    abstract = trees.flatten_names(flat.trainable) | trees.flatten_names(
        flat.model_state
    )
    abstract |= trees.flatten_names(flat.frozen)
    for name, module in flat.modules.items():
        for path, x in trees.flatten_names(module).items():
            abstract[f"{MODULES}/{name}/{path}"] = x
    return {
        path: jax.device_put(np.asarray(x), abstract[path].sharding)
        for path, x in initial.items()
    }


def _open(source: WeightSource, target: Target) -> OpenedWeights:
    """Opens a source on all processes. An error on one process is raised on all.

    Raises:
      ConfigError: the weights cannot be used (see `WeightSource.open`), or processes
        found different weights.
      CheckpointError: no checkpoint can be used; see `WeightSource.open`.
    """
    fault: ConfigError | CheckpointError | None = None
    facts: object = None
    try:
        opened = source.open(target)
        facts = opened.facts
    except (ConfigError, CheckpointError) as error:
        fault = error
        facts = str(error)
    consistency.agree(lambda: {source.key: facts})
    if fault is not None:
        raise fault
    return opened


def _keep_small_files(weights: LoadedWeights, folder: Path) -> None:
    if weights.note:
        print(weights.note)
    if weights.small_files is not None:
        kept = folder / tokenizer_config.HUGGINGFACE
        tokenizer_config.copy_small_files(weights.small_files, kept)


def _with_optimizer(state: State, built: TrainStep, weights: LoadedWeights) -> State:
    """Replaces the optimizer's state, and the moving average if the weights have one.

    The loss scale stays, because each run finds its own.
    """
    flat = built.views.flat(state)
    assert weights.opt_state is not None
    opt_state = weights.opt_state._replace(loss_scale=flat.opt_state.loss_scale)
    ema = flat.ema if weights.ema is None else weights.ema
    return built.views.by_stage(flat._replace(opt_state=opt_state, ema=ema))
