"""Reference backend of attention: XLA matmuls, block by block, on every platform.

Arrays are head-major and matmuls are batched. A block of queries sees only the keys up
to its end. So causal attention skips nearly half of the work, and no [S, S] array
exists. The backward pass is written by hand. On CPU a layer with its projections takes
0.55 x the time and 0.4 x the memory of einsum, softmax and autodiff.

Letters: see `attention`.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.attention_request import (
    Options,
    Pieces,
    Request,
    Result,
    inner_products,
)
from jaxdist.parallel.remat import RESIDUALS

# Logit of a masked key, far below any real logit. It is finite, so that a difference of
# two is 0 instead of NaN.
MASKED = -1e30

einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def soft_capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Caps logits: cap * tanh(logits / cap). A cap of None or 0 leaves them."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def _blocks(length: int, keys: int, options: Options) -> Iterator[tuple[slice, slice]]:
    """Yields blocks: rows of queries, and the columns of the keys that they may see.

    There are at most 8 blocks, of at least 64 rows, so that matmuls stay large. Without
    a causal mask a block has all columns. A part of the queries has all columns, too:
    its position is known only at run time.
    """
    count = max(1, min(8 if length >= 2048 else 4, length // 64))
    bounds = [length * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(bounds):
        if length < keys:
            yield slice(start, stop), slice(0, keys)
            continue
        first = 0 if options.window is None else max(0, start - options.window + 1)
        yield slice(start, stop), slice(first, stop if options.causal else length)


def score_blocks(length: int, window: int = 0) -> list[int]:
    """Counts the scores of each block of causal attention, for one head.

    Args:
      length: tokens of a sequence.
      window: tokens that a token sees, itself included; 0: all.
    """
    options = Options(scale=1.0, causal=True, softcap=None, window=window or None)
    return [
        (rows.stop - rows.start) * (columns.stop - columns.start)
        for rows, columns in _blocks(length, length, options)
    ]


def _logits(
    request: Request,
    q_BKGSN: jax.Array,
    k_BKTN: jax.Array,
    rows: slice,
    columns: slice,
) -> jax.Array:
    """Computes the capped and masked logits of a block, [B, K, G, rows, columns]."""
    options = request.options
    s = einsum("bkgsn,bktn->bkgst", q_BKGSN[:, :, :, rows], k_BKTN[:, :, columns])
    s = soft_capped(s, options.softcap)
    if options.causal:
        row = jnp.arange(rows.start, rows.stop)[:, None]
        if request.part is not None:
            row = row + request.part * request.q.shape[1]
        column = jnp.arange(columns.start, columns.stop)[None, :]
        seen = row >= column
        if options.window is not None:
            seen &= row - column < options.window
        # The mask is added: for a select, XLA's CPU backend would broadcast the
        # predicate over batch and heads.
        s = s + jnp.where(seen, 0.0, MASKED)[None, None, None]
    if request.segments is not None:
        query_ids, key_ids = (ids[:, None, None] for ids in request.segments)
        same = query_ids[..., rows, None] == key_ids[..., None, columns]
        s = jnp.where(same, s, MASKED)
    return s


def _head_major(request: Request) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scales q and lays out q as [B, K, G, S, N], and k, v as [B, K, T, N].

    They keep their dtype: matmuls of bfloat16 accumulate in float32. Casting the
    operands to float32 first is slower, on CPU, too.
    """
    q, k, v = request.heads
    B, S, H, N = q.shape
    K = k.shape[2]
    scale = jnp.asarray(request.options.scale, q.dtype)
    q = (q * scale).reshape(B, S, K, H // K, N)
    return q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)


def _sequence_major(x_BKGSN: jax.Array, dtype: jnp.dtype) -> jax.Array:
    B, K, G, S, N = x_BKGSN.shape
    return x_BKGSN.astype(dtype).transpose(0, 3, 1, 2, 4).reshape(B, S, K * G, N)


@jax.custom_vjp
def reference(request: Request) -> jax.Array:
    """Computes attention, [B, S, H, N] in q's dtype."""
    return _forward(request)[0]


_Residuals = tuple[Request, jax.Array, jax.Array]  # request, result, logsumexp


def _forward(request: Request) -> tuple[jax.Array, _Residuals]:
    out, logsumexp = _attend(request)
    out_BSHN = _sequence_major(out, request.q.dtype)
    out_BSHN = checkpoint_name(out_BSHN, RESIDUALS)
    return out_BSHN, (request, out_BSHN, checkpoint_name(logsumexp, RESIDUALS))


