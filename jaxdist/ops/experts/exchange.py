"""Exchange of rows between devices that split the experts.

All functions run on a device, in a region manual over the mesh. There are two forms:

`rounds`: every pair of devices swaps C rows by an all-to-all, until the fullest pair is
done. An even load takes one round, or a few if a device has many rows. A skewed load
takes more rounds, but no more memory.

`gather`: every device gets all tokens of its group. It computes what its own experts
add to each token, in chunks of rows, and the sums are scattered.

Neither form drops a row, whatever the load is.

Letters: `T` tokens of a device, `k` experts of a token, `A` = T k assignments, `D`
model, `E` experts, `n` devices that split the experts, `e` = E / n, `C` rows of a pair
in a round, `M` rows of a chunk, `R` rows allocated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.ops.experts import feed_forward
from jaxdist.ops.experts.dispatch import Order, evaluate_steps, sort_by_expert
from jaxdist.ops.experts.feed_forward import Activation, Backend, Kernels, Products
from jaxdist.parallel import execution

# Names of the exchange's collectives in a compiled program. Rows and their gradients
# have the same names.
TO_EXPERTS = "rows_to_experts"
FROM_EXPERTS = "rows_from_experts"

Carry = TypeVar("Carry")  # of a loop


@dataclass(frozen=True)
class Exchange:
    """Static description of an exchange."""

    kind: str  # local | rounds | gather
    experts: int  # E: experts of all devices
    chunk: int  # C for rounds, M for the others
    activation: Activation
    backend: Backend
    dtype: DTypeLike  # dtype of the kernels' gradients
    axis: str = ""  # mesh axis that splits the experts; "" = none
    parts: int = 1  # n: size of this axis
    # whether the axis splits the tokens, too; False: its devices have the same tokens
    split_tokens: bool = True
    mesh_axes: tuple[str, ...] = ()  # all axes of the mesh
    trips: int = 1  # rounds, or chunks, that an even load takes

    @property
    def scope(self) -> str:
        """Name of the loops whose length depends on the load; the planner reads it."""
        return f"even_load_trips_{self.trips}"

    @property
    def own_experts(self) -> int:
        """Number of experts of a device."""
        return self.experts // self.parts

    @property
    def keeps_products(self) -> bool:
        """Whether the rows' products may be kept, if `remat.policy` allows it."""
        return self.backend.keeps_products and self.kind == "local"


class Tokens(NamedTuple):
    """Tokens of a device, with their experts."""

    x_TD: jax.Array
    ids_Tk: jax.Array  # E means no expert
    weights_Tk: jax.Array
    order: Order  # result of `order_of`
    sizes_E: jax.Array  # rows of the device's own tokens for each expert


class Gradients(NamedTuple):
    """Result of the backward pass on a device."""

    x_TD: jax.Array
    weights_Tk: jax.Array
    kernels: Kernels | None  # None: zeros


def order_of(ids_Tk: jax.Array, exchange: Exchange) -> Order:
    """Sorts a layer's assignments; the forward and the backward pass use this order."""
    if exchange.kind == "gather":
        return sort_by_expert(_own_ids(ids_Tk, exchange), exchange.own_experts)
    return sort_by_expert(ids_Tk, exchange.experts)


def forward(
    tokens: Tokens, kernels: Kernels, exchange: Exchange
) -> tuple[jax.Array, jax.Array | int, Products]:
    """Sums the weighted outputs of each token's experts.

    Returns:
      The sum [T, D]; the number of rounds or chunks; and the products of the rows, if
      `Exchange.keeps_products`.
    """
    if exchange.kind == "rounds":
        return _rounds_forward(tokens, kernels, exchange)
    return _chunks_forward(tokens, kernels, exchange)


