"""Attention over sequences that devices split over the mesh axis `context`.

It has three forms.

heads: an all-to-all gives every device whole sequences for a part of the heads, and a
second one returns the results (DeepSpeed-Ulysses, arXiv:2309.14509). It supports all
backends and masks, and all devices have equal work.

gather: every device gets all keys and values, or those in reach of its window. It
attends with its own part of the queries (as in Llama 3, arXiv:2407.21783, section
3.3.2). Without a window, the last part has the most work.

ring: see `ring_attention`.

Letters: c size of the axis; see `attention` for the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.ops.attention_backends import Backend
from jaxdist.ops.attention_request import Request
from jaxdist.ops.ring_attention import Ring, ring_attention
from jaxdist.parallel import execution
from jaxdist.parallel.context import AXIS, FROM_HEADS, KEYS, TO_HEADS
from jaxdist.parallel.sharding import Rules


@dataclass(frozen=True)
class Form:
    """Form in which devices compute attention together."""

    # "heads", "gather", "ring", or "whole": the sequence is not split
    name: str
    context: int  # devices that split the sequence
    head_shards: int  # devices that split the heads
    # gather: whether the request of a device has all keys and values already
    has_all_keys: bool = False

    @property
    def splits_sequence(self) -> bool:
        """Whether devices split the sequence."""
        return self.context > 1

    @property
    def parts(self) -> int:
        """Number of parts of the queries; a backend computes one at a time."""
        if self.name == "gather":
            return self.context
        if self.name == "ring":
            return 2 * self.context
        return 1

    @property
    def busiest(self) -> float:
        """Work of the busiest device, relative to the mean, with a causal mask."""
        return 2 - 1 / self.context if self.name == "gather" else 1.0

    def hops(self, part: int, window: int | None) -> int:
        """Counts the preceding devices whose keys a device needs.

        Args:
          part: tokens of a device's part of the sequence.
          window: tokens that a token sees; None or 0: all.
        """
        most = self.context - 1
        if not window:
            return most
        return min(-(-(window - 1) // part), most)

    def run(self, backend: Backend, request: Request) -> jax.Array:
        """Computes attention on a device.

        Args:
          backend: implementation to call.
          request: the device's part of the arrays, but all segment ids.
        """
        if self.name == "whole":
            return backend.run(request)
        if self.name == "heads":
            with jax.named_scope(TO_HEADS):
                q, k, v = (
                    jax.lax.all_to_all(x, AXIS, 2, 1, tiled=True) for x in request.heads
                )
            out = backend.run(request.with_heads(q, k, v))
            with jax.named_scope(FROM_HEADS):
                result: jax.Array = jax.lax.all_to_all(out, AXIS, 1, 2, tiled=True)
                return result
        if self.name == "ring":
            assert backend.pieces is not None
            ring = Ring(backend.pieces, request.options.causal, self.context)
            return ring_attention(request, ring)
        _, k, v = request.heads
        part = jax.lax.axis_index(AXIS)
        if self.has_all_keys:
            return backend.run(request.of_part(part, k, v, request.segment_ids))
        hops = self.hops(k.shape[1], request.options.window)
        if hops < self.context - 1:
            with jax.named_scope(KEYS):
                k, v = (_with_previous(x, hops, self.context) for x in (k, v))
            ids = _previous_ids(request, hops, self.context)
            return backend.run(request.of_part(jnp.int32(hops), k, v, ids))
        with jax.named_scope(KEYS):
            k = _gather_keys(k)
            v = _gather_keys(v)
        return backend.run(request.of_part(part, k, v, request.segment_ids))


def _with_previous(k_BSKN: jax.Array, hops: int, size: int) -> jax.Array:
    """Joins the keys of the `hops` preceding devices with this device's own."""
    previous = [
        jax.lax.ppermute(k_BSKN, AXIS, [(i, (i + hop) % size) for i in range(size)])
        for hop in range(hops, 0, -1)
    ]
    return jnp.concatenate([*previous, k_BSKN], axis=1)


def _previous_ids(request: Request, hops: int, size: int) -> jax.Array:
    """Slices the segment ids of the keys of `_with_previous`.

    Keys that wrap around from the end of the sequence get an id that no token has.
    """
    rows, length = request.q.shape[:2]
    segment_ids_BS = request.segment_ids
    if segment_ids_BS is None:
        segment_ids_BS = jnp.zeros((rows, length * size), jnp.int32)
    no_document = jnp.iinfo(jnp.int32).min
    padded = jnp.pad(
        segment_ids_BS, [(0, 0), (hops * length, 0)], constant_values=no_document
    )
    start = jax.lax.axis_index(AXIS) * length
    return jax.lax.dynamic_slice_in_dim(padded, start, (hops + 1) * length, 1)


def _gather_keys(k_BSKN: jax.Array) -> jax.Array:
    """Gathers the keys of all devices; the backward pass sums their gradients."""
    wide = execution.summable(k_BSKN)
    gathered: jax.Array = jax.lax.all_gather(wide, AXIS, axis=1, tiled=True)
    return gathered.astype(k_BSKN.dtype)


