"""What training carries from step to step, and what is known of it before it exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.sharding import Names

Tree = Any  # nested dicts of arrays


class State(NamedTuple):
    """The state after `step` updates. Random keys are not stored: they fold from seed and step."""

    step: jax.Array  # int32
    trainable: Tree
    frozen: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree  # None without a moving average


@dataclass(frozen=True)
class ModelSpec:
    """A model without its arrays: its graph, their shapes, and their logical names."""

    build: Callable[[nnx.Rngs], nnx.Module]
    graph: nnx.GraphDef
    trainable: Tree  # of ShapeDtypeStruct
    model_state: Tree
    names: Tree  # like trainable, of tuples of logical names
    stack: Names = ()  # names of the blocks' stack dims, where a pipeline has cut them up

    def assemble(self, trainable: Tree, model_state: Tree) -> Any:
        """Returns the model with these arrays in it."""
        return nnx.merge(self.graph, _as_state(trainable), _as_state(model_state))

    def named_parameters(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Returns path -> (abstract array, logical names)."""
        leaves = jax.tree_util.tree_flatten_with_path(self.trainable)[0]
        names = jax.tree.leaves(self.placed_names, is_leaf=lambda x: isinstance(x, tuple))
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): (leaf, name)
            for (path, leaf), name in zip(leaves, names, strict=True)
        }

    @property
    def placed_names(self) -> Tree:
        """Returns the names with those of stack dims before a block's own."""
        if not self.stack:
            return self.names
        blocks = jax.tree.map(
            lambda names: (*self.stack, *names), self.names["blocks"], is_leaf=lambda x: isinstance(x, tuple)
        )
        return self.names | {"blocks": blocks}

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.trainable))


def describe(build: Callable[[nnx.Rngs], nnx.Module]) -> ModelSpec:
    """Returns the spec of the model that `build(rngs)` makes; nothing is allocated.

    Raises:
      ConfigError: it cannot be made of these options, or holds state that is not a parameter.
    """
    with nnx.use_eager_sharding(False):
        try:
            model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model: cannot be built with these options: {error}") from error
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    kinds = sorted({type(leaf).__name__ for leaf in jax.tree.leaves(rest, is_leaf=_is_variable)})
    if kinds:
        raise ConfigError(
            f"the model has state that is no parameter ({', '.join(kinds)}): not built yet; "
            f"draw random numbers from `key`, and keep running statistics out of the model"
        )
    names = jax.tree.map(_logical_names, parameters, is_leaf=_is_variable)
    return ModelSpec(build, graph, _pure(parameters), _pure(rest), _pure(names))


def fresh_arrays(build: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> tuple[Tree, Tree]:
    """Returns (trainable, model state) of a newly initialised model."""
    with nnx.use_eager_sharding(False):
        model = build(nnx.Rngs(key))
    _, parameters, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    return _pure(parameters), _pure(rest)


def _is_variable(x) -> bool:
    return isinstance(x, nnx.Variable)


def _logical_names(variable: nnx.Variable) -> Names:
    """Returns the variable's logical names; flax's own annotations are read too."""
    found = variable.get_metadata()
    names = found.get("logical") or found.get("out_sharding") or found.get("sharding_names") or ()
    return tuple(names)


def _pure(tree) -> Tree:
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def _as_state(tree: Tree) -> nnx.State:
    return nnx.State(tree)
