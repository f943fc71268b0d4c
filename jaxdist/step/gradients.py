"""The loss of any model as sums, and its gradients over the parts of a global batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution, precision
from jaxdist.parallel.pipeline.executor import pipeline_sums
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.stage import Pipeline
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.parallel.remat import RematConfig, recompute
from jaxdist.protocols.model import Batch, Loss
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.param_names import STACKED
from jaxdist.step import loss_scale, reduction
from jaxdist.step.batch_parts import split_batch
from jaxdist.step.state import State

# (trainable, model_state, frozen, batch, key, *, scale) -> (objective or gradient sums,
# (Loss, model_state)), the state as the model's own code left it, objective and
# gradients times the scale (None: as they are).
PartSums = Callable[..., tuple[Any, tuple[Loss, Tree]]]


class Sums(NamedTuple):
    """Sums over the global batch, float32, not yet divided by the count."""

    gradients: Tree
    loss: Loss
    model_state: Tree  # no sum: that before, or after a batch in one part


def build_objective(
    spec: ModelSpec, *, compute: str, remat: RematConfig | str
) -> PartSums:
    """Returns `objective(trainable, model_state, frozen, batch, key, scale) ->
    (objective, (Loss, state))`.

    The objective is the sum of losses and aux terms.

    Args:
      compute: dtype of matrix products and activations; `execution.activate` is told
        the same.
      remat: policy for the blocks of a staged model, or more; a model without blocks is
        not touched.
    """

    def objective(trainable, model_state, frozen, batch, key, scale=None):
        if execution.current().manual and not spec.casts_itself:
            trainable = _with_whole_edges(trainable)
            frozen = _with_whole_edges(frozen)
        # of the model's own random streams: the parts of a step draw different ones
        own_key = key
        if key is not None and spec.streams and "sample" in batch:
            own_key = jax.random.fold_in(key, batch["sample"][0])
        model = assembled(spec, compute, trainable, model_state, frozen, own_key)
        loss = spec.objective.batch_loss(model, batch, key, recompute(remat))
        after = spec.state_of(model) if model_state else model_state
        total = loss.sum + sum(loss.aux.values())
        return total if scale is None else total * scale, (loss, after)

    return objective


def names_of(spec: ModelSpec) -> StageParams:
    """Returns the logical names of a model's arrays."""
    return StageParams(spec.names, spec.frozen_names, spec.state_names)


def build_pipelined(
    spec: ModelSpec, cut: Staging, *, compute: str, backward: bool = True
) -> PartSums:
    """Returns `pipelined(trainable, model_state, frozen, batch, key, scale) ->
    (gradients, (Loss, state))`.

    They equal those of `build_objective`, computed by the stages of a pipeline.

    Args:
      spec: with blocks by stage.
      backward: False computes the loss alone.
    """
    program = cut.program()
    names = names_of(spec)

    def score(model, x, microbatch, number):
        return spec.objective.head_loss(model, x, microbatch)

    def pipelined(trainable, model_state, frozen, batch, key, scale=None):
        params = StageParams(trainable, frozen, model_state)
        parts = split_batch(batch, cut.microbatches)
        assemble = assembler(spec, compute, key)
        pipeline = Pipeline(cut, program, assemble, score)
        sums, loss = pipeline_sums(
            pipeline, params, names, parts, key, scale, backward=backward
        )
        return sums, (loss, model_state)

    return pipelined


def assembler(
    spec: ModelSpec, compute: str, key: jax.Array | None
) -> Callable[[StageParams], Any]:
    """Returns the function that makes a stage's part of a model of its arrays.

    Args:
      key: see `ModelSpec.assemble`.
    """

    def assemble(part: StageParams):
        trained = part.trained
        frozen = part.frozen
        if not spec.casts_itself:
            trained = _with_whole_edges(trained)
            frozen = _with_whole_edges(frozen)
        return assembled(spec, compute, trained, part.model_state, frozen, key)

    return assemble


def _with_whole_edges(tree: Tree) -> Tree:
    """Returns the parameters in a region with those that are not in the blocks
    gathered.

    XLA's partitioner aborts on an index into a table that devices of a region share out
    ("Check failed: partition_group_list", spmd_partitioner_util.cc). `jaxdist.ops` look
    up without an index.
    """
    now = execution.current()
    whole = P()
    return {
        name: part
        if name in STACKED
        else jax.tree.map(lambda x: now.constrain(x, whole), part)
        for name, part in tree.items()
    }


