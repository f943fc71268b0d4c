"""Views of the layer stack: flat [layers, ...] as models and checkpoints have it, or by stage.

A pipeline holds its blocks as [chunks, stages, layers, ...]: place k = chunk * stages + stage has the
layers k * layers and on, the last places filled up with layers of zeros. Row by row this is the flat
order, so a view is a reshape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.training.state import ModelSpec, Tree

NAMES = ("chunks", "stages", "layers")


@dataclasses.dataclass(frozen=True)
class Staging:
    """How a model's layers lie on stages."""

    num_layers: int
    stages: int
    chunks: int

    @property
    def dims(self) -> tuple[int, int, int]:
        places = self.stages * self.chunks
        return (self.chunks, self.stages, -(-self.num_layers // places))

    def staged(self, tree: Tree) -> Tree:
        """Returns a tree with its flat block leaves by stage."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: self._cut(x) if _in_blocks(path) and x.shape[:1] == (self.num_layers,) else x,
            tree,
        )

    def flat(self, tree: Tree) -> Tree:
        """Returns a tree with its staged block leaves flat, padding left out."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: self._join(x) if _in_blocks(path) and x.shape[:3] == self.dims else x, tree
        )

    def staged_spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of the model with its blocks by stage."""
        trainable = jax.eval_shape(self.staged, spec.trainable)
        return dataclasses.replace(spec, trainable=trainable, stack=NAMES)

    def _cut(self, x: jax.Array) -> jax.Array:
        chunks, stages, layers = self.dims
        extra = chunks * stages * layers - self.num_layers
        padded = jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)) if extra else x
        return padded.reshape(*self.dims, *x.shape[1:])

    def _join(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[3:])[: self.num_layers]


def _in_blocks(path: tuple[Any, ...]) -> bool:
    return any(getattr(entry, "key", None) == "blocks" for entry in path)
