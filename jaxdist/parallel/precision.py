"""The precision policy: dtypes of storage, of computation and of reductions.

By default, parameters, optimizer state, gradients and reductions are float32. Matmuls
run in `precision.compute`. `ops` reads it from the active `Execution`. So the embedding
returns activations of this dtype, and every matmul casts its kernel to it. Norms,
softmax and losses are computed in float32. Parameters of models that do not use `ops`
are cast by `cast`.

`precision.matmul` selects other numbers for matmuls with large kernels. The dtypes of
activations, gradients and parameters, and all other ops, stay the same. The tables here
name the formats, and each format declares its requirements (`parallel.formats`).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jaxdist.config.annotations import PositiveFloat, PositiveInt, ReadWith
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
# defaults of torch
LOSS_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
_SCALED = ReadWith(
    "precision.compute",
    tuple(name for name, format in FORMATS.items() if format.scales_loss),
)


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of storage and of computation."""

    # dtype of stored parameters; bfloat16 halves their memory and loses small updates
    params: FloatName = "float32"
    # dtype of matmuls and activations; float16 is for GPUs without bfloat16
    compute: ComputeName = "float32"
    # dtype of kernels' gradients between devices; bfloat16 halves the bytes and rounds
    reduce: FloatName = "float32"
    # numbers of matmuls with large kernels: the compute dtype, or a recipe of 8-bit
    # floats
    matmul: Literal["compute", RecipeName] = "compute"
    # use 8-bit floats also for kernels that are too small to gain from them
    fp8_small_kernels: bool = False
    # initial loss scale with compute=float16, a power of two
    loss_scale: Annotated[PositiveFloat, _SCALED] = LOSS_SCALE
    # consecutive finite steps after which the loss scale doubles
    loss_scale_growth_interval: Annotated[PositiveInt, _SCALED] = GROWTH_INTERVAL

    @property
    def format(self) -> Format:
        """The format of activations and matmuls."""
        return FORMATS[self.compute]

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of matmuls with large kernels; None: the compute dtype."""
        if self.matmul == "compute":
            return None
        return dataclasses.replace(
            RECIPES[self.matmul], takes_small=self.fp8_small_kernels
        )

    @property
    def peak(self) -> str:
        """The dtype whose published peak MFU refers to: the fastest one of matmuls."""
        return (self.recipe or self.format).peak

    def faults(self) -> Iterator[str]:
        """Yields a message for each conflict of values, with its fix."""
        # None for an unknown name, which the check of ranges reports
        recipe = RECIPES.get(self.matmul)
        if recipe is not None and self.compute != recipe.dtype:
            yield (
                f"precision.matmul={self.matmul}: activations and gradients between such matmuls are "
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
    """Yields why a device must not compute in `precision.compute`, with the fix."""
    if config.compute in FORMATS:  # the check of ranges reports other names
        yield from config.format.device_faults(device)


def advice(config: PrecisionConfig, device: jax.Device) -> Iterator[str]:
    """Yields advice for a device that computes in `precision.compute`."""
    return config.format.advice(device)


def cast(tree: Any, dtype: str | jnp.dtype) -> Any:
    """Casts the floating-point leaves of a tree; integers stay as they are."""

    def cast_leaf(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast_leaf, tree)
