"""Table look-up that moves activations instead of the table.

Under fsdp a table is split by width. Gathering it to look up a few thousand rows would
move and hold the whole vocabulary; instead every shard looks up its part of the width
for all samples of its fsdp group, and the rows change places (one all-to-all of
activations). The gradient goes the same way back, and adds up in float32: a frequent
token's gradient is a long sum.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.parallel import execution
from jaxdist.protocols.param_names import Names


def embed(table: nnx.Variable, indices_BS: jax.Array) -> jax.Array:
    """Returns the rows [B, S, D] of the table [V, D] at integer indices of any rank, in
    the compute dtype.
    """
    kernel = table[...]
    chex.assert_rank(kernel, 2)
    chex.assert_type(indices_BS, int)
    dtype = execution.current().compute_dtype(kernel.dtype)
    return _embed(kernel, indices_BS, getattr(table, "logical", ()), dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _embed(table, indices, names: Names, dtype):
    by_width = execution.current().splits_width(names, zero=3)
    local, in_part = _own_part(_of_group(indices, by_width), table, names)
    rows = jnp.take(_unsplit(table, by_width), local, axis=0, mode="clip").astype(dtype)
    axis = execution.current().vocabulary_axis(names)
    if axis is not None:
        rows = execution.sum_over(jnp.where(in_part[..., None], rows, 0), axis)
    return _of_part(_of_group(rows, by_width, "width"), by_width)


def _forward(table, indices, names, dtype):
    return _embed(table, indices, names, dtype), (table, indices)


def _backward(names, dtype, residuals, dx):
    table, indices = residuals
    by_width = execution.current().splits_width(names, zero=2)
    dx = _of_group(_of_part(dx, by_width), by_width, "width")
    indices = _of_group(indices, by_width)
    local, in_part = _own_part(indices, table, names)
    dx = (dx if in_part is None else jnp.where(in_part[..., None], dx, 0)).astype(
        jnp.float32
    )
    total = jnp.zeros(table.shape, jnp.float32)
    total = _unsplit(_unsplit(total, by_width).at[local].add(dx), by_width)
    return execution.scatter(total, names).astype(table.dtype), None


_embed.defvjp(_forward, _backward)


def _unsplit(table, by_width: bool):
    """Returns a device's part of a table with its vocabulary whole on every tensor
    shard.

    XLA's partitioner (jax 0.12) aborts on a lookup along a dim that it splits in a
    region that is manual over other axes. Outside of one the table is returned as it
    is.
    """
    if not execution.current().manual:
        return table
    return execution.shard(table, None, "width" if by_width else None)


def _own_part(indices, table, names: Names):
    """Returns indices into this stage's part of the table, and which of them are in it
    (None: all).
    """
    axis = execution.current().vocabulary_axis(names)
    if axis is None:
        return indices, None
    local = indices - jax.lax.axis_index(axis) * table.shape[0]
    in_part = (local >= 0) & (local < table.shape[0])
    return jnp.where(in_part, local, 0), in_part


def _of_group(x, by_width: bool, *last: str):
    """Returns rows (or their indices) on all shards of a group, if the table is split
    by width.
    """
    return execution.shard(x, "batch_of_group", None, *last) if by_width else x


def _of_part(x, by_width: bool):
    """Returns rows of a device's own part of the sequence, split by width over the rest
    of the group.

    On the way to whole rows: axes of the sequence and of the batch change places one
    after another, or XLA's partitioner would gather.
    """
    split = by_width and execution.current().axis_size("context") > 1
    return (
        execution.shard(x, "batch_of_group", "sequence", "width_of_part")
        if split
        else x
    )
