"""Feed-forward networks of the experts on rows sorted by expert, with gradients.

All of it runs on one device, without collectives.

Letters: `R` rows (some of them spare), `E` experts, `D` model, `F` feed-forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Activation = Callable[[jax.Array], jax.Array]
# products of the rows with the kernels gate and up, [R, F] each, or with up alone
Products = tuple[jax.Array, ...]


class HiddenGradients(NamedTuple):
    """Gradients at the hidden rows, and the weighted hidden rows themselves."""

    products: tuple[jax.Array, ...]  # [R, F] gradient of each of the `Products`
    weighted: jax.Array  # [R, F] hidden rows times their weights
    weights: jax.Array  # [R] float32 gradient of the rows' weights


def hidden(activation: Activation, *products: jax.Array) -> jax.Array:
    """Computes the hidden rows: activation(gate) * up, or activation(up)."""
    if len(products) == 2:
        gate, up = products
        return activation(gate) * up
    return activation(products[0])


def hidden_gradients(
    activation: Activation,
    products: Sequence[jax.Array],
    dh: jax.Array,
    weights: jax.Array,
) -> HiddenGradients:
    """Computes the gradients of the products and of the rows' weights.

    Args:
      activation: elementwise function.
      products: gate and up, [R, F] each, or up alone.
      dh: [R, F] gradient of the weighted hidden rows.
      weights: [R] float32 weights of the rows.
    """
    h, pull_back = jax.vjp(lambda *products: hidden(activation, *products), *products)
    wide_dh = dh.astype(jnp.float32)
    weights = weights[:, None]
    dweights = (wide_dh * h.astype(jnp.float32)).sum(-1)
    weighted = (h.astype(jnp.float32) * weights).astype(h.dtype)
    dproducts = pull_back((wide_dh * weights).astype(dh.dtype))
    return HiddenGradients(dproducts, weighted, dweights)


@dataclass(frozen=True)
class Backend:
    """Implementation of grouped matmuls on one platform."""

    name: str
    reason: str  # one line for users: what the backend is, and why it was chosen
    # (rows, groups) -> rows to allocate for them, spare ones included
    allocated: Callable[[int, int], int]
    # (x [R, K], kernels [E, K, N], sizes [E]) -> [R, N], in the dtype of x;
    # with `transposed`: x [R, N] -> [R, K]
    matmul: Callable[..., jax.Array]
    # (x [R, K], dy [R, N], sizes [E], total [E, K, N] or None, dtype)
    # -> total + each group's sum of x^T dy, in dtype
    kernel_gradient: Callable[..., jax.Array]
    # Whether `remat.policy` may keep products of a device's own rows for the backward
    # pass. False: a second forward pass computes them again, and would have to gather
    # the kernels once more.
    keeps_products: bool = False
    # Whether the down projection is computed with kernels [E, D, F]. fsdp splits
    # d_model, on TPUs often into parts smaller than a vector. A gather of the last dim
    # would then copy the whole kernel once more.
    turns_down: bool = False
    hidden_gradients: Callable[..., HiddenGradients] = hidden_gradients


class Kernels(NamedTuple):
    """Kernels of the experts, or something that belongs to each of these kernels."""

    inputs: tuple[Any, ...]  # gate and up [E, D, F], or up alone
    down: Any  # [E, F, D]; [E, D, F] where the backend turns it


class RowGradients(NamedTuple):
    """Gradients of rows, and of the kernels that they meet."""

    x: jax.Array  # [R, D]
    weights: jax.Array  # [R] float32
    kernels: Kernels


def forward(
    x_RD: jax.Array,
    sizes_E: jax.Array,
    kernels: Kernels,
    activation: Activation,
    backend: Backend,
) -> tuple[jax.Array, Products]:
    """Computes the experts' outputs [R, D] of their rows, and the rows' products."""
    products = tuple(backend.matmul(x_RD, kernel, sizes_E) for kernel in kernels.inputs)
    h = hidden(activation, *products)
    out = backend.matmul(h, kernels.down, sizes_E, transposed=backend.turns_down)
    return out, products


def backward(
    *,
    x_RD: jax.Array,
    dout_RD: jax.Array,
    weights_R: jax.Array,
    sizes_E: jax.Array,
    kernels: Kernels,
    totals: Kernels | None,
    products: Products = (),
    activation: Activation,
    backend: Backend,
    dtype: DTypeLike,
) -> RowGradients:
    """Computes the gradients of rows, of their weights and of the kernels.

    The output is not computed again. A weight's gradient is the inner product of the
    output and the output's gradient. The hidden row and its gradient have the same
    inner product.

    Args:
      x_RD: rows, sorted by expert.
      dout_RD: gradient of the weighted sum of outputs.
      weights_R: float32 weights of the rows in this sum.
      sizes_E: number of rows of each expert.
      kernels: kernels of the experts.
      totals: sums that the kernels' gradients are added to; None: zeros.
      products: products of the forward pass; if empty, they are computed again.
      activation: elementwise function.
      backend: implementation of the matmuls.
      dtype: dtype of the kernels' gradients.
    """
    if not products:
        products = tuple(
            backend.matmul(x_RD, kernel, sizes_E) for kernel in kernels.inputs
        )
    dh = backend.matmul(
        dout_RD, kernels.down, sizes_E, transposed=not backend.turns_down
    )
    dproducts, h, dweights = backend.hidden_gradients(
        activation, products, dh, weights_R
    )
    if totals is None:
        totals = Kernels((None,) * len(products), None)
    down_operands = (dout_RD, h) if backend.turns_down else (h, dout_RD)
    ddown = backend.kernel_gradient(*down_operands, sizes_E, totals.down, dtype)
    dinputs = tuple(
        backend.kernel_gradient(x_RD, dproduct, sizes_E, total, dtype)
        for dproduct, total in zip(dproducts, totals.inputs, strict=True)
    )
    terms = [
        backend.matmul(dproduct, kernel, sizes_E, transposed=True)
        for dproduct, kernel in zip(dproducts, kernels.inputs, strict=True)
    ]
    # The sum is in float32: a bare sum of bfloat16 is slow on TPUs.
    wide_terms = [term.astype(jnp.float32) for term in terms]
    dx_RD = sum(wide_terms[1:], wide_terms[0]).astype(x_RD.dtype)
    return RowGradients(dx_RD, dweights, Kernels(dinputs, ddown))
