"""Attention over whole sequences, and of new tokens against a key/value cache.

Shapes: `B` batch, `S` sequence, `T` new tokens, `H` query heads, `K` kv heads, `G` = H / K,
`N` head size. One entry, three implementations, chosen by the platform of the mesh in force:
"splash" (TPU, Pallas), "cudnn" (NVIDIA), "reference" (XLA, everywhere).
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.config import extras
from jaxdist.parallel import execution

IMPLEMENTATIONS = ("auto", "reference", "cudnn", "splash")
OUT = "attention_out"  # name of the result
RESIDUALS = "attention_residuals"  # name of what a backward pass reads: output and logsumexp
MASKED = -1e30  # finite: a difference of two is 0, not NaN; far below any real logit


class _Options(NamedTuple):
    """What shapes attention besides arrays; hashable, so a static argument."""

    scale: float
    causal: bool
    softcap: float | None
    window: int | None


def attention(
    q_BSHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool = True,
    segment_ids_BS: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Returns softmax(scale * q k^T) v over the keys a token may see, [B, S, H, N] in q's dtype.

    Logits and softmax are float32. Query head h reads kv head h // (H / K) (arXiv:2305.13245).
    Nothing of size S^2 is kept for the backward pass, which computes the probabilities again from
    the logsumexp (arXiv:2205.14135). A remat policy that saves "attention_residuals" spares the
    second forward pass; saving "attention_out" does not.

    Args:
      segment_ids_BS: tokens see equal ids only (packed documents); None: one segment.
      scale: of the logits; None: N ** -0.5.
      softcap: logits become softcap * tanh(logits / softcap); None: off.
      window: a token sees itself and the window - 1 tokens before it; None: all. Needs causal.
      implementation: "auto" asks the platform; others force one (tests, measurements).

    Raises:
      ValueError: heads that don't group, an unknown implementation, a window without causal.
    """
    _check(q_BSHN, k_BSKN, v_BSKN, causal, window, implementation)
    length, head_size = q_BSHN.shape[1], q_BSHN.shape[-1]
    window = window if window and window < length else None  # kernels without a window do less
    options = _Options(scale or head_size**-0.5, causal, softcap, window)
    if implementation == "auto":
        implementation = _implementation(q_BSHN, options)
    k_BSKN, v_BSKN = _spread(k_BSKN, q_BSHN), _spread(v_BSKN, q_BSHN)
    if implementation == "reference":
        out = _reference(q_BSHN, k_BSKN, v_BSKN, segment_ids_BS, options)
    else:
        kernel = {"splash": _splash, "cudnn": _cudnn}[implementation]
        kernel = functools.partial(kernel, options=options)
        out = _per_device(kernel, q_BSHN, k_BSKN, v_BSKN, segment_ids_BS)
    return checkpoint_name(out, OUT)


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, window: int | None, implementation: str
) -> None:
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape}; required: [B, S, H, N], "
            f"[B, S, K, N], [B, S, K, N] with equal B, S and N"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: {q.shape[2]} query heads do not group over {k.shape[2]} kv heads; "
            f"make num_heads a multiple of num_kv_heads"
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"attention: window={window}, causal={causal}; a window is >= 1 token and needs causal=True"
        )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention: implementation={implementation!r}; choose one of {IMPLEMENTATIONS}")


def _implementation(q_BSHN: jax.Array, options: _Options) -> str:
    platform = execution.current().platform
    if platform == "tpu":
        return "splash"
    if platform != "gpu":
        return "reference"
    reason = _cudnn_refusal(q_BSHN, options)
    if reason is None:
        return "cudnn"
    warnings.warn(
        f"attention: {reason}, so no cuDNN kernel: XLA computes it, more slowly and with a "
        f"[B, H, S / 4, S] buffer of float32 logits",
        stacklevel=3,
    )
    return "reference"


# --- placement ------------------------------------------------------------------------------------


def _spread(k_BSKN: jax.Array, q_BSHN: jax.Array) -> jax.Array:
    """Returns k with heads repeated just enough to be split like the query heads.

    With tensor=8 and 4 kv heads every one is held twice, so that 8 devices have one each.
    """
    shards = execution.current().axis_size("tensor")
    H, K = q_BSHN.shape[2], k_BSKN.shape[2]
    if K % shards == 0 or H % shards:
        return k_BSKN
    copies = math.lcm(K, shards) // K
    copies = copies if H % (K * copies) == 0 else H // K
    return execution.shard(jnp.repeat(k_BSKN, copies, 2), "batch", "sequence", "kv_heads", None)


