"""Attention of new tokens to a cache of keys and values, which devices may share out
over `context`.

Then each device keeps a part of the slots of every sequence. A prompt is split as in
training, so its keys and values are written where they were computed; behind its part
of the prompt a device has a part of the room for new tokens. New tokens' queries go to
all devices, each attends to its own slots, and the parts of the softmax are added up:
[B, T, H, N + 1] elements a layer. Keys and values stay where they are.

Letters: `S` slots, `T` new tokens, `P` tokens of a prompt, `L` layers, else see
`attention`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.ops.attention_reference import MASKED, einsum, soft_capped
from jaxdist.ops.attention_request import Options
from jaxdist.parallel import execution
from jaxdist.parallel.context import AXIS

CACHE_DIMS = (None, "batch", "sequence", "kv_heads", None)  # of [L, B, S, K, N]


def whole_slots(length: int) -> int:
    """Returns the slots for so many tokens: a multiple of the devices that share them
    out.
    """
    size = execution.current().axis_size(AXIS)
    return -(-length // size) * size


def are_shared_out(slots: int) -> bool:
    """Tells if devices share out the slots of a cache: if their number divides them."""
    return execution.current().axis_size(AXIS) > 1 and whole_slots(slots) == slots


def init_places(slots: int) -> jax.Array:
    """Returns the position that each slot of an empty cache is for, [S] int32."""
    places = jnp.arange(slots, dtype=jnp.int32)
    return execution.shard(places, "sequence") if are_shared_out(slots) else places


def places_behind(prompt: int, slots: int) -> jax.Array:
    """Returns these positions where a prompt of P tokens is split first, and then the
    room behind it.
    """
    size = execution.current().axis_size(AXIS)
    positions = jnp.arange(slots, dtype=jnp.int32)
    parts = [x.reshape(size, -1) for x in (positions[:prompt], positions[prompt:])]
    return execution.shard(jnp.concatenate(parts, axis=1).reshape(-1), "sequence")


# --- writing --------------------------------------------------------------------------

# Written out, since `.at[layer, rows, positions]` would gather the rows of all devices:
# here every row of the cache takes its own row of the tokens.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)


def written(
    cached_LBSKN: jax.Array,
    new_BTKN: jax.Array,
    layer: jax.Array,
    positions_BT: jax.Array,
    places_S: jax.Array | None = None,
) -> jax.Array:
    """Returns the cache with T new tokens of one layer at their positions.

    In place: a cache that went through the scan as its input and output would be copied
    each step.
    """
    if places_S is None:
        return _scattered(cached_LBSKN, new_BTKN, layer, positions_BT)
    kv = _kv_spec(cached_LBSKN[0])
    specs = (P(None, *kv), P(kv[0], None, *kv[2:]), P(), P(kv[0], None), P(AXIS))
    return execution.per_device(_written_part, specs, specs[0])(
        cached_LBSKN, new_BTKN, layer, positions_BT, places_S
    )


def _scattered(cached_LBSKN, new_BTKN, layer, slots_BT):
    where_BT2 = jnp.stack([jnp.full_like(slots_BT, layer), slots_BT], axis=-1)
    new = new_BTKN.astype(cached_LBSKN.dtype)
    return jax.lax.scatter(
        cached_LBSKN, where_BT2, new, _ROW_BY_ROW, unique_indices=True
    )


def _written_part(cached_LBSKN, new_BTKN, layer, positions_BT, places_S):
    """Returns a device's slots with those of the tokens that belong to it."""
    here_BTS = positions_BT[:, :, None] == places_S[None, None, :]
    # What lies beyond the slots is not written; each token's own number there, as they
    # are said to be unique.
    beyond = len(places_S) + jnp.arange(positions_BT.shape[1], dtype=jnp.int32)
    slots_BT = jnp.where(
        here_BTS.any(-1), jnp.argmax(here_BTS, -1).astype(jnp.int32), beyond
    )
    return _scattered(cached_LBSKN, new_BTKN, layer, slots_BT)


