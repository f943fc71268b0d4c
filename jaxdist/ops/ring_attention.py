"""Attention around a ring of devices: keys and values travel, no device holds them all.

A device attends with its queries to its own keys first. Then it attends to the keys
that arrive from its neighbour, while it sends on those that it had (arXiv:2310.01889).
The parts of the softmax are merged by their logsumexp.

With a causal mask, the sequence has 2c chunks, and a device takes the i-th and the i-th
last of them. So all devices have equal work (arXiv:2311.09431). A step computes the
attention of two pairs of whole chunks, and every mask is static. Gradients of keys and
values travel with them in float32, and one more hop returns them to their own device.

Letters: c devices, i this device, h tokens of a chunk; see `attention` for the others.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.attention_request import Pieces, Request, Result, inner_products
from jaxdist.parallel.context import AXIS, CHUNKS, KEYS
from jaxdist.parallel.remat import RESIDUALS

Tree = TypeVar("Tree")  # a tree of arrays
Carry = TypeVar("Carry")  # the carry of a loop
Number = jax.Array | int


class Keys(NamedTuple):
    """Keys and values of a chunk, or their gradients."""

    k: jax.Array  # [B, h, K, N]
    v: jax.Array


class Queries(NamedTuple):
    """Queries of a chunk, with what the backward pass needs of their result."""

    q: jax.Array  # [B, h, H, N]
    result: Result


class Sum(NamedTuple):
    """Attention to the keys of the steps so far, float32."""

    out: jax.Array  # [B, h, H, N]
    lse: jax.Array  # [B, h, H] logsumexp of the logits


class Ring(NamedTuple):
    """Static description of a ring; hashable."""

    pieces: Pieces
    causal: bool
    size: int  # c


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def ring_attention(request: Request, ring: Ring) -> jax.Array:
    """Computes attention of a device's part of the sequence.

    Call it in a region that is manual over `context`.

    Args:
      request: the device's part of the arrays, in order, but all segment ids. Chunks are
        exchanged inside.
      ring: static description.

    Returns:
      [B, S / c, H, N] in the dtype of q.
    """
    return _forward(request, ring)[0]


def _piece(
    request: Request,
    ring: Ring,
    q: jax.Array,
    keys: Keys,
    *,
    query_chunk: Number,
    key_chunk: Number,
    key_device: jax.Array,
    causal: bool,
) -> Request:
    """Builds the request of a chunk of this device's queries and a chunk of keys.

    Args:
      request: request of the ring.
      ring: static description.
      q: queries of the chunk.
      keys: keys and values of the chunk.
      query_chunk: number of the chunk of queries on this device, 0 or 1.
      key_chunk: number of the chunk of keys on their device, 0 or 1.
      key_device: device of the keys.
      causal: whether the two chunks are the same.
    """
    query_ids = _chunk_ids(request, ring, jax.lax.axis_index(AXIS), query_chunk)
    segment_ids = _chunk_ids(request, ring, key_device, key_chunk)
    options = request.options._replace(causal=causal)
    return Request(
        q=q,
        k=keys.k,
        v=keys.v,
        segment_ids=segment_ids,
        options=options,
        query_ids=query_ids,
    )


_Gradients = tuple[list[jax.Array], list[Keys]]  # of the chunks of queries and of keys

# request, result, and the logsumexp of each chunk
_Residuals = tuple[Request, jax.Array, list[jax.Array]]


def _forward(request: Request, ring: Ring) -> tuple[jax.Array, _Residuals]:
    q, k, v = (_chunks(x, ring) for x in request.heads)
    keys = [Keys(*pair) for pair in zip(k, v, strict=True)]

    def attend(
        query_chunk: Number,
        key_chunk: Number,
        q: jax.Array,
        keys: Keys,
        key_device: jax.Array,
        *,
        causal: bool = False,
    ) -> Sum:
        piece = _piece(
            request,
            ring,
            q,
            keys,
            query_chunk=query_chunk,
            key_chunk=key_chunk,
            key_device=key_device,
            causal=causal,
        )
        return Sum(*ring.pieces.forward(piece))

    sums = [
        attend(n, n, q[n], keys[n], _key_device(0, ring), causal=ring.causal)
        for n in range(len(q))
    ]
    if len(q) == 2:
        sums[1] = _merge(sums[1], attend(1, 0, q[1], keys[0], _key_device(0, ring)))

    def step(sums: list[Sum], keys: list[Keys], number: jax.Array) -> list[Sum]:
        device = _key_device(number, ring)
        if len(q) == 1:
            return [_merge(sums[0], attend(0, 0, q[0], keys[0], device))]
        second = _merge(sums[1], attend(1, 0, q[1], keys[0], device))
        # The keys' first chunk precedes this device's first chunk if their device does.
        # Then both of its chunks see only the first chunk of keys. Otherwise only its
        # second chunk sees keys: both chunks of them.
        is_before = number <= jax.lax.axis_index(AXIS)
        chunk = jnp.where(is_before, 0, 1)
        chunk_keys = _where(is_before, keys[0], keys[1])
        merged = _merge(
            _where(is_before, sums[0], second),
            attend(chunk, chunk, _where(is_before, *q), chunk_keys, device),
        )
        return [
            _where(is_before, merged, sums[0]),
            _where(is_before, second, merged),
        ]

    sums = _around(step, sums, keys, ring)
    out = _in_order([part.out.astype(request.q.dtype) for part in sums], ring)
    out = checkpoint_name(out, RESIDUALS)
    lse = checkpoint_name([part.lse for part in sums], RESIDUALS)
    return out, (request, out, lse)


def _backward(
    ring: Ring, residuals: _Residuals, grad_BSHN: jax.Array
) -> tuple[Request]:
    request, out_BSHN, lse = residuals
    # The inner products are exchanged instead of the results, which are N times larger.
    inner_BSH = inner_products(out_BSHN, grad_BSHN)
    q, k, v, grad, inner = (
        _chunks(x, ring) for x in (*request.heads, grad_BSHN, inner_BSH)
    )
    results = map(Result, grad, inner, lse)
    queries = [Queries(*parts) for parts in zip(q, results, strict=True)]
    keys = [Keys(*pair) for pair in zip(k, v, strict=True)]

    def pull_back(
        query_chunk: Number,
        key_chunk: Number,
        queries: Queries,
        keys: Keys,
        key_device: jax.Array,
        *,
        causal: bool = False,
    ) -> tuple[jax.Array, Keys]:
        piece = _piece(
            request,
            ring,
            queries.q,
            keys,
            query_chunk=query_chunk,
            key_chunk=key_chunk,
            key_device=key_device,
            causal=causal,
        )
        dq, dk, dv = ring.pieces.backward(piece, queries.result)
        return dq, Keys(dk, dv)

    step = partial(_add_gradients, pull_back, queries, ring)
    start = _first_gradients(pull_back, queries, keys, ring)
    dq, dkeys = _around(step, start, keys, ring)
    dkeys = _hop(dkeys, ring)
    dq = [part.astype(request.q.dtype) for part in dq]
    dk, dv = ([part[n].astype(request.k.dtype) for part in dkeys] for n in range(2))
    gradients = (_in_order(parts, ring) for parts in (dq, dk, dv))
    return (request.gradients(*gradients),)


ring_attention.defvjp(_forward, _backward)


def _first_gradients(
    pull_back: Callable[..., tuple[jax.Array, Keys]],
    queries: list[Queries],
    keys: list[Keys],
    ring: Ring,
) -> _Gradients:
    """Computes the gradients of a device's queries and keys by one another."""
    device = _key_device(0, ring)
    dq = []
    dkeys = []
    for n, (chunk_queries, chunk_keys) in enumerate(zip(queries, keys, strict=True)):
        dq_part, dkeys_part = pull_back(
            n, n, chunk_queries, chunk_keys, device, causal=ring.causal
        )
        dq.append(dq_part)
        dkeys.append(dkeys_part)
    if len(queries) == 2:
        dq_second, dkeys_first = pull_back(1, 0, queries[1], keys[0], device)
        dq[1] = dq[1] + dq_second
        dkeys[0] = _add(dkeys[0], dkeys_first)
    return dq, dkeys


