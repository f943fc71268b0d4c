"""Skipping of attention blocks between different documents, for TPU kernels.

A splash kernel walks over the blocks of its mask by tables in scalar memory. The tables
say whether a step computes its block, and which block it fetches. They are inputs of
the kernel. So the tables of a static mask can be reduced at run time, by the documents
that are packed into a sequence.

Letters: `I` blocks of queries, `J` steps over blocks of keys (the other way round for
gradients of keys), `h` masks (1: one mask for all heads), `S` sequence.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

Tables = splash_attention_mask_info.MaskInfo
_WHOLE = 2  # entry of a block mask: no element of the block is masked


def skip_unshared_blocks(
    tables: Tables,
    ids_of_queries: jax.Array,
    ids_of_keys: jax.Array,
    sizes: tuple[int, int],
    *,
    by_keys: bool = False,
) -> Tables:
    """Removes the blocks whose queries and keys share no document from a kernel's tables.

    A skipped step fetches the block of the next computed step, or nothing new. Ids may
    have any order. If they rise along the sequence, as packed ids do, every such block
    is skipped.

    Args:
      tables: tables of the kernel.
      ids_of_queries: int32 [S] documents of one sequence's queries.
      ids_of_keys: int32 [S] documents of its keys.
      sizes: tokens of a block of queries, and of a block of keys.
      by_keys: whether the kernel computes dk and dv: its steps go over queries.
    """
    shared = shared_blocks(ids_of_queries, ids_of_keys, sizes)
    steps = 1 if by_keys else 2
    if tables.data_next is None:  # no tables: the kernel computes every block in order
        order = jax.lax.broadcasted_iota(jnp.int32, (1, *shared.shape), steps)
        whole = jnp.full(order.shape, _WHOLE, jnp.int32)
        tables = tables._replace(data_next=order, block_mask=whole)
    fetched, computed = (
        jnp.moveaxis(jnp.asarray(x), steps, 2)
        for x in (tables.data_next, tables.block_mask)
    )
    shared = (shared.T if by_keys else shared)[None]
    shared = jnp.broadcast_to(shared, (len(fetched), *shared.shape[1:]))
    computed = jnp.where(
        jnp.take_along_axis(shared, fetched.astype(jnp.int32), 2), computed, 0
    )
    fetched = jnp.take_along_axis(fetched, _nearest(computed > 0), 2)
    fetched, computed = (jnp.moveaxis(x, 2, steps) for x in (fetched, computed))
    return tables._replace(data_next=fetched, block_mask=computed)


def shared_blocks(
    ids_of_queries: jax.Array, ids_of_keys: jax.Array, sizes: tuple[int, int]
) -> jax.Array:
    """Finds blocks that may share a document, bool [query blocks, key blocks]."""
    query_low, query_high = _id_ranges(ids_of_queries, sizes[0])
    key_low, key_high = _id_ranges(ids_of_keys, sizes[1])
    starts_before_end = query_low[:, None] <= key_high[None]
    ends_after_start = key_low[None] <= query_high[:, None]
    return starts_before_end & ends_after_start


def _id_ranges(ids_S: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Finds the smallest and the largest id of each block."""
    blocks = jnp.asarray(ids_S).reshape(-1, size)
    return blocks.min(1), blocks.max(1)


def _nearest(computed_hIJ: jax.Array) -> jax.Array:
    """Finds the computed step at or after each step; after the last one, that one."""
    count = computed_hIJ.shape[2]
    steps = jax.lax.broadcasted_iota(jnp.int32, computed_hIJ.shape, 2)
    following = jax.lax.cummin(
        jnp.where(computed_hIJ, steps, count), axis=2, reverse=True
    )
    last = jnp.where(computed_hIJ, steps, 0).max(2, keepdims=True)
    return jnp.where(following < count, following, last)