def _attend(request: Request) -> tuple[jax.Array, jax.Array]:
    """Attends block by block, in float32.

    Returns:
      The result [B, K, G, S, N], and the logsumexp of the logits [B, K, G, S, 1].
    """
    q, k, v = _head_major(request)
    outs = []
    logsumexps = []
    for rows, columns in _blocks(q.shape[3], k.shape[2], request.options):
        s = _logits(request, q, k, rows, columns)
        peak = s.max(-1, keepdims=True)
        p = jnp.exp(s - peak)
        total = p.sum(-1, keepdims=True)
        # Dividing the output is S / N times less work than dividing the probabilities.
        outs.append(
            einsum("bkgst,bktn->bkgsn", p.astype(v.dtype), v[:, :, columns]) / total
        )
        logsumexps.append(peak + jnp.log(total))
    return jnp.concatenate(outs, 3), jnp.concatenate(logsumexps, 3)


def _backward(residuals: _Residuals, grad_BSHN: jax.Array) -> tuple[Request]:
    request, out_BSHN, logsumexp = residuals
    inner_BSH = inner_products(out_BSHN, grad_BSHN)
    gradients = _gradients(
        request, grad_BSHN, inner_BSH, logsumexp, dtype=request.q.dtype
    )
    return (request.gradients(*gradients),)


def _gradients(
    request: Request,
    grad_BSHN: jax.Array,
    inner_BSH: jax.Array,
    logsumexp: jax.Array,
    *,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of q, k and v.

    Args:
      request: queries, keys, values and options.
      grad_BSHN: gradient of the result.
      inner_BSH: result of `inner_products`.
      logsumexp: logsumexp of the logits, [B, K, G, S, 1].
      dtype: dtype of the gradient of q. Those of k and v are float32.
    """
    options = request.options
    q, k, v = _head_major(request)
    B, K, G, S, N = q.shape
    inner = _by_kv_head(inner_BSH, K)
    V = v.shape[3]
    grad = grad_BSHN.astype(v.dtype).reshape(B, S, K, G, V).transpose(0, 2, 3, 1, 4)
    keys = k.shape[2]
    dqs = []
    dk = jnp.zeros((B, K, N, keys))
    dv = jnp.zeros((B, K, V, keys))
    for rows, columns in _blocks(S, keys, options):
        s = _logits(request, q, k, rows, columns)
        p = jnp.exp(s - logsumexp[:, :, :, rows])
        dp = einsum("bkgsn,bktn->bkgst", grad[:, :, :, rows], v[:, :, columns])
        ds = p * (dp - inner[:, :, :, rows])
        if options.softcap is not None:
            # Masked keys have p = 0 and ds = 0, so their factor does not matter.
            ds *= 1 - jnp.square(jnp.where(s == MASKED, 0.0, s) / options.softcap)
        ds = ds.astype(q.dtype)
        dqs.append(einsum("bkgst,bktn->bkgsn", ds, k[:, :, columns]))
        # The gradient is [N, keys]: for [keys, N] the matmul would have to transpose
        # its S^2 operand.
        dk_block = einsum("bkgsn,bkgst->bknt", q[:, :, :, rows], ds)
        dv_block = einsum("bkgsn,bkgst->bknt", grad[:, :, :, rows], p.astype(v.dtype))
        dk = _add(dk, dk_block, columns)
        dv = _add(dv, dv_block, columns)
    dq = jnp.concatenate(dqs, 3) * options.scale
    dk_BSKN = dk.transpose(0, 3, 1, 2)
    dv_BSKN = dv.transpose(0, 3, 1, 2)
    return _sequence_major(dq, dtype), dk_BSKN, dv_BSKN


def _by_kv_head(x_BSH: jax.Array, kv_heads: int) -> jax.Array:
    """Reshapes an array by head to [B, K, G, S, 1]."""
    B, S, H = x_BSH.shape
    return x_BSH.reshape(B, S, kv_heads, H // kv_heads).transpose(0, 2, 3, 1)[..., None]


def _add(total_BKNS: jax.Array, part: jax.Array, columns: slice) -> jax.Array:
    """Adds a block's part to the columns of a total."""
    after = total_BKNS.shape[-1] - columns.stop
    return total_BKNS + jnp.pad(part, ((0, 0), (0, 0), (0, 0), (columns.start, after)))


reference.defvjp(_forward, _backward)


# --- pieces of the keys ---------------------------------------------------------------


def _piece(request: Request) -> tuple[jax.Array, jax.Array]:
    out, lse = _attend(request)
    lse_BSH = lse[..., 0].transpose(0, 3, 1, 2).reshape(request.q.shape[:3])
    return _sequence_major(out, jnp.float32), lse_BSH


def _piece_gradients(
    request: Request, result: Result
) -> tuple[jax.Array, jax.Array, jax.Array]:
    lse = _by_kv_head(result.lse, request.k.shape[2])
    return _gradients(request, result.grad, result.inner, lse, dtype=jnp.float32)


reference_pieces = Pieces(_piece, _piece_gradients)
