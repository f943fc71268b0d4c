"""The model, data and optimizer that a caller passes to `jaxdist.fit`, and the config.

The model is converted to a function of nnx.Rngs. The config is made of the arguments.
"""

import functools
import inspect
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist.config import ConfigError, schema
from jaxdist.data.dataset import Dataset
from jaxdist.models import registry
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.protocols.model_spec import describe
from jaxdist.protocols.objective import Objective
from jaxdist.step.first_state import MODULES
from jaxdist.trainer import initial_weights, run_config
from jaxdist.trainer.run_config import Build, RunConfig, TrainConfig, TrainedFor

Model = nnx.Module | type[nnx.Module] | Build


def builder(model: Model) -> tuple[Build, dict[str, np.ndarray] | None]:
    """Converts the caller's model to a function of nnx.Rngs.

    Args:
      model: an nnx module, or a function or class that makes one from an nnx.Rngs.

    Returns:
      The function; and the values of a module by path, or None.

    Raises:
      ConfigError: the model is neither a module nor makes one.
    """
    if isinstance(model, nnx.Module):
        return _builder_of_module(model)
    fault = registry.foreign_fault(model)
    if fault:
        raise ConfigError(f"model: {fault}")
    if not callable(model):
        raise ConfigError(
            f"model: {model!r}; required an nnx.Module, or a function of rngs that makes one"
        )
    return functools.partial(_build, model, _takes_rngs_by_name(model)), None


def with_objective(
    build: Build,
    initial: Mapping[str, np.ndarray] | None,
    objective: Objective | None,
    modules: Mapping[str, Model],
) -> tuple[Build, Mapping[str, np.ndarray] | None]:
    """Adds an objective and its frozen modules to a caller's model.

    Args:
      build: makes the model.
      initial: initial values of the model by path; None = those of `build`.
      objective: the objective; None = the model's own loss.
      modules: the frozen modules by name, in the forms of a model.

    Returns:
      The function that makes the model; and initial values, with those of modules as
      `modules/NAME/PATH`.

    Raises:
      ConfigError: there are modules without an objective, the objective is none, or a
        module cannot be used.
    """
    if objective is None:
        if modules:
            raise ConfigError(
                f"modules: {', '.join(modules)} would not be read, because the model's own "
                f"loss has no frozen modules; give an objective"
            )
        return build, initial
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"objective: {objective!r:.80}; required an object of a subclass of "
            f"jaxdist.protocols.objective.Objective"
        )
    _check_name(objective)
    values = dict(initial or {})
    builders = {}
    for name, module in modules.items():
        builders[name], given = builder(module)
        if given is None and initial is not None:
            raise ConfigError(
                f"modules: {name} is a function, and the model is a module with values; "
                f"give {name} as a module with its values, too"
            )
        for path, value in (given or {}).items():
            values[f"{MODULES}/{name}/{path}"] = value
    return TrainedFor(build, objective, builders), values or None


def _builder_of_module(model: nnx.Module) -> tuple[Build, dict[str, np.ndarray]]:
    graph, *states = nnx.split(model, nnx.RngState, nnx.Variable, ...)
    streams, arrays, others = states
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    values = {
        "/".join(map(str, path)): np.asarray(x.get_value())
        for path, x in nnx.to_flat_state(arrays)
    }

    def with_zeros(rngs: nnx.Rngs) -> nnx.Module:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        module: nnx.Module = nnx.merge(graph, streams, zeros, others)
        return module

    return with_zeros, values


def _takes_rngs_by_name(model: Any) -> bool:
    function: Any = model.func if isinstance(model, functools.partial) else model
    if isinstance(function, type):
        # The signature of an nnx class does not show its parameters.
        function = function.__init__  # type: ignore[misc]  # of a class that is unknown
    return "rngs" in inspect.signature(function).parameters


