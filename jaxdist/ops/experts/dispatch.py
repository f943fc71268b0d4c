"""Where the rows of tokens go: one sort of a device's assignments by expert, and
arithmetic on its counts.

Letters: `T` tokens of a device, `k` experts of a token, `A` = T k assignments, `E`
experts. Assignment a is the choice a % k of token a // k. Sorted, those of expert 0
come first; its place there is its slot.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
    """A device's assignments sorted by expert."""

    # [A] int32, the assignment at each slot; those left out come last
    assignments: jax.Array
    slots: jax.Array  # [A] int32, the slot of each assignment


def sort_by_expert(ids_Tk: jax.Array, num_experts: int) -> Order:
    """Returns the order of the assignments; ids of `num_experts` and more stand for
    none.
    """
    ids = jnp.minimum(ids_Tk.reshape(-1), num_experts)
    A = ids.size
    iota = jnp.arange(ids.size, dtype=jnp.int32)
    # one key that holds both: half of what a sort of pairs moves
    if (num_experts + 1) * A < 2**31:
        order = jax.lax.sort(ids * A + iota) % A
    else:
        order = jax.lax.sort((ids, iota), num_keys=1)[1]
    slots = (
        jnp.zeros_like(order)
        .at[order]
        .set(iota, unique_indices=True, mode="promise_in_bounds")
    )
    return Order(order, slots)


def count(
    ids_Tk: jax.Array, num_experts: int, counted_T: jax.Array | None = None
) -> jax.Array:
    """Returns the assignments of each expert, [E] int32; with `counted_T` only those of
    such tokens.
    """
    # A sum and no scatter, which TPUs do one by one.
    chosen = ids_Tk[..., None] == jnp.arange(num_experts).reshape(1, 1, -1)
    if counted_T is not None:
        chosen &= counted_T[:, None, None]
    return chosen.sum((0, 1), dtype=jnp.int32)


def over_capacity(
    ids_BSk: jax.Array, num_experts: int, limit: int, axes: tuple[str, ...]
) -> jax.Array:
    """Finds which assignments find their expert full, [B, S, k] bool.

    An expert takes the first `limit` assignments of every sequence, so what is dropped
    does not depend on how samples are split over devices or parts of a step.

    Args:
      ids_BSk: those of `num_experts` stand for none, and are not over it.
      axes: manual mesh axes that share out the sequence.
    """
    B, S, k = ids_BSk.shape
    ids = ids_BSk.reshape(B, S * k)
    counts = (ids[..., None] == jnp.arange(num_experts).reshape(1, 1, -1)).sum(
        1, dtype=jnp.int32
    )
    rank = jax.vmap(lambda own: sort_by_expert(own[:, None], num_experts).slots)(ids)
    # slots of this sequence before the expert's own
    before = jnp.cumsum(counts, 1) - counts
    for axis in axes:  # and its assignments in earlier parts of the sequence
        all_counts = jax.lax.all_gather(counts, axis)
        earlier = jnp.arange(all_counts.shape[0]) < jax.lax.axis_index(axis)
        before -= jnp.where(earlier[:, None, None], all_counts, 0).sum(0)
    start = jnp.take_along_axis(before, jnp.minimum(ids, num_experts - 1), 1)
    return ((rank - start >= limit) & (ids < num_experts)).reshape(B, S, k)


def steps(ends: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
    """Returns values[i] where ends[i - 1] <= at < ends[i], of the last dim; values[-1]
    beyond the last end.

    As a sum of steps: look-ups one by one are slow on TPUs.

    Args:
      ends: [..., n], ascending.
      values: [..., n + 1], the last one for what is beyond.
      at: [..., m].
    """
    rises = (values[..., 1:] - values[..., :-1])[..., None, :]
    passed = ends[..., None, :] <= at[..., None]
    return values[..., :1] + jnp.where(passed, rises, 0).sum(-1, dtype=values.dtype)
