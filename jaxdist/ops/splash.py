"""TPU attention: JAX's Pallas splash kernel, given whole sequences of one device's batch and heads.

Shapes: `B` batch, `S` sequence, `H` query heads, `K` kv heads, `N` head size. Source:
jax.experimental.pallas.ops.tpu.splash_attention (arXiv:2205.14135 with a block-sparse mask).
"""

import contextlib
import functools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as pallas_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from jaxdist.ops.attention_reference import Options, Part
from jaxdist.parallel.remat import RESIDUALS

LANES = 128  # the kernel's sequence blocks are multiples of a vector register's width
MAX_BLOCK = 512  # 512 x 512 float32 logits are 1 MiB of VMEM, double-buffered, on all generations


def splash_attention(
    q_BSHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    segment_ids_BS: jax.Array | None,
    options: Options,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention as [B, S, H, N] in q's dtype, computed by one kernel a direction.

    Call it per device (inside `shard_map`): a Mosaic kernel is opaque to the partitioner. Sequences
    that are no multiple of 128 are padded to one, with a warning that tells the cost.

    Args:
      segment_ids_BS: tokens attend within equal ids only; None: one segment.
      interpret: run the kernel's Python on any backend (tests).
    """
    chex.assert_rank([q_BSHN, k_BSKN, v_BSKN], 4)
    S = q_BSHN.shape[1]
    length = -(-S // LANES) * LANES
    if length > S:
        warnings.warn(
            f"attention: sequence length {S} is padded to {length} for the TPU kernel, "
            f"{(length / S) ** 2 - 1:.0%} more work; use a multiple of {LANES}",
            stacklevel=2,
        )
        if segment_ids_BS is None and not options.causal:  # causal: no token sees the padding after it
            segment_ids_BS = jnp.zeros(q_BSHN.shape[:2], jnp.int32)
        q_BSHN, k_BSKN, v_BSKN = (_pad(x, length, 0) for x in (q_BSHN, k_BSKN, v_BSKN))
        if segment_ids_BS is not None:
            segment_ids_BS = _pad(segment_ids_BS, length, np.iinfo(np.int32).min)
    q_BSHN = q_BSHN * jnp.asarray(options.scale, q_BSHN.dtype)
    segments = None
    if segment_ids_BS is not None:
        segments = pallas_splash.SegmentIds(segment_ids_BS, segment_ids_BS)
    kernel = _kernel(length, q_BSHN.shape[2], options, interpret)
    out_BHSN = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q_BSHN, k_BSKN, v_BSKN)), segments)
    return out_BHSN.swapaxes(1, 2)[:, :S]


def splash_attention_of_part(
    q_BSHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    segment_ids_BS: jax.Array | None,
    part: Part,
    *,
    options: Options,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention of a part of the queries [B, S / count, H, N] to all keys [B, S, K, N].

    A part has a multiple of 128 queries. The kernel's tables, of the blocks that its mask leaves, are cut by
    parts; each takes its own at run time.
    """
    segments = None
    if segment_ids_BS is not None:
        segments = pallas_splash.SegmentIds(part.of(segment_ids_BS), segment_ids_BS)
    kernel = _kernel(k_BSKN.shape[1], q_BSHN.shape[2], options, interpret, part.count)

    def own(table: np.ndarray, dim: int) -> jax.Array:
        size = table.shape[dim] // part.count
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), part.index * size, size, dim)

    def own_of(info):
        cut = {"data_next": 1, "mask_next": 1, "block_mask": 1, "q_sequence": 0}  # dim of queries
        tables = {name: own(x, dim) for name, dim in cut.items() if (x := getattr(info, name)) is not None}
        return info._replace(**tables)

    infos, kwargs = kernel.tree_flatten()
    kernel = type(kernel)(*map(own_of, infos), **kwargs)
    q_BSHN = q_BSHN * jnp.asarray(options.scale, q_BSHN.dtype)
    out_BHSN = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q_BSHN, k_BSKN, v_BSKN)), segments)
    return out_BHSN.swapaxes(1, 2)


