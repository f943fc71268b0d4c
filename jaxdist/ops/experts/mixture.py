"""Mixture of experts: a feed-forward layer in which each token uses a few kernels.

The op is one `custom_vjp` around `shard_map`. A device computes the rows of its own
experts: those of its own tokens, and those that other devices send. Kernels are
gathered and their gradients are summed like those of all other matmuls.

Letters: `B` batch, `S` sequence, `D` model, `F` feed-forward, `E` experts, `k` experts
of a token.
"""

import math
from collections.abc import Callable, Sequence
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
from jaxdist.ops.experts.feed_forward import Activation, Kernels, Products
from jaxdist.parallel import execution
from jaxdist.parallel.remat import EXPERT_ORDER, EXPERT_PRODUCTS
from jaxdist.parallel.sharding import Rules, axes_in
from jaxdist.protocols.dim_names import Names

INPUT_NAMES = ("experts", "d_model", "d_ff")
DOWN_NAMES = ("experts", "d_ff", "d_model")
Kind = Literal["auto", "rounds", "gather"]
# rows of all rounds, or chunks, relative to the rows of an even load
SLACK = 1.25
# A device with more than ROWS rows goes through them in several rounds, with at least
# ROWS_OF_EXPERT rows of each expert in a round. With 8,192 rows a matmul takes 15 times
# as long as reading and writing the sum of a kernel's gradient (v5p).
ROWS = 65_536
ROWS_OF_EXPERT = 8192
MOST_TRIPS = 4


class Stats(NamedTuple):
    """Statistics of the tokens: float32 sums, which may be added over layers."""

    load: jax.Array  # [E] choices of each expert by counted tokens, dropped ones too
    dropped: jax.Array  # choices dropped because their expert was full
    rounds: jax.Array  # rounds of exchange, or chunks, of all devices
    # rounds that even loads take: rounds / exchanges is 1 for an even load
    exchanges: jax.Array


class Output(NamedTuple):
    """Result of `experts`."""

    x: jax.Array  # [B, S, D]
    stats: Stats


@dataclass(frozen=True)
class _Options:
    """Static arguments of a call."""

    names: Kernels  # logical names of the kernels' dims, turned as the backend needs
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
    """Computes the weighted sum of each token's experts.

    The output of an expert is down(activation(gate(x)) * up(x)). The memory does not
    depend on the load. The op runs on one device, in a train step, and in a region of a
    step. The backward pass computes the gate and up matmuls again: on CPUs if `remat`
    does not keep them, elsewhere always. It never computes the outputs again.

    Args:
      x_BSD: tokens.
      ids_BSk: int32 experts of each token, all different, from `route`.
      weights_BSk: float32 weights of these experts, from `route`.
      gate: parameter [E, D, F]; None: no gate, down(activation(up(x))).
      up: parameter [E, D, F].
      down: parameter [E, F, D]. The three parameters carry their logical names as
        metadata. Arrays without metadata have the names `INPUT_NAMES` and `DOWN_NAMES`.
      activation: elementwise function.
      exchange: how rows reach experts on other devices: "rounds", "gather" (for few
        devices and many experts per token), or "auto" (fewer bytes). See `explain`.
      slack: rows of the rounds, or chunks, relative to the rows of an even load.
      capacity_factor: number of choices that an expert takes of a sequence, relative to
        its even share. It takes the first ones and drops the others. None: no drops.
      valid_BS: bool, False for padding: no expert computes these tokens, and their
        output is 0. None: all tokens are valid.
      counted_BS: bool, tokens whose choices count for the load and for the capacity.
        None: the valid tokens.

    Returns:
      The sum [B, S, D] in the dtype of x, and statistics.

    Raises:
      AssertionError: an array has the wrong rank.
      ValueError: shapes or options do not fit.
    """
    chex.assert_rank([x_BSD, ids_BSk, weights_BSk], 3)
    parameters = Kernels((gate, up) if gate is not None else (up,), down)
    names = Kernels(
        tuple(_logical_names(p, INPUT_NAMES) for p in parameters.inputs),
        _logical_names(down, DOWN_NAMES),
    )
    names = _turn_down(names, lambda name, a, b: (name[0], name[b], name[a]))
    kernels = Kernels(tuple(p[...] for p in parameters.inputs), down[...])
    _check_shapes(x_BSD, ids_BSk, weights_BSk, kernels)
    _check_options(exchange, slack, capacity_factor)
    options = _Options(
        names=names,
        activation=activation,
        kind=exchange,
        slack=slack,
        capacity_factor=capacity_factor,
    )
    valid, counted = (
        None if mask is None else mask.astype(bool) for mask in (valid_BS, counted_BS)
    )
    weights = weights_BSk.astype(jnp.float32)
    out, stats = jaxdist_experts(
        x_BSD, ids_BSk, weights, valid, counted, kernels, options
    )
    return Output(out, stats)