def _build(function: Any, by_name: bool, rngs: nnx.Rngs) -> nnx.Module:
    """Calls the caller's function and checks that it makes an nnx module."""
    model = function(rngs=rngs) if by_name else function(rngs)
    fault = registry.foreign_fault(model)
    if fault:
        raise ConfigError(f"model: {fault}")
    if not isinstance(model, nnx.Module):
        raise ConfigError(
            f"model: the function made {model!r:.80}; required an nnx.Module"
        )
    return model


def maker(
    config: RunConfig, folder: Path, model: Model | None, target: str | None
) -> Build | None:
    """Finds the function that makes the model of a run of `jaxdist.fit`.

    Args:
      config: the run's config.
      folder: the workdir.
      model: the model, if the caller passes it again.
      target: the model, if the caller names it as package.module:NAME.

    Returns:
      The function; None if the config names the model, or if nobody does. A stand-in
      for the model then explains what to do.

    Raises:
      ConfigError: the config names the model, and the caller passes one; or the model
        cannot be used.
    """
    if config.model["target"] != registry.USER_TARGET:
        if model is not None:
            raise ConfigError(
                f"model: {folder} says by itself which, {config.model['target']}; leave it out"
            )
        return None
    if model is None and target is not None and target != registry.USER_TARGET:
        model = registry.find_maker(target, folder)
    if model is None:
        return None
    build, _ = builder(model)
    return build


def maker_for(
    config: RunConfig,
    build: Build | None,
    objective: Objective,
    modules: Mapping[str, Model],
) -> Build:
    """Adds the objective to the maker of a run of `jaxdist.fit`.

    Args:
      config: the run's config.
      build: the function that `maker` has found.
      objective: the objective, as the caller passes it again.
      modules: its frozen modules. Their values are those of the checkpoint.

    Raises:
      ConfigError: the run was trained for another objective, or a module cannot be used.
    """
    if build is None:
        raise ConfigError("objective: it is for a caller's model; give model=, too")
    trained_for = objective_in(config) or "the loss of its model"
    if objective_text(objective) != trained_for:
        raise ConfigError(
            f"objective: {objective_text(objective)}, and the run was trained for "
            f"{trained_for}; give the same"
        )
    adapted, _ = with_objective(build, None, objective, modules)
    return adapted


# --- the config of a call of `fit` ----------------------------------------------------

# keys that an argument sets and that a setting may still replace
_FREE = ("optimizer.frozen", "optimizer.groups", "optimizer.nonfinite_limit")


def config_of_fit(
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    evaluates: bool,
    saves: bool,
) -> RunConfig:
    """Makes the config of a call of `jaxdist.fit`.

    Args:
      arguments: values by key that follow from arguments of the call.
      settings: the argument `settings`: values by key.
      evaluates: whether the call has held-out data.
      saves: whether the call names a folder.

    Raises:
      ConfigError: a setting repeats an argument, a key is unknown, or a value has the
        wrong type.
    """
    arguments = {
        "data.source": "given",
        "model.target": registry.USER_TARGET,
        **arguments,
    }
    _refuse_settings(settings, arguments)
    values = schema.flatten(run_config.default_config(registry.USER_TARGET))
    if not evaluates:
        values["train.eval_every"] = 0
    if not saves:
        values["checkpoint.every_steps"] = 0
        values["checkpoint.save_at_end"] = False
    return run_config.from_config(schema.unflatten({**values, **arguments, **settings}))


