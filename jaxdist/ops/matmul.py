"""Matmuls of activations with parameters.

`project` multiplies large kernels by the current recipe (`precision.matmul`), and all
others in the compute dtype (`ops.dense_matmul`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
from flax import nnx

from jaxdist.ops import dense_matmul, fp8
from jaxdist.ops.dense_matmul import FrozenKernel, Kernel
from jaxdist.parallel import execution
from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.formats.fp8 import Fp8Recipe
from jaxdist.protocols.dim_names import Names

# Function of each class of recipes: (x, kernels, names, contract, recipe) -> outputs.
_MULTIPLY: Mapping[type[Recipe], Callable[..., tuple[jax.Array, ...]]] = {
    Fp8Recipe: fp8.multiply,
}


def project(x: jax.Array, *kernels: Any, contract: int = 1) -> tuple[jax.Array, ...]:
    """Multiplies `x` with each kernel, in the dtype of `x`.

    Args:
      x: [..., *K]; the last `contract` dims are summed over.
      *kernels: parameters [*K, *N] with their logical names as metadata. A module may
        stand for a parameter (`models.lora.LoraKernel`); it has the methods
        `frozen() -> FrozenKernel` and `apply_adapter(y, x) -> y`.
      contract: number of dims in K.

    Returns:
      [..., *N] for each kernel.
    """
    names = tuple(getattr(kernel, "logical", ()) for kernel in kernels)
    stored = tuple(k.frozen() if hasattr(k, "frozen") else k[...] for k in kernels)
    for kernel in stored:
        if not isinstance(kernel, FrozenKernel):
            chex.assert_equal(kernel.shape[:contract], x.shape[-contract:])
    outputs = _multiply_by_format(x, stored, names, contract)
    return tuple(
        kernel.apply_adapter(y, x) if hasattr(kernel, "frozen") else y
        for kernel, y in zip(kernels, outputs, strict=True)
    )


def project_lightly(x: jax.Array, kernel: nnx.Variable[jax.Array]) -> jax.Array:
    """Multiplies x [..., K] with a kernel [K, *N], without keeping the result.

    Computing the result again is cheaper than keeping it. So this is a batch of one
    matmul: `remat.policy=dots` keeps only matmuls without a batch.
    """
    names = (getattr(kernel, "logical", ()),)
    (y,) = jax.vmap(lambda x, kernel: dense_matmul.multiply(x, (kernel,), names, 1))(
        x[None], kernel[...][None]
    )
    result: jax.Array = y[0]
    return result


def _multiply_by_format(
    x: jax.Array, kernels: Sequence[Kernel], names: tuple[Names, ...], contract: int
) -> tuple[jax.Array, ...]:
    """Multiplies with two groups of kernels: those of the recipe, and the others."""
    recipe = execution.current().recipe
    by_recipe = []
    if recipe is not None:
        by_recipe = [
            i
            for i, (kernel, kernel_names) in enumerate(zip(kernels, names, strict=True))
            if _takes(recipe, x, kernel, kernel_names, contract)
        ]
    others = [i for i in range(len(kernels)) if i not in by_recipe]
    outputs: dict[int, jax.Array] = {}
    for group in (by_recipe, others):
        if not group:
            continue
        arguments: Any = (
            x,
            tuple(kernels[i] for i in group),
            tuple(names[i] for i in group),
            contract,
        )
        if recipe is not None and group is by_recipe:
            results = _MULTIPLY[type(recipe)](*arguments, recipe)
        else:
            results = dense_matmul.multiply(*arguments)
        outputs |= zip(group, results, strict=True)
    return tuple(outputs[i] for i in range(len(kernels)))


def _takes(
    recipe: Recipe, x: jax.Array, kernel: Kernel, names: Names, contract: int
) -> bool:
    """Checks whether the recipe multiplies x with a kernel."""
    if x.dtype != execution.current().compute_dtype(x.dtype):
        return False  # a wider dtype than the compute dtype is meant (routers)
    if isinstance(kernel, FrozenKernel):
        return kernel.is_plain and not recipe.why_not(
            names, kernel.parts[0].shape, contract
        )
    return not recipe.why_not(names, kernel.shape, contract)
