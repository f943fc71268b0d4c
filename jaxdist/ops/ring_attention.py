"""Attention around a ring of devices: keys and values travel, and no device ever holds
all of them.

A device attends with its queries to its own keys, then to those that arrive from its
neighbour while it hands on the ones it had (arXiv:2310.01889); parts of the softmax are
merged by their logsumexp. For causal masks a device takes the i-th and the i-th last of
2c chunks, so that all have equal work (arXiv:2311.09431): then a step is two products
of whole chunks, and every mask is known when the program is made. Gradients of keys and
values travel with them, in float32, and one hop brings them home.

Letters: c devices, i this one, h places of a chunk, else see `attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.attention_request import Pieces, Request, Result, inner_products
from jaxdist.parallel.context import AXIS, CHUNKS, KEYS
from jaxdist.parallel.remat import RESIDUALS


class Keys(NamedTuple):
    """Keys and values of a chunk, or their gradients."""

    k: jax.Array  # [B, h, K, N]
    v: jax.Array


class Queries(NamedTuple):
    """What the backward pass knows of a chunk's queries."""

    q: jax.Array  # [B, h, H, N]
    result: Result


class Sum(NamedTuple):
    """Attention to the keys so far, float32."""

    out: jax.Array  # [B, h, H, N]
    lse: jax.Array  # [B, h, H] logsumexp of the logits


class Ring(NamedTuple):
    """What is static; hashable."""

    pieces: Pieces
    causal: bool
    size: int  # c


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def ring_attention(request: Request, ring: Ring) -> jax.Array:
    """Computes attention of a device's part of the sequence, [B, S / c, H, N] in q's
    dtype.

    Call it in a region that is manual over `context`, with whole segment ids and a
    device's part of the rest, which lies in order: chunks change places in here.
    """
    return _forward(request, ring)[0]


def _piece(
    request: Request,
    ring: Ring,
    n: Any,
    m: Any,
    q: jax.Array,
    keys: Keys,
    device: Any,
    *,
    causal: bool,
) -> Request:
    """Makes the request of a chunk of this device's queries and one of keys.

    Args:
      n, m: number of the chunk of queries, and of keys, on its device: 0 or 1.
      device: whose keys they are.
    """
    query_ids = _ids(request, ring, jax.lax.axis_index(AXIS), n)
    segment_ids = _ids(request, ring, device, m)
    options = request.options._replace(causal=causal)
    return Request(q, *keys, segment_ids, options, query_ids)


def _forward(request: Request, ring: Ring):
    q, k, v = (_chunks(x, ring) for x in request.heads)
    keys = [Keys(*both) for both in zip(k, v, strict=True)]

    def piece(*chunks: Any, causal: bool = False) -> Sum:
        of_chunks = _piece(request, ring, *chunks, causal=causal)
        return Sum(*ring.pieces.forward(of_chunks))

    sums = [
        piece(n, n, q[n], keys[n], _device(0, ring), causal=ring.causal)
        for n in range(len(q))
    ]
    if len(q) == 2:
        sums[1] = _merged(sums[1], piece(1, 0, q[1], keys[0], _device(0, ring)))

    def step(sums, keys, number):
        device = _device(number, ring)
        if len(q) == 1:
            return [_merged(sums[0], piece(0, 0, q[0], keys[0], device))]
        late = _merged(sums[1], piece(1, 0, q[1], keys[0], device))
        # those keys are before this device's first chunk
        before = number <= jax.lax.axis_index(AXIS)
        n = jnp.where(before, 0, 1)
        chosen = _where(before, keys[0], keys[1])
        both = _merged(
            _where(before, sums[0], late),
            piece(n, n, _where(before, *q), chosen, device),
        )
        return [_where(before, both, sums[0]), _where(before, late, both)]

    sums = _around(step, sums, keys, ring)
    out = _in_order([part.out.astype(request.q.dtype) for part in sums], ring)
    out = checkpoint_name(out, RESIDUALS)
    lse = checkpoint_name([part.lse for part in sums], RESIDUALS)
    return out, (request, out, lse)


def _backward(ring: Ring, residuals, grad_BSHN: jax.Array):
    request, out_BSHN, lse = residuals
    # In order: it is an N-th of the results, which then stay where they are.
    inner_BSH = inner_products(out_BSHN, grad_BSHN)
    q, k, v, grad, inner = (
        _chunks(x, ring) for x in (*request.heads, grad_BSHN, inner_BSH)
    )
    results = map(Result, grad, inner, lse)
    queries = [Queries(*parts) for parts in zip(q, results, strict=True)]
    keys = [Keys(*both) for both in zip(k, v, strict=True)]

    def piece(
        n: Any, m: Any, queries: Queries, *of_keys: Any, causal: bool = False
    ) -> tuple[jax.Array, Keys]:
        of_chunks = _piece(request, ring, n, m, queries.q, *of_keys, causal=causal)
        dq, dk, dv = ring.pieces.backward(of_chunks, queries.result)
        return dq, Keys(dk, dv)

    def step(carry, keys, number):
        dq, dkeys = carry
        dkeys = _hop(dkeys, ring)
        device = _device(number, ring)
        if len(q) == 1:
            more, dkey = piece(0, 0, queries[0], keys[0], device)
            return [dq[0] + more], [_added(dkeys[0], dkey)]
        late, first = piece(1, 0, queries[1], keys[0], device)
        before = number <= jax.lax.axis_index(AXIS)
        n = jnp.where(before, 0, 1)
        more, dkey = piece(
            n, n, _where(before, *queries), _where(before, *keys), device
        )
        none = jnp.zeros_like(more)
        nothing = jax.tree.map(jnp.zeros_like, dkey)
        dq = [
            dq[0] + jnp.where(before, more, none),
            dq[1] + late + jnp.where(before, none, more),
        ]
        first = _added(first, _where(before, dkey, nothing))
        return dq, [
            _added(dkeys[0], first),
            _added(dkeys[1], _where(before, nothing, dkey)),
        ]

    start = _own_gradients(piece, queries, keys, ring)
    dq, dkeys = _around(step, start, keys, ring)
    dkeys = _hop(dkeys, ring)
    dq = [part.astype(request.q.dtype) for part in dq]
    dk, dv = ([part[n].astype(request.k.dtype) for part in dkeys] for n in range(2))
    gradients = (_in_order(parts, ring) for parts in (dq, dk, dv))
    return (request.gradients(*gradients),)


