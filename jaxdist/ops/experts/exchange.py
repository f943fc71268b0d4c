"""Experts that devices share out, and how rows reach them. For a device, in a region
manual over the mesh.

`rounds`: every pair of devices swaps C rows by an all-to-all, until the fullest pair is
done. With an even load that is one round, or a few where there are many rows; a skewed
one takes more, and no more memory. `gather`: every device gets all tokens of the group
and computes what its own experts add to each, in chunks of rows; the sums are
scattered. Both drop nothing, whatever the load is.

Letters: `T` tokens of a device, `k` experts of a token, `A` = T k, `D` model, `E`
experts, `n` devices that share them out, `e` = E / n, `C` rows of a pair in a round,
`M` rows of a chunk, `R` rows allocated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.ops.experts import feed_forward
from jaxdist.ops.experts.dispatch import Order, sort_by_expert, steps
from jaxdist.ops.experts.feed_forward import Activation, Backend, Kernels, Products
from jaxdist.parallel import execution

# What the exchange's collectives are called in a compiled program: rows, and their
# gradients.
TO_EXPERTS = "rows_to_experts"
FROM_EXPERTS = "rows_from_experts"


@dataclass(frozen=True)
class Exchange:
    """What is static of the exchange."""

    kind: str  # local | rounds | gather
    experts: int  # of all devices
    chunk: int  # C of rounds, M of gather
    activation: Activation
    backend: Backend
    dtype: Any  # of the kernels' gradients
    axis: str = ""  # of the mesh, that shares out the experts; "": none does
    parts: int = 1  # its size
    # whether the tokens are, too; else its devices have the same ones
    split_tokens: bool = True
    mesh_axes: tuple[str, ...] = ()
    trips: int = 1  # rounds, or chunks, that an even load takes

    @property
    def scope(self) -> str:
        """Of loops that the load ends: for the planner."""
        return f"even_load_trips_{self.trips}"

    @property
    def own_experts(self) -> int:
        return self.experts // self.parts

    @property
    def keeps_products(self) -> bool:
        """Whether the first products of rows are kept, if `remat.policy` lets
        them be.
        """
        return self.backend.keeps_products and self.kind == "local"


class Tokens(NamedTuple):
    """A device's tokens, or those of its group."""

    x_TD: jax.Array
    ids_Tk: jax.Array  # that of an expert more than there are: none
    weights_Tk: jax.Array
    order: Order  # of the rows, see `order_of`
    sizes_E: jax.Array  # rows of the device's own tokens for each expert


class Gradients(NamedTuple):
    """What the backward pass gives."""

    x_TD: jax.Array
    weights_Tk: jax.Array
    kernels: Any  # Kernels; None: zeros


def order_of(ids_Tk: jax.Array, exchange: Exchange) -> Order:
    """Returns the one sort of a layer, that both passes use."""
    if exchange.kind == "gather":
        return sort_by_expert(_own_ids(ids_Tk, exchange), exchange.own_experts)
    return sort_by_expert(ids_Tk, exchange.experts)


def forward(
    tokens: Tokens, kernels: Kernels, exchange: Exchange
) -> tuple[jax.Array, Any, Products]:
    """Computes the sum of the weighted outputs of each token's experts.

    Returns:
      The sum [T, D]; how many rounds it took; and the products of its rows that the
      backward pass may have (`Exchange.keeps_products`).
    """
    run = _rounds_forward if exchange.kind == "rounds" else _chunks_forward
    return run(tokens, kernels, exchange)


def backward(
    tokens: Tokens,
    dout_TD: jax.Array,
    kernels: Kernels,
    products: Products,
    exchange: Exchange,
) -> Gradients:
    """Computes the gradients of a device's tokens, and of its kernels from the rows
    that it saw.
    """
    if exchange.kind == "rounds":
        return _rounds_backward(tokens, dout_TD, kernels, exchange)
    return _chunks_backward(tokens, dout_TD, kernels, products, exchange)


def _added(total_T, rows, index_Tk, there_Tk, weights_Tk=None) -> jax.Array:
    """Returns total [T, D] + the sum over k of rows[index] that are there, float32,
    weighted.
    """
    for j in range(index_Tk.shape[1]):
        own = rows[index_Tk[:, j]].astype(jnp.float32)
        own = own if weights_Tk is None else own * weights_Tk[:, j, None]
        total_T = total_T + jnp.where(there_Tk[:, j, None], own, 0)
    return total_T


