"""Attention on TPU by JAX's Pallas splash kernel.

The kernel gets whole sequences of a device's batch rows and heads. Source:
jax.experimental.pallas.ops.tpu.splash_attention (arXiv:2205.14135 with a block-sparse
mask).

Letters: `B` batch, `S` sequence, `H` query heads, `K` kv heads, `N` head size.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
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
from jaxdist.ops.document_blocks import Tables, shared_blocks, skip_unshared_blocks
from jaxdist.parallel.remat import RESIDUALS

LANES = 128  # the kernel's sequence blocks are multiples of a vector register's width
# shortest sequence in which blocks between documents are skipped: it has 4 x 4 blocks
_LEAST_TOKENS = 2048
# 512 x 512 float32 logits are 1 MiB of VMEM, double-buffered, on all generations
MAX_BLOCK = 512


def splash_attention(request: Request, *, interpret: bool = False) -> jax.Array:
    """Computes attention by one kernel for each direction.

    Call it per device (inside `shard_map`): the partitioner cannot split a Mosaic
    kernel. A sequence is padded to a multiple of 128 tokens, with a warning about the
    extra work. A part of the queries must have a multiple of 128 tokens.

    Args:
      request: queries, keys, values and options.
      interpret: whether the kernel is emulated on any platform (for tests).

    Returns:
      [B, S, H, N] in the dtype of q.
    """
    chex.assert_rank(request.heads, 4)
    S = request.q.shape[1]
    if request.part is None:
        request = _pad_sequence(request)
    length = request.k.shape[1]
    segments = _segments(request)
    heads_first = _heads_first(request)
    if request.part is None and _chunk(length, request.options):
        out_BHSN = _long(*heads_first, segments, request.options, interpret)
    else:
        parts = length // request.q.shape[1]
        kernel = _kernel(length, request.q.shape[2], request.options, interpret, parts)
        if request.part is not None:
            kernel = _kernel_of_part(kernel, request.part, parts)
        kernel = _skip_between_documents(kernel, segments)
        out_BHSN = jax.vmap(kernel)(*heads_first, segments)
    return out_BHSN.swapaxes(1, 2)[:, :S]


def _pad_sequence(request: Request) -> Request:
    """Pads a sequence to a multiple of 128 tokens."""
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
    if segment_ids is None and not request.options.causal:
        # Without a causal mask, only segment ids can hide the padding.
        segment_ids = jnp.zeros(request.q.shape[:2], jnp.int32)
    request = request.with_heads(*(_pad(x, length, 0) for x in request.heads))
    if segment_ids is not None:
        segment_ids = _pad(segment_ids, length, np.iinfo(np.int32).min)
    return replace(request, segment_ids=segment_ids)


def _kernel_of_part(kernel: Any, part: jax.Array, parts: int) -> Any:
    """Builds the kernel of a part of the queries.

    The tables of a mask's blocks contain all parts, one after another. Each part takes
    its own tables at run time.
    """

    def slice_part(table: np.ndarray, dim: int) -> jax.Array:
        size = table.shape[dim] // parts
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), part * size, size, dim)

    def tables_of_part(tables: Tables) -> Tables:
        # the dim of queries in each table
        dims = {"data_next": 1, "mask_next": 1, "block_mask": 1, "q_sequence": 0}
        sliced: dict[str, Any] = {}
        for name, dim in dims.items():
            table = getattr(tables, name)
            if table is not None:
                sliced[name] = slice_part(table, dim)
        return tables._replace(**sliced)

    tables, kwargs = kernel.tree_flatten()
    return type(kernel)(*map(tables_of_part, tables), **kwargs)


def piece(request: Request, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Computes attention to some of the keys, in float32; see `Pieces`.

    Returns:
      The result [B, S, H, N], and the logsumexp of the logits [B, S, H].
    """
    length = request.k.shape[1]
    heads = request.q.shape[2]
    kernel = _kernel(length, heads, request.options, interpret, residuals=True)
    with _mask_scope(request.options):
        out, (lse,) = jax.vmap(kernel)(*_heads_first(request), _segments(request))
    return out.swapaxes(1, 2).astype(jnp.float32), lse.swapaxes(1, 2)


