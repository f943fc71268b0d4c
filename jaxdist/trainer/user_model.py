"""What a caller of `jaxdist.fit` hands over: data, an optimizer, a model, and a config.

The model becomes a function of rngs; the config is made of the call's arguments.
"""

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist.config import ConfigError, schema
from jaxdist.data import Dataset
from jaxdist.models import registry
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.protocols.model_spec import describe
from jaxdist.trainer import initial_weights, run_config
from jaxdist.trainer.run_config import Build, RunConfig

Model = nnx.Module | type[nnx.Module] | Build


class UserInputs(NamedTuple):
    """What a caller hands over instead of what the config names; None: the config's."""

    build: Build | None = None
    dataset: Dataset | None = None
    optimizer: optax.GradientTransformation | None = None
    # path -> value that the model begins with
    initial: Mapping[str, np.ndarray] | None = None


def builder(model: Model) -> tuple[Build, dict[str, np.ndarray] | None]:
    """Makes a function of rngs of the model, and, if it is made, path -> its values.

    Raises:
      ConfigError: it is neither a module nor makes one.
    """
    if isinstance(model, nnx.Module):
        graph, *parts = nnx.split(model, nnx.RngState, nnx.Variable, ...)
        streams, arrays, rest = parts
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        values = {
            "/".join(map(str, path)): x.get_value()
            for path, x in nnx.to_flat_state(arrays)
        }

        def empty(rngs: nnx.Rngs) -> nnx.Module:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return nnx.merge(graph, streams, zeros, rest)

        return empty, {path: np.asarray(x) for path, x in values.items()}
    fault = registry.foreign_fault(model)
    if fault:
        raise ConfigError(f"model: {fault}")
    if not callable(model):
        raise ConfigError(
            f"model: {model!r}; required an nnx.Module, or a function of rngs that makes one"
        )
    return functools.partial(_made, model, _takes_rngs_by_name(model)), None


def _takes_rngs_by_name(model: Any) -> bool:
    made: Any = model.func if isinstance(model, functools.partial) else model
    # Of an nnx class, only __init__ says what it takes.
    says = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
    return "rngs" in inspect.signature(says).parameters


def _made(model: Any, by_name: bool, rngs: nnx.Rngs) -> nnx.Module:
    made = model(rngs=rngs) if by_name else model(rngs)
    fault = registry.foreign_fault(made)
    if fault:
        raise ConfigError(f"model: {fault}")
    if not isinstance(made, nnx.Module):
        raise ConfigError(
            f"model: the function made {made!r:.80}; required an nnx.Module"
        )
    return made


def maker(
    config: RunConfig, folder: Path, model: Model | None, target: str | None
) -> Build | None:
    """Finds what makes the model of a run of `jaxdist.fit`; None for any other run,
    whose config says it.

    Raises:
      ConfigError: neither `model` nor `target` names it; the run is no such run.
    """
    if config.model["target"] != registry.USER_TARGET:
        if model is not None:
            raise ConfigError(
                f"model: {folder} says by itself which, {config.model['target']}; leave it out"
            )
        return None
    if model is None and target is not None and target != registry.USER_TARGET:
        model = registry.find_maker(target, folder)
    # None: its stand-in says what to do
    return None if model is None else builder(model)[0]


# --- the config of a call of `fit` ----------------------------------------------------

# keys that an argument sets and a setting may replace
_FREE = ("optimizer.frozen", "optimizer.groups", "optimizer.nonfinite_limit")


def config_of_fit(
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    evaluates: bool,
    saves: bool,
) -> RunConfig:
    """Makes the config of a call of `jaxdist.fit`: settings over usual values.

    Args:
      arguments: values by key that arguments of the call set.
      settings: of the call, values by key.
      evaluates: whether the call has held-out data.
      saves: whether the call names a folder.

    Raises:
      ConfigError: a setting that an argument makes, unknown keys, wrong types.
    """
    arguments = {
        "data.source": "given",
        "model.target": registry.USER_TARGET,
        **arguments,
    }
    _refuse_settings(settings, arguments)
    values = schema.flatten(run_config.default_config(registry.USER_TARGET))
    values["train.eval_every"] = 0
    if evaluates:
        values["train.eval_every"] = max(arguments["train.steps"] // 10, 1)
    if not saves:
        values["checkpoint.every_steps"] = 0
        values["checkpoint.save_at_end"] = False
    return run_config.from_config(schema.unflatten({**values, **arguments, **settings}))


def _refuse_settings(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Checks that no setting is what something else decides.

    Raises:
      ConfigError: a line for each setting that names weights of jaxdist's own
        transformer, or that an argument makes.
    """
    # Other formats than jaxdist's checkpoints are those of its own transformer.
    own_format = {source.key for source in initial_weights.CORE_SOURCES}
    foreign = [
        key
        for key in initial_weights.weight_keys()
        if settings.get(key) and key not in own_format
    ]
    if foreign:
        raise ConfigError(
            f"settings: {key} reads weights into jaxdist's own transformer. fit trains the model that you "
            f"give. Run jaxdist train, or load the weights into your model before fit."
            for key in foreign
        )
    taken = [key for key in settings if key in arguments and key not in _FREE]
    if taken:
        raise ConfigError(
            f"settings: {key} is what an argument of fit says; leave it out"
            for key in taken
        )


def name_of(model: Model, build: Build) -> str:
    """Names the class of a caller's model.

    Args:
      model: as the caller gave it.
      build: makes it from rngs.
    """
    kind = type(model) if isinstance(model, nnx.Module) else describe(build).model_class
    return f"{kind.__module__}.{kind.__qualname__}"


def optimizer_values(
    optimizer: optax.GradientTransformation | OptimizerConfig,
) -> dict[str, Any]:
    """Lists the values of `optimizer.*` by key.

    Raises:
      ConfigError: it is neither a transformation of optax nor a config.
    """
    if isinstance(optimizer, OptimizerConfig):
        return schema.flatten({"optimizer": vars(optimizer)})
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}; required a transformation of optax, e.g. "
            f"optax.adamw(3e-4), or jaxdist.OptimizerConfig(...)"
        )
    # The rate, its schedule and all else are the transformation's own.
    return {
        "optimizer.name": "given",
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": 0.0,
    }


def mesh_values(mesh: Mapping[str, int] | MeshConfig | None) -> dict[str, Any]:
    """Lists the values of `mesh.*` by key."""
    sizes = schema.to_config_dict(mesh) if isinstance(mesh, MeshConfig) else mesh
    return schema.flatten({"mesh": sizes or {}})
