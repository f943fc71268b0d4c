"""The precision policy: what is stored, what is computed in, and the one place for casts.

Masters, optimizer state, gradients and (by default) reductions are float32. Matrix products run in
`precision.compute`. `ops` reads it from the `Execution` in force, so a model's activations take it at
the embedding and keep it: every product casts its kernel to its activations' dtype, norms, softmax
and losses work in float32. Models that don't use `ops` get their parameters cast by `cast`.

`precision.matmul` has the large products with kernels in 8-bit floats instead (`ops.fp8`): activations,
gradients and parameters stay as they are, and so does all else that is computed.
"""

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

FloatName = Literal["float32", "bfloat16"]
Recipe = Literal["fp8_rowwise", "fp8_rowwise_wgrad_bf16", "fp8_tensorwise"]  # of torchao's
RECIPES: tuple[Recipe, ...] = typing.get_args(Recipe)
Matmul = Literal["compute", "fp8_rowwise", "fp8_rowwise_wgrad_bf16", "fp8_tensorwise"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of storage and of computation."""

    params: FloatName = "float32"  # stored parameters; bfloat16 halves them and loses small updates
    compute: FloatName = "float32"  # matrix products and activations
    reduce: FloatName = "float32"  # kernels' gradients between devices; bfloat16 halves bytes and rounds
    matmul: Matmul = "compute"  # of products with large kernels: the compute dtype, or 8-bit floats by recipe
    fp8_small_kernels: bool = False  # in 8-bit floats also those that bfloat16 multiplies as fast

    @property
    def peak(self) -> str:
        """Returns the dtype whose published peak MFU is a share of: the fastest that products are in."""
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


def cast(tree, dtype: str | jnp.dtype):
    """Returns the tree with its floating-point leaves in `dtype`; integers stay."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
