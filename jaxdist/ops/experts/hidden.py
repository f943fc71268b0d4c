"""Hidden rows of experts, and their gradients.

Letters: `R` rows, `F` feed-forward.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


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


def gradients(
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
