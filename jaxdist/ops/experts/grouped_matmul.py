"""Products of rows, sorted by group, with one kernel a group: what each platform
computes them with.

`jax.lax.ragged_dot` is never used: on CPU and GPU XLA expands it to a product with
every group's kernel, and on TPU its weight gradient. All products here do the work of
the rows' own kernels: forward, for the input's gradient (transposed kernels) and for
the kernels' gradient.

Letters: `R` rows, `E` groups (experts), `K`, `N` a kernel's dims. Rows of group 0 come
first; behind those of the last group are spare rows, whose results mean nothing (they
may be NaN).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config import extras
from jaxdist.ops.experts.feed_forward import Backend
from jaxdist.parallel import execution


def choose(spare: float = 1.0) -> Backend:
    """Returns the backend of the platform in force.

    Args:
      spare: of the rows that it is given, how many times those that an even load fills.
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


# --- CPU: blocks of one group ---------------------------------------------------------

# rows: products of fewer are slow, of more no faster
MAX_BLOCK = 64
MIN_BLOCK = 16


def block_rows(rows: int, groups: int) -> int:
    """Returns the rows of a block: a power of two, up to an eighth of a group's even
    share.

    The last block of a group is half empty on average: a sixteenth of the work, or
    less.
    """
    share = max(1, rows // (8 * groups))
    return min(MAX_BLOCK, max(MIN_BLOCK, 2 ** int(math.log2(share))))


def _over_blocks(add: Callable[..., Any], carry: Any, size, start, block: int) -> Any:
    """Returns the carry after add(carry, first row, rows left) of all blocks of one
    group.
    """
    count = (size + block - 1) // block
    return jax.lax.fori_loop(
        0, count, lambda i, c: add(c, start + i * block, size - i * block), carry
    )


def _blocked_allocated(rows: int, groups: int) -> int:
    return rows + MAX_BLOCK  # a block reads and writes beyond its group


def _blocked_matmul(x, kernels, sizes, *, transposed: bool = False):
    block = block_rows(x.shape[0] - MAX_BLOCK, kernels.shape[0])
    starts = jnp.cumsum(sizes) - sizes
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def one_group(group, y):
        kernel = kernels[group]  # cut out once

        def add(y, row, _):
            part = jax.lax.dynamic_slice_in_dim(x, row, block)
            part = jax.lax.dot_general(
                part, kernel, contracted, preferred_element_type=x.dtype
            )
            # the next group overwrites its own
            return jax.lax.dynamic_update_slice_in_dim(y, part, row, 0)

        return _over_blocks(add, y, sizes[group], starts[group], block)

    zeros = jnp.zeros((x.shape[0], kernels.shape[1 if transposed else 2]), x.dtype)
    return jax.lax.fori_loop(0, kernels.shape[0], one_group, zeros)


def _blocked_gradient(x, dy, sizes, total, dtype):
    # Each block adds to a whole kernel, so here larger ones pay.
    block = min(MAX_BLOCK, 2 * block_rows(x.shape[0] - MAX_BLOCK, sizes.shape[0]))
    starts = jnp.cumsum(sizes) - sizes
    if total is None:
        total = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)

    def one_group(group, total):
        def add(own, row, left):
            x_part, dy_part = (
                jax.lax.dynamic_slice_in_dim(a, row, block) for a in (x, dy)
            )
            dy_part = jnp.where(jnp.arange(block)[:, None] < left, dy_part, 0)
            return own + jnp.tensordot(
                x_part, dy_part, ((0,), (0,)), preferred_element_type=own.dtype
            )

        own = jax.lax.dynamic_index_in_dim(total, group, 0, keepdims=False)
        own = _over_blocks(add, own, sizes[group], starts[group], block)
        return jax.lax.dynamic_update_index_in_dim(total, own, group, 0)

    return jax.lax.fori_loop(0, sizes.shape[0], one_group, total).astype(dtype)


# --- GPU: shares of all groups, then what is left -------------------------------------

SHARE_SLACK = 1.25  # rows of a share, relative to the even one


