"""Backends of attention: the limits of each, and the choice between them.

A backend is a function request -> out over whole sequences of a device's batch rows and
heads. To add one, add a row to `BACKENDS`, which lists preferred backends first. A
backend may also support a part of the queries with all keys (`takes_parts`), and parts
of both (`Pieces`).
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
    """Implementation of attention, and its limits."""

    run: Callable[[Request], jax.Array]
    takes_parts: bool = False  # whether it computes a part of the queries with all keys
    pieces: Pieces | None = None  # functions for parts of queries and keys; None: none
    platforms: tuple[str, ...] = ("tpu", "gpu", "cpu")
    dtypes: tuple[str, ...] = ()  # dtypes of q, k and v; () = any
    head_size_multiple: int = 1
    max_head_size: float = math.inf
    length_multiple: int = 1  # of the sequence length
    part_multiple: int = 1  # of the queries of a part, and of the keys of a piece
    softcap: bool = True  # whether it supports a softcap
    before_ampere: bool = True  # whether it runs on NVIDIA GPUs without bfloat16
    # whether the partitioner cannot split it, so that it is called device by device
    is_kernel: bool = True

    def refusal(
        self, request: Request, *, parts: int = 1, pieces: bool = False
    ) -> str | None:
        """Explains why the backend cannot compute a request; None: it can.

        Args:
          request: the whole request.
          parts: number of parts that the queries are computed in.
          pieces: whether the keys are computed in parts, too.
        """
        now = execution.current()
        options = request.options
        dtype = str(request.q.dtype)
        length = request.q.shape[1]
        head_sizes = (request.q.shape[3], request.v.shape[3])
        queries = length // parts
        if now.platform not in self.platforms:
            return f"it is for {' and '.join(self.platforms)}, not {now.platform}"
        if not self.before_ampere and lacks_bfloat16(now.device):
            return "the GPU is older than Ampere"
        reason = self.size_refusal(dtype, length, head_sizes)
        if reason:
            return reason
        if options.softcap is not None and not self.softcap:
            return "a softcap is set"
        if pieces and self.pieces is None:
            return "keys and values travel from device to device"
        if parts > 1 and not pieces and not self.takes_parts:
            return "each device has all keys for a part of the queries"
        if parts > 1 and queries % self.part_multiple:
            return f"{queries} queries a device are no multiple of {self.part_multiple}"
        return None

    def size_refusal(
        self, dtype: str, length: int, head_sizes: tuple[int, int]
    ) -> str | None:
        """Explains why the backend does not support a dtype or a size; None: it does.

        Args:
          dtype: dtype of queries, keys and values.
          length: tokens of a sequence.
          head_sizes: elements of a head of queries and keys, and of one of values.
        """
        if self.dtypes and dtype not in self.dtypes:
            return f"{dtype} is not {' or '.join(self.dtypes)}"
        for size in head_sizes:
            if size % self.head_size_multiple or size > self.max_head_size:
                sizes = f"{self.head_size_multiple} up to {self.max_head_size}"
                return f"head size {size} is not a multiple of {sizes}"
        if length % self.length_multiple:
            multiple = self.length_multiple
            return f"sequence length {length} is not a multiple of {multiple}"
        return None


def has_kernel(
    platform: str, dtype: str, length: int, head_sizes: tuple[int, int]
) -> bool:
    """Checks whether a kernel computes attention of whole sequences on a platform.

    Args:
      platform: tpu, gpu or cpu.
      dtype: dtype of queries, keys and values.
      length: tokens of a sequence.
      head_sizes: elements of a head of queries and keys, and of one of values.
    """
    return any(
        backend.is_kernel
        and platform in backend.platforms
        and backend.size_refusal(dtype, length, head_sizes) is None
        for backend in BACKENDS.values()
    )


def explain_sizes(head_sizes: tuple[int, int]) -> str:
    """Explains to users how GPUs compute heads of two sizes; "" on other platforms.

    Args:
      head_sizes: elements of a head of queries and keys, and of one of values.
    """
    size, value_size = head_sizes
    if execution.current().platform != "gpu" or size == value_size:
        return ""
    line = f"attention: heads of {size} elements, {value_size} of values"
    if BACKENDS["cudnn"].size_refusal("bfloat16", 2, head_sizes):
        return f"{line}: too large for cuDNN, XLA computes it"
    return f"{line}: padded to {max(head_sizes)} for cuDNN, which takes one size"


def choose(request: Request, *, parts: int = 1, pieces: bool = False) -> Backend:
    """Chooses the first backend that supports a request.

    It warns if a preferred backend of this platform does not.
    """
    for name, backend in BACKENDS.items():
        reason = backend.refusal(request, parts=parts, pieces=pieces)
        if reason is None:
            return backend
        if execution.current().platform in backend.platforms:
            warnings.warn(
                f"attention: {reason}, so the {name} kernel is not used. XLA computes "
                f"attention more slowly, with a [B, H, S / 4, S] buffer of float32 logits.",
                stacklevel=3,
            )
    return BACKENDS["reference"]


def _splash() -> Any:
    """Imports the module of splash kernels; other platforms do not need it."""
    return extras.load("jaxdist.ops.splash")


def _cudnn(request: Request) -> jax.Array:
    # cuDNN packs documents by offsets, which we do not have. So the segment ids become
    # a [B, 1, S, S] bias, H times smaller than the logits. The causal flag still skips
    # the blocks above the diagonal. Before 9.10.2, cudnn_frontend rejects a window
    # together with a bias, so the bias then contains the window.
    options = request.options
    ids = request.segment_ids
    mask = None
    window = None
    if options.window is not None:
        window = (options.window - 1, 0)
    if ids is not None:
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        if options.window is not None:
            position = jnp.arange(request.q.shape[1])
            in_window = position[:, None] - position[None, :] < options.window
            mask = mask & in_window[None, None]
            window = None
    # jax takes values of another head size on Hopper and later only, and refuses them in
    # a program that it compiles for a GPU that is not here. Zeros change no result.
    value_size = request.v.shape[3]
    size = max(request.q.shape[3], value_size)
    q, k, v = (_pad_heads(x, size) for x in request.heads)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return out[..., :value_size]


def _pad_heads(x: jax.Array, size: int) -> jax.Array:
    """Pads heads [B, S, H, N] with zeros to a size."""
    padding = size - x.shape[3]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, padding)]) if padding else x


BACKENDS = {
    "splash": Backend(
        run=lambda request: _splash().splash_attention(request),
        takes_parts=True,
        pieces=Pieces(
            forward=lambda request: _splash().piece(request),
            backward=lambda request, result: _splash().piece_gradients(request, result),
        ),
        platforms=("tpu",),
        part_multiple=128,
    ),
    # Limits from jax._src.cudnn.fused_attention, and for GPUs from the table in
    # NVIDIA's documentation of cuDNN's attention.
    "cudnn": Backend(
        run=_cudnn,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        head_size_multiple=8,
        max_head_size=128,
        length_multiple=2,
        softcap=False,
        before_ampere=False,
    ),
    "reference": Backend(
        run=reference, takes_parts=True, pieces=reference_pieces, is_kernel=False
    ),
}
