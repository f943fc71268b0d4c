"""The experts' feed-forward part of rows sorted by expert, and its gradients; all on one device.

Letters: `R` rows (some spare), `E` experts, `D` model, `F` feed-forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.ops.experts.grouped_matmul import Backend

Activation = Callable[[jax.Array], jax.Array]
Products = tuple[jax.Array, ...]  # of the rows with gate and up [R, F], or with up alone


class Kernels(NamedTuple):
    """The experts' kernels, or what belongs to each of them."""

    inputs: tuple[Any, ...]  # gate and up [E, D, F], or up alone
    down: Any  # [E, F, D]


class RowGradients(NamedTuple):
    """What the backward pass of rows gives."""

    x: jax.Array  # [R, D]
    weights: jax.Array  # [R] float32
    kernels: Kernels


def _hidden(activation: Activation, *products: jax.Array) -> jax.Array:
    """Returns activation(gate) * up, or activation(up)."""
    return activation(products[0]) * products[1] if len(products) == 2 else activation(products[0])


def forward(
    x_RD, sizes_E, kernels: Kernels, activation: Activation, backend: Backend
) -> tuple[jax.Array, Products]:
    """Returns the experts' outputs of their rows [R, D], and the first products of these."""
    products = tuple(backend.matmul(x_RD, kernel, sizes_E) for kernel in kernels.inputs)
    return backend.matmul(_hidden(activation, *products), kernels.down, sizes_E), products


def backward(
    x_RD,
    dout_RD,
    weights_R,
    sizes_E,
    kernels: Kernels,
    totals: Kernels | None,
    products: Products = (),
    *,
    activation: Activation,
    backend: Backend,
    dtype,
) -> RowGradients:
    """Returns the gradients of a row's x, of its weight and, added to `totals`, of the kernels.

    The first products are computed again where they were not kept; the down projection is not: a weight's
    gradient, the product of the output and its gradient, is that of the hidden row and its gradient.

    Args:
      dout_RD: gradient of the weighted outputs' sum.
      weights_R: float32 weights of the rows in it.
      totals: in which the kernels' gradients add up, None for zeros.
      products: those of the forward pass; none: they are computed again.
      dtype: of the kernels' gradients.
    """
    up = products or [backend.matmul(x_RD, kernel, sizes_E) for kernel in kernels.inputs]
    h, of_products = jax.vjp(lambda *products: _hidden(activation, *products), *up)
    dh = backend.matmul(dout_RD, kernels.down, sizes_E, transposed=True)
    dweights = (dh.astype(jnp.float32) * h.astype(jnp.float32)).sum(-1)
    weights = weights_R[:, None]
    dproducts = of_products((dh.astype(jnp.float32) * weights).astype(dh.dtype))
    h = (h.astype(jnp.float32) * weights).astype(h.dtype)
    into = totals or Kernels((None,) * len(up), None)
    ddown = backend.kernel_gradient(h, dout_RD, sizes_E, into.down, dtype)
    dinputs = tuple(
        backend.kernel_gradient(x_RD, dy, sizes_E, total, dtype)
        for dy, total in zip(dproducts, into.inputs, strict=True)
    )
    dx = [
        backend.matmul(dy, kernel, sizes_E, transposed=True)
        for dy, kernel in zip(dproducts, kernels.inputs, strict=True)
    ]
    return RowGradients(sum(dx[1:], dx[0]), dweights, Kernels(dinputs, ddown))
