"""TPU attention: JAX's Pallas splash kernel, given whole sequences of one device's
batch and heads.

Shapes: `B` batch, `S` sequence, `H` query heads, `K` kv heads, `N` head size. Source:
jax.experimental.pallas.ops.tpu.splash_attention (arXiv:2205.14135 with a block-sparse
mask).
"""

import contextlib
import functools
import warnings
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as pallas_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from jaxdist.ops.attention_request import Options, Request, Result, inner_products
from jaxdist.ops.document_blocks import shared_blocks, skipping
from jaxdist.parallel.remat import RESIDUALS

LANES = 128  # the kernel's sequence blocks are multiples of a vector register's width
# of a sequence whose documents' blocks are told apart: 4 x 4 of them
_LEAST_TOKENS = 2048
# 512 x 512 float32 logits are 1 MiB of VMEM, double-buffered, on all generations
MAX_BLOCK = 512


def splash_attention(request: Request, *, interpret: bool = False) -> jax.Array:
    """Computes attention, [B, S, H, N] in q's dtype, by one kernel a direction.

    Call it per device (inside `shard_map`): a Mosaic kernel is opaque to the
    partitioner. Sequences that are no multiple of 128 are padded to one, with a warning
    that tells the cost. A part of the queries has a multiple of 128.

    Args:
      interpret: run the kernel's Python on any backend (tests).
    """
    chex.assert_rank(request.heads, 4)
    S = request.q.shape[1]
    if request.part is None:
        request = _padded(request)
    length = request.k.shape[1]
    segments = _segments(request)
    heads_first = _heads_first(request)
    if request.part is None and _chunk(length, request.options):
        out_BHSN = _long(*heads_first, segments, request.options, interpret)
    else:
        parts = length // request.q.shape[1]
        kernel = _kernel(length, request.q.shape[2], request.options, interpret, parts)
        if request.part is not None:
            kernel = _of_part(kernel, request.part, parts)
        out_BHSN = jax.vmap(_of_documents(kernel, segments))(*heads_first, segments)
    return out_BHSN.swapaxes(1, 2)[:, :S]


def _padded(request: Request) -> Request:
    """Fills a sequence up to a multiple of 128 tokens."""
    S = request.q.shape[1]
    length = -(-S // LANES) * LANES
    if length == S:
        return request
    warnings.warn(
        f"attention: sequence length {S} is padded to {length} for the TPU kernel, "
        f"{(length / S) ** 2 - 1:.0%} more work; use a multiple of {LANES}",
        stacklevel=3,
    )
    segment_ids = request.segment_ids
    # causal: no token sees the padding after it
    if segment_ids is None and not request.options.causal:
        segment_ids = jnp.zeros(request.q.shape[:2], jnp.int32)
    request = request.with_heads(*(_pad(x, length, 0) for x in request.heads))
    if segment_ids is not None:
        segment_ids = _pad(segment_ids, length, np.iinfo(np.int32).min)
    return replace(request, segment_ids=segment_ids)


def _of_part(kernel: Any, part: jax.Array, parts: int) -> Any:
    """Makes the kernel of a part of the queries.

    The tables of the blocks that a mask leaves are cut by parts; each takes its own at
    run time.
    """

    def own(table: np.ndarray, dim: int) -> jax.Array:
        size = table.shape[dim] // parts
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), part * size, size, dim)

    def own_of(info):
        # dim of queries
        cut = {"data_next": 1, "mask_next": 1, "block_mask": 1, "q_sequence": 0}
        tables = {
            name: own(x, dim)
            for name, dim in cut.items()
            if (x := getattr(info, name)) is not None
        }
        return info._replace(**tables)

    infos, kwargs = kernel.tree_flatten()
    return type(kernel)(*map(own_of, infos), **kwargs)