def explain(
    num_experts: int, k: int, *, exchange: Kind = "auto", slack: float = SLACK
) -> list[str]:
    """Explains the backend of the matmuls and the form of the exchange, in lines."""
    backend = grouped_matmul.choose()
    parts = execution.current().axis_size("expert")
    lines = [f"experts: matmuls by {backend.name}: {backend.reason}"]
    if parts == 1 or num_experts % parts:
        lines.append("experts: no exchange: each device has the kernels of all experts")
        return lines
    kind, reason = choose_exchange(exchange, parts, k, slack)
    lines.append(f"experts: exchange by {kind} over expert {parts}: {reason}")
    return lines


def choose_exchange(
    kind: Kind, parts: int, k: int, slack: float = SLACK
) -> tuple[str, str]:
    """Chooses rounds or gather, for experts that `parts` devices split.

    Returns:
      The form, and the reason for users.
    """
    if kind != "auto":
        return kind, "set by hand"
    # The rows of a token cross the mesh k slack (n - 1) / n times. With a gather, the
    # token crosses n - 1 times, and its sum twice as often where the compiler turns the
    # scatter into an all-reduce (libtpu). So gather is cheaper below k slack / 2
    # devices.
    if parts <= k * slack / 2:
        reason = (
            f"a copy of a token for each of {parts} devices takes fewer bytes than rows "
            f"for {k} experts"
        )
        return "gather", reason
    reason = (
        f"rows for {k} experts take fewer bytes than a copy of a token for each of "
        f"{parts} devices"
    )
    return "rounds", reason


def _logical_names(parameter: Any, default: Names) -> Names:
    return getattr(parameter, "logical", ()) or default


def _check_shapes(
    x: jax.Array, ids: jax.Array, weights: jax.Array, kernels: Kernels
) -> None:
    E, D, F = kernels.inputs[0].shape
    shapes = [kernel.shape for kernel in (*kernels.inputs, kernels.down)]
    required = [(E, D, F)] * len(kernels.inputs) + [(E, F, D)]
    if shapes != required or x.shape[2] != D:
        raise ValueError(
            f"experts: x {x.shape}, kernels {shapes}; required: [B, S, D], [E, D, F], [E, F, D]"
        )
    k = ids.shape[2]
    if not ids.shape == weights.shape == (*x.shape[:2], k) or k > E:
        raise ValueError(
            f"experts: ids {ids.shape}, weights {weights.shape}, x {x.shape}; required: [B, S, k] twice and "
            f"[B, S, D], with k of at most {E} experts"
        )


def _check_options(kind: str, slack: float, capacity_factor: float | None) -> None:
    if kind not in ("auto", "rounds", "gather"):
        raise ValueError(f"experts: exchange={kind!r}; choose auto, rounds or gather")
    if slack < 1 or (capacity_factor is not None and capacity_factor <= 0):
        raise ValueError(
            f"experts: slack={slack}, capacity_factor={capacity_factor}; required: slack >= 1, capacity_factor > 0 or None"
        )


def even_trips(rows: float, experts: int) -> int:
    """Chooses the number of rounds, or chunks, for an even load.

    The hidden rows are as large as everything else in a layer, and only those of one
    round are in memory. More rounds send no more bytes, but each round reads the
    kernels and adds to their gradients once more.

    Args:
      rows: rows of a device.
      experts: experts of a device.
    """
    trips = math.ceil(rows / ROWS)
    most = min(MOST_TRIPS, int(rows / (experts * ROWS_OF_EXPERT)))
    return max(1, min(trips, most))


