"""The experts' feed-forward part of rows sorted by expert, and its gradients; all on
one device.

Letters: `R` rows (some spare), `E` experts, `D` model, `F` feed-forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]
# of the rows with gate and up [R, F], or with up alone
Products = tuple[jax.Array, ...]


class HiddenGradients(NamedTuple):
    """What the backward pass needs of hidden rows."""

    products: tuple[jax.Array, ...]  # [R, F] each, of the weighted rows
    weighted: jax.Array  # [R, F], the hidden rows times their weights
    weights: jax.Array  # [R] float32


def hidden(activation: Activation, *products: jax.Array) -> jax.Array:
    """Returns activation(gate) * up, or activation(up)."""
    return (
        activation(products[0]) * products[1]
        if len(products) == 2
        else activation(products[0])
    )


def hidden_gradients(
    activation: Activation,
    products: Sequence[jax.Array],
    dh: jax.Array,
    weights: jax.Array,
) -> HiddenGradients:
    """Returns the gradients of the products that hidden rows are made of, and of the
    rows' weights.

    Args:
      products: [R, F], gate and up, or up alone.
      dh: [R, F], gradient of the hidden rows but for their weights.
      weights: [R] float32.
    """
    h, of_products = jax.vjp(lambda *products: hidden(activation, *products), *products)
    wide = dh.astype(jnp.float32)
    weights = weights[:, None]
    dweights = (wide * h.astype(jnp.float32)).sum(-1)
    weighted = (h.astype(jnp.float32) * weights).astype(h.dtype)
    return HiddenGradients(
        of_products((wide * weights).astype(dh.dtype)), weighted, dweights
    )


@dataclass(frozen=True)
class Backend:
    """How one platform multiplies groups of rows."""

    name: str
    reason: str  # one line for users: what it is, and why it was chosen
    # (rows, groups) -> rows to allocate for so many, spare ones included
    allocated: Callable[[int, int], int]
    # (x [R, K], kernels [E, K, N], sizes [E]) -> [R, N]; transposed: x [R, N] -> [R,
    # K]; in the dtype of x
    matmul: Callable[..., jax.Array]
    # (x [R, K], dy [R, N], sizes [E], total [E, K, N] or None, dtype) -> total + sums
    # of x^T dy, in dtype
    kernel_gradient: Callable[..., jax.Array]
    # Whether products of a device's own rows are kept for the backward pass where
    # `remat.policy` lets them be. Where it does not, they are computed again by a
    # second forward pass, for which kernels would be gathered once more.
    keeps_products: bool = False
    # Whether the down projection is computed with as [E, D, F]. fsdp splits d_model, on
    # TPUs often in parts smaller than a vector: gathered as the last dim, the whole
    # kernel is copied once more.
    turns_down: bool = False
    hidden_gradients: Callable[..., HiddenGradients] = hidden_gradients


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