def piece(request: Request, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Computes attention to some keys, float32 [B, S, H, N], and the logsumexp [B, S,
    H]: see `Pieces`.
    """
    length = request.k.shape[1]
    heads = request.q.shape[2]
    kernel = _kernel(length, heads, request.options, interpret, residuals=True)
    with _all_keys(request.options):
        out, (lse,) = jax.vmap(kernel)(*_heads_first(request), _segments(request))
    return out.swapaxes(1, 2).astype(jnp.float32), lse.swapaxes(1, 2)


def piece_gradients(
    request: Request, result: Result, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of q, k and v in float32: see `Pieces`."""
    of_result = (x.swapaxes(1, 2) for x in (result.lse, result.inner, result.grad))
    gradients = _gradients(
        [*_heads_first(request), *of_result],
        _segments(request),
        request.options,
        interpret,
    )
    dq, dk, dv = (x.swapaxes(1, 2).astype(jnp.float32) for x in gradients)
    return dq * request.options.scale, dk, dv


def _segments(request: Request) -> pallas_splash.SegmentIds | None:
    """Gives the kernel the segment ids of queries and keys."""
    return pallas_splash.SegmentIds(*request.segments) if request.segments else None


def _heads_first(request: Request) -> list[jax.Array]:
    """Lays out scaled q as [B, H, S, N], and k, v as [B, K, T, N]."""
    q, k, v = request.heads
    q = q * jnp.asarray(request.options.scale, q.dtype)
    return [x.swapaxes(1, 2) for x in (q, k, v)]


def _all_keys(options: Options):
    """Opens a scope that tells readers of the program whether queries see all keys, or
    half of them.
    """
    return contextlib.nullcontext() if options.causal else jax.named_scope("all_keys")


# --- gradients by one kernel ----------------------------------------------------------

# The kernel that computes dq, dk and dv does 5 products of a block where two kernels do
# 7. It gives a part of dq for each of its blocks of keys, in q's dtype: of a whole
# sequence S / 2048 times as much as dq itself. So long sequences are cut into chunks,
# and each pair of a chunk of queries and one of keys has its own call.
# keys of heads of 128: half as many of 256, for the sake of VMEM
_CHUNK = 8192
_FUSED_KEYS = 2048


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _long(
    q_BHSN, k_BKSN, v_BKSN, segments, options: Options, interpret: bool
) -> jax.Array:
    """Returns attention [B, H, S, N] of scaled queries; its gradients are computed
    chunk by chunk.
    """
    return _long_forward(q_BHSN, k_BKSN, v_BKSN, segments, options, interpret)[0]


def _long_forward(q_BHSN, k_BKSN, v_BKSN, segments, options: Options, interpret: bool):
    kernel = _kernel(
        q_BHSN.shape[2], q_BHSN.shape[1], options, interpret, residuals=True
    )
    kernel = _of_documents(kernel, segments)
    with _all_keys(options):
        out, (lse,) = jax.vmap(kernel)(q_BHSN, k_BKSN, v_BKSN, segments)
    out = checkpoint_name(out, RESIDUALS)
    lse = checkpoint_name(lse, RESIDUALS)
    return out, (q_BHSN, k_BKSN, v_BKSN, segments, out, lse)


def _long_backward(options: Options, interpret: bool, residuals, grad):
    q, k, v, segments, out, lse = residuals
    size = _chunk(q.shape[2], options)
    shared = _shared(segments, size)
    arrays = [q, k, v, lse, inner_products(out, grad), grad]
    parts = functools.partial(
        _pair_gradients, arrays, segments, size, options, interpret
    )

    def own(totals, pair):
        rows, columns = pair * size
        dq, *dkeys = parts(rows, columns, causal=True)
        return [
            _put(total, part, pair[1] * size)
            for total, part in zip(totals, dkeys, strict=True)
        ], dq

    def before(carry, pair):
        dq, dq_so_far, totals = carry
        rows, columns = pair * size
        # In float32 over the keys of a chunk of queries, of which one after another has
        # its turn.
        start = _cut(dq, rows, size, 2).astype(jnp.float32)
        dq_so_far = jnp.where(pair[1] == 0, start, dq_so_far)

        def add(dq_so_far, totals):
            more, *dkeys = parts(rows, columns, causal=False)
            sums = [
                _cut(t, columns, size, 2) + d.astype(t.dtype)
                for t, d in zip(totals, dkeys, strict=True)
            ]
            totals = [_put(*x, columns) for x in zip(totals, sums, strict=True)]
            return dq_so_far + more.astype(jnp.float32), totals

        if shared is None:
            dq_so_far, totals = add(dq_so_far, totals)
        else:
            leave = lambda *as_it_is: as_it_is  # noqa: E731
            dq_so_far, totals = jax.lax.cond(
                shared[pair[0], pair[1]], add, leave, dq_so_far, totals
            )
        return (_put(dq, dq_so_far, rows), dq_so_far, totals), None

    count = q.shape[2] // size
    dq = jnp.zeros_like(q)
    totals = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    pairs = [
        (n, m) for n in range(count) for m in range(n if options.causal else count)
    ]
    if options.causal:
        totals, dqs = jax.lax.scan(
            own, totals, jnp.asarray([(n, n) for n in range(count)])
        )
        dq = jnp.moveaxis(dqs, 0, 2).reshape(q.shape)
    start = dq, jnp.zeros_like(dq[:, :, :size], jnp.float32), totals
    (dq, _, (dk, dv)), _ = jax.lax.scan(before, start, jnp.asarray(pairs))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_long.defvjp(_long_forward, _long_backward)


def _pair_gradients(
    arrays: list[jax.Array],
    segments: pallas_splash.SegmentIds | None,
    size: int,
    options: Options,
    interpret: bool,
    rows: jax.Array,
    columns: jax.Array,
    *,
    causal: bool,
):
    """Computes the gradients by a chunk of queries and one of keys.

    Args:
      arrays: whole ones, see `_gradients`.
      rows, columns: places where the chunks of queries and keys begin.
    """
    q, k, v, *of_results = arrays
    own_q, *own_results = (_cut(x, rows, size, 2) for x in (q, *of_results))
    own_k, own_v = (_cut(x, columns, size, 2) for x in (k, v))
    ids = None
    if segments is not None:
        own_ids = _cut(segments.q, rows, size, 1)
        their_ids = _cut(segments.kv, columns, size, 1)
        ids = pallas_splash.SegmentIds(own_ids, their_ids)
    chunks = [own_q, own_k, own_v, *own_results]
    return _gradients(chunks, ids, options._replace(causal=causal), interpret)


def _chunk(length: int, options: Options) -> int:
    """Returns the places of a chunk; 0 where gradients are computed whole, by two
    kernels.

    Those of a window skip most blocks, and short sequences have no second chunk.
    """
    if length < 2 * _CHUNK or options.window is not None:
        return 0
    size = _largest(length, _CHUNK)
    return size if size >= _FUSED_KEYS else 0


def _cut(x: jax.Array, start, size: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _put(x_BHSN: jax.Array, part: jax.Array, start) -> jax.Array:
    """Returns x with a part at the places from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(
        x_BHSN, part.astype(x_BHSN.dtype), start, 2
    )


def _gradients(arrays: list[jax.Array], segments, options: Options, interpret: bool):
    """Returns the gradients of scaled queries, keys and values, from one kernel.

    jax gives kernels that return their logsumexp no gradient; the one that would
    compute it is private. That one sums the parts of dq in an instruction by itself,
    for which libtpu's cycles are ten times those of reading them. Where queries see all
    keys each block of them is called for alone, as if of another batch, and the parts
    are added here, in float32.

    Args:
      arrays: q [B, H, S, N], k and v [B, K, S, N], lse and inner [B, H, S], the
        result's gradient.
    """
    H, S = arrays[0].shape[1:3]
    layouts = dict.fromkeys(
        ("q_layout", "k_layout", "v_layout"), pallas_splash.QKVLayout.HEAD_DIM_MINOR
    )
    keys = _largest(S, _FUSED_KEYS * LANES // max(arrays[0].shape[3], LANES))
    blocks: dict[str, Any] = {
        "bq": block_size(S),
        "bkv": keys,
        "bkv_compute": block_size(keys),
    }
    made = _kernel(
        S, H, options, interpret, fused_keys=keys, seen=S if options.causal else keys
    )
    if options.causal:  # a pair of different chunks is left out as one, or not at all
        made = _of_documents(made, segments)
    kernel: Any = functools.partial(
        splash_attention_kernel._splash_attention_bwd_dkv,
        **blocks,
        **layouts,
        is_mqa=False,
        mask_info=made.dkv_mask_info,
        mask_value=made.kwargs["mask_value"],
        attn_logits_soft_cap=options.softcap,
        use_fused_bwd_kernel=True,
        mask_function=made.kwargs["mask_function"],
        interpret=interpret,
    )

    def one(arrays, segments):
        q, k, v, lse, inner, grad = arrays
        return kernel(q, k, v, segments, None, lse, grad, inner)

    if options.causal:
        return jax.vmap(one)(arrays, segments)
    q, k, v, *rest = arrays
    k_blocks, v_blocks = (x.reshape(*x.shape[:2], -1, keys, x.shape[3]) for x in (k, v))
    ids = None if segments is None else segments.kv.reshape(len(q), -1, keys)

    def block(k, v, ids):
        both = None if ids is None else pallas_splash.SegmentIds(segments.q, ids)
        return jax.vmap(one)([q, k, v, *rest], both)

    with _all_keys(options), jax.named_scope(f"key_blocks_{S // keys}"):
        parts, *dkeys = jax.vmap(block, (2, 2, 1), (0, 2, 2))(k_blocks, v_blocks, ids)
    dq = sum(part.astype(jnp.float32) for part in parts)
    return dq, *(d.reshape(x.shape) for d, x in zip(dkeys, (k, v), strict=True))


def _shared(segments: pallas_splash.SegmentIds | None, size: int) -> jax.Array | None:
    """Finds which chunks of queries and of keys share a document, of one sequence;
    None: all may.
    """
    if segments is None or len(segments.q) > 1:
        return None
    return shared_blocks(segments.q[0], segments.kv[0], (size, size))


def _of_documents(kernel: Any, segments: pallas_splash.SegmentIds | None) -> Any:
    """Returns the kernel of one sequence without the blocks between its documents; of
    several as it is.

    The kernel has one set of tables: several sequences would have their turns in a loop
    that copies each.
    """
    if (
        segments is None
        or segments.q.shape[0] > 1
        or segments.kv.shape[1] < _LEAST_TOKENS
    ):
        return kernel
    sizes = kernel.kwargs["block_sizes"]
    ids = (segments.q[0], segments.kv[0])
    (forward, dq, dkv), kwargs = kernel.tree_flatten()
    forward = skipping(forward, *ids, (sizes.block_q, sizes.block_kv))
    dq = dq and skipping(dq, *ids, (sizes.block_q_dq, sizes.block_kv_dq))
    dkv = dkv and skipping(
        dkv, *ids, (sizes.block_q_dkv, sizes.block_kv_dkv), by_keys=True
    )
    return type(kernel)(forward, dq, dkv, **kwargs)


def _largest(length: int, most: int) -> int:
    """Returns the largest multiple of 128, of so many places at most, that divides a
    length.
    """
    return next((n for n in range(most, LANES, -LANES) if length % n == 0), LANES)


def block_size(sequence_length: int) -> int:
    """Returns the largest multiple of 128, at most 512, that divides the (padded)
    sequence.
    """
    return _largest(sequence_length, MAX_BLOCK)


def _pad(x: jax.Array, length: int, value: int) -> jax.Array:
    widths = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=value)


@functools.lru_cache(maxsize=32)
def _kernel(
    length: int,
    num_heads: int,
    options: Options,
    interpret: bool,
    parts: int = 1,
    *,
    residuals: bool = False,
    fused_keys: int = 0,
    seen: int = 0,
) -> Any:
    """Returns the kernel of one sequence: (q_HSN, k_KSN, v_KSN, segments) -> out_HSN.

    Its tables are those of all parts of the queries, one after another. Cached, since
    the walk over the mask's blocks takes seconds for long sequences and a layer is
    traced several times. The tables are kept as numpy, so no tracer outlives its trace.

    Args:
      residuals: for the forward pass alone, with the logsumexp.
      fused_keys: for the backward pass alone, by one kernel with such blocks of keys;
        0: by two.
      seen: keys that there are, without a mask; 0: as many as queries.
    """
    alone = residuals or fused_keys
    sides = ("q", "kv") if alone else ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {
        f"block_{side}": block_size(length // parts) for side in sides
    }
    if fused_keys:
        sizes |= {
            "block_q_dkv": block_size(length),
            "block_kv_dkv": fused_keys,
            "use_fused_bwd_kernel": True,
        }
        sizes["block_kv"] = block_size(fused_keys)
    mask: pallas_splash.Mask = pallas_splash.FullMask((length, seen or length))
    if options.causal:
        reach = None if options.window is None else options.window - 1
        mask = _BandMask((length, length), (reach, 0), 0)
    with jax.ensure_compile_time_eval():
        kernel = pallas_splash.make_splash_mha(
            pallas_splash.MultiHeadMask([mask] * num_heads),
            block_sizes=pallas_splash.BlockSizes(**sizes),
            head_shards=1,
            q_seq_shards=parts,
            attn_logits_soft_cap=options.softcap,
            save_residuals=bool(alone),
            residual_checkpoint_name=None if alone else RESIDUALS,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


class _BandMask(pallas_splash.LocalMask):
    """A causal, perhaps windowed mask whose uniform blocks are not compared element by
    element.

    The walk over blocks is quadratic in the sequence: 128k tokens take seconds, not a
    minute.
    """

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        reach = self.window_size[0]
        nearest = rows.start - columns.stop + 1
        farthest = rows.stop - 1 - columns.start
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if farthest < 0 or (reach is not None and nearest > reach):
            return np.broadcast_to(False, shape)
        if nearest >= 0 and (reach is None or farthest <= reach):
            return np.broadcast_to(True, shape)
        return super().__getitem__(index)
