"""Gradients of hidden rows on TPU, in one kernel that reads each array once and writes
over it.

XLA makes a loop for each result, which reads all three arrays and holds up to five;
this is as much memory as the rest of a layer takes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core

from jaxdist.ops.experts import hidden
from jaxdist.ops.experts.hidden import Activation, HiddenGradients

NAME = "experts_hidden_gradients"  # of the kernel, which the planner looks for
LANES = 128
MAX_WIDTH = 1024
ROWS = (256, 128, 64, 32, 16, 8)

# Primitives that the TPU's kernel compiler has for float32.
_ELEMENTWISE = frozenset(
    "abs add add_any convert_element_type copy copy_p custom_jvp_call div exp exp2 ge gt integer_pow jit le "
    "log log1p logistic lt max min mul neg pjit select_n sign square sub tanh broadcast_in_dim".split()
)


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
                yield from _primitives(getattr(value, "jaxpr", value))


@lru_cache
def _in_kernel(activation: Activation) -> bool:
    """Returns whether the kernel compiler has all that an activation and its gradient
    are made of.
    """
    rows = jnp.zeros((8, LANES), jnp.float32)
    traced = jax.make_jaxpr(lambda x, dy: jax.vjp(activation, x)[1](dy))(rows, rows)
    return not traced.consts and _ELEMENTWISE.issuperset(_primitives(traced.jaxpr))


def gradients(
    activation: Activation,
    products: Sequence[jax.Array],
    dh: jax.Array,
    weights: jax.Array,
    *,
    interpret: bool = False,
) -> HiddenGradients:
    """Returns what `hidden.gradients` does."""
    (R, F) = dh.shape
    floats = jnp.issubdtype(dh.dtype, jnp.floating)
    rows = next((size for size in ROWS if R % size == 0), 0)
    width = next((size for size in range(MAX_WIDTH, 0, -LANES) if F % size == 0), 0)
    if (
        len(products) != 2
        or not (rows and width and floats)
        or not _in_kernel(activation)
    ):
        return hidden.gradients(activation, products, dh, weights)

    def kernel(weights, gate, up, dh, dgate, dup, weighted, dweights):
        gate_, up_, dh_ = (a[...].astype(jnp.float32) for a in (gate, up, dh))
        h, of_products = jax.vjp(
            lambda *products: hidden.hidden(activation, *products), gate_, up_
        )
        dgate_, dup_ = of_products(dh_ * weights[...])
        dgate[...] = dgate_.astype(dgate.dtype)
        dup[...] = dup_.astype(dup.dtype)
        weighted[...] = (h * weights[...]).astype(weighted.dtype)
        own = h * dh_

        @pl.when(pl.program_id(1) == 0)
        def _():
            dweights[...] = jnp.zeros_like(dweights)

        dweights[...] += sum(own[:, at : at + LANES] for at in range(0, width, LANES))

    block = pl.BlockSpec((rows, width), lambda i, j: (i, j))
    like = jax.ShapeDtypeStruct(dh.shape, dh.dtype)
    *dproducts, weighted, dweights = pl.pallas_call(
        kernel,
        grid=(R // rows, F // width),
        in_specs=[pl.BlockSpec((rows, 1), lambda i, j: (i, 0)), block, block, block],
        out_specs=[
            block,
            block,
            block,
            pl.BlockSpec((rows, LANES), lambda i, j: (i, 0)),
        ],
        out_shape=[like, like, like, jax.ShapeDtypeStruct((R, LANES), jnp.float32)],
        input_output_aliases={1: 0, 2: 1, 3: 2},
        name=NAME,
        interpret=interpret,
    )(weights[:, None], *products, dh)
    return HiddenGradients(tuple(dproducts), weighted, dweights.sum(-1))
