"""The loss of any model as sums, and its gradients over the parts of a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist import precision, sharding
from jaxdist.models.staged import Batch, Loss, as_loss, is_staged, run_blocks, staged_loss
from jaxdist.pipeline.executor import Pipeline, pipeline_sums
from jaxdist.pipeline.schedule import Program
from jaxdist.remat import rematerialised
from jaxdist.training.state import ModelSpec, Tree

Pipelined = Callable[[Tree, Tree, Batch, jax.Array | None], tuple[Tree, Loss]]
Objective = Callable[[Tree, Tree, Batch, jax.Array | None], tuple[jax.Array, Loss]]


class Sums(NamedTuple):
    """Sums over the global batch, float32, not yet divided by the count."""

    gradients: Tree
    loss: Loss


def build_objective(spec: ModelSpec, *, compute: str, remat: str) -> Objective:
    """Returns `objective(trainable, model_state, batch, key) -> (sum + aux sums, Loss)`.

    Args:
      compute: dtype of matrix products and activations.
      remat: policy for the blocks of a staged model; a model without blocks is not touched.
    """

    def objective(trainable, model_state, batch, key):
        with precision.computing_in(compute):
            model = spec.assemble(trainable, model_state)
            if not getattr(model, "casts_itself", False):
                model = spec.assemble(precision.cast(trainable, compute), model_state)
            if is_staged(model):
                loss = staged_loss(model, batch, key, lambda block: rematerialised(block, remat))
            else:
                loss = as_loss(model.loss(batch, key), batch)
        return loss.sum + sum(loss.aux.values()), loss

    return objective


def build_pipelined(
    spec: ModelSpec,
    program: Program,
    num_layers: int,
    *,
    compute: str,
    remat: str,
    gather_once: bool = False,
    edges_last: bool = False,
    backward: bool = True,
) -> Pipelined:
    """Returns `pipelined(trainable, model_state, batch, key) -> (gradient sums, Loss)`.

    It equals the gradients of `build_objective`, computed by the stages of a pipeline.

    Args:
      remat: policy inside a stage's recomputation; "layers": F keeps the inputs of all layers.
      gather_once: whether a stage's fsdp shards are gathered once, not in each tick.
      edges_last: whether stages embed and score for themselves, and only the ends' results count.
      backward: False computes the loss alone.
    """
    microbatches = program.schedule.microbatches

    def transform(block):
        return block if remat == "layers" else rematerialised(block, remat)

    def pipelined(trainable, model_state, batch, key):
        def assemble(parameters: Tree):
            model = spec.assemble(parameters, model_state)
            if getattr(model, "casts_itself", False):
                return model
            return spec.assemble(precision.cast(parameters, compute), model_state)

        pipeline = Pipeline(
            program, num_layers, assemble, transform, run_blocks,
            keeps_layers=remat == "layers", gather_once=gather_once, edges_last=edges_last,
        )  # fmt: skip
        parts = {name: split(value, microbatches) for name, value in batch.items()}
        with precision.computing_in(compute):
            return pipeline_sums(pipeline, trainable, parts, key, spec.placed_names, backward=backward)

    return pipelined


def sum_gradients(
    objective: Objective,
    trainable: Tree,
    model_state: Tree,
    batch: Batch,
    key: jax.Array,
    *,
    accumulation: int,
    names: Tree,
    pipelined: Pipelined | None = None,
) -> Sums:
    """Returns gradient and loss sums over a global batch, in `accumulation` sequential parts.

    Sums and counts are added up and divided by nobody here: the caller divides once by the global
    count, so parts with unequal counts (packing, padding) weigh as they do in one piece.
    """
    gradient_of = pipelined or jax.grad(objective, has_aux=True)

    def part_sums(part: Batch) -> Sums:
        gradients, loss = gradient_of(trainable, model_state, part, key)
        return Sums(_laid_out(gradients, names), loss)

    if accumulation == 1:
        return part_sums(batch)
    parts = {name: split(value, accumulation) for name, value in batch.items()}
    abstract = jax.eval_shape(part_sums, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    zeros = zeros._replace(gradients=_laid_out(zeros.gradients, names))

    def add(total: Sums, part: Batch):
        return jax.tree.map(jnp.add, total, part_sums(part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def _laid_out(gradients: Tree, names: Tree) -> Tree:
    """Returns float32 gradients in the gradients' sharding (a no-op where ops did it already)."""
    leaves, structure = jax.tree.flatten(gradients)
    known = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    out = [sharding.scatter(g.astype(jnp.float32), n) for g, n in zip(leaves, known, strict=True)]
    return jax.tree.unflatten(structure, out)


def split(x: jax.Array, parts: int) -> jax.Array:
    """Returns [batch, ...] as [parts, batch / parts, ...].

    Part i takes every parts-th sample, from i on: each batch shard then cuts up its own samples,
    and none has to move to another device.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])
    rows = sharding.shard(rows, "batch", *(None,) * (rows.ndim - 1))
    return jnp.moveaxis(rows, 1, 0)