def backward(
    tokens: Tokens,
    dout_TD: jax.Array,
    kernels: Kernels,
    products: Products,
    exchange: Exchange,
) -> Gradients:
    """Computes the gradients of a device's tokens and kernels.

    A kernel's gradient is the sum over the rows that this device computed.
    """
    if exchange.kind == "rounds":
        return _rounds_backward(tokens, dout_TD, kernels, exchange)
    return _chunks_backward(tokens, dout_TD, kernels, products, exchange)


def _add_rows(
    total_TD: jax.Array,
    rows: jax.Array,
    index_Tk: jax.Array,
    present_Tk: jax.Array,
    weights_Tk: jax.Array | None = None,
) -> jax.Array:
    """Adds the rows of each token's present assignments to its total, in float32."""
    for j in range(index_Tk.shape[1]):
        row = rows[index_Tk[:, j]].astype(jnp.float32)
        if weights_Tk is not None:
            row = row * weights_Tk[:, j, None]
        total_TD = total_TD + jnp.where(present_Tk[:, j, None], row, 0)
    return total_TD


def _zeros(kernels: Kernels) -> Kernels:
    zeros: Kernels = jax.tree.map(
        lambda kernel: jnp.zeros(kernel.shape, jnp.float32), kernels
    )
    return zeros


# --- local and gather: chunks of a device's rows --------------------------------------


def _own_ids(ids: jax.Array, exchange: Exchange) -> jax.Array:
    """Numbers the group's assignments among the device's own experts, e = not here."""
    if exchange.split_tokens:
        ids = jax.lax.all_gather(ids, exchange.axis, tiled=True)
    e = exchange.own_experts
    local: jax.Array = ids - jax.lax.axis_index(exchange.axis) * e
    return jnp.where((local >= 0) & (local < e), local, e)


def _gather_group(x: jax.Array, exchange: Exchange) -> jax.Array:
    if exchange.kind == "gather" and exchange.split_tokens:
        with jax.named_scope(TO_EXPERTS):
            gathered: jax.Array = jax.lax.all_gather(x, exchange.axis, tiled=True)
            return gathered
    return x


def _sum_over_group(x: jax.Array, exchange: Exchange) -> jax.Array:
    """Sums x over the group and returns the part of the device's own tokens."""
    if exchange.kind != "gather":
        return x
    if not exchange.split_tokens:
        return execution.sum_over(x, exchange.axis)
    wide = execution.summable(x)
    with jax.named_scope(FROM_EXPERTS):
        part: jax.Array = jax.lax.psum_scatter(wide, exchange.axis, tiled=True)
        return part.astype(x.dtype)


def _group_sizes(tokens: Tokens, exchange: Exchange) -> jax.Array:
    """Counts the rows of the group for each of the device's own experts."""
    sizes_E = tokens.sizes_E
    if exchange.kind != "gather":
        return sizes_E
    e = exchange.own_experts
    if exchange.split_tokens:
        sizes_E = jax.lax.psum(sizes_E, exchange.axis)
    first = jax.lax.axis_index(exchange.axis) * e
    return jax.lax.dynamic_slice_in_dim(sizes_E, first, e)


class _Chunk(NamedTuple):
    """Chunk of a device's rows, in the order of experts."""

    assignments: jax.Array  # [R] assignment of each row, spare ones last
    sizes: jax.Array  # [e] rows of each expert
    rows: jax.Array  # [T, k] row of each assignment
    present: jax.Array  # [T, k] whether the assignment is in the chunk


