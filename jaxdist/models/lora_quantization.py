"""Kernels in 8 or 4 bits, quantised with qwix (extra `lora`).

int8 has one scale per output channel (LLM.int8(), arXiv:2208.07339, without its
outliers). nf4 is the 16-entry code of QLoRA (arXiv:2305.14314). It has one scale per
tile of up to 64 weights along d_model, and two codes per byte: 4-bit arrays of XLA take
a byte per element on CPU. Scales are float32, and not quantised themselves.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from jaxdist.config import ConfigError
from jaxdist.protocols.dim_names import FSDP_NAME, Names

TILE = 64  # weights that share a scale, as in QLoRA
# with smaller tiles the scales would take more than half the memory of the codes
SMALLEST_TILE = 16


@dataclass(frozen=True)
class Form:
    """The quantised form of a kernel [*stack, *inputs, *outputs]; see `form_of`."""

    kind: str  # int8 or nf4
    inputs: tuple[int, ...]  # the kernel's input dims, counted from its end: -3
    axis: int  # the dim that nf4 splits into tiles, counted from the kernel's end

    def store(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Quantises a kernel.

        Returns:
          Codes and float32 scales. int8: codes have the shape of the kernel, scales lack
          its input dims. nf4: codes are uint8 with half the size of `axis`, scales have
          one element per tile there.
        """
        kernel = kernel.astype(jnp.float32)
        inputs = [kernel.ndim + dim for dim in self.inputs]
        axis = kernel.ndim + self.axis
        if self.kind == "int8":
            channels = [dim for dim in range(kernel.ndim) if dim not in inputs]
            quantized = qwix.quantize(kernel, jnp.int8, channelwise_axes=channels)
            return quantized.qvalue, quantized.scale.squeeze(inputs)
        tile = tile_of(kernel.shape[axis])

        def quantize_row(row: jax.Array) -> Any:
            return qwix.quantize(row, "nf4", tiled_axes={0: tile})

        quantized = _along(quantize_row, axis, kernel.ndim)(kernel)
        pairs = _split(quantized.qvalue.astype(jnp.uint8), axis, 2)
        low, high = jnp.moveaxis(pairs, axis + 1, 0)
        return low | high << 4, quantized.scale

    def restore(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Restores the kernel in float32, bit for bit as `qwix.dequantize` does."""
        if self.kind == "int8":
            quantized = qwix.QArray(codes, jnp.expand_dims(scales, self.inputs))
            kernel: jax.Array = qwix.dequantize(quantized)
            return kernel
        axis = codes.ndim + self.axis
        pairs = jnp.stack([codes & 15, codes >> 4], axis + 1)
        values = _join(_look_up(pairs), axis)
        tiles = _split(values, axis, values.shape[axis] // scales.shape[axis])
        return _join(tiles * jnp.expand_dims(scales, axis + 1), axis)

    def scale_names(self, names: Names) -> Names:
        """Derives the logical names of the scales from those of the kernel."""
        if not names:
            return ()
        if self.kind == "int8":
            return names[len(self.inputs) :]
        axis = len(names) + self.axis
        return (*names[:axis], None, *names[axis + 1 :])


def form_of(
    kind: str, names: Names, dims: tuple[int, ...], contract: int, path: str
) -> Form:
    """Chooses the quantised form of a kernel.

    Args:
      kind: int8 or nf4.
      names: logical names of `dims`, or ().
      dims: the kernel's dims without stack dims.
      contract: number of `dims` that are inputs.
      path: of the kernel, for messages.

    Raises:
      ConfigError: nf4 cannot split the dim into tiles.
    """
    axis = names.index(FSDP_NAME) if FSDP_NAME in names else 0
    if kind == "nf4" and tile_of(dims[axis]) < SMALLEST_TILE:
        raise ConfigError(
            f"lora.base=nf4: {path}: {dims[axis]} weights do not cut into tiles of {SMALLEST_TILE}, 32 or "
            f"{TILE}; set lora.base=int8"
        )
    rank = len(dims)
    return Form(kind, tuple(dim - rank for dim in range(contract)), axis - rank)


def tile_of(size: int) -> int:
    """Computes the largest tile of nf4, TILE or less, that divides a dim's size."""
    return math.gcd(size, TILE)


@functools.cache
def table() -> np.ndarray:
    """Reads the 16 values of nf4 from qwix."""
    with jax.ensure_compile_time_eval():
        codes = qwix.QArray(jnp.arange(16, dtype=jnp.uint4), jnp.ones(1), qtype="nf4")
        return np.asarray(qwix.dequantize(codes))


def _look_up(codes: jax.Array) -> jax.Array:
    """Looks up the values of nf4 codes.

    qwix looks them up in one long row. For that a partitioner would gather the shards
    of all devices, and a lookup is slow on TPU. So each of four rounds halves the
    candidates by one bit of the code, which fuses with the ops that follow.

    The first round has no `where` of two constants, because that needs arrays of them.
    They do not depend on the layer, so `jax.lax.scan` would move them out of the loop
    over layers. There all of them would be in memory at once. (XLA for TPU moves them
    back, XLA for GPU does not.) A clamp takes the constants as scalars. The table
    ascends: a number above it is clamped to the odd candidate, one below to the even.
    """
    beyond = 4 * (codes & 1).astype(jnp.float32) - 2  # 2 or -2; the table is within 1
    values = table()
    candidates = [
        jax.lax.clamp(even, beyond, odd)
        for even, odd in zip(values[::2], values[1::2], strict=True)
    ]
    for bit in range(1, 4):
        is_set = (codes >> bit & 1) == 1
        halves = zip(candidates[::2], candidates[1::2], strict=True)
        candidates = [jnp.where(is_set, odd, even) for even, odd in halves]
    value: jax.Array = candidates[0]
    return value


def _along(
    function: Callable[..., Any], axis: int, rank: int
) -> Callable[[jax.Array], Any]:
    """Maps a function of vectors over all dims of an array but one.

    So reshapes in the function cannot mix dims, which may be on different devices.

    Args:
      function: takes a vector.
      axis: the dim that the vectors lie along.
      rank: number of dims of the array.
    """
    for dim in range(rank):
        if dim != axis:
            function = jax.vmap(function, in_axes=dim, out_axes=dim)
    return function


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits a dim of x into [dim / size, size]."""
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _join(x: jax.Array, axis: int) -> jax.Array:
    """Joins a dim of x with the next dim."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