def _add_gradients(
    pull_back: Callable[..., tuple[jax.Array, Keys]],
    queries: list[Queries],
    ring: Ring,
    gradients: _Gradients,
    keys: list[Keys],
    number: jax.Array,
) -> _Gradients:
    """Adds the gradients of a device's queries and of another device's keys.

    Args:
      pull_back: computes the gradients of a chunk of queries and a chunk of keys.
      queries: chunks of this device's queries.
      ring: static description.
      gradients: sums so far. Those of the keys are still on the preceding device.
      keys: chunks of the other device's keys.
      number: distance of the other device in hops.
    """
    dq, dkeys = gradients
    dkeys = _hop(dkeys, ring)
    device = _key_device(number, ring)
    if len(queries) == 1:
        dq_part, dkeys_part = pull_back(0, 0, queries[0], keys[0], device)
        return [dq[0] + dq_part], [_add(dkeys[0], dkeys_part)]
    dq_second, dkeys_first = pull_back(1, 0, queries[1], keys[0], device)
    is_before = number <= jax.lax.axis_index(AXIS)  # see `_forward`
    chunk = jnp.where(is_before, 0, 1)
    dq_part, dkeys_part = pull_back(
        chunk,
        chunk,
        _where(is_before, *queries),
        _where(is_before, *keys),
        device,
    )
    no_dq = jnp.zeros_like(dq_part)
    no_dkeys = jax.tree.map(jnp.zeros_like, dkeys_part)
    dq = [
        dq[0] + jnp.where(is_before, dq_part, no_dq),
        dq[1] + dq_second + jnp.where(is_before, no_dq, dq_part),
    ]
    dkeys_first = _add(dkeys_first, _where(is_before, dkeys_part, no_dkeys))
    return dq, [
        _add(dkeys[0], dkeys_first),
        _add(dkeys[1], _where(is_before, no_dkeys, dkeys_part)),
    ]