ring_attention.defvjp(_forward, _backward)


def _own_gradients(
    piece: Callable[..., tuple[jax.Array, Keys]],
    queries: list[Queries],
    keys: list[Keys],
    ring: Ring,
) -> tuple[list[jax.Array], list[Keys]]:
    """Computes the gradients of a device's queries, and of its own keys by these."""
    device = _device(0, ring)
    dq = []
    dkeys = []
    for n, (own_queries, own_keys) in enumerate(zip(queries, keys, strict=True)):
        more, dkey = piece(n, n, own_queries, own_keys, device, causal=ring.causal)
        dq.append(more)
        dkeys.append(dkey)
    if len(queries) == 2:
        late, first = piece(1, 0, queries[1], keys[0], device)
        dq[1] = dq[1] + late
        dkeys[0] = _added(dkeys[0], first)
    return dq, dkeys


def _around(step: Callable[..., Any], carry, keys, ring: Ring):
    """Returns step(carry, keys, number) folded over the keys of the other devices, 1 to
    c - 1 hops away.

    What is needed next travels while a step computes.
    """
    keys = _hop(keys, ring)

    def one(state, number):
        carry, keys = state
        return (step(carry, keys, number), _hop(keys, ring)), None

    if ring.size > 2:
        (carry, keys), _ = jax.lax.scan(
            one, (carry, keys), jnp.arange(1, ring.size - 1)
        )
    return step(carry, keys, jnp.int32(ring.size - 1))


def _hop(tree, ring: Ring):
    """Fetches the arrays of the device before."""
    pairs = [(i, (i + 1) % ring.size) for i in range(ring.size)]
    with jax.named_scope(KEYS):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _device(hops, ring: Ring) -> jax.Array:
    """Returns whose keys arrive after so many hops."""
    return (jax.lax.axis_index(AXIS) - hops) % ring.size


def _merged(one: Sum, other: Sum) -> Sum:
    lse = jnp.logaddexp(one.lse, other.lse)
    shares = [jnp.exp(part.lse - lse)[..., None] for part in (one, other)]
    return Sum(shares[0] * one.out + shares[1] * other.out, lse)


def _added(one: Keys, other: Keys) -> Keys:
    return jax.tree.map(jnp.add, one, other)


def _where(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


# --- places of chunks -----------------------------------------------------------------


def _chunks(x: jax.Array, ring: Ring) -> list[jax.Array]:
    """Returns a device's chunks i and 2c - 1 - i of what it has in order, 2i and 2i +
    1; not causal: all.
    """
    if not ring.causal:
        return [x]
    with jax.named_scope(CHUNKS):
        halves = [
            jax.lax.ppermute(half, AXIS, _moves(ring, n))
            for n, half in enumerate(jnp.split(x, 2, axis=1))
        ]
    # Chunks of even number arrive from the first halves: a device's first chunk has its
    # own number.
    even = jax.lax.axis_index(AXIS) % 2 == 0
    return [_where(even, *halves), _where(even, *halves[::-1])]


def _in_order(chunks: list[jax.Array], ring: Ring) -> jax.Array:
    """Returns the inverse of `_chunks`."""
    if len(chunks) == 1:
        return chunks[0]
    even = jax.lax.axis_index(AXIS) % 2 == 0
    halves = [_where(even, *chunks), _where(even, *chunks[::-1])]
    back = [[(to, device) for device, to in _moves(ring, n)] for n in range(2)]
    with jax.named_scope(CHUNKS):
        halves = [
            jax.lax.ppermute(half, AXIS, pairs)
            for half, pairs in zip(halves, back, strict=True)
        ]
    return jnp.concatenate(halves, axis=1)


def _moves(ring: Ring, half: int) -> list[tuple[int, int]]:
    """Returns to which device each one's first or second half goes."""
    return [
        (i, min(2 * i + half, 2 * ring.size - 1 - 2 * i - half))
        for i in range(ring.size)
    ]


def _ids(request: Request, ring: Ring, device, number) -> jax.Array | None:
    """Cuts out the segment ids of a device's chunk; number 0 or 1 may be an array."""
    ids = request.segment_ids
    if ids is None:
        return None
    place = device
    size = ids.shape[1] // ring.size
    if ring.causal:
        place = jnp.where(number == 0, device, 2 * ring.size - 1 - device)
        size = ids.shape[1] // (2 * ring.size)
    return jax.lax.dynamic_slice_in_dim(ids, place * size, size, 1)