def share_rows(rows: int, groups: int, spare: float = 1.0) -> int:
    """Returns the rows of a share: a multiple of 16, of which tensor cores
    take tiles.
    """
    return -(-math.ceil(max(1.0, SHARE_SLACK / spare) * rows / groups) // 16) * 16


class _Shares(NamedTuple):
    """Shares of groups that one batched product computes."""

    number: jax.Array | int  # of the first of them
    group: jax.Array  # [n]
    first: jax.Array  # [n] row
    # [n] rows from there to the end of the group; a share has room for fewer or more
    left: jax.Array


def further_shares(sizes: jax.Array, share: int) -> jax.Array:
    """Returns the shares that groups of these sizes take beyond their first, [E]."""
    return jnp.maximum((sizes + share - 1) // share - 1, 0)


def _over_shares(
    add: Callable[..., Any], carry: Any, sizes: jax.Array, share: int
) -> Any:
    """Returns the carry after add(carry, shares) of the first share of each group, and
    then of all others.

    The others are as many as their rows need, whatever groups they are of: together at
    most E / slack, so that no load makes more than about twice the work of an even one.
    They are computed E / 4 at a time.
    """
    E = sizes.shape[0]
    starts = jnp.cumsum(sizes) - sizes
    further = further_shares(sizes, share)
    together = max(1, E // 4)
    ends = jnp.cumsum(further)

    def others(i, carry):
        number = i * together + jnp.arange(together)
        group = jnp.minimum((ends[None] <= number[:, None]).sum(-1), E - 1)
        done = (number - (ends - further)[group] + 1) * share
        left = jnp.where(number < ends[-1], sizes[group] - done, 0)
        return add(carry, _Shares(E + i * together, group, starts[group] + done, left))

    carry = add(carry, _Shares(0, jnp.arange(E), starts, sizes))
    with jax.named_scope("even_load_trips_0"):  # for the planner
        return jax.lax.fori_loop(
            0, (ends[-1] + together - 1) // together, others, carry
        )


def _rows_of(x, shares: _Shares, share: int):
    """Returns rows [n, share, K]; 0 where a group has no more."""
    place = jnp.arange(share)[None]
    there = place < shares.left[:, None]
    row = jnp.where(there, shares.first[:, None] + place, 0)
    return jnp.where(there[..., None], x[row], 0)


def _own(kernels, shares: _Shares):
    """Returns the kernel of each share; the first ones are of all groups, in order."""
    return kernels if isinstance(shares.number, int) else kernels[shares.group]


def _padded_allocated(rows: int, groups: int) -> int:
    return rows


def _padded_matmul(x, kernels, sizes, *, transposed: bool = False, spare: float = 1.0):
    R = x.shape[0]
    E = kernels.shape[0]
    share = share_rows(R, E, spare)
    equation = "ecn,ekn->eck" if transposed else "eck,ekn->ecn"
    ends = jnp.cumsum(sizes)
    further = further_shares(sizes, share)
    of_row = (ends[None] <= jnp.arange(R)[:, None]).sum(-1)
    group = jnp.minimum(of_row, E - 1)
    place = jnp.arange(R) - (ends - sizes)[group]
    number = E + (jnp.cumsum(further) - further)[group] + place // share - 1
    # of each row's share
    number = jnp.where(of_row == E, -1, jnp.where(place < share, group, number))

    def add(y, shares: _Shares):
        part = jnp.einsum(equation, _rows_of(x, shares, share), _own(kernels, shares))
        at = number - shares.number
        own = (at >= 0) & (at < shares.group.size)
        row = jnp.where(own, at * share + place % share, 0)
        return jnp.where(own[:, None], part.reshape(-1, part.shape[-1])[row], y)

    zeros = jnp.zeros((R, kernels.shape[1 if transposed else 2]), x.dtype)
    return _over_shares(add, zeros, sizes, share)


def _padded_gradient(x, dy, sizes, total, dtype, *, spare: float = 1.0):
    share = share_rows(x.shape[0], sizes.shape[0], spare)
    if total is None:
        total = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)

    def add(total, shares: _Shares):
        parts = (_rows_of(a, shares, share) for a in (x, dy))
        product = jnp.einsum("eck,ecn->ekn", *parts, preferred_element_type=total.dtype)
        return (
            total + product
            if isinstance(shares.number, int)
            else total.at[shares.group].add(product)
        )

    return _over_shares(add, total, sizes, share).astype(dtype)


# --- TPU: a kernel --------------------------------------------------------------------


def _tpu() -> Any:
    """Imports the kernels for TPUs, which only these need."""
    return extras.load("jaxdist.ops.experts.tpu")


BACKENDS = {
    "cpu": Backend(
        "blocks",
        f"blocks of up to {MAX_BLOCK} rows of one expert; XLA's own grouped product is dense on CPU",
        _blocked_allocated,
        _blocked_matmul,
        _blocked_gradient,
        keeps_products=True,
    ),
    "gpu": Backend(
        "shares",
        f"batched products of {SHARE_SLACK} x the even share of every expert, then of what is left; XLA's "
        "own grouped product is dense on GPU",
        _padded_allocated,
        _padded_matmul,
        _padded_gradient,
    ),
    "tpu": Backend(
        "megablox",
        "jax's megablox kernels; the gradient of XLA's own grouped product is dense on TPU",
        lambda rows, groups: _tpu().allocated(rows, groups),
        lambda *args, **options: _tpu().matmul(*args, **options),
        lambda *args, **options: _tpu().kernel_gradient(*args, **options),
        turns_down=True,
        hidden_gradients=lambda *args: _tpu().hidden_gradients(*args),
    ),
}