def _over_chunks(
    add: Callable[[Carry, _Chunk], Carry],
    carry: Carry,
    *,
    tokens: Tokens,
    k: int,
    exchange: Exchange,
) -> tuple[Carry, jax.Array | int]:
    """Folds `add` over all chunks.

    Args:
      add: function of the carry and a chunk.
      carry: initial carry.
      tokens: tokens of the device.
      k: experts of a token.
      exchange: static description.

    Returns:
      The last carry, and the number of chunks.
    """
    order = tokens.order
    sizes = _group_sizes(tokens, exchange)
    A = order.slots.size
    M = exchange.chunk
    ends = jnp.cumsum(sizes)
    slots = order.slots.reshape(-1, k)
    rows = exchange.backend.allocated(M, sizes.shape[0])

    def add_chunk(number: jax.Array | int, carry: Carry) -> Carry:
        first = number * M
        assignments = order.assignments[jnp.minimum(first + jnp.arange(rows), A - 1)]
        ends_in_chunk = jnp.clip(ends - first, 0, M)
        sizes_in_chunk = ends_in_chunk - jnp.clip(ends - sizes - first, 0, M)
        present = (slots >= first) & (slots - first < ends_in_chunk[-1])
        chunk = _Chunk(
            assignments=assignments,
            sizes=sizes_in_chunk,
            rows=jnp.where(present, slots - first, 0),
            present=present,
        )
        return add(carry, chunk)

    if M >= A:
        return add_chunk(0, carry), 1
    count = (ends[-1] + M - 1) // M
    with jax.named_scope(exchange.scope):
        return jax.lax.fori_loop(0, count, add_chunk, carry), count


