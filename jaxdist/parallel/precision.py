"""The precision policy: what is stored, what is computed in, and the one place for
casts.

Masters, optimizer state, gradients and (by default) reductions are float32. Matrix
products run in `precision.compute`. `ops` reads it from the `Execution` in force, so a
model's activations take it at the embedding and keep it: every product casts its kernel
to its activations' dtype, norms, softmax and losses work in float32. Models that don't
use `ops` get their parameters cast by `cast`.

float16 has a range so narrow that gradients need a scale: `step.loss_scale`. It is for
GPUs without bfloat16.

`precision.matmul` has the large products with kernels in 8-bit floats instead
(`ops.fp8`): activations, gradients and parameters stay as they are, and so does all
else that is computed.
"""

import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.config.annotations import PositiveFloat, PositiveInt
from jaxdist.hardware.chips import chip_for, platform_of

FloatName = Literal["float32", "bfloat16"]
ComputeName = Literal["float32", "bfloat16", "float16"]
# of torchao's
Recipe = Literal["fp8_rowwise", "fp8_rowwise_wgrad_bf16", "fp8_tensorwise"]
RECIPES: tuple[Recipe, ...] = typing.get_args(Recipe)
Matmul = Literal["compute", "fp8_rowwise", "fp8_rowwise_wgrad_bf16", "fp8_tensorwise"]
LOSS_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # torch's
NO_BFLOAT16 = (
    "has no units for bfloat16, products would be in float32; set precision.compute=float16, which is given "
    "a loss scale by itself"
)
_AMPERE = 8  # NVIDIA's compute capability from which on there is bfloat16
# Cycles of a product of float16 over those of bfloat16, compiled ahead of time (libtpu
# 0.0.42.1).
_FLOAT16_COSTS = {"TPU v5e": 1.02, "TPU v5p": 1.02, "TPU v6e": 1.14, "TPU 7x": 1.33}


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of storage and of computation."""

    # stored parameters; bfloat16 halves them and loses small updates
    params: FloatName = "float32"
    # matrix products and activations; float16 for GPUs without bfloat16
    compute: ComputeName = "float32"
    # kernels' gradients between devices; bfloat16 halves bytes and rounds
    reduce: FloatName = "float32"
    # of products with large kernels: the compute dtype, or 8-bit floats by recipe
    matmul: Matmul = "compute"
    # in 8-bit floats also those that bfloat16 multiplies as fast
    fp8_small_kernels: bool = False
    # with compute=float16: at the beginning, a power of two
    loss_scale: PositiveFloat = LOSS_SCALE
    # good steps in a row after which it doubles
    loss_scale_growth_interval: PositiveInt = GROWTH_INTERVAL

    @property
    def peak(self) -> str:
        """Returns the dtype whose published peak MFU is a share of: the fastest that
        products are in.
        """
        return self.compute if self.matmul == "compute" else "float8"

    def faults(self) -> Iterator[str]:
        """Yields what is wrong between the values, each with its cure."""
        if self.matmul != "compute" and self.compute != "bfloat16":
            yield (
                f"precision.matmul={self.matmul}: activations and gradients between such products are "
                f"bfloat16, and precision.compute={self.compute}; set precision.compute=bfloat16"
            )
        if self.fp8_small_kernels and self.matmul == "compute":
            yield "precision.fp8_small_kernels: no kernel is in 8-bit floats; set precision.matmul, too"
        mantissa, exponent = math.frexp(self.loss_scale)
        if mantissa != 0.5 or not -23 <= exponent <= 128:
            yield (
                f"precision.loss_scale={self.loss_scale:g}; required a power of two from 2^-24 to 2^127, "
                f"which rounds nothing; set 65536, or leave it out"
            )


def device_faults(config: PrecisionConfig, device: jax.Device) -> Iterator[str]:
    """Yields why a device gains nothing from `precision.compute`."""
    if config.compute == "float16" and platform_of(device.platform) == "tpu":
        chip = chip_for(device.device_kind)
        cost = _FLOAT16_COSTS.get(chip.name if chip else "")
        slower = (
            f": there a product takes {cost:g} times as many cycles" if cost else ""
        )
        yield (
            f"precision.compute=float16: {device.device_kind} multiplies bfloat16, which needs no loss "
            f"scale{slower}; set precision.compute=bfloat16"
        )


def advice(config: PrecisionConfig, device: jax.Device) -> Iterator[str]:
    """Yields what to say of bfloat16 on a GPU that has no units for it."""
    if config.compute == "bfloat16" and lacks_bfloat16(device):
        yield f"precision.compute=bfloat16: {device.device_kind} {NO_BFLOAT16}"


def lacks_bfloat16(device: jax.Device) -> bool:
    """Returns whether a device is known to multiply float16, but not bfloat16: GPUs
    before Ampere.
    """
    if platform_of(device.platform) != "gpu":
        return False
    if chip := chip_for(device.device_kind):
        return chip.peak("bfloat16") is None and chip.peak("float16") is not None
    # NVIDIA's, "7.5"
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return capability.isdecimal() and int(capability) < _AMPERE


def cast(tree, dtype: str | jnp.dtype):
    """Returns the tree with its floating-point leaves in `dtype`; integers stay."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