# --- placement ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Placement:
    """Placement of a call's arrays in the mesh."""

    tokens: P  # of [B, S]
    kernels: Kernels  # specs of the kernels that the matmuls read
    gradients: Kernels  # specs of the kernels' gradients that the devices return
    static: Exchange

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the tokens."""
        return tuple(axis for entry in self.tokens for axis in axes_in(entry))

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the sequence."""
        return axes_in(self.tokens[1])

    @property
    def d_ff_axes(self) -> tuple[str, ...]:
        """Mesh axes that split d_ff: each device has a part of every sum."""
        return axes_in(self.kernels.inputs[0][2])

    @property
    def order(self) -> P:
        """Spec of each device's expert ids and their order."""
        axis = self.static.axis
        axes = self.token_axes
        if axis and axis not in axes:
            axes = (*axes, axis)
        return P(axes)

    @property
    def products(self) -> tuple[P, ...]:
        """Specs of the products that each device keeps of its own rows."""
        if not self.static.keeps_products:
            return ()
        return tuple(P(self.order[0], kernel[2]) for kernel in self.kernels.inputs)


def _place(x: jax.Array, k: int, kernels: Kernels, options: _Options) -> _Placement:
    now = execution.current()
    tokens = now.rules.activation(("batch", "sequence"), x.shape[:2])
    computed = _specs(kernels, options.names, Rules.computed)
    expert_axes = axes_in(computed.down[0])
    if any(axes_in(spec[0]) != expert_axes for spec in computed.inputs) or (
        len(expert_axes) > 1
    ):
        raise ValueError(
            f"experts: kernels are split as {computed}; all must split their dim of "
            "experts over the same mesh axis, or not at all"
        )
    token_axes = {axis for entry in tokens for axis in axes_in(entry)}
    gradients = _specs(kernels, options.names, Rules.gradient)
    if "fsdp" not in token_axes:
        # The devices of the axis have the same tokens, and so the same gradients.
        gradients = computed
    shards = math.prod(now.axis_size(axis) for axis in token_axes)
    axis = expert_axes[0] if expert_axes else ""
    static = _exchange(
        rows=x.shape[0] * x.shape[1] * k // shards,
        num_experts=kernels.down.shape[0],
        k=k,
        axis=axis,
        splits_tokens=not axis or axis in token_axes,
        options=options,
    )
    return _Placement(tokens, computed, gradients, static)