def piece(q_BSHN, k_BSKN, v_BSKN, own_ids, ids, options: Options, *, interpret: bool = False):
    """Returns attention to some keys, float32 [B, S, H, N], and the logsumexp [B, S, H]: see `Pieces`."""
    kernel = _kernel(k_BSKN.shape[1], q_BSHN.shape[2], options, interpret, 1, True)
    segments = None if ids is None else pallas_splash.SegmentIds(own_ids, ids)
    q_BSHN = q_BSHN * jnp.asarray(options.scale, q_BSHN.dtype)
    with _all_keys(options):
        out, (lse,) = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q_BSHN, k_BSKN, v_BSKN)), segments)
    return out.swapaxes(1, 2).astype(jnp.float32), lse.swapaxes(1, 2)


def piece_gradients(queries: Any, k_BSKN, v_BSKN, own_ids, ids, options: Options, *, interpret: bool = False):
    """Returns the gradients of q, k and v in float32: see `Pieces`.

    jax gives kernels that return their logsumexp no gradient; the kernels that would compute it are private.
    """
    kernel = _kernel(k_BSKN.shape[1], queries.q.shape[2], options, interpret, 1, True)
    segments = None if ids is None else pallas_splash.SegmentIds(own_ids, ids)
    scale = jnp.asarray(options.scale, queries.q.dtype)

    backward: Any = splash_attention_kernel._splash_attention_bwd

    def one(arrays, segments):
        q, k, v, out, lse, grad = arrays
        tables = kernel.dq_mask_info, kernel.dkv_mask_info
        residuals = (q, k, v, segments, None, out, lse, *tables)
        return backward(*map(kernel.kwargs.get, _STATIC), interpret, residuals, grad)[3:6]

    arrays = queries.q * scale, k_BSKN, v_BSKN, queries.out, queries.lse, queries.grad
    heads_first = [x.swapaxes(1, 2) for x in arrays]
    with _all_keys(options):
        dq, dk, dv = (x.swapaxes(1, 2).astype(jnp.float32) for x in jax.vmap(one)(heads_first, segments))
    return dq * options.scale, dk, dv


def _all_keys(options: Options):
    """Opens a scope that tells readers of the program whether queries see all keys, or half of them."""
    return contextlib.nullcontext() if options.causal else jax.named_scope("all_keys")


_STATIC = (
    "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
    "attn_logits_soft_cap",
)  # fmt: skip


def block_size(sequence_length: int) -> int:
    """Returns the largest multiple of 128, at most 512, that divides the (padded) sequence."""
    blocks = range(MAX_BLOCK, LANES, -LANES)
    return next((b for b in blocks if sequence_length % b == 0), LANES)


def _pad(x: jax.Array, length: int, value: int) -> jax.Array:
    widths = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=value)


@functools.lru_cache(maxsize=32)
def _kernel(
    length: int, num_heads: int, options: Options, interpret: bool, parts: int = 1, residuals: bool = False
) -> Any:
    """Returns the kernel of one sequence: (q_HSN, k_KSN, v_KSN, segments) -> out_HSN.

    Its tables are those of all parts of the queries, one after another. Cached, since the walk over the
    mask's blocks takes seconds for long sequences and a layer is traced several times. The tables are kept
    as numpy, so no tracer outlives its trace.
    """
    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(sides, block_size(length // parts))
    mask: pallas_splash.Mask = pallas_splash.FullMask((length, length))
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
            save_residuals=residuals,
            residual_checkpoint_name=None if residuals else RESIDUALS,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


class _BandMask(pallas_splash.LocalMask):
    """A causal, perhaps windowed mask whose uniform blocks are not compared element by element.

    The walk over blocks is quadratic in the sequence: 128k tokens take seconds, not a minute.
    """

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        reach = self.window_size[0]
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if farthest < 0 or (reach is not None and nearest > reach):
            return np.broadcast_to(False, shape)
        if nearest >= 0 and (reach is None or farthest <= reach):
            return np.broadcast_to(True, shape)
        return super().__getitem__(index)
