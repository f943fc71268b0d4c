"""What a caller hands over: data, an optimizer, and a model, which becomes a function of
rngs.
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

from jaxdist.config import ConfigError
from jaxdist.data import Dataset
from jaxdist.models import registry
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
    """Returns what makes the model of its rngs, and, if it is made, path -> its values.

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
    if fault := registry.foreign_fault(model):
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
    if fault := registry.foreign_fault(made):
        raise ConfigError(f"model: {fault}")
    if not isinstance(made, nnx.Module):
        raise ConfigError(
            f"model: the function made {made!r:.80}; required an nnx.Module"
        )
    return made


def maker(
    config: RunConfig, folder: Path, model: Model | None, target: str | None
) -> Build | None:
    """Returns what makes the model of a run of `jaxdist.fit`; None for any other run,
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