def _chunks_forward(
    tokens: Tokens, kernels: Kernels, exchange: Exchange
) -> tuple[jax.Array, jax.Array | int, Products]:
    x, weights = (_gather_group(a, exchange) for a in (tokens.x_TD, tokens.weights_Tk))
    k = weights.shape[1]
    kept_products: list[jax.Array] = []  # of the only chunk

    def add(out: jax.Array, chunk: _Chunk) -> jax.Array:
        rows = x[chunk.assignments // k]
        y, products = feed_forward.forward(
            rows, chunk.sizes, kernels, exchange.activation, exchange.backend
        )
        if exchange.keeps_products:
            kept_products.extend(products)
        return _add_rows(out, y, chunk.rows, chunk.present, weights)

    zeros = jnp.zeros(x.shape, jnp.float32)
    out, count = _over_chunks(add, zeros, tokens=tokens, k=k, exchange=exchange)
    out = _sum_over_group(out.astype(x.dtype), exchange)
    return out, count, tuple(kept_products)


def _chunks_backward(
    tokens: Tokens,
    dout_TD: jax.Array,
    kernels: Kernels,
    products: Products,
    exchange: Exchange,
) -> Gradients:
    x, weights, dout = (
        _gather_group(a, exchange) for a in (tokens.x_TD, tokens.weights_Tk, dout_TD)
    )
    k = weights.shape[1]

    def add(total: Gradients, chunk: _Chunk) -> Gradients:
        token = chunk.assignments // k
        rows = feed_forward.backward(
            x_RD=x[token],
            dout_RD=dout[token],
            weights_R=weights.reshape(-1)[chunk.assignments],
            sizes_E=chunk.sizes,
            kernels=kernels,
            totals=total.kernels,
            products=products,
            activation=exchange.activation,
            backend=exchange.backend,
            dtype=jnp.float32 if total.kernels else exchange.dtype,
        )
        dx = _add_rows(total.x_TD, rows.x, chunk.rows, chunk.present)
        dweights = total.weights_Tk + jnp.where(
            chunk.present, rows.weights[chunk.rows], 0
        )
        return Gradients(dx, dweights, rows.kernels)

    has_one_chunk = exchange.chunk >= tokens.order.slots.size
    kernel_totals = None if has_one_chunk else _zeros(kernels)
    zeros = Gradients(
        x_TD=jnp.zeros(x.shape, jnp.float32),
        weights_Tk=jnp.zeros(weights.shape, jnp.float32),
        kernels=kernel_totals,
    )
    total, _ = _over_chunks(add, zeros, tokens=tokens, k=k, exchange=exchange)
    dx = _sum_over_group(total.x_TD.astype(x.dtype), exchange)
    dweights = _sum_over_group(total.weights_Tk, exchange)
    return Gradients(dx, dweights, total.kernels)


# --- rounds: rows that pairs of devices swap ------------------------------------------


class _Routes(NamedTuple):
    """Routes of a device's rows; the same in all rounds."""

    first: jax.Array  # [n] slot of the first row for each device
    # [n, e] for the rows from each device, the end of the rows of each own expert
    received_ends: jax.Array
    owner: jax.Array  # [T, k] device that has the expert
    # [T, k] number among the rows for this device; -1: the assignment has no expert
    row: jax.Array
    rounds: jax.Array  # rounds that the fullest pair of devices in the mesh needs


class _Round(NamedTuple):
    """Rows of a round: sent, received, and grouped by expert."""

    # [n C] assignment of each sent row; the part for each device ends with spare rows
    assignments: jax.Array
    grouped: jax.Array  # [R] index of each grouped row among the received rows
    ungrouped: jax.Array  # [n C] index of each received row among the grouped rows
    sizes: jax.Array  # [e] grouped rows of each own expert
    rows: jax.Array  # [T, k] index of each assignment among the sent rows
    present: jax.Array  # [T, k] whether the assignment is in this round


def _routes(tokens: Tokens, exchange: Exchange) -> _Routes:
    n = exchange.parts
    e = exchange.own_experts
    C = exchange.chunk
    ids_Tk = tokens.ids_Tk
    sizes_E = tokens.sizes_E
    sent = sizes_E.reshape(n, e).sum(1)
    first = jnp.cumsum(sent) - sent
    received = jax.lax.all_to_all(sizes_E, exchange.axis, 0, 0, tiled=True)
    received = received.reshape(n, e)
    has_no_expert = ids_Tk >= exchange.experts
    owner = jnp.where(has_no_expert, 0, ids_Tk // e)
    slots = tokens.order.slots.reshape(ids_Tk.shape)
    is_owner = jnp.arange(n).reshape(1, 1, -1) == owner[..., None]
    first_of_owner = jnp.where(is_owner, first.reshape(1, 1, -1), 0).sum(-1)
    # All devices of the mesh have the same number of rounds: loops of unequal length
    # could wait for one another.
    rounds = jax.lax.pmax((sent.max() + C - 1) // C, exchange.mesh_axes)
    row = jnp.where(has_no_expert, -1, slots - first_of_owner)
    return _Routes(
        first=first,
        received_ends=jnp.cumsum(received, 1),
        owner=owner,
        row=row,
        rounds=rounds,
    )


def _round(
    number: jax.Array, routes: _Routes, order: Order, exchange: Exchange
) -> _Round:
    n = exchange.parts
    e = exchange.own_experts
    C = exchange.chunk
    start = number * C
    slots = routes.first[:, None] + start + jnp.arange(C)[None]
    assignments = order.assignments[
        jnp.minimum(slots, order.slots.size - 1).reshape(-1)
    ]
    # In this round, device s sends the rows [begins[s, j], ends[s, j]) for expert j.
    ends = jnp.clip(routes.received_ends - start, 0, C)
    begins = jnp.concatenate([jnp.zeros((n, 1), ends.dtype), ends[:, :-1]], 1)
    lengths = (ends - begins).T.reshape(-1)  # grouped: by expert, then by device
    group_ends = jnp.cumsum(lengths)
    # distance from a grouped row to its received row, by expert and device
    shift = ((jnp.arange(n)[:, None] * C + begins).T.reshape(-1)) - (
        group_ends - lengths
    )
    R = exchange.backend.allocated(n * C, e)
    grouped_rows = jnp.arange(R)
    grouped = grouped_rows + evaluate_steps(
        group_ends, jnp.append(shift, 0), grouped_rows
    )
    back = jnp.concatenate([-shift.reshape(e, n).T, jnp.zeros((n, 1), shift.dtype)], 1)
    received = jnp.arange(n * C).reshape(n, C)
    ungrouped = received + evaluate_steps(
        ends, back, received - jnp.arange(n)[:, None] * C
    )
    present = (routes.row >= start) & (routes.row < start + C)
    rows = jnp.where(present, routes.owner * C + routes.row - start, 0)
    return _Round(
        assignments=assignments,
        grouped=jnp.clip(grouped, 0, n * C - 1),
        ungrouped=jnp.clip(ungrouped, 0, R - 1).reshape(-1),
        sizes=lengths.reshape(e, n).sum(1),
        rows=rows,
        present=present,
    )


def _swap(rows: jax.Array, exchange: Exchange, name: str) -> jax.Array:
    """Swaps rows [n C, ...]: each device gets the C rows that each other has for it."""
    with jax.named_scope(name):
        swapped: jax.Array = jax.lax.all_to_all(rows, exchange.axis, 0, 0, tiled=True)
        return swapped


def _rounds_forward(
    tokens: Tokens, kernels: Kernels, exchange: Exchange
) -> tuple[jax.Array, jax.Array, Products]:
    x = tokens.x_TD
    weights = tokens.weights_Tk
    k = weights.shape[1]
    routes = _routes(tokens, exchange)

    def add_round(number: jax.Array, out: jax.Array) -> jax.Array:
        this_round = _round(number, routes, tokens.order, exchange)
        received = _swap(x[this_round.assignments // k], exchange, TO_EXPERTS)
        rows = received[this_round.grouped]
        y, _ = feed_forward.forward(
            rows, this_round.sizes, kernels, exchange.activation, exchange.backend
        )
        y = _swap(y[this_round.ungrouped], exchange, FROM_EXPERTS)
        return _add_rows(out, y, this_round.rows, this_round.present, weights)

    with jax.named_scope(exchange.scope):
        out = jax.lax.fori_loop(
            0, routes.rounds, add_round, jnp.zeros(x.shape, jnp.float32)
        )
    return out.astype(x.dtype), routes.rounds, ()


def _rounds_backward(
    tokens: Tokens, dout_TD: jax.Array, kernels: Kernels, exchange: Exchange
) -> Gradients:
    x = tokens.x_TD
    weights = tokens.weights_Tk
    k = weights.shape[1]
    routes = _routes(tokens, exchange)

    def add_round(number: jax.Array, total: Gradients) -> Gradients:
        this_round = _round(number, routes, tokens.order, exchange)
        token = this_round.assignments // k
        sent = (x[token], dout_TD[token], weights.reshape(-1)[this_round.assignments])
        x_rows, dout_rows, weight_rows = (
            _swap(a, exchange, TO_EXPERTS)[this_round.grouped] for a in sent
        )
        rows = feed_forward.backward(
            x_RD=x_rows,
            dout_RD=dout_rows,
            weights_R=weight_rows,
            sizes_E=this_round.sizes,
            kernels=kernels,
            totals=total.kernels,
            activation=exchange.activation,
            backend=exchange.backend,
            dtype=jnp.float32,
        )
        returned = (rows.x, rows.weights)
        dx, dweights = (
            _swap(a[this_round.ungrouped], exchange, FROM_EXPERTS) for a in returned
        )
        dweights = jnp.where(this_round.present, dweights[this_round.rows], 0)
        dx = _add_rows(total.x_TD, dx, this_round.rows, this_round.present)
        return Gradients(dx, total.weights_Tk + dweights, rows.kernels)

    zeros = Gradients(
        x_TD=jnp.zeros(x.shape, jnp.float32),
        weights_Tk=jnp.zeros(weights.shape, jnp.float32),
        kernels=_zeros(kernels),
    )
    with jax.named_scope(exchange.scope):
        total: Gradients = jax.lax.fori_loop(0, routes.rounds, add_round, zeros)
    return total._replace(x_TD=total.x_TD.astype(x.dtype))