def assembled(
    spec: ModelSpec, compute: str, trainable, model_state, frozen, key
) -> Any:
    """Returns the model, its parameters (not its state) in the compute dtype unless it
    casts them itself.
    """
    if not spec.casts_itself:
        trainable, frozen = precision.cast((trainable, frozen), compute)
    return spec.assemble(trainable, model_state, frozen, key=key)


def sum_gradients(
    gradient_of: PartSums,
    state: State,
    batch: Batch,
    key: jax.Array,
    *,
    accumulation: int,
    names: StageParams,
    once: tuple[str, ...] = (),
    scale: jax.Array | None = None,
) -> Sums:
    """Returns gradient and loss sums over a global batch, in `accumulation` sequential
    parts.

    Sums and counts are added up and divided by nobody here: the caller divides once by
    the global count, so parts with unequal counts (packing, padding) weigh as they do
    in one piece.

    Args:
      gradient_of: `build_pipelined`, or the gradient of `build_objective`.
      names: logical names of the model's arrays.
      once: mesh axes over which the parts are added up unreduced, and summed once at
        the end. A model then sees a replica's samples alone (`reduction.choose`), and
        the batch divides by these axes.
      scale: of the loss where its gradient begins, for all parts; the sums come out
        without it.
    """

    def all_parts(
        params: StageParams, batch: Batch, key: jax.Array, scale: jax.Array | None
    ) -> Sums:
        scaled = partial(gradient_of, scale=scale)
        return _sum_parts(scaled, params, batch, key, accumulation, names.trained)

    params = StageParams(state.trainable, state.frozen, state.model_state)
    if not once:
        sums = all_parts(params, batch, key, scale)
        return sums._replace(gradients=loss_scale.unscaled(sums.gradients, scale))
    pipelined = execution.current().axis_size("pipeline") > 1
    axes = ("pipeline", *once) if pipelined else once
    specs = jax.tree.map(partial(execution.region_spec, axes=axes), params, names)
    gradients, loss = execution.region(
        lambda *arrays: _summed(all_parts(*arrays), names.trained, once),
        axes,
        in_specs=(specs, P(once), P(), P()),
        out_specs=(specs.trained, P()),
    )(params, batch, key, scale)
    gradients = loss_scale.unscaled(_laid_out(gradients, names.trained), scale)
    return Sums(gradients, loss, state.model_state)


def _sum_parts(
    gradient_of: PartSums, params: StageParams, batch, key, accumulation: int, names
) -> Sums:
    trainable, frozen, model_state = params

    def part_sums(part: Batch) -> Sums:
        gradients, (loss, after) = gradient_of(
            trainable, model_state, frozen, part, key
        )
        return Sums(
            _laid_out(gradients, names), loss, after if accumulation == 1 else {}
        )

    if accumulation == 1:
        return part_sums(batch)
    parts = split_batch(batch, accumulation)
    abstract = jax.eval_shape(part_sums, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    zeros = zeros._replace(gradients=_laid_out(zeros.gradients, names))

    def add(total: Sums, part: Batch):
        return jax.tree.map(jnp.add, total, part_sums(part)), None

    return jax.lax.scan(add, zeros, parts)[0]._replace(model_state=model_state)


def _summed(sums: Sums, names: Tree, axes: tuple[str, ...]) -> tuple[Tree, Loss]:
    """Returns a replica's sums of gradients and losses, added up over manual axes."""
    reduce = execution.current().reduce

    def total(gradient: jax.Array, own) -> jax.Array:
        sent = gradient.astype(reduction.sent_dtype(own, gradient.shape, reduce))
        return execution.sum_over(sent, axes).astype(jnp.float32)

    return jax.tree.map(total, sums.gradients, names), jax.lax.psum(sums.loss, axes)


def _laid_out(gradients: Tree, names: Tree) -> Tree:
    """Returns float32 gradients in the gradients' sharding (a no-op where ops did it
    already).
    """
    return jax.tree.map(
        lambda g, own: execution.scatter(g.astype(jnp.float32), own), gradients, names
    )
