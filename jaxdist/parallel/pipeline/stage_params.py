"""What a stage holds of the model: arrays of its layers and arrays of all else, trained
or not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.protocols import param_names

Tree = Any


class StageParams(NamedTuple):
    """Arrays of the model, of its blocks or of all else (`edges`); or their logical
    names.
    """

    trained: Tree
    frozen: Tree
    model_state: Tree

    @property
    def blocks(self) -> StageParams:
        """What is in the blocks."""
        return StageParams(*(tree.get("blocks", {}) for tree in self))

    @property
    def edges(self) -> StageParams:
        """What is not in the blocks."""
        return StageParams(*map(edges, self))

    def with_blocks(self, blocks: StageParams) -> StageParams:
        """Returns these edges and those blocks together."""
        return StageParams(
            *({"blocks": own, **rest} for own, rest in zip(blocks, self, strict=True))
        )


def edges(tree: Tree) -> Tree:
    """Selects the parameters outside of the blocks."""
    return {name: value for name, value in tree.items() if name != "blocks"}


def own_names(names):
    """Returns a block parameter's names without those of its stack dims."""
    return tuple(name for name in names if name not in param_names.STACKS)


def gathered(leaf: jax.Array, names) -> jax.Array:
    """Returns a stage's stack of kernels as ops use them; what fsdp does not split is
    left alone.
    """
    own = own_names(names)
    now = execution.current()
    split = now.rules.stored(own, leaf.shape) != now.rules.computed(own, leaf.shape)
    if not split or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return execution.gather(leaf, own, now.compute_dtype(leaf.dtype))
