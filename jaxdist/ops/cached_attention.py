"""Attention of new tokens to a cache of keys and values.

Devices may split the cache over `context`. Then each device keeps a part of the slots
of every sequence. A prompt is split as in training, so its keys and values are written
on the device that computed them. Behind its part of the prompt, a device has a part of
the room for new tokens. The queries of new tokens go to all devices. Each device
attends to its own slots, and the parts of the softmax are summed: [B, T, H, N + 1]
elements for each layer. Keys and values are not moved.

Letters: `S` slots, `T` new tokens, `P` tokens of a prompt, `L` layers; see `attention`
for the others.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.ops.attention_reference import MASKED, einsum, soft_capped
from jaxdist.ops.attention_request import Options
from jaxdist.parallel import execution
from jaxdist.parallel.context import AXIS

# names of the dims of a cache [L, B, S, K, N]
CACHE_DIMS = (None, "batch", "sequence", "kv_heads", None)


def whole_slots(length: int) -> int:
    """Rounds a number of tokens up to slots that the devices of `context` can split."""
    size = execution.current().axis_size(AXIS)
    return -(-length // size) * size


def are_shared_out(slots: int) -> bool:
    """Checks whether devices split the slots of a cache: if they divide equally."""
    return execution.current().axis_size(AXIS) > 1 and whole_slots(slots) == slots


def init_places(slots: int) -> jax.Array:
    """Creates the position of each slot of an empty cache, [S] int32."""
    places = jnp.arange(slots, dtype=jnp.int32)
    return execution.shard(places, "sequence") if are_shared_out(slots) else places


def places_behind(prompt: int, slots: int) -> jax.Array:
    """Computes the position of each slot after a prompt of P tokens, [S] int32.

    A device has its part of the prompt first, then its part of the room behind it.
    """
    size = execution.current().axis_size(AXIS)
    positions = jnp.arange(slots, dtype=jnp.int32)
    parts = [x.reshape(size, -1) for x in (positions[:prompt], positions[prompt:])]
    return execution.shard(jnp.concatenate(parts, axis=1).reshape(-1), "sequence")


# --- writing --------------------------------------------------------------------------

# `.at[layer, rows, positions]` would gather the rows of all devices. With these
# dimension numbers, every row of the cache takes its own row of the tokens.
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
    """Writes T new tokens of one layer to the cache, in place.

    A cache that is the input and the output of a scan would be copied at each step.

    Args:
      cached_LBSKN: keys or values of the cache.
      new_BTKN: keys or values of the new tokens.
      layer: number of the layer.
      positions_BT: int32 positions of the new tokens.
      places_S: position of each slot, if devices split the slots; None: slot i has
        position i.

    Returns:
      The cache.
    """
    if places_S is None:
        return _scatter(cached_LBSKN, new_BTKN, layer, positions_BT)
    kv = _kv_spec(cached_LBSKN[0])
    specs = (P(None, *kv), P(kv[0], None, *kv[2:]), P(), P(kv[0], None), P(AXIS))
    write = execution.per_device(_write_part, specs, specs[0])
    cache: jax.Array = write(cached_LBSKN, new_BTKN, layer, positions_BT, places_S)
    return cache


def _scatter(
    cached_LBSKN: jax.Array, new_BTKN: jax.Array, layer: jax.Array, slots_BT: jax.Array
) -> jax.Array:
    """Writes each token to its slot; slots beyond the cache are ignored."""
    indices_BT2 = jnp.stack([jnp.full_like(slots_BT, layer), slots_BT], axis=-1)
    new = new_BTKN.astype(cached_LBSKN.dtype)
    return jax.lax.scatter(
        cached_LBSKN, indices_BT2, new, _ROW_BY_ROW, unique_indices=True
    )


def _write_part(
    cached_LBSKN: jax.Array,
    new_BTKN: jax.Array,
    layer: jax.Array,
    positions_BT: jax.Array,
    places_S: jax.Array,
) -> jax.Array:
    """Writes the tokens whose slots this device has."""
    matches_BTS = positions_BT[:, :, None] == places_S[None, None, :]
    # Tokens of other devices get slots beyond the cache, which are not written. These
    # slots differ, because the indices must be unique.
    beyond = len(places_S) + jnp.arange(positions_BT.shape[1], dtype=jnp.int32)
    slots_BT = jnp.where(
        matches_BTS.any(-1), jnp.argmax(matches_BTS, -1).astype(jnp.int32), beyond
    )
    return _scatter(cached_LBSKN, new_BTKN, layer, slots_BT)


def written_prompt(
    cached_LBSKN: jax.Array,
    new_BPKN: jax.Array,
    layer: jax.Array,
    *,
    split: bool = False,
) -> jax.Array:
    """Writes whole prompts of one layer to the first slots of the cache.

    Args:
      cached_LBSKN: keys or values of the cache.
      new_BPKN: keys or values of the prompts.
      layer: number of the layer.
      split: whether devices split the slots. Each device then writes its own part of
        the prompt; see `places_behind`.

    Returns:
      The cache.
    """
    if not split:
        return _write_first(cached_LBSKN, new_BPKN, layer)
    kv = _kv_spec(new_BPKN)
    specs = (P(None, *kv), kv, P())
    write = execution.per_device(_write_first, specs, specs[0])
    cache: jax.Array = write(cached_LBSKN, new_BPKN, layer)
    return cache


def _write_first(
    cached_LBSKN: jax.Array, new_BPKN: jax.Array, layer: jax.Array
) -> jax.Array:
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
    """Computes attention of new tokens to a cache that contains them already.

    The token at position p sees the slots of positions 0 to p, or the last `window` of
    them. So slots that are not filled yet need no mask. With few queries, reading the
    cache takes most of the time. So, unlike `attention`, it uses no kernels and saves
    no memory for gradients.

    Args:
      q_BTHN: queries of the new tokens.
      k_BSKN: keys of the cache.
      v_BSKN: values of the cache; their head size may differ from that of the keys.
      q_positions_BT: int32 positions of the new tokens.
      places_S: position of each slot, if devices split the slots; None: slot i has
        position i.
      scale: factor of the logits; None: N ** -0.5.
      softcap: logits become softcap * tanh(logits / softcap); None: no cap.
      window: a token sees itself and the window - 1 tokens before it; None: all.

    Returns:
      [B, T, H, N] in the dtype of q, with the head size of the values.
    """
    options = Options(
        scale=scale or q_BTHN.shape[-1] ** -0.5,
        causal=True,
        softcap=softcap,
        window=window,
    )
    q = q_BTHN * jnp.asarray(options.scale, q_BTHN.dtype)
    if places_S is None:
        s = _logits(q, k_BSKN, q_positions_BT, None, options)
        p = jax.nn.softmax(s, -1)
        out = einsum("bkgts,bskn->btkgn", p.astype(v_BSKN.dtype), v_BSKN)
    else:
        kv = _kv_spec(k_BSKN)
        # Query heads are split like their kv heads: reading the cache takes the time,
        # and each device reads only its own kv heads.
        q_spec = P(kv[0], None, *kv[2:])
        specs = (q_spec, kv, kv, P(kv[0], None), P(AXIS))
        attend = execution.per_device(
            partial(_attend_part, options=options),
            specs,
            P(*q_spec[:3], None, None),
        )
        out = attend(q, k_BSKN, v_BSKN, q_positions_BT, places_S)
    return out.reshape(*q_BTHN.shape[:3], -1).astype(q_BTHN.dtype)


def _logits(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    q_positions_BT: jax.Array,
    places_S: jax.Array | None,
    options: Options,
) -> jax.Array:
    """Computes the capped and masked logits [B, K, G, T, S], float32."""
    B, T, H, N = q_BTHN.shape
    K = k_BSKN.shape[2]
    s = einsum("btkgn,bskn->bkgts", q_BTHN.reshape(B, T, K, H // K, N), k_BSKN)
    s = soft_capped(s, options.softcap)
    q_positions_BT1 = q_positions_BT[:, :, None]
    if places_S is None:
        places_S = jnp.arange(k_BSKN.shape[1])
    distance = q_positions_BT1 - places_S[None, None, :]
    seen = distance >= 0
    if options.window is not None:
        seen &= distance < options.window
    return jnp.where(seen[:, None, None], s, MASKED)


def _attend_part(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    q_positions_BT: jax.Array,
    places_S: jax.Array,
    options: Options,
) -> jax.Array:
    """Attends to this device's slots and sums over devices, [B, T, K, G, N] float32."""
    s = _logits(q_BTHN, k_BSKN, q_positions_BT, places_S, options)
    # A token sees at least itself, so the maximum over devices is not a masked logit.
    peak = jax.lax.pmax(s.max(-1, keepdims=True), AXIS)
    p = jnp.exp(s - peak)
    out = einsum("bkgts,bskn->btkgn", p.astype(v_BSKN.dtype), v_BSKN)
    total = jnp.moveaxis(p.sum(-1, keepdims=True), 3, 1)
    sums: tuple[jax.Array, jax.Array] = jax.lax.psum((out, total), AXIS)
    out, total = sums
    return out / total


# --- placement ------------------------------------------------------------------------


def _kv_spec(x_BSKN: jax.Array) -> P:
    """Looks up how the slots of a layer, or a prompt's keys, are split."""
    return execution.current().rules.activation(CACHE_DIMS[1:], x_BSKN.shape)
