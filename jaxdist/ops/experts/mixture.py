"""A mixture of experts: the feed-forward part of a block, of which every token uses a
few of many kernels.

One `custom_vjp` around one `shard_map`: a device computes what its tokens, and those
that others send it, ask of its experts; kernels are gathered and their gradients summed
as those of all products are.

Letters: `B` batch, `S` sequence, `D` model, `F` feed-forward, `E` experts, `k` experts
of a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.ops.experts import dispatch, exchange, grouped_matmul
from jaxdist.ops.experts.exchange import Exchange, Tokens
from jaxdist.ops.experts.feed_forward import Activation, Kernels
from jaxdist.parallel import execution
from jaxdist.parallel.remat import EXPERT_ORDER, EXPERT_PRODUCTS
from jaxdist.parallel.sharding import Rules, axes_in
from jaxdist.protocols.param_names import Names

INPUT_NAMES = ("experts", "d_model", "d_ff")
DOWN_NAMES = ("experts", "d_ff", "d_model")
Kind = Literal["auto", "rounds", "gather"]
# rows of all rounds, or chunks, that an even load takes, relative to those that it
# fills
SLACK = 1.25
# A device with more than so many rows goes through them in several rounds, of so many
# of each expert or more. With 8,192 a product takes 15 times as long as reading and
# writing the sum of a kernel's gradient (v5p).
ROWS = 65_536
ROWS_OF_EXPERT = 8192
MOST_TRIPS = 4


class Stats(NamedTuple):
    """What happened to the tokens, float32: sums over them, which add up over layers,
    parts and devices.
    """

    load: jax.Array  # [E] choices of each expert, of counted tokens, those dropped too
    dropped: jax.Array  # choices that the capacity left no place for
    rounds: jax.Array  # of exchange, or chunks, that devices went through
    # as many as even loads take: rounds / exchanges is 1 for an even load
    exchanges: jax.Array


class Output(NamedTuple):
    """What `experts` returns."""

    x: jax.Array  # [B, S, D]
    stats: Stats


@dataclass(frozen=True)
class _Options:
    names: Kernels  # of the kernels' dims, as they are computed with
    activation: Activation
    kind: Kind
    slack: float
    capacity_factor: float | None


def experts(
    x_BSD: jax.Array,
    ids_BSk: jax.Array,
    weights_BSk: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
    activation: Activation,
    *,
    exchange: Kind = "auto",
    slack: float = SLACK,
    capacity_factor: float | None = None,
    valid_BS: jax.Array | None = None,
    counted_BS: jax.Array | None = None,
) -> Output:
    """Returns the weighted sum of each token's experts' outputs [B, S, D] in the dtype
    of x, and statistics.

    An expert's output is down(activation(gate(x)) * up(x)). Every token is computed, in
    memory that does not depend on the load. It may be called anywhere: on one device,
    in a step, in its regions. Products of the first kernels are computed again in the
    backward pass, on CPUs where `remat` says so, elsewhere whatever it says; outputs
    are not.

    Args:
      ids_BSk, weights_BSk: int32 experts of each token, which differ, and float32
      weights, as of `route`. gate, up, down: parameters [E, D, F], [E, D, F] and [E, F,
      D], with their logical names as metadata
        (`("experts", "d_model", "d_ff")`, the default of arrays that have none); gate
        None: not gated, down(activation(up(x))).
      activation: elementwise.
      exchange: how rows reach experts that devices share out: "rounds", "gather" (few
        devices and many experts a token), or "auto", by bytes; see `explain`.
      slack: rows of the rounds, or chunks, that an even load takes, relative to those
        that it fills.
      capacity_factor: an expert takes so many times the even share of every sequence's
        choices, its first ones, and drops the others; None: nothing is dropped.
      valid_BS: bool, false for tokens that no expert sees: padding. Their output is 0.
      counted_BS: bool, which tokens' choices the load counts and the capacity limits;
        None: those valid.

    Raises:
      AssertionError: arrays of another rank.
      ValueError: shapes or options that do not fit.
    """
    chex.assert_rank([x_BSD, ids_BSk, weights_BSk], 3)
    parameters = Kernels((gate, up) if gate is not None else (up,), down)
    names = Kernels(
        tuple(_names(p, INPUT_NAMES) for p in parameters.inputs),
        _names(down, DOWN_NAMES),
    )
    names = _turned(names, lambda name, a, b: (name[0], name[b], name[a]))
    kernels = Kernels(tuple(p[...] for p in parameters.inputs), down[...])
    _check(x_BSD, ids_BSk, weights_BSk, kernels, exchange, slack, capacity_factor)
    options = _Options(names, activation, exchange, slack, capacity_factor)
    masks = [
        None if mask is None else mask.astype(bool) for mask in (valid_BS, counted_BS)
    ]
    out, stats = jaxdist_experts(
        x_BSD, ids_BSk, weights_BSk.astype(jnp.float32), *masks, kernels, options
    )
    return Output(out, stats)


def explain(
    num_experts: int, k: int, *, exchange: Kind = "auto", slack: float = SLACK
) -> list[str]:
    """Returns, in lines for users, what computes the products and how rows are
    exchanged, and why.
    """
    backend = grouped_matmul.choose()
    parts = execution.current().axis_size("expert")
    lines = [f"experts: products by {backend.name}: {backend.reason}"]
    if parts == 1 or num_experts % parts:
        return [
            *lines,
            "experts: no exchange: each device has the kernels of all experts",
        ]
    kind, reason = choose_exchange(exchange, parts, k, slack)
    return [*lines, f"experts: exchange by {kind} over expert {parts}: {reason}"]


def choose_exchange(
    kind: Kind, parts: int, k: int, slack: float = SLACK
) -> tuple[str, str]:
    """Returns rounds or gather, and why, for experts that so many devices share out."""
    if kind != "auto":
        return kind, "set by hand"
    # A row crosses k slack (n - 1) / n times, a token n - 1 times, and its sum twice as
    # often where the compiler makes an all-reduce of the scatter (libtpu): gather wins
    # below k slack / 2 devices.
    if parts <= k * slack / 2:
        return (
            "gather",
            f"to {parts} devices a token goes more cheaply than to {k} experts",
        )
    return "rounds", f"to {k} experts a token goes more cheaply than to {parts} devices"


def _names(parameter: Any, default: Names) -> Names:
    return getattr(parameter, "logical", ()) or default


def _check(
    x,
    ids,
    weights,
    kernels: Kernels,
    kind: str,
    slack: float,
    capacity_factor: float | None,
) -> None:
    E, D, F = kernels.inputs[0].shape
    shapes = [kernel.shape for kernel in (*kernels.inputs, kernels.down)]
    if shapes != [(E, D, F)] * len(kernels.inputs) + [(E, F, D)] or x.shape[2] != D:
        raise ValueError(
            f"experts: x {x.shape}, kernels {shapes}; required: [B, S, D], [E, D, F], [E, F, D]"
        )
    if (
        not ids.shape == weights.shape == (*x.shape[:2], ids.shape[2])
        or ids.shape[2] > E
    ):
        raise ValueError(
            f"experts: ids {ids.shape}, weights {weights.shape}, x {x.shape}; required: [B, S, k] twice and "
            f"[B, S, D], with k of at most {E} experts"
        )
    if kind not in ("auto", "rounds", "gather"):
        raise ValueError(f"experts: exchange={kind!r}; choose auto, rounds or gather")
    if slack < 1 or (capacity_factor is not None and capacity_factor <= 0):
        raise ValueError(
            f"experts: slack={slack}, capacity_factor={capacity_factor}; required: >= 1, > 0 or None"
        )


def even_trips(rows: float, experts: int) -> int:
    """Returns in how many rounds, or chunks, a device with so many experts goes through
    so many rows.

    Hidden rows are as large as all else in a layer, and only those of one round are in
    memory. More rounds send no more, but each reads the kernels and adds to their
    gradients again.
    """
    return max(
        1,
        min(MOST_TRIPS, math.ceil(rows / ROWS), int(rows / (experts * ROWS_OF_EXPERT))),
    )


# --- placement ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Placement:
    """How a call's arrays lie in the mesh."""

    tokens: P  # of [B, S]
    kernels: Kernels  # as they are computed with
    gradients: Kernels  # as a device leaves them
    static: Exchange

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(axis for entry in self.tokens for axis in axes_in(entry))

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        return axes_in(self.tokens[1])

    @property
    def dims_axes(self) -> tuple[str, ...]:
        """The axes that split d_ff: each device has a part of every sum."""
        return axes_in(self.kernels.inputs[0][2])

    @property
    def order(self) -> P:
        """Of what each device keeps of its own tokens' experts and their order."""
        axis = self.static.axis
        axes = self.token_axes
        if axis and axis not in axes:
            axes = (*axes, axis)
        return P(axes)

    @property
    def products(self) -> tuple[P, ...]:
        """Of what each device keeps of its own rows' products."""
        kept = self.kernels.inputs if self.static.keeps_products else ()
        return tuple(P(self.order[0], kernel[2]) for kernel in kept)