def _per_device(
    kernel: Callable[..., jax.Array],
    q_BSHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    segment_ids_BS: jax.Array | None,
) -> jax.Array:
    """Returns the kernel's result, called with every device's own batch rows and heads.

    The partitioner can't look into a kernel: without this it would gather all of q, k and v.
    """
    now = execution.current()
    if now.mesh is None:
        return kernel(q_BSHN, k_BSKN, v_BSKN, segment_ids_BS)
    q_spec = now.rules.activation(("batch", None, "heads", None), q_BSHN.shape)
    kv_spec = now.rules.activation(("batch", None, "kv_heads", None), k_BSKN.shape)
    mapped = jax.shard_map(
        kernel,
        **now.manual_region(),
        in_specs=(q_spec, kv_spec, kv_spec, P(q_spec[0], None)),
        out_specs=q_spec,
        check_vma=False,  # Pallas and cuDNN calls do not say over which axes their results vary
    )
    return mapped(q_BSHN, k_BSKN, v_BSKN, segment_ids_BS)


# --- kernels of others ----------------------------------------------------------------------------


def _splash(q, k, v, segment_ids, *, options: _Options) -> jax.Array:
    splash = extras.load("jaxdist.ops.splash")  # here: Pallas takes a tenth of a start, and only TPUs need it
    return splash.splash_attention(q, k, v, segment_ids, **options._asdict(), residual_name=RESIDUALS)


def _cudnn_refusal(q_BSHN: jax.Array, options: _Options) -> str | None:
    """Returns why cuDNN can't compute this, or None. Source: jax._src.cudnn.fused_attention."""
    S, head_size = q_BSHN.shape[1], q_BSHN.shape[3]
    if q_BSHN.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q_BSHN.dtype} is not bfloat16 or float16"
    if head_size % 8 or head_size > 128:
        return f"head size {head_size} is not a multiple of 8 up to 128"
    if options.softcap is not None:
        return "a softcap is set"
    return f"sequence length {S} is odd" if S % 2 else None


def _cudnn(q, k, v, segment_ids, *, options: _Options) -> jax.Array:
    # cuDNN's own packing wants document offsets; equal ids become a [B, 1, S, S] bias, H times less
    # than logits. The causal flag still skips the blocks above the diagonal. Before 9.10.2 a window
    # and a bias exclude each other (cudnn_frontend's checks), so the bias then has the window too.
    mask, window = None, None if options.window is None else (options.window - 1, 0)
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if mask is not None and options.window is not None:
        place = jnp.arange(q.shape[1])
        mask, window = mask & (place[:, None] - place < options.window)[None, None], None
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=window,
        implementation="cudnn",
    )


# --- the reference --------------------------------------------------------------------------------
# Head-major batched products, in blocks of queries: a block sees only the keys before its end, so
# causal attention skips nearly half of the work and no [S, S] array exists. On CPU a layer with
# its projections takes 0.55 x the time and 0.4 x the memory of einsum, softmax and autodiff.

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Block(NamedTuple):
    """Queries [start, stop) see keys [first, stop) (all keys if not causal)."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def columns(self) -> slice:
        return slice(self.first, self.last)


def _blocks(length: int, options: _Options) -> Iterator[_Block]:
    """Yields blocks of queries: at most 8, of at least 64 rows, so that products stay large."""
    count = max(1, min(8 if length >= 2048 else 4, length // 64))
    bounds = [length * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(bounds):
        first = 0 if options.window is None else max(0, start - options.window + 1)
        yield _Block(start, stop, first, stop if options.causal else length)


def _logits(q_BKGSN, k_BKSN, segment_ids_BS, block: _Block, options: _Options) -> jax.Array:
    """Returns the capped, unmasked logits and the masked ones of a block, [B, K, G, rows, cols]."""
    s = _einsum("bkgsn,bktn->bkgst", q_BKGSN[:, :, :, block.rows], k_BKSN[:, :, block.columns])
    if options.softcap is not None:
        s = options.softcap * jnp.tanh(s / options.softcap)
    if options.causal:
        row = jnp.arange(block.start, block.stop)[:, None]
        column = jnp.arange(block.first, block.last)[None, :]
        seen = row >= column
        if options.window is not None:
            seen &= row - column < options.window
        # Added, not selected: XLA's CPU backend would spread a predicate over batch and heads.
        s = s + jnp.where(seen, 0.0, MASKED)[None, None, None]
    if segment_ids_BS is not None:
        ids = segment_ids_BS[:, None, None]
        same = ids[..., block.rows, None] == ids[..., None, block.columns]
        s = jnp.where(same, s, MASKED)
    return s


def _head_major(q, k, v, options: _Options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns scaled q [B, K, G, S, N] and k, v [B, K, S, N], still in their own dtype.

    Products of bfloat16 accumulate in float32; widening the operands first was slower on CPU too.
    """
    B, S, H, N = q.shape
    K = k.shape[2]
    q = (q * jnp.asarray(options.scale, q.dtype)).reshape(B, S, K, H // K, N)
    return q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)


