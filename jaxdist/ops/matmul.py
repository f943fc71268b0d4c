"""Matmuls of activations with parameters: `project` chooses how each kernel is
multiplied.

Large kernels are multiplied by the recipe in force (`precision.matmul`), all others in
the compute dtype (`ops.dense_matmul`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
from flax import nnx

from jaxdist.ops import dense_matmul, fp8
from jaxdist.ops.dense_matmul import FrozenKernel
from jaxdist.parallel import execution
from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.formats.fp8 import Fp8Recipe
from jaxdist.protocols.param_names import Names

# The function of each class of recipes: (x, kernels, names, contract, recipe) ->
# products.
_MULTIPLY: Mapping[type[Recipe], Callable[..., tuple[jax.Array, ...]]] = {
    Fp8Recipe: fp8.multiply,
}


def project(x: jax.Array, *kernels: Any, contract: int = 1) -> tuple[jax.Array, ...]:
    """Returns the product of `x` with each kernel, in the dtype of `x`.

    Args:
      x: [..., *K], its last `contract` dims are summed over.
      kernels: parameters [*K, *out], with their logical names as metadata; or modules
        that stand for one (`models.lora.LoraKernel`): `frozen() -> FrozenKernel`, and
        `apply_adapter(y, x) -> y`.
      contract: number of dims summed over.
    """
    names = tuple(getattr(kernel, "logical", ()) for kernel in kernels)
    stored = tuple(k.frozen() if hasattr(k, "frozen") else k[...] for k in kernels)
    for kernel in stored:
        if not isinstance(kernel, FrozenKernel):
            chex.assert_equal(kernel.shape[:contract], x.shape[-contract:])
    products = zip(kernels, _by_format(x, stored, names, contract), strict=True)
    return tuple(
        k.apply_adapter(y, x) if hasattr(k, "frozen") else y for k, y in products
    )


def project_lightly(x: jax.Array, kernel: nnx.Variable) -> jax.Array:
    """Returns x [..., K] times a kernel [K, *out] that is cheaper to apply again than
    to keep.

    It is a batch of one product: `remat.policy=dots` keeps only products without a
    batch.
    """
    names = (getattr(kernel, "logical", ()),)
    (y,) = jax.vmap(lambda x, kernel: dense_matmul.multiply(x, (kernel,), names, 1))(
        x[None], kernel[...][None]
    )
    return y[0]


def _by_format(
    x, kernels, names: tuple[Names, ...], contract: int
) -> tuple[jax.Array, ...]:
    """Multiplies with kernels: those that the recipe takes as one group, the others as
    another.
    """
    recipe = execution.current().recipe
    taken = []
    if recipe is not None:
        taken = [
            i
            for i, (kernel, own_names) in enumerate(zip(kernels, names, strict=True))
            if _takes(recipe, x, kernel, own_names, contract)
        ]
    others = [i for i in range(len(kernels)) if i not in taken]
    products: dict[int, jax.Array] = {}
    for group in filter(None, (taken, others)):
        arguments: Any = (
            x,
            tuple(kernels[i] for i in group),
            tuple(names[i] for i in group),
            contract,
        )
        if recipe is not None and group is taken:
            outputs = _MULTIPLY[type(recipe)](*arguments, recipe)
        else:
            outputs = dense_matmul.multiply(*arguments)
        products |= zip(group, outputs, strict=True)
    return tuple(products[i] for i in range(len(kernels)))


def _takes(recipe: Recipe, x, kernel, names: Names, contract: int) -> bool:
    """Checks if the recipe multiplies a kernel."""
    # wider is meant (routers)
    if x.dtype != execution.current().compute_dtype(x.dtype):
        return False
    if isinstance(kernel, FrozenKernel):
        return kernel.is_plain and not recipe.why_not(
            names, kernel.parts[0].shape, contract
        )
    return not recipe.why_not(names, kernel.shape, contract)