def _zeros(kernels: Kernels) -> Kernels:
    return jax.tree.map(lambda kernel: jnp.zeros(kernel.shape, jnp.float32), kernels)


# --- in chunks of a device's rows -----------------------------------------------------


def _own_ids(ids, exchange: Exchange):
    """Returns ids of all tokens of the group, counted among the device's own
    experts.
    """
    if exchange.split_tokens:
        ids = jax.lax.all_gather(ids, exchange.axis, tiled=True)
    own = exchange.own_experts
    local = ids - jax.lax.axis_index(exchange.axis) * own
    return jnp.where((local >= 0) & (local < own), local, own)


def _of_group(x, exchange: Exchange):
    if exchange.kind == "gather" and exchange.split_tokens:
        with jax.named_scope(TO_EXPERTS):
            return jax.lax.all_gather(x, exchange.axis, tiled=True)
    return x


def _summed(x, exchange: Exchange):
    """Returns a device's part of the sum over the group."""
    if exchange.kind != "gather":
        return x
    if not exchange.split_tokens:
        return execution.sum_over(x, exchange.axis)
    wide = execution.summable(x)
    with jax.named_scope(FROM_EXPERTS):
        return jax.lax.psum_scatter(wide, exchange.axis, tiled=True).astype(x.dtype)


def _group_sizes(tokens: Tokens, exchange: Exchange) -> jax.Array:
    """Counts the rows of the group for each of the device's own experts."""
    sizes_E = tokens.sizes_E
    if exchange.kind != "gather":
        return sizes_E
    own = exchange.own_experts
    if exchange.split_tokens:
        sizes_E = jax.lax.psum(sizes_E, exchange.axis)
    first = jax.lax.axis_index(exchange.axis) * own
    return jax.lax.dynamic_slice_in_dim(sizes_E, first, own)


class _Chunk(NamedTuple):
    """A chunk of a device's rows, in the order of experts."""

    assignments: jax.Array  # [R], spare ones last
    sizes: jax.Array  # [e]
    rows: jax.Array  # [T, k], the row of each assignment
    there: jax.Array  # [T, k], whether it is in the chunk


def _over_chunks(
    add: Callable[[Any, _Chunk], Any],
    carry: Any,
    tokens: Tokens,
    k: int,
    exchange: Exchange,
) -> tuple[Any, Any]:
    """Folds `add` over all chunks.

    Args:
      k: experts of a token.

    Returns:
      The last carry, and the number of chunks.
    """
    order = tokens.order
    sizes = _group_sizes(tokens, exchange)
    A = order.slots.size
    size = exchange.chunk
    ends = jnp.cumsum(sizes)
    slots = order.slots.reshape(-1, k)
    rows = exchange.backend.allocated(size, sizes.shape[0])

    def one(number, carry):
        first = number * size
        assignments = order.assignments[jnp.minimum(first + jnp.arange(rows), A - 1)]
        inside = jnp.clip(ends - first, 0, size)
        own = inside - jnp.clip(ends - sizes - first, 0, size)
        there = (slots >= first) & (slots - first < inside[-1])
        return add(
            carry, _Chunk(assignments, own, jnp.where(there, slots - first, 0), there)
        )

    if size >= A:
        return one(0, carry), 1
    count = (ends[-1] + size - 1) // size
    with jax.named_scope(exchange.scope):
        return jax.lax.fori_loop(0, count, one, carry), count


