"""Look-up in a table that moves activations instead of the table.

fsdp splits a table by width. Gathering the table to look up a few thousand rows would
move and hold the whole vocabulary. So every shard looks up its part of the width for
all samples of its fsdp group, and the rows are exchanged by one all-to-all. The
gradient goes the same way back. It is summed in float32, because a frequent token's
gradient is a long sum.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.parallel import execution
from jaxdist.protocols.dim_names import Names


def embed(table: nnx.Variable[jax.Array], indices_BS: jax.Array) -> jax.Array:
    """Looks up rows of a table, [B, S, D] in the compute dtype.

    Args:
      table: table [V, D].
      indices_BS: integer indices of the rows, of any rank.
    """
    kernel = table[...]
    chex.assert_rank(kernel, 2)
    chex.assert_type(indices_BS, int)
    dtype = execution.current().compute_dtype(kernel.dtype)
    return _embed(kernel, indices_BS, getattr(table, "logical", ()), dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _embed(
    table: jax.Array, indices: jax.Array, names: Names, dtype: jnp.dtype
) -> jax.Array:
    by_width = execution.current().splits_width(names, zero=3)
    local, in_part = _local_indices(_on_group(indices, by_width), table, names)
    rows = jnp.take(_unsplit(table, by_width), local, axis=0, mode="clip").astype(dtype)
    axis = execution.current().vocabulary_axis(names)
    if axis is not None and in_part is not None:
        rows = execution.sum_over(jnp.where(in_part[..., None], rows, 0), axis)
    return _on_part(_on_group(rows, by_width, "width"), by_width)


def _forward(
    table: jax.Array, indices: jax.Array, names: Names, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _embed(table, indices, names, dtype), (table, indices)


def _backward(
    names: Names,
    dtype: jnp.dtype,
    residuals: tuple[jax.Array, jax.Array],
    dx: jax.Array,
) -> tuple[jax.Array, None]:
    table, indices = residuals
    by_width = execution.current().splits_width(names, zero=2)
    dx = _on_group(_on_part(dx, by_width), by_width, "width")
    indices = _on_group(indices, by_width)
    local, in_part = _local_indices(indices, table, names)
    if in_part is not None:
        dx = jnp.where(in_part[..., None], dx, 0)
    dx = dx.astype(jnp.float32)
    total = jnp.zeros(table.shape, jnp.float32)
    total = _unsplit(_unsplit(total, by_width).at[local].add(dx), by_width)
    return execution.scatter(total, names).astype(table.dtype), None


_embed.defvjp(_forward, _backward)


def _unsplit(table: jax.Array, by_width: bool) -> jax.Array:
    """Gathers the vocabulary of a device's part of a table on every tensor shard.

    It does so in a manual region only: there XLA's partitioner (jax 0.12) aborts on a
    look-up along a dim that it splits over other axes. Outside of a region the table is
    returned unchanged.
    """
    if not execution.current().manual:
        return table
    return execution.shard(table, None, "width" if by_width else None)


def _local_indices(
    indices: jax.Array, table: jax.Array, names: Names
) -> tuple[jax.Array, jax.Array | None]:
    """Computes indices into this stage's part of the table.

    Returns:
      The indices, and which of them are in this part (None: all).
    """
    axis = execution.current().vocabulary_axis(names)
    if axis is None:
        return indices, None
    local = indices - jax.lax.axis_index(axis) * table.shape[0]
    in_part = (local >= 0) & (local < table.shape[0])
    return jnp.where(in_part, local, 0), in_part


def _on_group(x: jax.Array, by_width: bool, *last: str) -> jax.Array:
    """Gathers rows, or their indices, on a group's shards if width splits the table."""
    return execution.shard(x, "batch_of_group", None, *last) if by_width else x


def _on_part(x: jax.Array, by_width: bool) -> jax.Array:
    """Lays out rows of a device's own part of the sequence, still split by width.

    This is a step on the way to whole rows. The axes of the sequence and of the batch
    are moved one after another; otherwise XLA's partitioner gathers.
    """
    if not by_width or execution.current().axis_size("context") == 1:
        return x
    return execution.shard(x, "batch_of_group", "sequence", "width_of_part")
