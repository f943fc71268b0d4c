"""Blocks of attention between different documents, which TPU kernels leave out.

A splash kernel walks over the blocks of its mask by tables in scalar memory: whether a
step computes one, and which it fetches. They are inputs of the kernel, so those of a
mask that is known before are cut down at run time by the documents that a sequence is
packed with.

Letters: `I` blocks of queries, `J` steps over blocks of keys (for gradients of keys the
other way round), `h` masks (1: the same for all heads), `S` sequence.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

Tables = splash_attention_mask_info.MaskInfo
_WHOLE = 2  # of a block mask: all of the block counts


def skipping(
    tables: Tables,
    ids_of_queries: jax.Array,
    ids_of_keys: jax.Array,
    sizes: tuple[int, int],
    *,
    by_keys: bool = False,
) -> Tables:
    """Returns a kernel's tables without the blocks whose queries and keys share no
    document.

    A step that is left out fetches what the next one computes, or nothing new. Ids may
    come in any order; of those that rise along the sequence, as packing gives them,
    every such block is left out.

    Args:
      ids_of_queries, ids_of_keys: int32 [S] of one sequence.
      sizes: places of a block of queries, and of one of keys.
      by_keys: of the kernel for dk and dv, whose steps go over queries.
    """
    shared = shared_blocks(ids_of_queries, ids_of_keys, sizes)
    steps = 1 if by_keys else 2
    if tables.data_next is None:  # every block has its turn
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
    """Finds which blocks of queries and of keys may share a document, bool [blocks,
    blocks].
    """
    own_low, own_high = _ranges(ids_of_queries, sizes[0])
    low, high = _ranges(ids_of_keys, sizes[1])
    return (own_low[:, None] <= high[None]) & (low[None] <= own_high[:, None])


def _ranges(ids_S: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and the largest id of each block."""
    blocks = jnp.asarray(ids_S).reshape(-1, size)
    return blocks.min(1), blocks.max(1)


def _nearest(computed_hIJ: jax.Array) -> jax.Array:
    """Returns for each step the next one that computes, itself included, or else the
    last before it.
    """
    count = computed_hIJ.shape[2]
    steps = jax.lax.broadcasted_iota(jnp.int32, computed_hIJ.shape, 2)
    following = jax.lax.cummin(
        jnp.where(computed_hIJ, steps, count), axis=2, reverse=True
    )
    last = jnp.where(computed_hIJ, steps, 0).max(2, keepdims=True)
    return jnp.where(following < count, following, last)
