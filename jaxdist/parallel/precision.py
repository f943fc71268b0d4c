"""The precision policy: what is stored, what is computed in, and the one place for
casts.

Masters, optimizer state, gradients and (by default) reductions are float32. Matrix
products run in `precision.compute`. `ops` reads it from the `Execution` in force, so a
model's activations take it at the embedding and keep it: every product casts its kernel
to its activations' dtype, norms, softmax and losses work in float32. Models that don't
use `ops` get their parameters cast by `cast`.

`precision.matmul` has the large products with kernels in other numbers instead:
activations, gradients and parameters stay as they are, and so does all else that is
computed. The tables here name the formats, and each says itself what it needs
(`parallel.formats`).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.config.annotations import PositiveFloat, PositiveInt
from jaxdist.parallel.formats import floats, fp8
from jaxdist.parallel.formats.format import Format, Recipe, Units

FloatName = Literal["float32", "bfloat16"]
ComputeName = Literal["float32", "bfloat16", "float16"]
RecipeName = Literal["fp8_rowwise", "fp8_rowwise_wgrad_bf16", "fp8_tensorwise"]

FORMATS: Mapping[str, Format] = {
    format.name: format for format in (floats.FLOAT32, floats.BFLOAT16, floats.FLOAT16)
}
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (fp8.ROWWISE, fp8.ROWWISE_WGRAD_BF16, fp8.TENSORWISE)
}
UNITS: tuple[Units, ...] = tuple(
    dict.fromkeys(recipe.units for recipe in RECIPES.values())
)
LOSS_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # torch's


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
    matmul: Literal["compute", RecipeName] = "compute"
    # in 8-bit floats also those that bfloat16 multiplies as fast
    fp8_small_kernels: bool = False
    # with compute=float16: at the beginning, a power of two
    loss_scale: PositiveFloat = LOSS_SCALE
    # good steps in a row after which it doubles
    loss_scale_growth_interval: PositiveInt = GROWTH_INTERVAL

    @property
    def format(self) -> Format:
        """Returns the format of activations and matmuls."""
        return FORMATS[self.compute]

    @property
    def recipe(self) -> Recipe | None:
        """Returns how large kernels are multiplied; None: in the compute dtype."""
        if self.matmul == "compute":
            return None
        return dataclasses.replace(
            RECIPES[self.matmul], takes_small=self.fp8_small_kernels
        )

    @property
    def peak(self) -> str:
        """Names the dtype whose published peak MFU is a share of: the fastest that
        matmuls are in.
        """
        return (self.recipe or self.format).peak

    def faults(self) -> Iterator[str]:
        """Yields what is wrong between the values, each with its cure."""
        recipe = RECIPES.get(
            self.matmul
        )  # of another word the range says what is wrong
        if recipe is not None and self.compute != recipe.dtype:
            yield (
                f"precision.matmul={self.matmul}: activations and gradients between such products are "
                f"{recipe.dtype}, and precision.compute={self.compute}; set precision.compute={recipe.dtype}"
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
    """Yields why a device is not to compute in `precision.compute`, with the fix."""
    if config.compute in FORMATS:  # of another word the range says what is wrong
        yield from config.format.device_faults(device)


def advice(config: PrecisionConfig, device: jax.Device) -> Iterator[str]:
    """Yields what to know before a device computes in `precision.compute`."""
    return config.format.advice(device)


def cast(tree, dtype: str | jnp.dtype):
    """Returns the tree with its floating-point leaves in `dtype`; integers stay."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
