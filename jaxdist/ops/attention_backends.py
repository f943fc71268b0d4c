"""The backends of attention: what each supports, and the one place that chooses.

A new backend is a function request -> out over whole sequences of one device's batch
rows and heads, and a row of `BACKENDS`, which lists the preferred ones first. Where it
can, it takes a part of the queries and all keys, too, and `Pieces` are for parts of
both.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import extras
from jaxdist.ops.attention_reference import reference, reference_pieces
from jaxdist.ops.attention_request import Pieces, Request
from jaxdist.parallel import execution
from jaxdist.parallel.formats.floats import lacks_bfloat16


@dataclass(frozen=True)
class Backend:
    """A way to compute attention, and what it supports."""

    run: Callable[[Request], jax.Array]
    takes_parts: bool = False  # of the queries, with all keys
    pieces: Pieces | None = None
    platforms: tuple[str, ...] = ("tpu", "gpu", "cpu")
    dtypes: tuple[str, ...] = ()  # of q, k and v; (): any
    head_size_multiple: int = 1
    max_head_size: float = math.inf
    length_multiple: int = 1
    part_multiple: int = 1  # of the queries of a part, and the keys of a piece
    softcap: bool = True
    before_ampere: bool = True  # on NVIDIA's GPUs without bfloat16
    # the partitioner cannot look into it: it is called device by device
    is_kernel: bool = True

    def refusal(
        self, request: Request, *, parts: int = 1, pieces: bool = False
    ) -> str | None:
        """Says why it cannot compute a request in the execution in force; None: it can.

        Args:
          parts: of the queries, of which a call has one.
          pieces: of the keys, too.
        """
        now = execution.current()
        options = request.options
        dtype = str(request.q.dtype)
        _, length, _, head_size = request.q.shape
        queries = length // parts
        if now.platform not in self.platforms:
            return f"it is for {' and '.join(self.platforms)}, not {now.platform}"
        if not self.before_ampere and lacks_bfloat16(now.device):
            return "the GPU is older than Ampere"
        if self.dtypes and dtype not in self.dtypes:
            return f"{dtype} is not {' or '.join(self.dtypes)}"
        if head_size % self.head_size_multiple or head_size > self.max_head_size:
            sizes = f"{self.head_size_multiple} up to {self.max_head_size}"
            return f"head size {head_size} is not a multiple of {sizes}"
        if options.softcap is not None and not self.softcap:
            return "a softcap is set"
        if pieces and self.pieces is None:
            return "keys and values travel from device to device"
        if parts > 1 and not pieces and not self.takes_parts:
            return "each device has all keys for a part of the queries"
        if parts > 1 and queries % self.part_multiple:
            return f"{queries} queries a device are no multiple of {self.part_multiple}"
        if length % self.length_multiple:
            multiple = self.length_multiple
            return f"sequence length {length} is not a multiple of {multiple}"
        return None


def choose(request: Request, *, parts: int = 1, pieces: bool = False) -> Backend:
    """Chooses the first backend that supports a request; warns why one for this
    platform does not.
    """
    for name, backend in BACKENDS.items():
        reason = backend.refusal(request, parts=parts, pieces=pieces)
        if reason is None:
            return backend
        if execution.current().platform in backend.platforms:
            warnings.warn(
                f"attention: {reason}, so no {name} kernel: XLA computes it, more slowly and with a "
                f"[B, H, S / 4, S] buffer of float32 logits",
                stacklevel=3,
            )
    return BACKENDS["reference"]


def _splash() -> Any:
    """Imports the splash kernels, which only TPUs need."""
    return extras.load("jaxdist.ops.splash")


def _cudnn(request: Request) -> jax.Array:
    # cuDNN's own packing wants document offsets; equal ids become a [B, 1, S, S] bias,
    # H times less than logits. The causal flag still skips the blocks above the
    # diagonal. Before 9.10.2 a window and a bias exclude each other (cudnn_frontend's
    # checks), so the bias then has the window too.
    options = request.options
    ids = request.segment_ids
    mask = None
    window = None
    if options.window is not None:
        window = (options.window - 1, 0)
    if ids is not None:
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        if options.window is not None:
            place = jnp.arange(request.q.shape[1])
            near = place[:, None] - place[None, :] < options.window
            mask = mask & near[None, None]
            window = None
    return jax.nn.dot_product_attention(
        *request.heads,
        mask=mask,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=window,
        implementation="cudnn",
    )


BACKENDS = {
    "splash": Backend(
        lambda request: _splash().splash_attention(request),
        takes_parts=True,
        pieces=Pieces(
            lambda request: _splash().piece(request),
            lambda request, result: _splash().piece_gradients(request, result),
        ),
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
        reference, takes_parts=True, pieces=reference_pieces, is_kernel=False
    ),
}
