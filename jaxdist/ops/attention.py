"""Attention over whole sequences; `cached_attention` attends to a cache.

Letters: `B` batch, `S` sequence, `H` query heads, `K` kv heads, `G` = H / K, `N` head
size, `V` head size of the values. Arrays named `N` have V elements a head where they are
values or results. `attention_backends` chooses the implementation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.ops import context_attention
from jaxdist.ops.attention_backends import BACKENDS, choose
from jaxdist.ops.attention_request import Options, Request
from jaxdist.ops.context_attention import Form
from jaxdist.parallel import execution

OUT = "attention_out"  # name of the result in remat policies


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
    """Computes softmax(scale * q k^T) v over the keys that a token sees.

    If devices split the sequence, `context_attention` chooses how they compute it
    together. Logits and softmax are float32. Query head h reads kv head h // (H / K)
    (arXiv:2305.13245). Nothing of size S^2 is kept for the backward pass, which
    computes the probabilities again from the logsumexp (arXiv:2205.14135). A remat
    policy that saves "attention_residuals" avoids a second forward pass. Saving
    "attention_out" does not.

    Args:
      q_BSHN: queries.
      k_BSKN: keys.
      v_BSKN: values; their head size V may differ from N.
      causal: whether a token sees only itself and earlier tokens.
      segment_ids_BS: documents of packed sequences; a token sees equal ids only. None:
        each sequence is one document.
      scale: factor of the logits; None: N ** -0.5.
      softcap: logits become softcap * tanh(logits / softcap); None: no cap.
      window: a token sees itself and the window - 1 tokens before it; None: all. A
        window needs causal.
      implementation: "auto" chooses by platform; a name of `BACKENDS` forces that one
        (for tests and measurements).

    Returns:
      [B, S, H, V] in the dtype of q.

    Raises:
      AssertionError: an array has the wrong rank.
      ConfigError: see `context_attention.choose_form`.
      ValueError: shapes do not fit, heads do not group, the implementation is unknown,
        or a window is not causal.
    """
    keys = (k_BSKN, v_BSKN)
    return _attention(
        q_BSHN,
        keys,
        lambda *keys: keys,
        segment_ids_BS=segment_ids_BS,
        options=Options(
            scale=scale or q_BSHN.shape[3] ** -0.5,
            causal=causal,
            softcap=softcap,
            window=window,
        ),
        implementation=implementation,
    )


# Function of compressed arrays: keys [B, S, K, N] and values [B, S, K, V].
Expand = Callable[..., tuple[jax.Array, jax.Array]]


def compressed_attention(
    q_BSHN: jax.Array,
    compressed: Sequence[jax.Array],
    expand: Expand,
    *,
    segment_ids_BS: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Computes causal attention to keys and values that follow from smaller arrays.

    It equals `attention(q, *expand(*compressed))`. If each device gathers the keys and
    values of all devices of `context`, it gathers the smaller arrays instead, and
    expands them itself.

    Args:
      q_BSHN: queries.
      compressed: arrays [B, S, ...].
      expand: computes keys and values [B, S, K, N], [B, S, K, V] from such arrays, each
        token from its own row. It may get more tokens than `compressed` has.
      segment_ids_BS: see `attention`.
      scale: see `attention`.
      softcap: see `attention`.
      implementation: see `attention`.

    Returns:
      [B, S, H, V] in the dtype of q.
    """
    return _attention(
        q_BSHN,
        compressed,
        expand,
        segment_ids_BS=segment_ids_BS,
        options=Options(
            scale=scale or q_BSHN.shape[3] ** -0.5,
            causal=True,
            softcap=softcap,
            window=None,
        ),
        implementation=implementation,
        gathers_compressed=True,
    )


