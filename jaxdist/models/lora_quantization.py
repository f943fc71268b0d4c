"""Kernels in 8 or 4 bits, written and read with qwix (extra `lora`).

int8 has one scale an output channel (LLM.int8(), arXiv:2208.07339, without its
outliers). nf4 is the 16-entry code of QLoRA (arXiv:2305.14314), one scale a tile of up
to 64 weights along d_model, two codes a byte: XLA's own 4-bit arrays take a byte each
on CPU. Scales are float32, and not quantised again.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from jaxdist.config import ConfigError
from jaxdist.protocols.param_names import FSDP_NAME, Names

TILE = 64  # weights that share a scale; in QLoRA too
# with smaller ones the scales would take more than half of what the codes do
SMALLEST_TILE = 16


@dataclass(frozen=True)
class Form:
    """How a kernel [*stack, *inputs, *outputs] lies in memory; made by `form_of`,
    hashable.
    """

    kind: str  # int8, nf4
    inputs: tuple[int, ...]  # the kernel's input dims, from its end: -3
    axis: int  # the dim that nf4 cuts into tiles, from the kernel's end

    def store(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (codes, float32 scales) of a kernel.

        int8: codes like the kernel, scales without its input dims. nf4: codes uint8
        with half of `axis`, scales with a tile-th of it.
        """
        kernel = kernel.astype(jnp.float32)
        inputs = [kernel.ndim + dim for dim in self.inputs]
        axis = kernel.ndim + self.axis
        if self.kind == "int8":
            channels = [dim for dim in range(kernel.ndim) if dim not in inputs]
            quantized = qwix.quantize(kernel, jnp.int8, channelwise_axes=channels)
            return quantized.qvalue, quantized.scale.squeeze(inputs)
        tile = tile_of(kernel.shape[axis])
        quantize = _along(
            lambda row: qwix.quantize(row, "nf4", tiled_axes={0: tile}),
            axis,
            kernel.ndim,
        )
        quantized = quantize(kernel)
        low, high = jnp.moveaxis(
            _split(quantized.qvalue.astype(jnp.uint8), axis, 2), axis + 1, 0
        )
        return low | high << 4, quantized.scale

    def restore(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Returns the kernel in float32: the values that `qwix.dequantize` gives, bit
        for bit.
        """
        if self.kind == "int8":
            return qwix.dequantize(
                qwix.QArray(codes, jnp.expand_dims(scales, self.inputs))
            )
        axis = codes.ndim + self.axis
        values = _joined(
            _looked_up(jnp.stack([codes & 15, codes >> 4], axis + 1)), axis
        )
        tiles = _split(values, axis, values.shape[axis] // scales.shape[axis])
        return _joined(tiles * jnp.expand_dims(scales, axis + 1), axis)

    def scale_names(self, names: Names) -> Names:
        """Returns the logical names of the scales of a kernel with these names."""
        if not names:
            return ()
        if self.kind == "int8":
            return names[len(self.inputs) :]
        at = len(names) + self.axis
        return (*names[:at], None, *names[at + 1 :])


def form_of(
    kind: str, names: Names, dims: tuple[int, ...], contract: int, path: str
) -> Form:
    """Returns the form of a kernel whose own dims (without stack dims) are `dims`.

    Args:
      names: logical names of `dims`, or ().
      contract: how many of the dims are inputs.

    Raises:
      ConfigError: nf4 finds no tiles in its dim.
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
    """Returns the weights to a scale: the most that a dim of this size allows, TILE at
    best.
    """
    return math.gcd(size, TILE)


@functools.cache
def table() -> np.ndarray:
    """Returns the 16 values of nf4, as qwix has them."""
    with jax.ensure_compile_time_eval():
        codes = qwix.QArray(jnp.arange(16, dtype=jnp.uint4), jnp.ones(1), qtype="nf4")
        return np.asarray(qwix.dequantize(codes))


def _looked_up(codes: jax.Array) -> jax.Array:
    """Returns the values of nf4 codes.

    qwix looks them up in one long row: a partitioner would gather the shards of all
    devices for it, and a lookup is slow on TPU. Four rounds of choosing by a bit fuse
    with what comes after.
    """
    level = [jnp.float32(value) for value in table()]
    for bit in range(4):
        odd = (codes >> bit & 1) == 1
        level = [
            jnp.where(odd, b, a) for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    return level[0]


def _along(function: Callable, axis: int, rank: int) -> Callable:
    """Returns a function of vectors as one of arrays, along one of their dims.

    What it does to a vector's shape then never mixes dims, which may lie on different
    devices.
    """
    for dim in range(rank):
        if dim != axis:
            function = jax.vmap(function, in_axes=dim, out_axes=dim)
    return function


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Returns x with a dim as [dim / size, size]."""
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """Returns x with a dim and the next as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
