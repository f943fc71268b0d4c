"""The precision policy: what is stored, what is computed in, and the one place for casts.

Masters, optimizer state, gradients and (by default) reductions are float32. Matrix products run in
`precision.compute`. `ops` reads it from the `Execution` in force, so a model's activations take it at
the embedding and keep it: every product casts its kernel to its activations' dtype, norms, softmax
and losses work in float32. Models that don't use `ops` get their parameters cast by `cast`.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

FloatName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of storage and of computation."""

    params: FloatName = "float32"  # stored parameters; bfloat16 halves them and loses small updates
    compute: FloatName = "float32"  # matrix products and activations
    reduce: FloatName = "float32"  # kernels' gradients between devices; bfloat16 halves bytes and rounds


def cast(tree, dtype: str | jnp.dtype):
    """Returns the tree with its floating-point leaves in `dtype`; integers stay."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