@jax.custom_vjp
def gather_sequence(x_BS: jax.Array) -> jax.Array:
    """Gives each device of `context` the whole sequence.

    Each device's part of the result is a copy of x, so the result has c S tokens. Layers
    apply to it as to any activation, and each device then computes all tokens.

    It has a gradient of its own: that of `shard_map` would also sum over the axes that do
    not split x.

    Args:
      x_BS: [B, S, ...], which the devices split.

    Returns:
      [B, c S, ...], which the devices split.
    """

    def gather(part: jax.Array) -> jax.Array:
        with jax.named_scope(KEYS):
            return _gather_keys(part)

    return _on_parts(gather, x_BS)


def _gather_forward(x_BS: jax.Array) -> tuple[jax.Array, None]:
    return gather_sequence(x_BS), None


def _gather_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    """Sums the gradients of the devices' copies."""

    def scatter(copy: jax.Array) -> jax.Array:
        with jax.named_scope(KEYS):
            total: jax.Array = jax.lax.psum_scatter(
                execution.summable(copy), AXIS, scatter_dimension=1, tiled=True
            )
            return total.astype(copy.dtype)

    return (_on_parts(scatter, gradient),)


gather_sequence.defvjp(_gather_forward, _gather_backward)


def _on_parts(function: Callable[[jax.Array], jax.Array], x_BS: jax.Array) -> jax.Array:
    """Calls a function with each device's part of [B, S, ...], split over `context`."""
    names = ("batch", "sequence", *(None,) * (x_BS.ndim - 2))
    spec = execution.current().rules.activation(names, x_BS.shape)
    result: jax.Array = execution.per_device(function, (spec,), spec)(x_BS)
    return result


def choose_form(dims: Sequence[int], *, window: bool = False) -> Form:
    """Chooses the form for queries [B, S, H, N] by the current rules; see `form_under`."""
    return form_under(execution.current().rules, dims, window=window)


def form_under(rules: Rules, dims: Sequence[int], *, window: bool = False) -> Form:
    """Chooses the form for queries [B, S, H, N].

    A ring supports no window and needs 2 c chunks of equal size. Otherwise
    context.attention=ring uses gather.

    Args:
      rules: rules of the layout.
      dims: shape of the queries.
      window: whether attention has a window.

    Raises:
      ConfigError: context.attention is heads, but the heads do not divide.
    """
    size = rules.shape.sizes[AXIS]
    tensor = rules.shape.sizes["tensor"]
    if size == 1 or dims[1] % size:
        return Form("whole", 1, tensor)
    if rules.attention == "ring" and not window and dims[1] % (2 * size) == 0:
        return Form("ring", size, tensor)
    if rules.attention == "ring" or not heads_divide(rules, dims[2]):
        if rules.attention == "heads":
            raise ConfigError(_refusal(rules, dims[2]))
        return Form("gather", size, tensor)
    if rules.attention == "gather":
        return Form("gather", size, tensor)
    return Form("heads", size, _head_shards(rules, dims[2]))


def faults(rules: Rules, length: int, heads: int) -> Iterator[str]:
    """Yields the errors of context.attention, as texts for users.

    Args:
      rules: rules of the layout.
      length: tokens of a sequence.
      heads: number of query heads.
    """
    yield from length_faults(rules, length)
    if rules.attention != "heads" or rules.shape.sizes[AXIS] == 1:
        return
    if not heads_divide(rules, heads):
        yield _refusal(rules, heads)


def length_faults(rules: Rules, length: int) -> Iterator[str]:
    """Yields a text for users if devices cannot split sequences of this many tokens."""
    size = rules.shape.sizes[AXIS]
    parts = size
    name = f"mesh.context={size}"
    if rules.attention == "ring":
        parts = 2 * size
        name = f"2 x {name} (context.attention=ring)"
    if size > 1 and length % parts:
        lengths = (length // parts * parts, -(-length // parts) * parts)
        legal = " or ".join(str(n) for n in lengths if n)
        yield f"batch.sequence_length={length} is not divisible by {name}; nearest legal lengths: {legal}"


def copied_heads(kv_heads: int, heads: int, shards: int) -> int:
    """Computes the number of kv heads after they are repeated to split like query heads.

    They are repeated just enough. With 8 shards, 4 kv heads become 8, one for each
    device.
    """
    if kv_heads % shards == 0 or heads % shards:
        return kv_heads
    copied = math.lcm(kv_heads, shards)
    return copied if heads % copied == 0 else heads


def shards_of(heads: int, tensor: int) -> int:
    """Counts the devices of `tensor` that split the heads: 1 if they do not divide."""
    return tensor if heads % tensor == 0 else 1


def _head_shards(rules: Rules, heads: int) -> int:
    return rules.shape.sizes[AXIS] * shards_of(heads, rules.shape.sizes["tensor"])


def heads_divide(rules: Rules, heads: int) -> bool:
    """Checks whether the devices of context x tensor can split the heads equally."""
    return heads % _head_shards(rules, heads) == 0


def indivisible(rules: Rules, heads: int) -> str:
    """Describes why the heads do not divide, as a clause for users."""
    tensor = shards_of(heads, rules.shape.sizes["tensor"])
    divisor = f"mesh.context={rules.shape.sizes[AXIS]}"
    if tensor > 1:
        divisor = f"{divisor} x mesh.tensor={tensor}"
    return f"{heads} query heads are not divisible by {divisor}"


def _refusal(rules: Rules, heads: int) -> str:
    return (
        f"context.attention=heads: {indivisible(rules, heads)}; set context.attention=auto, which takes "
        f"gather here, or make model.num_heads a multiple of {_head_shards(rules, heads)}"
    )