def written_prompt(
    cached_LBSKN: jax.Array,
    new_BPKN: jax.Array,
    layer: jax.Array,
    *,
    split: bool = False,
) -> jax.Array:
    """Returns the cache with one layer of whole prompts in its first slots.

    Args:
      split: devices share out the slots, each gets its own part of the prompt: see
        `places_behind`.
    """
    if not split:
        return _put(cached_LBSKN, new_BPKN, layer)
    kv = _kv_spec(new_BPKN)
    specs = (P(None, *kv), kv, P())
    return execution.per_device(_put, specs, specs[0])(cached_LBSKN, new_BPKN, layer)


def _put(cached_LBSKN, new_BPKN, layer):
    first = jnp.zeros_like(layer)
    new = new_BPKN.astype(cached_LBSKN.dtype)[None]
    return jax.lax.dynamic_update_slice(cached_LBSKN, new, (layer, *[first] * 4))


# --- reading --------------------------------------------------------------------------


def cached_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    q_positions_BT: jax.Array,
    places_S: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Returns attention of new tokens against a cache that holds them already, [B, T,
    H, N].

    The token at position p sees the slots of positions 0 to p (the last `window` of
    them), so slots that are not filled yet need no mask of their own. Unlike
    `attention`: no gradient economy, no kernels; with few queries the time goes into
    reading the cache.

    Args:
      k_BSKN, v_BSKN: the cache.
      q_positions_BT: int32 positions of the new tokens.
      places_S: the position that each slot is for, where devices share them out; None:
        slot i holds i.
    """
    options = Options(scale or q_BTHN.shape[-1] ** -0.5, True, softcap, window)
    q = q_BTHN * jnp.asarray(options.scale, q_BTHN.dtype)
    if places_S is None:
        s = _logits(q, k_BSKN, q_positions_BT, None, options)
        p = jax.nn.softmax(s, -1)
        out = einsum("bkgts,bskn->btkgn", p.astype(v_BSKN.dtype), v_BSKN)
    else:
        kv = _kv_spec(k_BSKN)
        # Query heads lie where their kv heads do: what is read, and takes the time, is
        # the same.
        own = P(kv[0], None, *kv[2:])
        specs = (own, kv, kv, P(kv[0], None), P(AXIS))
        attend = execution.per_device(
            partial(_attended_part, options=options), specs, P(*own[:3], None, None)
        )
        out = attend(q, k_BSKN, v_BSKN, q_positions_BT, places_S)
    return out.reshape(q_BTHN.shape).astype(q_BTHN.dtype)


def _logits(q_BTHN, k_BSKN, q_positions_BT, places_S, options: Options) -> jax.Array:
    """Returns the capped and masked logits [B, K, G, T, S], float32."""
    B, T, H, N = q_BTHN.shape
    K = k_BSKN.shape[2]
    s = einsum("btkgn,bskn->bkgts", q_BTHN.reshape(B, T, K, H // K, N), k_BSKN)
    s = soft_capped(s, options.softcap)
    distance = (
        q_positions_BT[:, :, None]
        - (jnp.arange(k_BSKN.shape[1]) if places_S is None else places_S)[None, None, :]
    )
    seen = distance >= 0
    if options.window is not None:
        seen &= distance < options.window
    return jnp.where(seen[:, None, None], s, MASKED)


def _attended_part(
    q_BTHN, k_BSKN, v_BSKN, q_positions_BT, places_S, options: Options
) -> jax.Array:
    """Returns attention to the slots of all devices [B, T, K, G, N], float32, from this
    one's own.
    """
    s = _logits(q_BTHN, k_BSKN, q_positions_BT, places_S, options)
    # A token sees itself at least, so the largest of all devices is a logit that
    # counts.
    peak = jax.lax.pmax(s.max(-1, keepdims=True), AXIS)
    p = jnp.exp(s - peak)
    out = einsum("bkgts,bskn->btkgn", p.astype(v_BSKN.dtype), v_BSKN)
    total = jnp.moveaxis(p.sum(-1, keepdims=True), 3, 1)
    out, total = jax.lax.psum((out, total), AXIS)
    return out / total


# --- placement ------------------------------------------------------------------------


def _kv_spec(x_BSKN: jax.Array) -> P:
    """Looks up how slots lie, or a prompt's keys that are written to them."""
    return execution.current().rules.activation(CACHE_DIMS[1:], x_BSKN.shape)
