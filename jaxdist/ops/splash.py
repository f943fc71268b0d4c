"""TPU attention: JAX's Pallas splash kernel, given whole sequences of one device's batch and heads.

Shapes: `B` batch, `S` sequence, `H` query heads, `K` kv heads, `N` head size. Source:
jax.experimental.pallas.ops.tpu.splash_attention (arXiv:2205.14135 with a block-sparse mask).
"""

import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as pallas_splash

LANES = 128  # the kernel's sequence blocks are multiples of a vector register's width
MAX_BLOCK = 512  # 512 x 512 float32 logits are 1 MiB of VMEM, double-buffered, on all generations


def splash_attention(
    q_BSHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    segment_ids_BS: jax.Array | None,
    *,
    scale: float,
    causal: bool = True,
    softcap: float | None = None,
    window: int | None = None,
    residual_name: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention as [B, S, H, N] in q's dtype, computed by one kernel a direction.

    Call it per device (inside `shard_map`): a Mosaic kernel is opaque to the partitioner. Sequences
    that are no multiple of 128 are padded to one, with a warning that tells the cost.

    Args:
      segment_ids_BS: tokens attend within equal ids only; None: one segment.
      residual_name: `checkpoint_name` of the output and logsumexp that the backward kernels read.
      interpret: run the kernel's Python on any backend (tests).
    """
    S = q_BSHN.shape[1]
    padding = -S % LANES
    if padding:
        _warn_padding(S, padding)
        if segment_ids_BS is None and not causal:  # causal: no token sees the padding after it
            segment_ids_BS = jnp.zeros(q_BSHN.shape[:2], jnp.int32)
        q_BSHN, k_BSKN, v_BSKN = (_pad(x, padding, 0) for x in (q_BSHN, k_BSKN, v_BSKN))
        if segment_ids_BS is not None:
            segment_ids_BS = _pad(segment_ids_BS, padding, np.iinfo(np.int32).min)
    q_BHSN, k_BKSN, v_BKSN = (
        x.swapaxes(1, 2) for x in (q_BSHN * jnp.asarray(scale, q_BSHN.dtype), k_BSKN, v_BSKN)
    )
    segments = None
    if segment_ids_BS is not None:
        segments = pallas_splash.SegmentIds(segment_ids_BS, segment_ids_BS)
    kernel = _kernel(S + padding, q_BSHN.shape[2], causal, softcap, window, residual_name, interpret)
    out_BHSN = jax.vmap(kernel)(q_BHSN, k_BKSN, v_BKSN, segments)
    return out_BHSN.swapaxes(1, 2)[:, :S]


def block_size(sequence_length: int) -> int:
    """Returns the largest multiple of 128, at most 512, that divides the (padded) sequence."""
    blocks = range(MAX_BLOCK, LANES, -LANES)
    return next((b for b in blocks if sequence_length % b == 0), LANES)


def _pad(x: jax.Array, padding: int, value: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, padding)
    return jnp.pad(x, widths, constant_values=value)


def _warn_padding(sequence_length: int, padding: int) -> None:
    padded = sequence_length + padding
    warnings.warn(
        f"attention: sequence length {sequence_length} is padded to {padded} for the TPU kernel, "
        f"{(padded / sequence_length) ** 2 - 1:.0%} more work; use a multiple of {LANES}",
        stacklevel=2,
    )


@functools.lru_cache(maxsize=32)
def _kernel(
    sequence_length: int,
    num_heads: int,
    causal: bool,
    softcap: float | None,
    window: int | None,
    residual_name: str | None,
    interpret: bool,
) -> Callable[..., jax.Array]:
    """Returns the kernel of one sequence: (q_HSN, k_KSN, v_KSN, segments) -> out_HSN.

    Cached, since the walk over the mask's blocks takes seconds for long sequences and a layer is
    traced several times. Its tables are kept as numpy, so no tracer outlives its trace.
    """
    block = block_size(sequence_length)
    sizes = pallas_splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    with jax.ensure_compile_time_eval():
        kernel = pallas_splash.make_splash_mha(
            pallas_splash.MultiHeadMask([_mask(sequence_length, causal, window)] * num_heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=residual_name,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


def _mask(sequence_length: int, causal: bool, window: int | None) -> pallas_splash.Mask:
    """Returns a mask that the kernel computes from row and column numbers, never a dense table."""
    shape = (sequence_length, sequence_length)
    if not causal:
        return pallas_splash.FullMask(shape)
    reach = None if window is None or window >= sequence_length else window - 1
    return _BandMask(shape, (reach, 0), 0)


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
            return _uniform(shape, False)
        if nearest >= 0 and (reach is None or farthest <= reach):
            return _uniform(shape, True)
        return super().__getitem__(index)


@functools.lru_cache(maxsize=8)
def _uniform(shape: tuple[int, int], value: bool) -> np.ndarray:
    return np.full(shape, value)