def _attention(
    q_BSHN: jax.Array,
    compressed: Sequence[jax.Array],
    expand: Expand,
    *,
    segment_ids_BS: jax.Array | None,
    options: Options,
    implementation: str,
    gathers_compressed: bool = False,
) -> jax.Array:
    """Computes attention; see `compressed_attention`."""
    chex.assert_rank(q_BSHN, 4)
    window = options.window
    _check_options(options.causal, window, implementation)
    if window and window >= q_BSHN.shape[1]:
        window = None  # kernels without a window do less work
    options = options._replace(window=window)
    form = context_attention.choose_form(q_BSHN.shape, window=window is not None)
    copies = 1
    if gathers_compressed and form.name == "gather":
        form = replace(form, has_all_keys=True)
        compressed = [context_attention.gather_sequence(x) for x in compressed]
        copies = form.context
    k_BSKN, v_BSKN = expand(*compressed)
    _check_shapes(q_BSHN, k_BSKN, v_BSKN, copies)
    request = Request(
        q=q_BSHN, k=k_BSKN, v=v_BSKN, segment_ids=segment_ids_BS, options=options
    )
    backend = BACKENDS.get(implementation)
    if backend is None:
        backend = choose(request, parts=form.parts, pieces=form.name == "ring")
    k_BSKN = _repeat_heads(k_BSKN, q_BSHN, form.head_shards)
    v_BSKN = _repeat_heads(v_BSKN, q_BSHN, form.head_shards)
    request = request.with_heads(q_BSHN, k_BSKN, v_BSKN)
    run: Callable[[Request], jax.Array] = partial(form.run, backend)
    if backend.is_kernel or form.splits_sequence:
        run = _per_device(run, form, request)
    out: jax.Array = checkpoint_name(run(request), OUT)
    return out


def _check_shapes(
    q_BSHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, copies: int
) -> None:
    """Checks the shapes of queries, and of keys and values of `copies` x S tokens."""
    chex.assert_rank([k_BSKN, v_BSKN], 4)
    B, S, H, N = q_BSHN.shape
    K = k_BSKN.shape[2]
    T = copies * S
    if k_BSKN.shape != (B, T, K, N) or v_BSKN.shape[:3] != (B, T, K):
        raise ValueError(
            f"attention: q {q_BSHN.shape}, k {k_BSKN.shape}, v {v_BSKN.shape}; required: [B, S, H, N], "
            f"[B, S, K, N], [B, S, K, V] with equal B, S, K and N, and S = {T} for k and v"
        )
    if H % K:
        raise ValueError(
            f"attention: {H} query heads do not group over {K} kv heads; "
            f"make num_heads a multiple of num_kv_heads"
        )


def _check_options(causal: bool, window: int | None, implementation: str) -> None:
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"attention: window={window}, causal={causal}; a window is >= 1 token and needs causal=True"
        )
    choices = ("auto", *BACKENDS)
    if implementation not in choices:
        raise ValueError(
            f"attention: implementation={implementation!r}; choose one of {choices}"
        )


# --- placement ------------------------------------------------------------------------


def _repeat_heads(k_BSKN: jax.Array, q_BSHN: jax.Array, shards: int) -> jax.Array:
    """Repeats kv heads just enough to be split like the query heads."""
    H = q_BSHN.shape[2]
    K = k_BSKN.shape[2]
    copies = context_attention.copied_heads(K, H, shards) // K
    if copies == 1:
        return k_BSKN
    return execution.shard(
        jnp.repeat(k_BSKN, copies, 2), "batch", "sequence", "kv_heads", None
    )


def _per_device(
    run: Callable[[Request], jax.Array], form: Form, request: Request
) -> Callable[[Request], jax.Array]:
    """Makes each device attend with its own batch rows, heads and sequence part."""
    rules = execution.current().rules
    sequence = "sequence" if form.splits_sequence else None
    q_spec: Any = rules.activation(("batch", sequence, "heads", None), request.q.shape)
    kv_spec: Any = rules.activation(
        ("batch", sequence, "kv_heads", None), request.k.shape
    )
    ids_spec: Any = P(q_spec[0], None)
    specs = Request(
        q=q_spec, k=kv_spec, v=kv_spec, segment_ids=ids_spec, options=request.options
    )
    return execution.per_device(run, (specs,), q_spec)
