"""What a stage holds of the model: arrays of its layers and arrays of all else, trained or not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.protocols import param_names

Tree = Any


class StageParams(NamedTuple):
    """Arrays of some layers, or of all that are not layers."""

    trained: Tree
    held: dict[str, Tree]  # what else the model reads, by kind: "frozen", "model_state"


def blocks_of(trained: Tree, held: dict[str, Tree]) -> StageParams:
    """Returns what is in the blocks."""
    return StageParams(
        trained.get("blocks", {}), {kind: tree.get("blocks", {}) for kind, tree in held.items()}
    )


def edges_of(trained: Tree, held: dict[str, Tree]) -> StageParams:
    """Returns what is not in the blocks."""
    return StageParams(edges(trained), {kind: edges(tree) for kind, tree in held.items()})


def edges(tree: Tree) -> Tree:
    """Returns what is not in the blocks."""
    return {name: value for name, value in tree.items() if name != "blocks"}


def joined(blocks: StageParams, rest: StageParams) -> tuple[Tree, dict[str, Tree]]:
    """Returns (trained, held) of both."""
    held = {kind: {"blocks": blocks.held[kind], **tree} for kind, tree in rest.held.items()}
    return {"blocks": blocks.trained, **rest.trained}, held


def stacked(layer: StageParams) -> StageParams:
    """Returns a layer's arrays as a stack of one."""
    return jax.tree.map(lambda x: x[None], layer)


def own_names(names):
    """Returns a block parameter's names without those of its stack dims."""
    return tuple(name for name in names if name not in param_names.STACKS)


def gathered(leaf: jax.Array, names) -> jax.Array:
    """Returns a stage's stack of kernels as ops use them; what fsdp does not split is left alone."""
    own, now = own_names(names), execution.current()
    if not (jnp.issubdtype(leaf.dtype, jnp.floating) and now.stored_in_shards(own, leaf.shape)):
        return leaf
    return execution.gather(leaf, own, now.compute_dtype(leaf.dtype))