def _around(
    step: Callable[[Carry, list[Keys], jax.Array], Carry],
    carry: Carry,
    keys: list[Keys],
    ring: Ring,
) -> Carry:
    """Folds step(carry, keys, number) over the keys of the other devices.

    The number is the distance of their device in hops, 1 to c - 1. The keys of the next
    step travel while a step computes.
    """
    keys = _hop(keys, ring)

    def step_and_hop(
        state: tuple[Carry, list[Keys]], number: jax.Array
    ) -> tuple[tuple[Carry, list[Keys]], None]:
        carry, keys = state
        return (step(carry, keys, number), _hop(keys, ring)), None

    if ring.size > 2:
        (carry, keys), _ = jax.lax.scan(
            step_and_hop, (carry, keys), jnp.arange(1, ring.size - 1)
        )
    return step(carry, keys, jnp.int32(ring.size - 1))


def _hop(tree: Tree, ring: Ring) -> Tree:
    """Fetches the arrays of the preceding device."""
    pairs = [(i, (i + 1) % ring.size) for i in range(ring.size)]
    with jax.named_scope(KEYS):
        fetched: Tree = jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)
        return fetched


def _key_device(hops: Number, ring: Ring) -> jax.Array:
    """Computes the device whose keys are here after a number of hops."""
    device: jax.Array = (jax.lax.axis_index(AXIS) - hops) % ring.size
    return device


def _merge(first: Sum, second: Sum) -> Sum:
    lse = jnp.logaddexp(first.lse, second.lse)
    shares = [jnp.exp(part.lse - lse)[..., None] for part in (first, second)]
    return Sum(shares[0] * first.out + shares[1] * second.out, lse)


def _add(first: Keys, second: Keys) -> Keys:
    total: Keys = jax.tree.map(jnp.add, first, second)
    return total


def _where(condition: jax.Array, if_true: Tree, if_false: Tree) -> Tree:
    chosen: Tree = jax.tree.map(
        lambda a, b: jnp.where(condition, a, b), if_true, if_false
    )
    return chosen


# --- exchange of chunks ---------------------------------------------------------------


def _chunks(x: jax.Array, ring: Ring) -> list[jax.Array]:
    """Exchanges halves, so that device i has the chunks i and 2c - 1 - i.

    In order, it has the chunks 2i and 2i + 1. Without a causal mask nothing is exchanged,
    and the device's part is one chunk.
    """
    if not ring.causal:
        return [x]
    with jax.named_scope(CHUNKS):
        halves = [
            jax.lax.ppermute(half, AXIS, _moves(ring, n))
            for n, half in enumerate(jnp.split(x, 2, axis=1))
        ]
    # First halves are the chunks of even number. The first chunk of device i is chunk
    # i.
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    return [_where(is_even, *halves), _where(is_even, *halves[::-1])]


def _in_order(chunks: list[jax.Array], ring: Ring) -> jax.Array:
    """Undoes `_chunks` and joins the chunks."""
    if len(chunks) == 1:
        return chunks[0]
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    halves = [_where(is_even, *chunks), _where(is_even, *chunks[::-1])]
    back = [[(to, device) for device, to in _moves(ring, n)] for n in range(2)]
    with jax.named_scope(CHUNKS):
        halves = [
            jax.lax.ppermute(half, AXIS, pairs)
            for half, pairs in zip(halves, back, strict=True)
        ]
    return jnp.concatenate(halves, axis=1)


def _moves(ring: Ring, half: int) -> list[tuple[int, int]]:
    """Lists the moves (from, to) of the devices' first or second halves."""
    return [
        (i, min(2 * i + half, 2 * ring.size - 1 - 2 * i - half))
        for i in range(ring.size)
    ]


def _chunk_ids(
    request: Request, ring: Ring, device: jax.Array, number: Number
) -> jax.Array | None:
    """Slices the segment ids of chunk `number` (0 or 1) of a device."""
    ids = request.segment_ids
    if ids is None:
        return None
    index = device
    size = ids.shape[1] // ring.size
    if ring.causal:
        index = jnp.where(number == 0, device, 2 * ring.size - 1 - device)
        size = ids.shape[1] // (2 * ring.size)
    return jax.lax.dynamic_slice_in_dim(ids, index * size, size, 1)