def _exchange(
    *,
    rows: int,
    num_experts: int,
    k: int,
    axis: str,
    splits_tokens: bool,
    options: _Options,
) -> Exchange:
    """Chooses the form of the exchange and its sizes.

    Args:
      rows: rows of a device's own tokens.
      num_experts: experts of all devices.
      k: experts of a token.
      axis: mesh axis that splits the experts; "": none.
      splits_tokens: whether this axis splits the tokens, too.
      options: static arguments of the call.
    """
    now = execution.current()
    kind = "local"
    chunk = rows
    parts = 1
    trips = 1
    if axis:
        parts = now.axis_size(axis)
        kind, _ = choose_exchange(options.kind, parts, k, options.slack)
        if not splits_tokens:
            kind = "gather"  # the devices have the same tokens
        trips = even_trips(options.slack * rows, num_experts // parts)
        pairs = parts if kind == "rounds" else 1
        # A gather takes the tokens of all devices of the axis.
        groups = parts if kind == "gather" and splits_tokens else 1
        chunk = min(
            _round_up(options.slack * rows / trips / pairs), _round_up(rows * groups)
        )
    return Exchange(
        kind=kind,
        experts=num_experts,
        chunk=chunk,
        activation=options.activation,
        backend=grouped_matmul.choose(options.slack if chunk != rows else 1.0),
        dtype=jnp.dtype(now.reduce),
        axis=axis,
        parts=parts,
        split_tokens=splits_tokens,
        mesh_axes=now.mesh.axis_names if now.mesh is not None else (),
        trips=trips,
    )


def _specs(
    kernels: Kernels, names: Kernels, use: Callable[[Rules, Names, Sequence[int]], P]
) -> Kernels:
    """Looks up how kernels are split in a use, for example `Rules.gradient`."""
    rules = execution.current().rules
    specs: Kernels = jax.tree.map(
        lambda kernel, kernel_names: _pad_spec(
            use(rules, kernel_names, kernel.shape), 3
        ),
        kernels,
        names,
    )
    return specs


def _pad_spec(spec: P, rank: int) -> P:
    return P(*spec, *(None,) * (rank - len(spec)))


def _round_up(rows: float) -> int:
    """Rounds up to whole tiles: 8 rows on any platform, 128 from 1024 rows on."""
    multiple = 128 if rows >= 1024 else 8
    return -(-math.ceil(rows) // multiple) * multiple


def _turn_down(
    kernels: Kernels, swap: Callable[[Any, int, int], Any] = jnp.swapaxes
) -> Kernels:
    """Swaps the last dims of the down kernel, if the backend computes with [E, D, F].

    A second call undoes the first one.
    """
    if not grouped_matmul.choose().turns_down:
        return kernels
    return kernels._replace(down=swap(kernels.down, 1, 2))


def _gather_kernels(kernels: Kernels, names: Kernels, dtype: jnp.dtype) -> Kernels:
    gathered: Kernels = jax.tree.map(
        lambda kernel, kernel_names: execution.gather(kernel, kernel_names, dtype),
        kernels,
        names,
    )
    return gathered


# --- the function and its gradient ----------------------------------------------------

# expert of each assignment [A] (E: no expert), and the order of the rows
_Order = tuple[jax.Array, dispatch.Order]
_Residuals = tuple[jax.Array, jax.Array, _Order, Products, Kernels]


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def jaxdist_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array | None,
    counted: jax.Array | None,
    kernels: Kernels,
    options: _Options,
) -> tuple[jax.Array, Stats]:
    """Computes a mixture; `telemetry.flops` recognizes the call by this name."""
    return _forward(x, ids, weights, valid, counted, kernels, options)[0]


def _forward(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    valid: jax.Array | None,
    counted: jax.Array | None,
    kernels: Kernels,
    options: _Options,
) -> tuple[tuple[jax.Array, Stats], _Residuals]:
    turned = _turn_down(kernels)
    place = _place(x, ids.shape[2], turned, options)
    token_spec = _pad_spec(place.tokens, 3)
    sort = execution.per_device(
        partial(
            _sort_locally,
            place=place,
            capacity_factor=options.capacity_factor,
            length=x.shape[1],
        ),
        (token_spec, place.tokens, place.tokens),
        (place.order, P()),
    )
    order, counts = sort(ids, valid, counted)
    order = checkpoint_name(order, EXPERT_ORDER)
    compute = execution.per_device(
        partial(_local_forward, place=place),
        (token_spec, token_spec, place.order, place.kernels),
        (token_spec, P(), place.products),
    )
    out, trips, products = compute(
        x, weights, order, _gather_kernels(turned, options.names, x.dtype)
    )
    products = checkpoint_name(products, EXPERT_PRODUCTS)
    return (out, Stats(*counts, *trips)), (x, weights, order, products, kernels)


def _sort_locally(
    ids: jax.Array,
    valid: jax.Array | None,
    counted: jax.Array | None,
    *,
    place: _Placement,
    capacity_factor: float | None,
    length: int,
) -> tuple[_Order, tuple[jax.Array, jax.Array]]:
    """Sorts a device's assignments, without those of invalid tokens and full experts.

    Args:
      ids: [B, S, k], the device's part.
      valid: [B, S], tokens to compute; None: all.
      counted: [B, S], tokens that count for load and capacity; None: the valid ones.
      place: placement of the call.
      capacity_factor: argument of `experts`.
      length: tokens of a whole sequence.

    Returns:
      The assignments' experts with their order, and the load [E] with the number of
      dropped assignments.
    """
    static = place.static
    B, S, k = ids.shape
    E = static.experts
    flat = partial(jnp.reshape, shape=(B * S, -1))
    if valid is not None:
        ids = jnp.where(valid[..., None], ids, E)
    if counted is not None:
        counted = counted.reshape(-1)
    load = dispatch.count(flat(ids), E, counted)
    dropped = jnp.zeros((), jnp.int32)
    if capacity_factor is not None:
        limit = math.ceil(capacity_factor * length * k / E)
        limited = ids
        if counted is not None:
            limited = jnp.where(counted.reshape(B, S, 1), ids, E)
        full = dispatch.over_capacity(limited, E, limit, place.sequence_axes)
        ids = jnp.where(full, E, ids)
        dropped = full.sum(dtype=jnp.int32)
    load_sum = _sum_over(load.astype(jnp.float32), place.token_axes)
    dropped_sum = _sum_over(dropped.astype(jnp.float32), place.token_axes)
    ids_A = ids.reshape(-1)
    order = exchange.order_of(flat(ids), static)
    return (ids_A, order), (load_sum, dropped_sum)


def _local_forward(
    x: jax.Array,
    weights: jax.Array,
    order: _Order,
    kernels: Kernels,
    *,
    place: _Placement,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Products]:
    """Computes the experts' outputs on a device.

    Returns:
      The outputs [B, S, D]; the rounds with the rounds of an even load; and the
      products to keep.
    """
    static = place.static
    tokens = _tokens(x, weights, order, static.experts)
    out, rounds, products = exchange.forward(tokens, kernels, static)
    out = _sum_over(out, place.d_ff_axes)
    rounds_sum = _sum_over(jnp.float32(rounds), place.token_axes)
    even_sum = _sum_over(jnp.float32(static.trips), place.token_axes)
    return out.reshape(x.shape), (rounds_sum, even_sum), products


def _tokens(x: jax.Array, weights: jax.Array, order: _Order, experts: int) -> Tokens:
    """Builds a device's tokens from its arrays and the result of `_sort_locally`."""
    flat = partial(jnp.reshape, shape=(x.shape[0] * x.shape[1], -1))
    ids, order_of_rows = order
    ids_Tk = flat(ids)
    sizes = dispatch.count(ids_Tk, experts)
    return Tokens(
        x_TD=flat(x),
        ids_Tk=ids_Tk,
        weights_Tk=flat(weights),
        order=order_of_rows,
        sizes_E=sizes,
    )


def _backward(
    options: _Options,
    residuals: _Residuals,
    cotangents: tuple[jax.Array, Stats],
) -> tuple[jax.Array, None, jax.Array, None, None, Kernels]:
    x, weights, order, products, kernels = residuals
    dout, _ = cotangents
    turned = _turn_down(kernels)
    place = _place(x, weights.shape[2], turned, options)
    token_spec = _pad_spec(place.tokens, 3)
    compute = execution.per_device(
        partial(_local_backward, place=place),
        (
            token_spec,
            token_spec,
            token_spec,
            place.order,
            place.products,
            place.kernels,
        ),
        (token_spec, token_spec, place.gradients),
    )
    gathered = _gather_kernels(turned, options.names, x.dtype)
    dx, dweights, gradients = compute(x, weights, dout, order, products, gathered)
    gradients = _turn_down(jax.tree.map(execution.scatter, gradients, options.names))
    gradients = jax.tree.map(
        lambda gradient, kernel: gradient.astype(kernel.dtype), gradients, kernels
    )
    return dx, None, dweights, None, None, gradients


jaxdist_experts.defvjp(_forward, _backward)


def _local_backward(
    x: jax.Array,
    weights: jax.Array,
    dout: jax.Array,
    order: _Order,
    products: Products,
    kernels: Kernels,
    *,
    place: _Placement,
) -> tuple[jax.Array, jax.Array, Kernels]:
    """Computes the gradients of x, of the weights and of the kernels on a device."""
    static = place.static
    tokens = _tokens(x, weights, order, static.experts)
    dout = dout.reshape(tokens.x_TD.shape)
    local = exchange.backward(tokens, dout, kernels, products, static)
    dx = _sum_over(local.x_TD, place.d_ff_axes)
    dweights = _sum_over(local.weights_Tk, place.d_ff_axes)
    axes = [axis for axis in place.token_axes if axis != static.axis]
    gradients: Kernels = jax.tree.map(
        lambda gradient, spec: _sum_or_scatter(
            gradient.astype(static.dtype), spec, axes
        ),
        local.kernels,
        place.gradients,
    )
    return dx.reshape(x.shape), dweights.reshape(weights.shape), gradients


def _sum_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    return execution.sum_over(x, axes) if axes else x


def _sum_or_scatter(gradient: jax.Array, spec: P, axes: Sequence[str]) -> jax.Array:
    """Sums a kernel's gradient over mesh axes; where fsdp splits it, to its shard."""
    shards = [dim for dim, entry in enumerate(spec) if "fsdp" in axes_in(entry)]
    if shards and "fsdp" in axes:
        wide = execution.summable(gradient)
        part = jax.lax.psum_scatter(
            wide, "fsdp", scatter_dimension=shards[0], tiled=True
        )
        gradient = part.astype(gradient.dtype)
        axes = [axis for axis in axes if axis != "fsdp"]
    return _sum_over(gradient, tuple(axes))