def _place(x, k: int, kernels: Kernels, options: _Options) -> _Placement:
    now = execution.current()
    E = kernels.down.shape[0]
    tokens = now.rules.activation(("batch", "sequence"), x.shape[:2])
    used, gradients = (
        _specs(kernels, options.names, use) for use in (Rules.computed, Rules.gradient)
    )
    over = axes_in(used.down[0])
    if any(axes_in(spec[0]) != over for spec in used.inputs) or len(over) > 1:
        raise ValueError(
            f"experts: kernels are split as {used}; their dim of experts must be split alike"
        )
    split = {axis for entry in tokens for axis in axes_in(entry)}
    # its devices have the same tokens, and so the same gradients
    if "fsdp" not in split:
        gradients = used
    shards = math.prod(now.axis_size(axis) for axis in split)
    rows = x.shape[0] * x.shape[1] * k // shards
    kind = "local"
    chunk = rows
    parts = 1
    trips = 1
    if over:
        parts = now.axis_size(over[0])
        kind, _ = choose_exchange(options.kind, parts, k, options.slack)
        # the devices have the same tokens
        kind = kind if over[0] in split else "gather"
        # the tokens of all of them are gathered
        shared_out = kind == "gather" and over[0] in split
        trips = even_trips(options.slack * rows, E // parts)
        chunk = _rounded(
            options.slack * rows / trips / (parts if kind == "rounds" else 1)
        )
        chunk = min(chunk, _rounded(rows * parts if shared_out else rows))
    static = Exchange(
        kind=kind,
        experts=E,
        chunk=chunk,
        activation=options.activation,
        backend=grouped_matmul.choose(options.slack if chunk != rows else 1.0),
        dtype=jnp.dtype(now.reduce),
        axis=over[0] if over else "",
        parts=parts,
        split_tokens=not over or over[0] in split,
        mesh_axes=now.mesh.axis_names if now.mesh is not None else (),
        trips=trips,
    )
    return _Placement(tokens, used, gradients, static)


def _specs(kernels: Kernels, names: Kernels, use) -> Kernels:
    """Looks up how the kernels are split in a use, for example `Rules.gradient`."""
    rules = execution.current().rules
    return jax.tree.map(
        lambda kernel, own: _padded(use(rules, own, kernel.shape), 3), kernels, names
    )


def _padded(spec: P, rank: int) -> P:
    return P(*spec, *(None,) * (rank - len(spec)))


def _rounded(rows: float) -> int:
    """Returns rows rounded up to whole tiles (8 on any platform, 128 where there are
    many).
    """
    multiple = 128 if rows >= 1024 else 8
    return -(-math.ceil(rows) // multiple) * multiple


def _turned(kernels: Kernels, swap=jnp.swapaxes) -> Kernels:
    """Turns kernels to what products are computed with: down [E, D, F] where the backend turns
    it; or the reverse.
    """
    turns = grouped_matmul.choose().turns_down
    return kernels._replace(down=swap(kernels.down, 1, 2)) if turns else kernels


def _gathered(kernels: Kernels, names: Kernels, dtype) -> Kernels:
    return jax.tree.map(
        lambda kernel, own: execution.gather(kernel, own, dtype), kernels, names
    )


# --- the function and its gradient ----------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def jaxdist_experts(
    x, ids, weights, valid, counted, kernels: Kernels, options: _Options
):
    return _forward(x, ids, weights, valid, counted, kernels, options)[0]


def _forward(x, ids, weights, valid, counted, kernels: Kernels, options: _Options):
    turned = _turned(kernels)
    place = _place(x, ids.shape[2], turned, options)
    rows: Any = _padded(place.tokens, 3)
    sort = execution.per_device(
        partial(
            _local_order,
            place=place,
            capacity_factor=options.capacity_factor,
            length=x.shape[1],
        ),
        (rows, place.tokens, place.tokens),
        (place.order, P()),
    )
    order, counts = sort(ids, valid, counted)
    order = checkpoint_name(order, EXPERT_ORDER)
    compute = execution.per_device(
        partial(_local_forward, place=place),
        (rows, rows, place.order, place.kernels),
        (rows, P(), place.products),
    )
    out, trips, products = compute(
        x, weights, order, _gathered(turned, options.names, x.dtype)
    )
    products = checkpoint_name(products, EXPERT_PRODUCTS)
    return (out, Stats(*counts, *trips)), (x, weights, order, products, kernels)


def _local_order(ids, valid, counted, *, place, capacity_factor, length):
    """Returns the expert of each assignment [A] and their order, and the load and what
    was dropped.
    """
    static = place.static
    B, S, k = ids.shape
    E = static.experts
    flat = partial(jnp.reshape, shape=(B * S, -1))
    ids = ids if valid is None else jnp.where(valid[..., None], ids, E)
    counted = counted if counted is None else counted.reshape(-1)
    load = dispatch.count(flat(ids), E, counted)
    dropped = jnp.zeros((), jnp.int32)
    if capacity_factor is not None:
        limit = math.ceil(capacity_factor * length * k / E)
        limited = (
            ids if counted is None else jnp.where(counted.reshape(B, S, 1), ids, E)
        )
        full = dispatch.over_capacity(limited, E, limit, place.sequence_axes)
        ids = jnp.where(full, E, ids)
        dropped = full.sum(dtype=jnp.int32)
    counts = tuple(
        _sum(a.astype(jnp.float32), place.token_axes) for a in (load, dropped)
    )
    return (ids.reshape(-1), exchange.order_of(flat(ids), static)), counts


def _local_forward(x, weights, order, kernels: Kernels, *, place: _Placement):
    """Returns the experts' outputs, their rounds and how many an even load takes, and
    products to keep.
    """
    static = place.static
    tokens = _tokens(x, weights, order, static.experts)
    out, rounds, products = exchange.forward(tokens, kernels, static)
    out = _sum(out, place.dims_axes)
    trips = tuple(
        _sum(jnp.float32(a), place.token_axes) for a in (rounds, static.trips)
    )
    return out.reshape(x.shape), trips, products


def _tokens(x, weights, order, experts: int) -> Tokens:
    """Makes a device's tokens of its arrays and of what `_local_order` returned."""
    flat = partial(jnp.reshape, shape=(x.shape[0] * x.shape[1], -1))
    ids, order_of_rows = order
    ids_Tk = flat(ids)
    sizes = dispatch.count(ids_Tk, experts)
    return Tokens(flat(x), ids_Tk, flat(weights), order_of_rows, sizes)


def _backward(options: _Options, residuals, cotangents):
    x, weights, order, products, kernels = residuals
    dout, _ = cotangents
    turned = _turned(kernels)
    place = _place(x, weights.shape[2], turned, options)
    rows: Any = _padded(place.tokens, 3)
    mapped = execution.per_device(
        partial(_local_backward, place=place),
        (rows, rows, rows, place.order, place.products, place.kernels),
        (rows, rows, place.gradients),
    )
    gathered = _gathered(turned, options.names, x.dtype)
    dx, dweights, gradients = mapped(x, weights, dout, order, products, gathered)
    gradients = _turned(jax.tree.map(execution.scatter, gradients, options.names))
    gradients = jax.tree.map(
        lambda gradient, kernel: gradient.astype(kernel.dtype), gradients, kernels
    )
    return dx, None, dweights, None, None, gradients


jaxdist_experts.defvjp(_forward, _backward)


def _local_backward(
    x, weights, dout, order, products, kernels: Kernels, *, place: _Placement
):
    static = place.static
    tokens = _tokens(x, weights, order, static.experts)
    dout = dout.reshape(tokens.x_TD.shape)
    own = exchange.backward(tokens, dout, kernels, products, static)
    dx, dweights = (_sum(a, place.dims_axes) for a in (own.x_TD, own.weights_Tk))
    over = [axis for axis in place.token_axes if axis != static.axis]
    gradients = jax.tree.map(
        lambda gradient, spec: _sum_in_shards(
            gradient.astype(static.dtype), spec, over
        ),
        own.kernels,
        place.gradients,
    )
    return dx.reshape(x.shape), dweights.reshape(weights.shape), gradients


def _sum(x, axes: Sequence[str]):
    return execution.sum_over(x, axes) if axes else x


def _sum_in_shards(gradient, spec: P, axes: Sequence[str]):
    """Returns a kernel's gradient summed over the devices that share out tokens, or its
    fsdp shard.
    """
    shards = [dim for dim, entry in enumerate(spec) if "fsdp" in axes_in(entry)]
    if shards and "fsdp" in axes:
        wide = execution.summable(gradient)
        part = jax.lax.psum_scatter(
            wide, "fsdp", scatter_dimension=shards[0], tiled=True
        )
        gradient = part.astype(gradient.dtype)
        axes = [axis for axis in axes if axis != "fsdp"]
    return _sum(gradient, tuple(axes))
