"""Grouped matmuls: rows sorted by group, times one kernel per group.

Each platform has its own implementation. `jax.lax.ragged_dot` is never used: on CPU and
GPU XLA expands it to a matmul with every group's kernel, and on TPU it does so for the
kernels' gradient. All matmuls here do only the work of the rows' own kernels: forward,
for the input's gradient (transposed kernels) and for the kernels' gradient.

Letters: `R` rows, `E` groups (experts), `K`, `N` a kernel's dims. Rows of group 0 come
first. Spare rows follow the last group; their results are meaningless (they may be
NaN).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.config import extras
from jaxdist.ops.experts.feed_forward import Backend
from jaxdist.parallel import execution

Carry = TypeVar("Carry")  # of a loop


def choose(spare: float = 1.0) -> Backend:
    """Chooses the backend of the current platform.

    Args:
      spare: number of rows that the backend gets, relative to the rows that an even
        load fills.
    """
    platform = execution.current().platform
    backend = BACKENDS[platform]
    if platform == "cpu" or spare == 1:
        return backend
    return replace(
        backend,
        matmul=partial(backend.matmul, spare=spare),
        kernel_gradient=partial(backend.kernel_gradient, spare=spare),
    )


def share_of_group(rows: int, groups: int, *, least: int, most: int) -> int:
    """Rounds 1/8 of a group's even share of the rows down to a power of two.

    Args:
      rows: rows of all groups.
      groups: number of groups.
      least: smallest result.
      most: largest result.
    """
    share = max(1, rows // (8 * groups))
    size: int = 2 ** int(math.log2(share))
    return min(most, max(least, size))


# --- CPU: blocks of one group ---------------------------------------------------------

# Rows of a block. Matmuls of fewer rows than MIN_BLOCK are slow; matmuls of more rows
# than MAX_BLOCK are no faster.
MAX_BLOCK = 64
MIN_BLOCK = 16


def block_rows(rows: int, groups: int) -> int:
    """Chooses the rows of a block.

    The last block of a group is half empty on average. This costs at most a sixteenth
    of the work.
    """
    return share_of_group(rows, groups, least=MIN_BLOCK, most=MAX_BLOCK)


def _over_blocks(
    add: Callable[[Carry, jax.Array, jax.Array], Carry],
    carry: Carry,
    size: jax.Array,
    start: jax.Array,
    block: int,
) -> Carry:
    """Folds add(carry, first row, rows left) over the blocks of one group."""
    count = (size + block - 1) // block
    result: Carry = jax.lax.fori_loop(
        0, count, lambda i, c: add(c, start + i * block, size - i * block), carry
    )
    return result


def _blocked_allocated(rows: int, groups: int) -> int:
    return rows + MAX_BLOCK  # a block reads and writes beyond its group


def _blocked_matmul(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, transposed: bool = False
) -> jax.Array:
    block = block_rows(x.shape[0] - MAX_BLOCK, kernels.shape[0])
    starts = jnp.cumsum(sizes) - sizes
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply_group(group: jax.Array, y: jax.Array) -> jax.Array:
        kernel = kernels[group]  # sliced once for all blocks of the group

        def multiply_block(y: jax.Array, row: jax.Array, _: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(x, row, block)
            part = jax.lax.dot_general(
                part, kernel, contracted, preferred_element_type=x.dtype
            )
            # Rows beyond the group are overwritten by the next group.
            return jax.lax.dynamic_update_slice_in_dim(y, part, row, 0)

        return _over_blocks(multiply_block, y, sizes[group], starts[group], block)

    zeros = jnp.zeros((x.shape[0], kernels.shape[1 if transposed else 2]), x.dtype)
    y: jax.Array = jax.lax.fori_loop(0, kernels.shape[0], multiply_group, zeros)
    return y


def _blocked_gradient(
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    total: jax.Array | None,
    dtype: DTypeLike,
) -> jax.Array:
    # Each block is added to a whole kernel, so larger blocks pay off here.
    block = min(MAX_BLOCK, 2 * block_rows(x.shape[0] - MAX_BLOCK, sizes.shape[0]))
    starts = jnp.cumsum(sizes) - sizes
    if total is None:
        total = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)

    def add_group(group: jax.Array, total: jax.Array) -> jax.Array:
        def add_block(
            gradient: jax.Array, row: jax.Array, rows_left: jax.Array
        ) -> jax.Array:
            x_part, dy_part = (
                jax.lax.dynamic_slice_in_dim(a, row, block) for a in (x, dy)
            )
            dy_part = jnp.where(jnp.arange(block)[:, None] < rows_left, dy_part, 0)
            return gradient + jnp.tensordot(
                x_part, dy_part, ((0,), (0,)), preferred_element_type=gradient.dtype
            )

        gradient = jax.lax.dynamic_index_in_dim(total, group, 0, keepdims=False)
        gradient = _over_blocks(add_block, gradient, sizes[group], starts[group], block)
        updated: jax.Array = jax.lax.dynamic_update_index_in_dim(
            total, gradient, group, 0
        )
        return updated

    total = jax.lax.fori_loop(0, sizes.shape[0], add_group, total)
    return total.astype(dtype)


# --- GPU: one share of every group, then the remaining rows ---------------------------

SHARE_SLACK = 1.25  # rows of a share, relative to a group's even share


def share_rows(rows: int, groups: int, spare: float = 1.0) -> int:
    """Chooses the rows of a share: a multiple of 16, the tile of tensor cores."""
    return -(-math.ceil(max(1.0, SHARE_SLACK / spare) * rows / groups) // 16) * 16


class _Shares(NamedTuple):
    """Shares of groups that one batched matmul computes."""

    # number of the first share; an int: the shares are the first ones of all groups
    number: jax.Array | int
    group: jax.Array  # [n] group of each share
    first: jax.Array  # [n] first row of each share
    # [n] rows from there to the end of the group, possibly more than a share holds
    left: jax.Array


def further_shares(sizes: jax.Array, share: int) -> jax.Array:
    """Counts the shares that each group needs beyond its first one, [E]."""
    return jnp.maximum((sizes + share - 1) // share - 1, 0)


def _over_shares(
    add: Callable[[Carry, _Shares], Carry], carry: Carry, sizes: jax.Array, share: int
) -> Carry:
    """Folds add(carry, shares) over the first share of every group, then the others.

    There are as many others as the remaining rows need, whatever their groups: at most
    E / slack. So no load makes more than about twice the work of an even load. E / 4 of
    the others are computed at a time.
    """
    E = sizes.shape[0]
    starts = jnp.cumsum(sizes) - sizes
    further = further_shares(sizes, share)
    together = max(1, E // 4)
    ends = jnp.cumsum(further)

    def add_others(i: jax.Array, carry: Carry) -> Carry:
        number = i * together + jnp.arange(together)
        group = jnp.minimum((ends[None] <= number[:, None]).sum(-1), E - 1)
        done = (number - (ends - further)[group] + 1) * share
        left = jnp.where(number < ends[-1], sizes[group] - done, 0)
        return add(carry, _Shares(E + i * together, group, starts[group] + done, left))

    carry = add(carry, _Shares(0, jnp.arange(E), starts, sizes))
    with jax.named_scope("even_load_trips_0"):  # the planner reads this name
        result: Carry = jax.lax.fori_loop(
            0, (ends[-1] + together - 1) // together, add_others, carry
        )
    return result


def _rows_of(x: jax.Array, shares: _Shares, share: int) -> jax.Array:
    """Gathers the rows of shares, [n, share, K]; 0 beyond the end of a group."""
    offset = jnp.arange(share)[None]
    is_in_group = offset < shares.left[:, None]
    row = jnp.where(is_in_group, shares.first[:, None] + offset, 0)
    return jnp.where(is_in_group[..., None], x[row], 0)


def _kernels_of(kernels: jax.Array, shares: _Shares) -> jax.Array:
    if isinstance(shares.number, int):
        return kernels  # the first shares are those of all groups, in order
    return kernels[shares.group]


def _padded_allocated(rows: int, groups: int) -> int:
    return rows


def _padded_matmul(
    x: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    spare: float = 1.0,
) -> jax.Array:
    R = x.shape[0]
    E = kernels.shape[0]
    share = share_rows(R, E, spare)
    equation = "ecn,ekn->eck" if transposed else "eck,ekn->ecn"
    ends = jnp.cumsum(sizes)
    further = further_shares(sizes, share)
    # group of each row; E for spare rows
    group_or_E = (ends[None] <= jnp.arange(R)[:, None]).sum(-1)
    group = jnp.minimum(group_or_E, E - 1)
    offset = jnp.arange(R) - (ends - sizes)[group]
    # number of each row's share; -1 for spare rows
    number = E + (jnp.cumsum(further) - further)[group] + offset // share - 1
    number = jnp.where(group_or_E == E, -1, jnp.where(offset < share, group, number))

    def add(y: jax.Array, shares: _Shares) -> jax.Array:
        part = jnp.einsum(
            equation, _rows_of(x, shares, share), _kernels_of(kernels, shares)
        )
        index = number - shares.number
        is_in_shares = (index >= 0) & (index < shares.group.size)
        row = jnp.where(is_in_shares, index * share + offset % share, 0)
        return jnp.where(
            is_in_shares[:, None], part.reshape(-1, part.shape[-1])[row], y
        )

    zeros = jnp.zeros((R, kernels.shape[1 if transposed else 2]), x.dtype)
    return _over_shares(add, zeros, sizes, share)


def _padded_gradient(
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    total: jax.Array | None,
    dtype: DTypeLike,
    *,
    spare: float = 1.0,
) -> jax.Array:
    share = share_rows(x.shape[0], sizes.shape[0], spare)
    if total is None:
        total = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)

    def add(total: jax.Array, shares: _Shares) -> jax.Array:
        parts = (_rows_of(a, shares, share) for a in (x, dy))
        gradients = jnp.einsum(
            "eck,ecn->ekn", *parts, preferred_element_type=total.dtype
        )
        if isinstance(shares.number, int):
            return total + gradients
        return total.at[shares.group].add(gradients)

    return _over_shares(add, total, sizes, share).astype(dtype)


# --- TPU: a Pallas kernel -------------------------------------------------------------


def _tpu() -> Any:
    """Imports the module of TPU kernels; other platforms do not need it."""
    return extras.load("jaxdist.ops.experts.tpu")


BACKENDS = {
    "cpu": Backend(
        name="blocks",
        reason=f"blocks of up to {MAX_BLOCK} rows of one expert; XLA's own grouped "
        "matmul is dense on CPU",
        allocated=_blocked_allocated,
        matmul=_blocked_matmul,
        kernel_gradient=_blocked_gradient,
        keeps_products=True,
    ),
    "gpu": Backend(
        name="shares",
        reason=f"batched matmuls of {SHARE_SLACK} x the even share of every expert, "
        "then of the remaining rows; XLA's own grouped matmul is dense on GPU",
        allocated=_padded_allocated,
        matmul=_padded_matmul,
        kernel_gradient=_padded_gradient,
    ),
    "tpu": Backend(
        name="megablox",
        reason="jax's megablox kernels; the gradient of XLA's own grouped matmul is "
        "dense on TPU",
        allocated=lambda rows, groups: _tpu().allocated(rows, groups),
        matmul=lambda *args, **options: _tpu().matmul(*args, **options),
        kernel_gradient=lambda *args, **options: _tpu().kernel_gradient(
            *args, **options
        ),
        turns_down=True,
        hidden_gradients=lambda *args: _tpu().hidden_gradients(*args),
    ),
}