def _sequence_major(x_BKGSN: jax.Array, dtype: jnp.dtype) -> jax.Array:
    B, K, G, S, N = x_BKGSN.shape
    return x_BKGSN.astype(dtype).transpose(0, 3, 1, 2, 4).reshape(B, S, K * G, N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _reference(q_BSHN, k_BSKN, v_BSKN, segment_ids_BS, options: _Options) -> jax.Array:
    return _reference_forward(q_BSHN, k_BSKN, v_BSKN, segment_ids_BS, options)[0]


def _reference_forward(q_BSHN, k_BSKN, v_BSKN, segment_ids_BS, options: _Options):
    q, k, v = _head_major(q_BSHN, k_BSKN, v_BSKN, options)
    outs, logsumexps = [], []
    for block in _blocks(q_BSHN.shape[1], options):
        s = _logits(q, k, segment_ids_BS, block, options)
        peak = s.max(-1, keepdims=True)
        p = jnp.exp(s - peak)
        total = p.sum(-1, keepdims=True)
        # Dividing the output, not the probabilities, is S / N times less work.
        out = _einsum("bkgst,bktn->bkgsn", p.astype(v.dtype), v[:, :, block.columns]) / total
        outs.append(out)
        logsumexps.append(peak + jnp.log(total))
    out_BSHN = _sequence_major(jnp.concatenate(outs, 3), q_BSHN.dtype)
    out_BSHN = checkpoint_name(out_BSHN, RESIDUALS)
    logsumexp = checkpoint_name(jnp.concatenate(logsumexps, 3), RESIDUALS)
    return out_BSHN, (q_BSHN, k_BSKN, v_BSKN, segment_ids_BS, out_BSHN, logsumexp)


def _reference_backward(options: _Options, residuals, grad_BSHN: jax.Array):
    q_BSHN, k_BSKN, v_BSKN, segment_ids_BS, out_BSHN, logsumexp = residuals
    q, k, v = _head_major(q_BSHN, k_BSKN, v_BSKN, options)
    B, K, G, S, N = q.shape
    # sum(p * dp) over keys equals sum(out * grad) over the head: S / N times less work.
    inner = jnp.sum(out_BSHN.astype(jnp.float32) * grad_BSHN.astype(jnp.float32), -1)
    inner = inner.reshape(B, S, K, G).transpose(0, 2, 3, 1)[..., None]
    grad = grad_BSHN.astype(v.dtype).reshape(B, S, K, G, N).transpose(0, 2, 3, 1, 4)
    dqs, dk, dv = [], jnp.zeros((B, K, N, S)), jnp.zeros((B, K, N, S))
    for block in _blocks(S, options):
        rows, columns = block.rows, block.columns
        s = _logits(q, k, segment_ids_BS, block, options)
        p = jnp.exp(s - logsumexp[:, :, :, rows])
        dp = _einsum("bkgsn,bktn->bkgst", grad[:, :, :, rows], v[:, :, columns])
        ds = p * (dp - inner[:, :, :, rows])
        if options.softcap is not None:  # where masked, p and so ds are 0 whatever this factor
            ds *= 1 - jnp.square(jnp.where(s == MASKED, 0.0, s) / options.softcap)
        ds = ds.astype(q.dtype)
        dqs.append(_einsum("bkgst,bktn->bkgsn", ds, k[:, :, columns]))
        # [N, keys], not [keys, N]: the product then need not transpose its S^2 operand.
        dk_block = _einsum("bkgsn,bkgst->bknt", q[:, :, :, rows], ds)
        dv_block = _einsum("bkgsn,bkgst->bknt", grad[:, :, :, rows], p.astype(v.dtype))
        dk, dv = _add(dk, dk_block, block), _add(dv, dv_block, block)
    dq = jnp.concatenate(dqs, 3) * options.scale
    dk, dv = (x.transpose(0, 3, 1, 2).astype(k_BSKN.dtype) for x in (dk, dv))
    return _sequence_major(dq, q_BSHN.dtype), dk, dv, None


def _add(total_BKNS: jax.Array, part: jax.Array, block: _Block) -> jax.Array:
    """Returns the total with a block's part added to its columns."""
    after = total_BKNS.shape[-1] - block.last
    return total_BKNS + jnp.pad(part, ((0, 0), (0, 0), (0, 0), (block.first, after)))


_reference.defvjp(_reference_forward, _reference_backward)


# --- decoding -------------------------------------------------------------------------------------


def cached_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    q_positions_BT: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Returns attention of new tokens against a cache that holds them already, [B, T, H, N].

    The token at position p sees cache slots 0 to p (the last `window` of them), so slots that are
    not filled yet need no mask of their own. Unlike `attention`: no gradient economy, no kernels;
    with few queries the time goes into reading the cache.

    Args:
      k_BSKN, v_BSKN: the cache; slot i holds position i.
      q_positions_BT: int32 positions of the new tokens.
    """
    B, T, H, N = q_BTHN.shape
    S, K = k_BSKN.shape[1:3]
    q = q_BTHN * jnp.asarray(scale or N**-0.5, q_BTHN.dtype)
    s = _einsum("btkgn,bskn->bkgts", q.reshape(B, T, K, H // K, N), k_BSKN)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    distance = q_positions_BT[:, :, None] - jnp.arange(S)[None, None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, MASKED), -1)
    out = _einsum("bkgts,bskn->btkgn", p.astype(v_BSKN.dtype), v_BSKN)
    return out.reshape(B, T, H, N).astype(q_BTHN.dtype)
