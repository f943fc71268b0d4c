"""Order of a device's rows: its assignments of tokens to experts, sorted by expert.

One sort gives the order; the rest is arithmetic on the counts of the experts.

Letters: `T` tokens of a device, `k` experts of a token, `A` = T k assignments, `E`
experts. Assignment a is choice a % k of token a // k. After the sort, the assignments
of expert 0 come first. An assignment's index in this order is its slot.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
    """Order of a device's assignments, sorted by expert."""

    # [A] int32, the assignment at each slot; assignments without an expert come last
    assignments: jax.Array
    slots: jax.Array  # [A] int32, the slot of each assignment


def sort_by_expert(ids_Tk: jax.Array, num_experts: int) -> Order:
    """Sorts the assignments by expert; ids from `num_experts` on mean no expert."""
    ids = jnp.minimum(ids_Tk.reshape(-1), num_experts)
    A = ids.size
    assignments = jnp.arange(ids.size, dtype=jnp.int32)
    if (num_experts + 1) * A < 2**31:
        # One key holds the expert and the assignment: a sort of pairs moves twice the
        # bytes.
        order = jax.lax.sort(ids * A + assignments) % A
    else:
        order = jax.lax.sort((ids, assignments), num_keys=1)[1]
    slots = (
        jnp.zeros_like(order)
        .at[order]
        .set(assignments, unique_indices=True, mode="promise_in_bounds")
    )
    return Order(order, slots)


def count(
    ids_Tk: jax.Array, num_experts: int, counted_T: jax.Array | None = None
) -> jax.Array:
    """Counts the assignments of each expert, [E] int32.

    Args:
      ids_Tk: experts of each token; ids from `num_experts` on mean no expert.
      num_experts: E.
      counted_T: bool, the tokens to count; None: all.
    """
    # A sum instead of a scatter: TPUs scatter element by element.
    chosen = ids_Tk[..., None] == jnp.arange(num_experts).reshape(1, 1, -1)
    if counted_T is not None:
        chosen &= counted_T[:, None, None]
    return chosen.sum((0, 1), dtype=jnp.int32)


def over_capacity(
    ids_BSk: jax.Array, num_experts: int, limit: int, axes: tuple[str, ...]
) -> jax.Array:
    """Finds the assignments whose expert is full, [B, S, k] bool.

    An expert takes the first `limit` assignments of every sequence. So the dropped
    assignments do not depend on how samples are split over devices or microbatches.

    Args:
      ids_BSk: experts of each token; ids of `num_experts` mean no expert, and are never
        over capacity.
      num_experts: E.
      limit: number of assignments that an expert takes of a sequence.
      axes: manual mesh axes that split the sequence.
    """
    B, S, k = ids_BSk.shape
    ids = ids_BSk.reshape(B, S * k)
    counts = (ids[..., None] == jnp.arange(num_experts).reshape(1, 1, -1)).sum(
        1, dtype=jnp.int32
    )
    rank = jax.vmap(
        lambda sequence: sort_by_expert(sequence[:, None], num_experts).slots
    )(ids)
    # slots of this sequence in front of the expert's first slot
    offset = jnp.cumsum(counts, 1) - counts
    for axis in axes:
        # The expert's assignments in earlier parts of the sequence count, too.
        all_counts = jax.lax.all_gather(counts, axis)
        is_earlier = jnp.arange(all_counts.shape[0]) < jax.lax.axis_index(axis)
        offset -= jnp.where(is_earlier[:, None, None], all_counts, 0).sum(0)
    start = jnp.take_along_axis(offset, jnp.minimum(ids, num_experts - 1), 1)
    return ((rank - start >= limit) & (ids < num_experts)).reshape(B, S, k)


def evaluate_steps(ends: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
    """Evaluates a step function: values[i] where ends[i - 1] <= at < ends[i].

    From the last end on it is values[-1]. It is computed as a sum of steps, because
    TPUs look values up one by one.

    Args:
      ends: [..., n], ascending.
      values: [..., n + 1].
      at: [..., m].
    """
    rises = (values[..., 1:] - values[..., :-1])[..., None, :]
    passed = ends[..., None, :] <= at[..., None]
    return values[..., :1] + jnp.where(passed, rises, 0).sum(-1, dtype=values.dtype)
