"""The experts' feed-forward part of rows sorted by expert, and its gradients; all on
one device.

Letters: `R` rows (some spare), `E` experts, `D` model, `F` feed-forward.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.ops.experts.grouped_matmul import Backend
from jaxdist.ops.experts.hidden import Activation, hidden

# of the rows with gate and up [R, F], or with up alone
Products = tuple[jax.Array, ...]


class Kernels(NamedTuple):
    """The experts' kernels, or what belongs to each of them."""

    inputs: tuple[Any, ...]  # gate and up [E, D, F], or up alone
    down: Any  # [E, F, D]; [E, D, F] where the backend turns it


class RowGradients(NamedTuple):
    """What the backward pass of rows gives."""

    x: jax.Array  # [R, D]
    weights: jax.Array  # [R] float32
    kernels: Kernels


def forward(
    x_RD, sizes_E, kernels: Kernels, activation: Activation, backend: Backend
) -> tuple[jax.Array, Products]:
    """Returns the experts' outputs of their rows [R, D], and the first products of
    these.
    """
    products = tuple(backend.matmul(x_RD, kernel, sizes_E) for kernel in kernels.inputs)
    h = hidden(activation, *products)
    return backend.matmul(
        h, kernels.down, sizes_E, transposed=backend.turns_down
    ), products


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
    """Returns the gradients of a row's x, of its weight and, added to `totals`, of the
    kernels.

    The first products are computed again where they were not kept; the down projection
    is not: a weight's gradient, the product of the output and its gradient, is that of
    the hidden row and its gradient.

    Args:
      dout_RD: gradient of the weighted outputs' sum.
      weights_R: float32 weights of the rows in it.
      totals: in which the kernels' gradients add up, None for zeros.
      products: those of the forward pass; none: they are computed again.
      dtype: of the kernels' gradients.
    """
    up = products or [
        backend.matmul(x_RD, kernel, sizes_E) for kernel in kernels.inputs
    ]
    dh = backend.matmul(
        dout_RD, kernels.down, sizes_E, transposed=not backend.turns_down
    )
    dproducts, h, dweights = backend.hidden_gradients(activation, up, dh, weights_R)
    into = totals or Kernels((None,) * len(up), None)
    rows = (dout_RD, h) if backend.turns_down else (h, dout_RD)
    ddown = backend.kernel_gradient(*rows, sizes_E, into.down, dtype)
    dinputs = tuple(
        backend.kernel_gradient(x_RD, dy, sizes_E, total, dtype)
        for dy, total in zip(dproducts, into.inputs, strict=True)
    )
    dx = [
        backend.matmul(dy, kernel, sizes_E, transposed=True)
        for dy, kernel in zip(dproducts, kernels.inputs, strict=True)
    ]
    # In float32: a bare sum of bfloat16 is slow on TPUs.
    wide = [part.astype(jnp.float32) for part in dx]
    dx_RD = sum(wide[1:], wide[0]).astype(x_RD.dtype)
    return RowGradients(dx_RD, dweights, Kernels(dinputs, ddown))