def _refuse_settings(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Checks that no setting contradicts an argument of the call.

    Args:
      settings: the argument `settings`: values by key.
      arguments: values by key that follow from the other arguments.

    Raises:
      ConfigError: a setting repeats an argument, or names weights that only fit
        jaxdist's transformer. It has a line for each.
    """
    # Only checkpoints have weights of any model. Other sources have those of jaxdist's
    # transformer.
    for_any_model = {source.key for source in initial_weights.CORE_SOURCES}
    for_transformer = [
        key
        for key in initial_weights.weight_keys()
        if settings.get(key) and key not in for_any_model
    ]
    if for_transformer:
        raise ConfigError(
            f"settings: {key} reads weights into jaxdist's own transformer. fit trains the model that you "
            f"give. Run jaxdist train, or load the weights into your model before fit."
            for key in for_transformer
        )
    taken = [key for key in settings if key in arguments and key not in _FREE]
    if taken:
        raise ConfigError(
            f"settings: {key} is what an argument of fit says; leave it out"
            for key in taken
        )


_OBJECTIVE = " for "  # in `model.name`, between the model and its objective


def name_of(model: Model, build: Build) -> str:
    """Names the class of a caller's model, and the objective if there is one.

    Args:
      model: the model as the caller passed it.
      build: the function that makes it from an nnx.Rngs.
    """
    if isinstance(model, nnx.Module):
        model_class = type(model)
    else:
        model_class = describe(build).model_class
    name = f"{model_class.__module__}.{model_class.__qualname__}"
    if isinstance(build, TrainedFor):
        name += _OBJECTIVE + objective_text(build.objective)
    return name


def objective_text(objective: Objective) -> str:
    """Names an objective with its options, which a later process writes alike."""
    return repr(objective)


def _check_name(objective: Objective) -> None:
    """Checks that a later process can tell an objective from one with other options.

    Raises:
      ConfigError: the objective is no frozen dataclass, or its text has an address of
        this process.
    """
    name = type(objective).__qualname__
    # of the class itself: a subclass of a dataclass may have further options
    parameters = vars(type(objective)).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise ConfigError(
            f"objective: {name} is no frozen dataclass, so a resumed run could not tell its options; "
            f"write @dataclasses.dataclass(frozen=True) above the class, and its options as fields"
        )
    if re.search(r" at 0x[0-9a-f]+", objective_text(objective)):
        raise ConfigError(
            f"objective: {objective_text(objective):.200} has a field that is written as an address, which "
            f"differs in each process; make the field a text or a number that chooses the function, or "
            f"give it field(repr=False)"
        )


def objective_in(config: RunConfig) -> str:
    """Names the objective that a caller of `fit` gave; "" if the loss is the model's."""
    return str(config.model.get("name", "")).partition(_OBJECTIVE)[2]


def optimizer_values(
    optimizer: optax.GradientTransformation | OptimizerConfig,
) -> dict[str, Any]:
    """Makes the values of `optimizer.*` by key.

    Raises:
      ConfigError: the optimizer is neither a transformation of optax nor a config.
    """
    if isinstance(optimizer, OptimizerConfig):
        return schema.flatten({"optimizer": vars(optimizer)})
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}; required a transformation of optax, e.g. "
            f"optax.adamw(3e-4), or jaxdist.OptimizerConfig(...)"
        )
    # The transformation does everything that these keys could configure.
    return {
        "optimizer.name": "given",
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": 0.0,
    }


def length_values(
    steps: int | None, epochs: float | None, dataset: Dataset
) -> dict[str, Any]:
    """Makes the values of the keys that say how long a run is.

    Args:
      steps: updates in total.
      epochs: passes over the samples of `dataset`.
      dataset: the caller's data.

    Raises:
      ConfigError: not exactly one of both is given, or there are no epochs.
    """
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"steps={steps} and epochs={epochs:g}: both say how long the run is; leave "
            f"one of them out"
        )
    if epochs is None:
        if steps is None:
            raise ConfigError(
                "steps or epochs: fit needs one of them, which say how long the run is"
            )
        return {"train.steps": steps, "train.epochs": 0.0}
    if not 0 < epochs < math.inf:
        raise ConfigError(f"epochs={epochs}: must be a positive number")
    if dataset.epoch_samples is None:
        raise ConfigError(
            f"epochs={epochs:g}: the number of samples is known of a dict of arrays "
            f"alone; give steps, since a function or an iterable may have any length"
        )
    return {"train.steps": TrainConfig.steps, "train.epochs": float(epochs)}


def mesh_values(mesh: Mapping[str, int] | MeshConfig | None) -> dict[str, Any]:
    """Makes the values of `mesh.*` by key."""
    sizes = schema.to_config_dict(mesh) if isinstance(mesh, MeshConfig) else mesh
    return schema.flatten({"mesh": sizes or {}})
