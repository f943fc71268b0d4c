"""The backends of attention: what each supports, and the one place that chooses.

A new backend is a function (q, k, v, segment_ids, options=) -> out over whole sequences
of one device's batch rows and heads, and a row of `BACKENDS`, which lists the preferred
ones first. Where it can, a second function (q, k, v, segment_ids, part, options=) ->
out is for a part of the queries and all keys, and `Pieces` are for parts of both.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import extras
from jaxdist.ops.attention_reference import (
    Options,
    Part,
    Pieces,
    reference,
    reference_of_part,
    reference_pieces,
)
from jaxdist.parallel import execution
from jaxdist.parallel.formats.floats import lacks_bfloat16


@dataclass(frozen=True)
class Backend:
    """A way to compute attention, and what it supports."""

    run: Callable[..., jax.Array]
    run_part: Callable[..., jax.Array] | None = None
    pieces: Pieces | None = None
    platforms: tuple[str, ...] = ("tpu", "gpu", "cpu")
    dtypes: tuple[str, ...] = ()  # of q, k and v; (): any
    head_size_multiple: int = 1
    max_head_size: float = math.inf
    length_multiple: int = 1
    part_multiple: int = 1  # of the queries of a part, and the keys of a piece
    window: bool = True
    softcap: bool = True
    segments: bool = True
    before_ampere: bool = True  # on NVIDIA's GPUs without bfloat16
    # the partitioner cannot look into it: it is called device by device
    is_kernel: bool = True

    def refusal(
        self,
        q_BSHN: jax.Array,
        options: Options,
        *,
        segments: bool = False,
        parts: int = 1,
        pieces: bool = False,
    ) -> str | None:
        """Returns why it cannot compute this in the execution in force, or None.

        Args:
          parts: of the queries, of which a call has one.
          pieces: of the keys, too.
        """
        now = execution.current()
        dtype = str(q_BSHN.dtype)
        every = self.length_multiple
        _, length, _, head_size = q_BSHN.shape
        platforms = " and ".join(self.platforms)
        head_sizes = f"{self.head_size_multiple} up to {self.max_head_size}"
        bad_head = head_size % self.head_size_multiple or head_size > self.max_head_size
        reasons = {
            f"it is for {platforms}, not {now.platform}": now.platform
            not in self.platforms,
            "the GPU is older than Ampere": not self.before_ampere
            and lacks_bfloat16(now.device),
            f"{dtype} is not {' or '.join(self.dtypes)}": self.dtypes
            and dtype not in self.dtypes,
            f"head size {head_size} is not a multiple of {head_sizes}": bad_head,
            "a softcap is set": options.softcap is not None and not self.softcap,
            "a window is set": options.window is not None and not self.window,
            "documents are packed": segments and not self.segments,
            "keys and values travel from device to device": pieces
            and self.pieces is None,
            "each device has all keys for a part of the queries": parts > 1
            and not pieces
            and self.run_part is None,
            f"{length // parts} queries a device are no multiple of {self.part_multiple}": parts
            > 1
            and length // parts % self.part_multiple,
            f"sequence length {length} is not a multiple of {every}": length % every,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)


def choose(
    q_BSHN: jax.Array,
    options: Options,
    *,
    segments: bool,
    parts: int = 1,
    pieces: bool = False,
) -> Backend:
    """Returns the first backend that supports this; warns why one for this platform
    does not.
    """
    for name, backend in BACKENDS.items():
        reason = backend.refusal(
            q_BSHN, options, segments=segments, parts=parts, pieces=pieces
        )
        if reason is None:
            return backend
        if execution.current().platform in backend.platforms:
            warnings.warn(
                f"attention: {reason}, so no {name} kernel: XLA computes it, more slowly and with a "
                f"[B, H, S / 4, S] buffer of float32 logits",
                stacklevel=3,
            )
    return BACKENDS["reference"]


def _kernels() -> Any:
    """Imports the splash kernels, which only TPUs need."""
    return extras.load("jaxdist.ops.splash")


def _splash(q, k, v, segment_ids, *, options: Options) -> jax.Array:
    return _kernels().splash_attention(q, k, v, segment_ids, options)


def _splash_part(q, k, v, segment_ids, part: Part, *, options: Options) -> jax.Array:
    return _kernels().splash_attention_of_part(
        q, k, v, segment_ids, part, options=options
    )


def _splash_piece(*arguments) -> tuple[jax.Array, jax.Array]:
    return _kernels().piece(*arguments)


def _splash_piece_gradients(*arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _kernels().piece_gradients(*arguments)


def _cudnn(q, k, v, segment_ids, *, options: Options) -> jax.Array:
    # cuDNN's own packing wants document offsets; equal ids become a [B, 1, S, S] bias,
    # H times less than logits. The causal flag still skips the blocks above the
    # diagonal. Before 9.10.2 a window and a bias exclude each other (cudnn_frontend's
    # checks), so the bias then has the window too.
    mask = None
    window = None if options.window is None else (options.window - 1, 0)
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if mask is not None and options.window is not None:
        place = jnp.arange(q.shape[1])
        mask = mask & (place[:, None] - place[None, :] < options.window)[None, None]
        window = None
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


BACKENDS = {
    "splash": Backend(
        _splash,
        _splash_part,
        Pieces(_splash_piece, _splash_piece_gradients),
        platforms=("tpu",),
        part_multiple=128,
    ),
    # Limits: jax._src.cudnn.fused_attention; the GPU's are in cuDNN's table
    # (docs.nvidia.com, Attention).
    "cudnn": Backend(
        _cudnn,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        head_size_multiple=8,
        max_head_size=128,
        length_multiple=2,
        softcap=False,
        before_ampere=False,
    ),
    "reference": Backend(
        reference, reference_of_part, reference_pieces, is_kernel=False
    ),
}
