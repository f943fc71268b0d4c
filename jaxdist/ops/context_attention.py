"""Attention over a sequence that devices share out over the mesh axis `context`: three
forms of it.

heads: an all-to-all gives every device whole sequences of a part of the heads, another
gives the results back (DeepSpeed-Ulysses, arXiv:2309.14509). Any backend computes it,
masks are those of whole sequences, and all devices have equal work. gather: every
device gets all keys and values, or those that its window reaches, and attends with its
own part of the queries (as in Llama 3, arXiv:2407.21783, section 3.3.2); without a
window the last part sees the most keys. ring: see `ring_attention`.

Letters: c size of the axis, else see `attention`.
"""

import math
from collections.abc import Iterator, Sequence
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
    """How devices compute attention together."""

    # "whole": no device has a part of the sequence; else "heads", "gather" or "ring"
    name: str
    context: int  # devices that share out the sequence
    head_shards: int  # devices that share out the heads

    @property
    def splits_sequence(self) -> bool:
        return self.context > 1

    @property
    def parts(self) -> int:
        """Returns the parts of the queries, of which a backend sees one at a time."""
        return {"gather": self.context, "ring": 2 * self.context}.get(self.name, 1)

    @property
    def busiest(self) -> float:
        """Returns the work of the device that has most, relative to the mean, with a
        causal mask.
        """
        return 2 - 1 / self.context if self.name == "gather" else 1.0

    def hops(self, part: int, window: int | None) -> int:
        """Returns from how many devices before a window reaches keys, if each has a
        part of the sequence.
        """
        most = self.context - 1
        return min(-(-(window - 1) // part), most) if window else most

    def run(self, backend: Backend, request: Request) -> jax.Array:
        """Computes attention as a device has it: called with its own part of the
        arrays, ids excepted.
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
                return jax.lax.all_to_all(out, AXIS, 1, 2, tiled=True)
        if self.name == "ring":
            assert backend.pieces is not None
            ring = Ring(backend.pieces, request.options.causal, self.context)
            return ring_attention(request, ring)
        _, k, v = request.heads
        hops = self.hops(k.shape[1], request.options.window)
        if hops < self.context - 1:
            with jax.named_scope(KEYS):
                k, v = (_with_those_before(x, hops, self.context) for x in (k, v))
            ids = _ids_before(request, hops, self.context)
            return backend.run(request.of_part(jnp.int32(hops), k, v, ids))
        part = jax.lax.axis_index(AXIS)
        with jax.named_scope(KEYS):
            k = _gathered(k)
            v = _gathered(v)
        return backend.run(request.of_part(part, k, v, request.segment_ids))


def _with_those_before(k_BSKN: jax.Array, hops: int, size: int) -> jax.Array:
    """Returns the keys of so many devices before this one, and its own: all that a
    window reaches.
    """
    before = [
        jax.lax.ppermute(k_BSKN, AXIS, [(i, (i + hop) % size) for i in range(size)])
        for hop in range(hops, 0, -1)
    ]
    return jnp.concatenate([*before, k_BSKN], axis=1)


def _ids_before(request: Request, hops: int, size: int) -> jax.Array:
    """Cuts out the segment ids of those keys; what comes round from the sequence's end
    is nobody's.
    """
    rows, length = request.q.shape[:2]
    segment_ids_BS = request.segment_ids
    if segment_ids_BS is None:
        segment_ids_BS = jnp.zeros((rows, length * size), jnp.int32)
    nobody = jnp.iinfo(jnp.int32).min
    padded = jnp.pad(
        segment_ids_BS, [(0, 0), (hops * length, 0)], constant_values=nobody
    )
    start = jax.lax.axis_index(AXIS) * length
    return jax.lax.dynamic_slice_in_dim(padded, start, (hops + 1) * length, 1)


def _gathered(k_BSKN: jax.Array) -> jax.Array:
    """Returns the keys of all devices; their gradients are summed on the way back."""
    wide = execution.summable(k_BSKN)
    return jax.lax.all_gather(wide, AXIS, axis=1, tiled=True).astype(k_BSKN.dtype)


def choose_form(dims: Sequence[int], *, window: bool = False) -> Form:
    """Returns `form_under` the rules in force."""
    return form_under(execution.current().rules, dims, window=window)


def form_under(rules: Rules, dims: Sequence[int], *, window: bool = False) -> Form:
    """Chooses how queries [B, S, H, N] attend.

    A ring knows no window, and its chunks are of one size: elsewhere `ring` gathers.

    Raises:
      ConfigError: context.attention=heads, and heads that do not divide.
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


def faults(rules: Rules, length: int, heads: int | None) -> Iterator[str]:
    """Yields what is wrong with context.attention for sequences of a length and so many
    query heads.
    """
    size = rules.shape.sizes[AXIS]
    parts = size
    name = f"mesh.context={size}"
    if rules.attention == "ring":
        parts = 2 * size
        name = f"2 x {name} (context.attention=ring)"
    if size > 1 and length % parts:
        legal = " or ".join(
            str(n) for n in (length // parts * parts, -(-length // parts) * parts) if n
        )
        yield f"batch.sequence_length={length} is not divisible by {name}; nearest legal lengths: {legal}"
    if heads is None:
        return
    if (
        rules.attention == "heads"
        and rules.shape.sizes[AXIS] > 1
        and not heads_divide(rules, heads)
    ):
        yield _refusal(rules, heads)


def copied_heads(kv_heads: int, heads: int, shards: int) -> int:
    """Returns the kv heads when they are repeated just enough to be split like the
    query heads.

    With 8 shards and 4 kv heads every one is held twice, so that 8 devices have one
    each.
    """
    if kv_heads % shards == 0 or heads % shards:
        return kv_heads
    copied = math.lcm(kv_heads, shards)
    return copied if heads % copied == 0 else heads


def shards_of(heads: int, tensor: int) -> int:
    """Counts how many devices share the heads out: none where they do not divide."""
    return tensor if heads % tensor == 0 else 1


def _head_shards(rules: Rules, heads: int) -> int:
    return rules.shape.sizes[AXIS] * shards_of(heads, rules.shape.sizes["tensor"])


def heads_divide(rules: Rules, heads: int) -> bool:
    """Checks whether each device of context x tensor can have as many heads."""
    return heads % _head_shards(rules, heads) == 0


def indivisible(rules: Rules, heads: int) -> str:
    """Names what does not divide, as a clause."""
    tensor = shards_of(heads, rules.shape.sizes["tensor"])
    product = (
        f"{rules.shape.sizes[AXIS]} x mesh.tensor={tensor}"
        if tensor > 1
        else rules.shape.sizes[AXIS]
    )
    return f"{heads} query heads are not divisible by mesh.context={product}"


def _refusal(rules: Rules, heads: int) -> str:
    return (
        f"context.attention=heads: {indivisible(rules, heads)}; set context.attention=auto, which takes "
        f"gather here, or make model.num_heads a multiple of {_head_shards(rules, heads)}"
    )
