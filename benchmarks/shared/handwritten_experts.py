"""The yardstick with experts: `handwritten.py` with a mixture in every layer.

It runs on one CPU device. The router takes the top k of a softmax, with weights that
add up to 1. A bias of the choice moves after each step (DeepSeek-V3). jaxdist's grouped
matmul is the only part that both sides share. Routing, sorting, moving of rows,
gradients and residuals are written here. Fast forms were measured
(benchmarks/step/README.md).

Letters: those of `handwritten`; E experts, k experts per token, A = T * k rows of
tokens, one per choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import handwritten as dense
import jax
import jax.numpy as jnp
from handwritten import INIT_STD, Options
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.experts.grouped_matmul import BACKENDS

GROUPED = BACKENDS["cpu"]


@dataclass(frozen=True)
class Shape(dense.Shape):
    """Sizes of a model and of its batch; `d_ff` is the width inside an expert."""

    num_experts: int = 8
    experts_per_token: int = 2
    balance_rate: float = 1e-3  # by which a step moves a bias


SHAPES = {"moe": Shape(4, 256, 512, 8, 4, 4096, 256, 8)}


class State(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array
    params: dict
    first: dict
    second: dict
    bias: jax.Array  # [L, E]


def init_params(shape: Shape, seed: int) -> dict:
    """Returns float32 parameters, layers stacked [L, ...], kernels of experts [L, E,
    ...].
    """
    params, c = dense.init_params(shape, seed), shape
    dims = {"router": (c.d_model, c.num_experts)}
    dims |= dict.fromkeys(("gate", "up"), (c.num_experts, c.d_model, c.d_ff))
    dims |= {"down": (c.num_experts, c.d_ff, c.d_model)}
    keys = jax.random.split(jax.random.key(seed + 1), len(dims))
    made = {
        name: INIT_STD * jax.random.normal(key, (c.num_layers, *size))
        for key, (name, size) in zip(keys, dims.items(), strict=True)
    }
    return params | {"blocks": params["blocks"] | made}


def init(shape: Shape, seed: int) -> State:
    """Returns the state before the first step."""
    params = init_params(shape, seed)
    moments = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return State(
        jnp.int32(0), params, *moments, jnp.zeros((shape.num_layers, shape.num_experts))
    )


# -------------------------------------------------------------------------- the experts


@jax.custom_vjp
def grouped(x_AD, kernels_EDF, sizes_E):
    """Returns each row times the kernel of its group."""
    return GROUPED.matmul(x_AD, kernels_EDF, sizes_E)


def _grouped_backward(residuals, dy):
    x, kernels, sizes = residuals
    dx = GROUPED.matmul(dy, kernels, sizes, transposed=True)
    return dx, GROUPED.kernel_gradient(x, dy, sizes, None, kernels.dtype), None


grouped.defvjp(lambda *arguments: (grouped(*arguments), arguments), _grouped_backward)


@jax.custom_vjp
def to_rows(h_TD, order, slots_Tk):
    """Returns the rows of the experts in order; its gradient has no use for the spare
    rows behind them.
    """
    return h_TD[order // slots_Tk.shape[1]]


def _to_rows_backward(slots_Tk, drows):
    return sum(drows[slots] for slots in slots_Tk.T), None, None


to_rows.defvjp(
    lambda h, order, slots: (to_rows(h, order, slots), slots), _to_rows_backward
)


@jax.custom_vjp
def from_rows(rows, order, slots_Tk):
    """Returns each token's rows added up."""
    return sum(rows[slots] for slots in slots_Tk.T)


def _from_rows_backward(residuals, dy_TD):
    order, k = residuals
    return dy_TD[order // k], None, None


from_rows.defvjp(
    lambda rows, order, slots: (from_rows(rows, order, slots), (order, slots.shape[1])),
    _from_rows_backward,
)


def mixture(h_TD, p, bias_E, shape: Shape):
    """Returns what a token's experts add [T, D], and how many tokens chose
    each, [E].
    """
    k, E = shape.experts_per_token, shape.num_experts
    scores = jax.nn.softmax((h_TD @ p["router"]).astype(jnp.float32))
    ids = lax.top_k(lax.stop_gradient(scores) + bias_E, k)[1]
    weights = jnp.take_along_axis(scores, ids, 1)
    weights = weights / weights.sum(-1, keepdims=True)
    load = jnp.bincount(ids.reshape(-1), length=E)
    order = jnp.argsort(ids.reshape(-1))
    slots = jnp.argsort(order)
    spare = GROUPED.allocated(order.size, E) - order.size
    order = jnp.pad(order, (0, spare))
    order, slots, sizes = (
        checkpoint_name(a, "experts") for a in (order, slots.reshape(-1, k), load)
    )
    rows = to_rows(h_TD, order, slots)
    gate, up = (
        checkpoint_name(grouped(rows, p[name], sizes), "experts")
        for name in ("gate", "up")
    )
    weights = to_rows(weights.reshape(-1), order, slots.reshape(-1, 1))
    y = grouped(jax.nn.silu(gate) * up * weights[:, None], p["down"], sizes)
    return from_rows(y, order, slots), load


# ----------------------------------------------------------------------------- the step


def loss(params, bias_LE, batch, shape: Shape, options: Options):
    """Returns mean nats per weighted token, a float32 scalar, and the load of the
    experts [L, E].
    """
    tables = dense.rotary_tables(shape)

    def layer(x_TD, inputs):
        p, bias_E = inputs
        x_TD, p, h = dense.attention_part(x_TD, p, tables, shape, options.kernel, None)
        y, load = mixture(h, p, bias_E, shape)
        return x_TD + y, load

    return dense.scanned_loss(
        layer, (params["blocks"], bias_LE), params, batch, shape, options, None
    )


def train_step(state: State, batch, learning_rate, *, shape: Shape, options: Options):
    """Returns the next state and {"loss", "grad_norm"}."""
    of_params = jax.value_and_grad(loss, has_aux=True)
    (value, load), grads = of_params(state.params, state.bias, batch, shape, options)
    new, norm = dense.updated(state, grads, learning_rate, options)
    step = jnp.sign(load.mean(-1, keepdims=True) - load)
    bias = state.bias + shape.balance_rate * (step - step.mean(-1, keepdims=True))
    return State(state.step + 1, *new, bias), {"loss": value, "grad_norm": norm}


def build_step(shape: Shape, options: Options, _=None):
    """Returns the jitted `(state, batch, learning_rate) -> (state, metrics)`, its state
    donated.
    """
    return jax.jit(partial(train_step, shape=shape, options=options), donate_argnums=0)
