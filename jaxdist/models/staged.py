"""The staged form of a model: embed, a stack of equal blocks, head.

A staged model has `embed(batch) -> x`, `blocks` (a module whose parameters are stacked, made by
`stack`; called as `block(x, context) -> (x, aux)`) and `head(x, batch) -> Loss`. Optional are
`prepare(batch) -> dict`, values that every block reads, computed once (rotary tables). Written so,
a model can be scanned, rematerialised block by block and pipelined without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

Batch = Mapping[str, jax.Array]


class Loss(NamedTuple):
    """Sums over the batch; the objective is (sum + all aux) / global count.

    sum: nats over weighted targets. count: their weight, from the batch alone. aux: named sums
    under the same divisor. stats: named sums, for models with running state (not used yet).
    """

    sum: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    aux: dict[str, jax.Array] = {}
    stats: dict[str, jax.Array] = {}


class Context(NamedTuple):
    """What a block may read beside its input."""

    key: jax.Array | None  # the step's key; None: deterministic
    layer: jax.Array  # int32, global layer number
    fields: dict[str, jax.Array]  # the batch's integer fields and what `prepare` made


def is_staged(model: nnx.Module) -> bool:
    """Returns whether the model has embed, blocks and head."""
    return all(hasattr(model, name) for name in ("embed", "blocks", "head"))


def stack(build: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Returns `count` modules as one, every parameter [count, ...], each with its own key."""
    graph = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))[0]
    keys = jax.random.split(rngs.params(), count)
    state = jax.vmap(lambda key: nnx.split(build(nnx.Rngs(params=key)))[1])(keys)
    return nnx.merge(graph, state)


Block = Callable[[Any, jax.Array, Context], tuple[jax.Array, dict[str, jax.Array]]]


def run_blocks(
    blocks: nnx.Module,
    x: jax.Array,
    key: jax.Array | None,
    fields: dict[str, jax.Array],
    transform: Callable[[Block], Block] = lambda block: block,
    *,
    first: int | jax.Array = 0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the stack applied to x by a scan, and the sums of the blocks' aux terms.

    Args:
      transform: wraps `block(parameters of one layer, x, context)`, for rematerialisation.
      first: global number of the first layer, where the stack is a part of the model's.
    """
    graph, state = nnx.split(blocks)
    depth = jax.tree.leaves(state)[0].shape[0]

    def apply(parameters, x, context):
        return nnx.merge(graph, parameters)(x, context)

    block = transform(apply)

    def one_layer(x, item):
        layer, parameters = item
        return block(parameters, x, Context(key, layer, fields))

    x, aux = jax.lax.scan(one_layer, x, (first + jnp.arange(depth), state))
    return x, jax.tree.map(lambda terms: terms.sum(0), aux)


def staged_loss(
    model: Any,
    batch: Batch,
    key: jax.Array | None,
    transform: Callable[[Block], Block] = lambda block: block,
) -> Loss:
    """Returns the loss of a staged model."""
    fields = shared_fields(model, batch)
    x, aux = run_blocks(model.blocks, model.embed(batch), key, fields, transform)
    loss = as_loss(model.head(x, batch), batch)
    return loss._replace(aux=loss.aux | aux)


def as_loss(value: Any, batch: Batch) -> Loss:
    """Returns what a model's `loss` gave as a Loss of float32 sums.

    Accepted are a Loss, a plain tuple (sum, count[, aux[, stats]]), or a scalar mean over the
    batch's samples, whose count is then the number of samples.
    """
    if not isinstance(value, tuple):
        samples = next(iter(batch.values())).shape[0]
        value = (jnp.float32(value) * samples, jnp.float32(samples))
    sums = Loss(*value)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), sums)


def shared_fields(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns the batch's integer fields and what the model prepares for all blocks."""
    fields = {n: v for n, v in batch.items() if jnp.issubdtype(v.dtype, jnp.integer)}
    return fields | (model.prepare(batch) if hasattr(model, "prepare") else {})