def piece_gradients(
    request: Request, result: Result, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of q, k and v in float32; see `Pieces`."""
    result_arrays = (x.swapaxes(1, 2) for x in (result.lse, result.inner, result.grad))
    gradients = _gradients(
        [*_heads_first(request), *result_arrays],
        _segments(request),
        request.options,
        interpret,
    )
    dq, dk, dv = (x.swapaxes(1, 2).astype(jnp.float32) for x in gradients)
    return dq * request.options.scale, dk, dv


def _segments(request: Request) -> pallas_splash.SegmentIds | None:
    """Wraps the segment ids of queries and keys for the kernel."""
    return pallas_splash.SegmentIds(*request.segments) if request.segments else None


def _heads_first(request: Request) -> list[jax.Array]:
    """Scales q and lays out q as [B, H, S, N], and k, v as [B, K, T, N]."""
    q, k, v = request.heads
    q = q * jnp.asarray(request.options.scale, q.dtype)
    return [x.swapaxes(1, 2) for x in (q, k, v)]


def _mask_scope(options: Options) -> contextlib.AbstractContextManager[None]:
    """Names operations for the planner: queries see all keys, or half of them."""
    return contextlib.nullcontext() if options.causal else jax.named_scope("all_keys")


# --- gradients by one kernel ----------------------------------------------------------

# One kernel that computes dq, dk and dv does 5 matmuls per block; two kernels do 7. It
# returns a part of dq for each of its blocks of keys, in the dtype of q. For a whole
# sequence, the parts are S / 2048 times as large as dq. So a long sequence is cut into
# chunks, and each pair of a chunk of queries and a chunk of keys has its own call.
_CHUNK = 8192  # most tokens of a chunk
# keys of a block, for heads of 128 elements; half as many for 256, to fit into VMEM
_FUSED_KEYS = 2048

# dq, the float32 gradient of the current chunk of queries, and the totals of dk and dv
_Carry = tuple[jax.Array, jax.Array, list[jax.Array]]
# scaled q, k, v, segment ids, result, logsumexp
_Residuals = tuple[
    jax.Array,
    jax.Array,
    jax.Array,
    pallas_splash.SegmentIds | None,
    jax.Array,
    jax.Array,
]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _long(
    q_BHSN: jax.Array,
    k_BKSN: jax.Array,
    v_BKSN: jax.Array,
    segments: pallas_splash.SegmentIds | None,
    options: Options,
    interpret: bool,
) -> jax.Array:
    """Computes attention [B, H, S, N] of scaled queries, with gradients by chunks."""
    return _long_forward(q_BHSN, k_BKSN, v_BKSN, segments, options, interpret)[0]


def _long_forward(
    q_BHSN: jax.Array,
    k_BKSN: jax.Array,
    v_BKSN: jax.Array,
    segments: pallas_splash.SegmentIds | None,
    options: Options,
    interpret: bool,
) -> tuple[jax.Array, _Residuals]:
    kernel = _kernel(
        q_BHSN.shape[2], q_BHSN.shape[1], options, interpret, residuals=True
    )
    kernel = _skip_between_documents(kernel, segments)
    with _mask_scope(options):
        out, (lse,) = jax.vmap(kernel)(q_BHSN, k_BKSN, v_BKSN, segments)
    out = checkpoint_name(out, RESIDUALS)
    lse = checkpoint_name(lse, RESIDUALS)
    return out, (q_BHSN, k_BKSN, v_BKSN, segments, out, lse)


def _long_backward(
    options: Options, interpret: bool, residuals: _Residuals, grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, lse = residuals
    size = _chunk(q.shape[2], options)
    shared = _shared_chunks(segments, size)
    arrays = [q, k, v, lse, inner_products(out, grad), grad]
    pull_back = functools.partial(
        _pair_gradients,
        arrays=arrays,
        segments=segments,
        size=size,
        options=options,
        interpret=interpret,
    )
    count = q.shape[2] // size
    dq = jnp.zeros_like(q)
    totals = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    if options.causal:
        dq, totals = _add_diagonal(pull_back, q.shape, totals, size)
    pairs = [
        (n, m) for n in range(count) for m in range(n if options.causal else count)
    ]
    dq, (dk, dv) = _add_pairs(
        pull_back, dq, totals, pairs=pairs, shared=shared, size=size
    )
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_PullBack = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def _add_diagonal(
    pull_back: _PullBack, dims: Sequence[int], totals: list[jax.Array], size: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes the gradients of the pairs of a chunk of queries and the same keys.

    Args:
      pull_back: function of the first query, the first key and `causal`.
      dims: shape of the queries [B, H, S, N].
      totals: zeros for the gradients of keys and values.
      size: tokens of a chunk.

    Returns:
      The gradient of the queries, and the totals.
    """

    def add(
        totals: list[jax.Array], pair: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        rows, columns = pair * size
        dq, *dkeys = pull_back(rows, columns, causal=True)
        updated = [
            _put(total, dkey, pair[1] * size)
            for total, dkey in zip(totals, dkeys, strict=True)
        ]
        return updated, dq

    diagonal = jnp.asarray([(n, n) for n in range(dims[2] // size)])
    totals, dqs = jax.lax.scan(add, totals, diagonal)
    return jnp.moveaxis(dqs, 0, 2).reshape(dims), totals


def _add_pairs(
    pull_back: _PullBack,
    dq: jax.Array,
    totals: list[jax.Array],
    pairs: list[tuple[int, int]],
    shared: jax.Array | None,
    size: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """Adds the gradients of pairs of a chunk of queries and a chunk of other keys.

    Args:
      pull_back: function of the first query, the first key and `causal`.
      dq: gradient of the queries.
      totals: gradients of keys and values.
      pairs: chunks of queries and of keys; the chunks of queries follow one another.
      shared: result of `_shared_chunks`; other pairs are skipped.
      size: tokens of a chunk.

    Returns:
      The gradient of the queries, and the totals.
    """

    def add_pair(carry: _Carry, pair: jax.Array) -> tuple[_Carry, None]:
        dq, dq_of_rows, totals = carry
        rows, columns = pair * size
        # The gradient of a chunk of queries is summed over the keys in float32. It
        # starts from its part on the diagonal.
        start = _cut(dq, rows, size, 2).astype(jnp.float32)
        dq_of_rows = jnp.where(pair[1] == 0, start, dq_of_rows)

        def add(
            dq_of_rows: jax.Array, totals: list[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            dq_part, *dkeys = pull_back(rows, columns, causal=False)
            sums = [
                _cut(total, columns, size, 2) + dkey.astype(total.dtype)
                for total, dkey in zip(totals, dkeys, strict=True)
            ]
            totals = [
                _put(total, part, columns)
                for total, part in zip(totals, sums, strict=True)
            ]
            return dq_of_rows + dq_part.astype(jnp.float32), totals

        def skip(
            dq_of_rows: jax.Array, totals: list[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            return dq_of_rows, totals

        if shared is None:
            dq_of_rows, totals = add(dq_of_rows, totals)
        else:
            dq_of_rows, totals = jax.lax.cond(
                shared[pair[0], pair[1]], add, skip, dq_of_rows, totals
            )
        return (_put(dq, dq_of_rows, rows), dq_of_rows, totals), None

    carry = (dq, jnp.zeros_like(dq[:, :, :size], jnp.float32), totals)
    (dq, _, totals), _ = jax.lax.scan(add_pair, carry, jnp.asarray(pairs))
    return dq, totals


_long.defvjp(_long_forward, _long_backward)


def _pair_gradients(
    rows: jax.Array,
    columns: jax.Array,
    *,
    causal: bool,
    arrays: list[jax.Array],
    segments: pallas_splash.SegmentIds | None,
    size: int,
    options: Options,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of a chunk of queries and a chunk of keys and values.

    Args:
      rows: position of the first query of the chunk.
      columns: position of the first key of the chunk.
      causal: whether the two chunks are the same.
      arrays: arrays of whole sequences; see `_gradients`.
      segments: segment ids of whole sequences.
      size: tokens of a chunk.
      options: options of attention.
      interpret: whether the kernel is emulated.
    """
    q, k, v, *result_arrays = arrays
    q_chunk, *result_chunks = (_cut(x, rows, size, 2) for x in (q, *result_arrays))
    k_chunk, v_chunk = (_cut(x, columns, size, 2) for x in (k, v))
    ids = None
    if segments is not None:
        query_ids = _cut(segments.q, rows, size, 1)
        key_ids = _cut(segments.kv, columns, size, 1)
        ids = pallas_splash.SegmentIds(query_ids, key_ids)
    chunks = [q_chunk, k_chunk, v_chunk, *result_chunks]
    return _gradients(chunks, ids, options._replace(causal=causal), interpret)


def _chunk(length: int, options: Options) -> int:
    """Chooses the tokens of a chunk; 0: two kernels compute the gradients, without chunks.

    With a window, most blocks are skipped. Short sequences have no second chunk.
    """
    if length < 2 * _CHUNK or options.window is not None:
        return 0
    size = _largest_divisor(length, _CHUNK)
    return size if size >= _FUSED_KEYS else 0


def _cut(x: jax.Array, start: jax.Array, size: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _put(x_BHSN: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """Replaces the positions of x from `start` on by a part."""
    updated: jax.Array = jax.lax.dynamic_update_slice_in_dim(
        x_BHSN, part.astype(x_BHSN.dtype), start, 2
    )
    return updated


def _gradients(
    arrays: list[jax.Array],
    segments: pallas_splash.SegmentIds | None,
    options: Options,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of scaled queries, keys and values by one kernel.

    jax defines no gradient of kernels that return their logsumexp. The kernel that
    computes it is private. It sums the parts of dq in a separate instruction, which
    libtpu rates at ten times the cycles of reading the parts. If queries see all keys,
    the kernel is called for each block of keys, as if the block were a sample. The
    parts are then summed here, in float32.

    Args:
      arrays: q [B, H, S, N], k and v [B, K, S, N], logsumexp and inner products
        [B, H, S], and the gradient of the result [B, H, S, N].
      segments: segment ids of queries and keys; None: one document.
      options: options of attention.
      interpret: whether the kernel is emulated.
    """
    H, S = arrays[0].shape[1:3]
    keys = _largest_divisor(S, _fused_keys(arrays[0].shape[3]))
    kernel = _backward_kernel(
        length=S,
        num_heads=H,
        keys=keys,
        segments=segments,
        options=options,
        interpret=interpret,
    )

    def pull_back(
        arrays: list[jax.Array], segments: pallas_splash.SegmentIds | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, lse, inner, grad = arrays
        gradients: tuple[jax.Array, jax.Array, jax.Array] = kernel(
            q, k, v, segments, None, lse, grad, inner
        )
        return gradients

    if options.causal:
        return jax.vmap(pull_back)(arrays, segments)
    q, k, v, *result_arrays = arrays
    k_blocks, v_blocks = (x.reshape(*x.shape[:2], -1, keys, x.shape[3]) for x in (k, v))
    ids = None if segments is None else segments.kv.reshape(len(q), -1, keys)

    def pull_back_block(
        k: jax.Array, v: jax.Array, ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        block_segments = None
        if segments is not None and ids is not None:
            block_segments = pallas_splash.SegmentIds(segments.q, ids)
        return jax.vmap(pull_back)([q, k, v, *result_arrays], block_segments)

    with _mask_scope(options), jax.named_scope(f"key_blocks_{S // keys}"):
        dq_parts, dk, dv = jax.vmap(pull_back_block, (2, 2, 1), (0, 2, 2))(
            k_blocks, v_blocks, ids
        )
    dq: Any = sum(part.astype(jnp.float32) for part in dq_parts)
    return dq, dk.reshape(k.shape), dv.reshape(v.shape)


def _fused_keys(head_size: int) -> int:
    """Chooses the most keys of a block: a multiple of 128, for a head of this size.

    Heads take whole vector registers, so that 192 elements need as much as 256.
    """
    registers = -(-head_size // LANES)
    return _FUSED_KEYS // registers // LANES * LANES


def _backward_kernel(
    length: int,
    num_heads: int,
    keys: int,
    segments: pallas_splash.SegmentIds | None,
    options: Options,
    interpret: bool,
) -> Callable[..., Any]:
    """Builds the private kernel that computes dq, dk and dv of one sequence.

    Args:
      length: tokens of the sequence.
      num_heads: query heads.
      keys: keys of a block.
      segments: segment ids of queries and keys; None: one document.
      options: options of attention.
      interpret: whether the kernel is emulated.
    """
    layouts = dict.fromkeys(
        ("q_layout", "k_layout", "v_layout"), pallas_splash.QKVLayout.HEAD_DIM_MINOR
    )
    block_sizes = {
        "bq": block_size(length),
        "bkv": keys,
        "bkv_compute": block_size(keys),
    }
    kernel = _kernel(
        length,
        num_heads,
        options,
        interpret,
        fused_keys=keys,
        num_keys=length if options.causal else keys,
    )
    if options.causal:
        # Pairs of different chunks are skipped as a whole instead; see
        # `_long_backward`.
        kernel = _skip_between_documents(kernel, segments)
    backward: Any = splash_attention_kernel._splash_attention_bwd_dkv
    return functools.partial(
        backward,
        **block_sizes,
        **layouts,
        is_mqa=False,
        mask_info=kernel.dkv_mask_info,
        mask_value=kernel.kwargs["mask_value"],
        attn_logits_soft_cap=options.softcap,
        use_fused_bwd_kernel=True,
        mask_function=kernel.kwargs["mask_function"],
        interpret=interpret,
    )


def _shared_chunks(
    segments: pallas_splash.SegmentIds | None, size: int
) -> jax.Array | None:
    """Finds the pairs of chunks that may share a document; None: all pairs may.

    It does so for a single sequence only.
    """
    if segments is None or len(segments.q) > 1:
        return None
    return shared_blocks(segments.q[0], segments.kv[0], (size, size))


def _skip_between_documents(
    kernel: Any, segments: pallas_splash.SegmentIds | None
) -> Any:
    """Removes the blocks between documents from a kernel, for a single sequence only.

    The kernel has one set of tables. Several sequences would need a loop over
    sequences, which copies each of them.
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
    forward = skip_unshared_blocks(forward, *ids, (sizes.block_q, sizes.block_kv))
    if dq is not None:
        dq = skip_unshared_blocks(dq, *ids, (sizes.block_q_dq, sizes.block_kv_dq))
    if dkv is not None:
        dkv_sizes = (sizes.block_q_dkv, sizes.block_kv_dkv)
        dkv = skip_unshared_blocks(dkv, *ids, dkv_sizes, by_keys=True)
    return type(kernel)(forward, dq, dkv, **kwargs)


def _largest_divisor(length: int, most: int) -> int:
    """Finds the largest divisor of a length that is a multiple of 128; 128 if none is.

    It is at most `most`.
    """
    return next((n for n in range(most, LANES, -LANES) if length % n == 0), LANES)


def block_size(sequence_length: int) -> int:
    """Chooses the tokens of a block: a multiple of 128 that divides the sequence.

    It is at most 512. The sequence is padded already.
    """
    return _largest_divisor(sequence_length, MAX_BLOCK)


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
    num_keys: int = 0,
) -> Any:
    """Builds the kernel of one sequence: (q_HSN, k_KSN, v_KSN, segments) -> out_HSN.

    The result is cached: the walk over a mask's blocks takes seconds for long sequences,
    and a layer is traced several times. The tables are numpy arrays, so no tracer
    outlives its trace.

    Args:
      length: tokens of the sequence.
      num_heads: query heads.
      options: options of attention.
      interpret: whether the kernel is emulated.
      parts: parts of the queries; the tables contain all parts, one after another.
      residuals: whether the kernel is for the forward pass only and returns the
        logsumexp.
      fused_keys: keys of a block in a kernel for the backward pass only, which computes
        all gradients; 0: two kernels compute them.
      num_keys: number of keys, if there is no causal mask; 0: as many as queries.
    """
    one_direction = residuals or fused_keys
    sides = ["q", "kv"]
    if not one_direction:
        sides += ["q_dkv", "kv_dkv", "q_dq", "kv_dq"]
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
    mask: pallas_splash.Mask = pallas_splash.FullMask((length, num_keys or length))
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
            save_residuals=bool(one_direction),
            residual_checkpoint_name=None if one_direction else RESIDUALS,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


class _BandMask(pallas_splash.LocalMask):
    """Causal mask, possibly with a window, that recognizes uniform blocks.

    It does not compare the elements of a uniform block. The walk over blocks is
    quadratic in the sequence: with 128k tokens it takes seconds instead of a minute.
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
