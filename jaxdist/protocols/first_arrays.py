"""The computation of a model's first arrays, traced once.

A start needs a model's shapes, the shapes of its whole state, and the program that makes
the state. Each of them would call the model's constructor under a trace. Here the
constructor runs once, and its trace is used for all three.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.protocols.repeated_outputs import RepeatedOutputs

Build = Callable[[nnx.Rngs], nnx.Module]


class FirstArrays:
    """Makes the arrays of a new model from a key."""

    def __init__(self, build: Build) -> None:
        """Traces the constructor.

        Args:
          build: builds the model.
        """
        self.build = build

        def arrays(key: jax.Array) -> Any:
            # flax treats arrays that are created while it traces as static, unless
            # their type is registered.
            nnx.register_data_type(type(jnp.zeros(())))
            self._graph, state = nnx.split(build(new_streams(key)))
            return state

        with nnx.use_eager_sharding(False):
            # An abstract key: a real one would compile a program first.
            traced = jax.jit(arrays).trace(jax.eval_shape(lambda: jax.random.key(0)))
            self._outputs = RepeatedOutputs(traced.jaxpr)
            self._state = traced.out_info

    def abstract_model(self) -> Any:
        """Makes the model with abstract arrays."""
        with nnx.use_eager_sharding(False):
            return nnx.merge(self._graph, self._state)

    def model(self, key: jax.Array) -> Any:
        """Makes the model with new arrays.

        Args:
          key: seed of the arrays. It has jax's default random number generator.
        """
        leaves = self._outputs(key)
        state = jax.tree.unflatten(jax.tree.structure(self._state), leaves)
        with nnx.use_eager_sharding(False):
            return nnx.merge(self._graph, state)


def new_streams(key: jax.Array) -> nnx.Rngs:
    """Makes the random streams that a model's constructor draws from.

    They give the numbers of `nnx.Rngs(key)`, in time that grows linearly with the number
    of draws.
    """
    streams = nnx.Rngs(key)
    vars(streams)["default"] = _CountedStream(key, tag="default")
    return streams


class _CountedStream(nnx.RngStream):
    """A random stream whose count is a number, not a traced array.

    flax adds 1 to a traced count by `count[...] += 1`, which reads `sharding` of the
    tracer. It has none, and jax composes an error text from the whole trace so far. So
    the time of N draws would grow with N^2 (docs/project/decisions.md, 2026-11-28).
    """

    count: Any  # RngCount

    def __init__(self, key: jax.Array, *, tag: str) -> None:
        super().__init__(key, tag=tag)
        if not self.key.shape:
            self.count.set_value(np.uint32(0))

    def __call__(self) -> jax.Array:
        count = self.count.get_value()
        if isinstance(count, jax.Array):  # a transform of flax has traced it
            return super().__call__()
        self.count.set_value(np.uint32(count + 1))
        return jax.random.fold_in(self.key[...], np.uint32(count))
