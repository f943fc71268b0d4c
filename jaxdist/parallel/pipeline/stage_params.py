"""The arrays of a model by their role and place: blocks and edges, trained or not."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.protocols.dim_names import STACKS, Names
from jaxdist.protocols.model_spec import Tree


class StageParams(NamedTuple):
    """Arrays of the model, or of its blocks or edges only; or their logical names.

    The edges are all arrays outside the blocks, such as embedding and head.
    """

    trainable: Tree
    frozen: Tree
    model_state: Tree

    @property
    def blocks(self) -> StageParams:
        """The arrays of the blocks."""
        return StageParams(*(tree.get("blocks", {}) for tree in self))

    @property
    def edges(self) -> StageParams:
        """The arrays outside the blocks."""
        return StageParams(*map(without_blocks, self))

    def with_blocks(self, blocks: StageParams) -> StageParams:
        """Adds blocks to these edges."""
        pairs = zip(blocks, self, strict=True)
        return StageParams(*({"blocks": inner, **edges} for inner, edges in pairs))


def without_blocks(tree: Tree) -> Tree:
    """Selects the leaves outside the blocks."""
    return {name: value for name, value in tree.items() if name != "blocks"}


def layer_names(names: Names) -> Names:
    """Selects the names of a layer's dims: those that are no stack dims."""
    return tuple(name for name in names if name not in STACKS)


def gathered(leaf: jax.Array, names: Names) -> jax.Array:
    """Gathers a stage's stack of kernels over fsdp, in the compute dtype of the ops.

    Arrays that fsdp does not split stay as they are, and so do integers.
    """
    layer = layer_names(names)
    now = execution.current()
    stored = now.rules.stored(layer, leaf.shape)
    computed = now.rules.computed(layer, leaf.shape)
    if stored == computed or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return execution.gather(leaf, layer, now.compute_dtype(leaf.dtype))
