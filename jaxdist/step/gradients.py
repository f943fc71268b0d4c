"""The loss of any model as sums, and its gradients over the parts of a global batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution, precision
from jaxdist.parallel.pipeline.executor import pipeline_sums
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.stage import Pipeline
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.parallel.remat import rematerialised
from jaxdist.protocols.model import Batch, Loss, as_loss, staged_loss
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step.state import State

# (trainable, model_state, frozen, batch, key) -> (objective or gradient sums, (Loss, model_state)), the
# state as the model's own code left it.
Objective = Callable[[Tree, Tree, Tree, Batch, jax.Array | None], tuple[Any, tuple[Loss, Tree]]]


class Sums(NamedTuple):
    """Sums over the global batch, float32, not yet divided by the count."""

    gradients: Tree
    loss: Loss
    model_state: Tree  # no sum: that before, or after a batch in one part


def build_objective(spec: ModelSpec, *, compute: str, remat: str) -> Objective:
    """Returns `objective(trainable, model_state, frozen, batch, key) -> (sum + aux sums, (Loss, state))`.

    Args:
      compute: dtype of matrix products and activations; `execution.activate` is told the same.
      remat: policy for the blocks of a staged model; a model without blocks is not touched.
    """

    def objective(trainable, model_state, frozen, batch, key):
        own_key = key  # of the model's own random streams: the parts of a step draw different ones
        if key is not None and spec.streams and "sample" in batch:
            own_key = jax.random.fold_in(key, batch["sample"][0])
        model = assembled(spec, compute, trainable, model_state, frozen, own_key)
        if spec.staged:
            loss = staged_loss(model, batch, key, lambda block: rematerialised(block, remat))
        else:
            loss = as_loss(model.loss(batch, key), batch)
        after = spec.state_of(model) if model_state else model_state
        return loss.sum + sum(loss.aux.values()), (loss, after)

    return objective


def build_pipelined(spec: ModelSpec, cut: Staging, *, compute: str, backward: bool = True) -> Objective:
    """Returns `pipelined(trainable, model_state, frozen, batch, key) -> (gradient sums, (Loss, state))`.

    It equals the gradients of `build_objective`, computed by the stages of a pipeline.

    Args:
      spec: with blocks by stage.
      backward: False computes the loss alone.
    """
    program = cut.program()
    names = StageParams(spec.names, spec.frozen_names, spec.state_names)

    def pipelined(trainable, model_state, frozen, batch, key):
        def assemble(part: StageParams):
            trained, frozen = part.trained, part.frozen
            if not spec.casts_itself:
                trained, frozen = _with_whole_edges(trained), _with_whole_edges(frozen)
            return assembled(spec, compute, trained, part.model_state, frozen, key)

        parts = {name: split(value, cut.microbatches) for name, value in batch.items()}
        params, pipeline = StageParams(trainable, frozen, model_state), Pipeline(cut, program, assemble)
        sums, loss = pipeline_sums(pipeline, params, names, parts, key, backward=backward)
        return sums, (loss, model_state)

    return pipelined


def _with_whole_edges(tree: Tree) -> Tree:
    """Returns the parameters in a stage with those that are not in its blocks gathered.

    XLA's partitioner aborts on an index into a table that devices of a stage share out ("Check failed:
    partition_group_list", spmd_partitioner_util.cc). `jaxdist.ops` look up without an index.
    """
    now = execution.current()
    whole = jax.sharding.PartitionSpec()
    return {
        name: part if name == "blocks" else jax.tree.map(lambda x: now.constrain(x, whole), part)
        for name, part in tree.items()
    }


def assembled(spec: ModelSpec, compute: str, trainable, model_state, frozen, key) -> Any:
    """Returns the model, its parameters (not its state) in the compute dtype unless it casts them itself."""
    if not spec.casts_itself:
        trainable, frozen = precision.cast((trainable, frozen), compute)
    return spec.assemble(trainable, model_state, frozen, key=key)


def sum_gradients(
    gradient_of: Objective, state: State, batch: Batch, key: jax.Array, *, accumulation: int, names: Tree
) -> Sums:
    """Returns gradient and loss sums over a global batch, in `accumulation` sequential parts.

    Sums and counts are added up and divided by nobody here: the caller divides once by the global
    count, so parts with unequal counts (packing, padding) weigh as they do in one piece.

    Args:
      gradient_of: `build_pipelined`, or the gradient of `build_objective`.
      names: logical names of the trained parameters.
    """

    def part_sums(part: Batch) -> Sums:
        gradients, (loss, after) = gradient_of(state.trainable, state.model_state, state.frozen, part, key)
        return Sums(_laid_out(gradients, names), loss, after if accumulation == 1 else {})

    if accumulation == 1:
        return part_sums(batch)
    parts = {name: split(value, accumulation) for name, value in batch.items()}
    abstract = jax.eval_shape(part_sums, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    zeros = zeros._replace(gradients=_laid_out(zeros.gradients, names))

    def add(total: Sums, part: Batch):
        return jax.tree.map(jnp.add, total, part_sums(part)), None

    return jax.lax.scan(add, zeros, parts)[0]._replace(model_state=state.model_state)


def _laid_out(gradients: Tree, names: Tree) -> Tree:
    """Returns float32 gradients in the gradients' sharding (a no-op where ops did it already)."""
    return jax.tree.map(lambda g, own: execution.scatter(g.astype(jnp.float32), own), gradients, names)


def split(x: jax.Array, parts: int) -> jax.Array:
    """Returns [batch, ...] as [parts, batch / parts, ...].

    Part i takes every parts-th sample, from i on: each batch shard then cuts up its own samples,
    and none has to move to another device.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])
    rows = execution.shard(rows, "batch", *(None,) * (rows.ndim - 1))
    return jnp.moveaxis(rows, 1, 0)