def _chunks_forward(tokens: Tokens, kernels: Kernels, exchange: Exchange):
    x, weights = (_of_group(a, exchange) for a in (tokens.x_TD, tokens.weights_Tk))
    k = weights.shape[1]

    def add(out, chunk: _Chunk):
        rows = x[chunk.assignments // k]
        y, own = feed_forward.forward(
            rows, chunk.sizes, kernels, exchange.activation, exchange.backend
        )
        if exchange.keeps_products:
            products.extend(own)
        return _added(out, y, chunk.rows, chunk.there, weights)

    products: list[jax.Array] = []  # of the one chunk
    zeros = jnp.zeros(x.shape, jnp.float32)
    out, count = _over_chunks(add, zeros, tokens, k, exchange)
    return _summed(out.astype(x.dtype), exchange), count, tuple(products)


def _chunks_backward(
    tokens: Tokens,
    dout_TD: jax.Array,
    kernels: Kernels,
    products: Products,
    exchange: Exchange,
):
    x, weights, dout = (
        _of_group(a, exchange) for a in (tokens.x_TD, tokens.weights_Tk, dout_TD)
    )
    k = weights.shape[1]

    def add(total, chunk: _Chunk):
        token = chunk.assignments // k
        rows = feed_forward.backward(
            x[token],
            dout[token],
            weights.reshape(-1)[chunk.assignments],
            chunk.sizes,
            kernels,
            total.kernels,
            products,
            activation=exchange.activation,
            backend=exchange.backend,
            dtype=jnp.float32 if total.kernels else exchange.dtype,
        )
        dx = _added(total.x_TD, rows.x, chunk.rows, chunk.there)
        dweights = total.weights_Tk + jnp.where(
            chunk.there, rows.weights[chunk.rows], 0
        )
        return Gradients(dx, dweights, rows.kernels)

    one_chunk = exchange.chunk >= tokens.order.slots.size
    totals = None if one_chunk else _zeros(kernels)
    zeros = Gradients(
        jnp.zeros(x.shape, jnp.float32), jnp.zeros(weights.shape, jnp.float32), totals
    )
    total, _ = _over_chunks(add, zeros, tokens, k, exchange)
    dx = _summed(total.x_TD.astype(x.dtype), exchange)
    dweights = _summed(total.weights_Tk, exchange)
    return Gradients(dx, dweights, total.kernels)


# --- in rounds of swapped rows --------------------------------------------------------


class _Routes(NamedTuple):
    """Which rows go where; the same in all rounds."""

    sent: jax.Array  # [n] rows for each device
    first: jax.Array  # [n] the slot of the first of them
    # [n, e] of the rows that come from a device, where those for an own expert end
    received_ends: jax.Array
    owner: jax.Array  # [T, k] device that has the expert
    place: jax.Array  # [T, k] place among the rows for it; below 0: left out
    rounds: jax.Array  # as many as the fullest pair of devices in the mesh needs


class _Round(NamedTuple):
    """A round's rows: sent, received, and grouped by expert."""

    # [n C] that this device sends, each device's part spare at its end
    assignments: jax.Array
    grouped: jax.Array  # [R] place of a grouped row among the received ones
    ungrouped: jax.Array  # [n C] place of a received row among the grouped ones
    sizes: jax.Array  # [e]
    rows: jax.Array  # [T, k] of each assignment, among those sent
    there: jax.Array  # [T, k] whether it is in this round


def _routes(tokens: Tokens, exchange: Exchange) -> _Routes:
    n = exchange.parts
    e = exchange.own_experts
    C = exchange.chunk
    ids_Tk = tokens.ids_Tk
    sizes_E = tokens.sizes_E
    sent = sizes_E.reshape(n, e).sum(1)
    first = jnp.cumsum(sent) - sent
    received = jax.lax.all_to_all(sizes_E, exchange.axis, 0, 0, tiled=True).reshape(
        n, e
    )
    left_out = ids_Tk >= exchange.experts
    owner = jnp.where(left_out, 0, ids_Tk // e)
    slots = tokens.order.slots.reshape(ids_Tk.shape)
    before = jnp.where(
        jnp.arange(n).reshape(1, 1, -1) == owner[..., None], first.reshape(1, 1, -1), 0
    ).sum(-1)
    # All devices of the mesh go round as often: loops of unequal length could wait for
    # one another.
    count = jax.lax.pmax((sent.max() + C - 1) // C, exchange.mesh_axes)
    place = jnp.where(left_out, -1, slots - before)
    return _Routes(sent, first, jnp.cumsum(received, 1), owner, place, count)


def _round(number, routes: _Routes, order: Order, exchange: Exchange) -> _Round:
    n = exchange.parts
    e = exchange.own_experts
    C = exchange.chunk
    start = number * C
    slots = routes.first[:, None] + start + jnp.arange(C)[None]
    assignments = order.assignments[
        jnp.minimum(slots, order.slots.size - 1).reshape(-1)
    ]
    # From device s come, in this round, the rows [begins[s, j], ends[s, j]) for expert
    # j.
    ends = jnp.clip(routes.received_ends - start, 0, C)
    begins = jnp.concatenate([jnp.zeros((n, 1), ends.dtype), ends[:, :-1]], 1)
    lengths = (ends - begins).T.reshape(-1)  # by expert, then by device: grouped
    group_ends = jnp.cumsum(lengths)
    shift = ((jnp.arange(n)[:, None] * C + begins).T.reshape(-1)) - (
        group_ends - lengths
    )
    R = exchange.backend.allocated(n * C, e)
    place = jnp.arange(R)
    grouped = place + steps(group_ends, jnp.append(shift, 0), place)
    back = jnp.concatenate([-shift.reshape(e, n).T, jnp.zeros((n, 1), shift.dtype)], 1)
    received = jnp.arange(n * C).reshape(n, C)
    ungrouped = received + steps(ends, back, received - jnp.arange(n)[:, None] * C)
    there = (routes.place >= start) & (routes.place < start + C)
    index = jnp.where(there, routes.owner * C + routes.place - start, 0)
    return _Round(
        assignments,
        jnp.clip(grouped, 0, n * C - 1),
        jnp.clip(ungrouped, 0, R - 1).reshape(-1),
        lengths.reshape(e, n).sum(1),
        index,
        there,
    )


def _swapped(rows, exchange: Exchange, what: str):
    """Returns the rows [n C, ...] that the other devices have for this one."""
    with jax.named_scope(what):
        return jax.lax.all_to_all(rows, exchange.axis, 0, 0, tiled=True)


def _rounds_forward(tokens: Tokens, kernels: Kernels, exchange: Exchange):
    x = tokens.x_TD
    weights = tokens.weights_Tk
    k = weights.shape[1]
    routes = _routes(tokens, exchange)

    def one(number, out):
        this = _round(number, routes, tokens.order, exchange)
        rows = _swapped(x[this.assignments // k], exchange, TO_EXPERTS)[this.grouped]
        y, _ = feed_forward.forward(
            rows, this.sizes, kernels, exchange.activation, exchange.backend
        )
        y = _swapped(y[this.ungrouped], exchange, FROM_EXPERTS)
        return _added(out, y, this.rows, this.there, weights)

    with jax.named_scope(exchange.scope):
        out = jax.lax.fori_loop(0, routes.rounds, one, jnp.zeros(x.shape, jnp.float32))
    return out.astype(x.dtype), routes.rounds, ()


def _rounds_backward(
    tokens: Tokens, dout_TD: jax.Array, kernels: Kernels, exchange: Exchange
):
    x = tokens.x_TD
    weights = tokens.weights_Tk
    k = weights.shape[1]
    routes = _routes(tokens, exchange)

    def one(number, total: Gradients):
        this = _round(number, routes, tokens.order, exchange)
        token = this.assignments // k
        sent = (x[token], dout_TD[token], weights.reshape(-1)[this.assignments])
        x_rows, dout_rows, weight_rows = (
            _swapped(a, exchange, TO_EXPERTS)[this.grouped] for a in sent
        )
        rows = feed_forward.backward(
            x_rows,
            dout_rows,
            weight_rows,
            this.sizes,
            kernels,
            total.kernels,
            activation=exchange.activation,
            backend=exchange.backend,
            dtype=jnp.float32,
        )
        back = (rows.x, rows.weights)
        dx, dweights = (
            _swapped(a[this.ungrouped], exchange, FROM_EXPERTS) for a in back
        )
        dweights = jnp.where(this.there, dweights[this.rows], 0)
        dx = _added(total.x_TD, dx, this.rows, this.there)
        return Gradients(dx, total.weights_Tk + dweights, rows.kernels)

    zeros = (
        jnp.zeros(x.shape, jnp.float32),
        jnp.zeros(weights.shape, jnp.float32),
        _zeros(kernels),
    )
    with jax.named_scope(exchange.scope):
        total = jax.lax.fori_loop(0, routes.rounds, one, Gradients(*zeros))
    return total._replace(x_TD=total.x_TD.astype(x.dtype))
