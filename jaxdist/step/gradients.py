"""The loss of a model as sums, and its gradients summed over a global batch.

Accumulation holds one tree of gradients. The backward pass of an accumulation step adds
a gradient to the sums as soon as it is known; in a scan over layers that is layer by
layer. If a step made a tree of its own first, there would be two.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.executor import pipeline_sums
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.stage import Pipeline
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.parallel.remat import RematConfig, recompute, rematerialised
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import Names
from jaxdist.protocols.model import Batch, Loss
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step import loss_scale, reduction
from jaxdist.step.assembly import assemble_model, build_assemble, gather_edges, names_of
from jaxdist.step.batch_parts import split_batch
from jaxdist.step.state import State, Sums


class SumsFunction(Protocol):
    """A function that computes the objective, or its gradients, for a batch.

    The step calls it with one accumulation step at a time. The trained parameters come
    first, since jax differentiates by the first argument.
    """

    def __call__(
        self,
        trainable: Tree,
        model_state: Tree,
        frozen: Tree,
        batch: Batch,
        key: jax.Array | None,
        scale: jax.Array | None = None,
    ) -> tuple[Any, tuple[Loss, Tree]]:
        """Computes sums over the rows of a batch.

        Args:
          trainable: the trained parameters.
          model_state: the model's state.
          frozen: the parameters that are not trained.
          batch: the global batch, or an accumulation step of it.
          key: the step's random key; None: the model is deterministic.
          scale: factor of the objective and its gradients; default: 1.

        Returns:
          The objective or its gradients, multiplied by `scale`; the unscaled loss; and
          the state that the model's code has left. A pipeline without its backward pass
          has neither: the first item is then a scalar 0, and only the loss is read.
        """
        ...


class GradientFunction(Protocol):
    """A function that computes the gradients of the objective for a batch."""

    def __call__(
        self,
        trainable: Tree,
        model_state: Tree,
        frozen: Tree,
        batch: Batch,
        key: jax.Array | None,
        scale: jax.Array | None = None,
        sums: Tree | None = None,
    ) -> tuple[Tree, tuple[Loss, Tree]]:
        """Computes gradients like a `SumsFunction`, or adds them to sums in place.

        Args:
          trainable: the trained parameters.
          model_state: the model's state.
          frozen: the parameters that are not trained.
          batch: the global batch, or an accumulation step of it.
          key: the step's random key; None: the model is deterministic.
          scale: factor of the objective and its gradients; default: 1.
          sums: float32 sums of the gradients of earlier accumulation steps.

        Returns:
          The gradients, or the new sums; the unscaled loss; and the model's state.
        """
        ...


def build_objective(
    spec: ModelSpec, *, compute: str, remat: RematConfig | str
) -> SumsFunction:
    """Builds the objective of a model: the sum of its losses and aux terms.

    Args:
      spec: the model.
      compute: dtype of matrix products and activations. `execution.activate` must get
        the same.
      remat: rematerialization of a staged model's blocks, or the name of its policy.
        A model without blocks ignores it.
    """

    def objective(
        trainable: Tree,
        model_state: Tree,
        frozen: Tree,
        batch: Batch,
        key: jax.Array | None,
        scale: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Loss, Tree]]:
        if execution.current().manual and not spec.casts_itself:
            trainable = gather_edges(trainable)
            frozen = gather_edges(frozen)
        # The model's own random streams must differ between accumulation steps.
        stream_key = key
        if key is not None and spec.streams and "sample" in batch:
            stream_key = jax.random.fold_in(key, batch["sample"][0])
        model = assemble_model(
            spec, compute, trainable, model_state, frozen, key=stream_key
        )
        loss = spec.objective.batch_loss(model, batch, key, recompute(remat))
        after = spec.state_of(model) if model_state else model_state
        total = loss.sum + sum(loss.aux.values())
        if scale is not None:
            total = total * scale
        return total, (loss, after)

    return objective


def differentiate(objective: SumsFunction) -> GradientFunction:
    """Makes the function that computes the gradients of an objective."""

    def gradients(
        trainable: Tree,
        model_state: Tree,
        frozen: Tree,
        batch: Batch,
        key: jax.Array | None,
        scale: jax.Array | None = None,
        sums: Tree | None = None,
    ) -> tuple[Tree, tuple[Loss, Tree]]:
        def of_trainable(trainable: Tree) -> tuple[jax.Array, tuple[Loss, Tree]]:
            total: tuple[jax.Array, tuple[Loss, Tree]] = objective(
                trainable, model_state, frozen, batch, key, scale
            )
            return total

        # jax adds to references only in the dtype of the parameters
        is_float32 = all(x.dtype == jnp.float32 for x in jax.tree.leaves(trainable))
        if sums is None or not is_float32:
            found, aux = jax.grad(of_trainable, has_aux=True)(trainable)
            if sums is not None:
                found = jax.tree.map(jnp.add, sums, found)
            return found, aux
        total, pull_back, aux = jax.vjp(of_trainable, trainable, has_aux=True)
        references = jax.tree.map(jax.new_ref, sums)
        add: Any = pull_back  # annotated as a plain function
        add.with_refs(references)(jnp.ones_like(total))
        return jax.tree.map(jax.freeze, references), aux

    return gradients


def build_pipelined(
    spec: ModelSpec, staging: Staging, *, compute: str, backward: bool = True
) -> GradientFunction:
    """Builds the gradients of the objective, computed by the stages of a pipeline.

    They equal the gradients of `build_objective`.

    Args:
      spec: the model with blocks by stage.
      staging: the pipeline's partition of the layers.
      compute: dtype of matrix products and activations.
      backward: False computes the loss only.
    """
    program = staging.program()
    names = names_of(spec)

    transform = partial(rematerialised, policy=staging.edge_remat)

    def pipelined(
        trainable: Tree,
        model_state: Tree,
        frozen: Tree,
        batch: Batch,
        key: jax.Array | None,
        scale: jax.Array | None = None,
        sums: Tree | None = None,
    ) -> tuple[Tree, tuple[Loss, Tree]]:
        params = StageParams(trainable, frozen, model_state)
        microbatches = split_batch(batch, staging.microbatches)

        def score(model: Any, x: jax.Array, part: Batch, number: jax.Array) -> Loss:
            return spec.objective.loss_of_output(model, x, part, key, transform)

        pipeline = Pipeline(staging, program, build_assemble(spec, compute, key), score)
        gradients, loss = pipeline_sums(
            pipeline, params, names, microbatches, key, scale, sums, backward=backward
        )
        return gradients, (loss, model_state)

    return pipelined


def sum_gradients(
    gradient_of: GradientFunction,
    state: State,
    batch: Batch,
    key: jax.Array,
    *,
    accumulation: int,
    names: StageParams,
    axes_summed_once: tuple[str, ...] = (),
    scale: jax.Array | None = None,
) -> Sums:
    """Sums gradients and losses over a global batch, one accumulation step at a time.

    The caller divides the sums by the global count. So accumulation steps with unequal
    counts (packing, padding) weigh as in a batch that is not split.

    Args:
      gradient_of: function of `build_pipelined` or `differentiate`.
      state: the state, whose parameters and model state are read.
      batch: the global batch.
      key: the step's random key.
      accumulation: number of accumulation steps, which run one after another.
      names: logical names of the model's arrays.
      axes_summed_once: mesh axes over which gradients are summed once, after all
        accumulation steps. A model then sees only the rows of its replica
        (`reduction.choose`). The batch must be divisible by these axes.
      scale: factor of the loss. The returned sums are unscaled.
    """

    def sum_locally(
        params: StageParams, batch: Batch, key: jax.Array, scale: jax.Array | None
    ) -> Sums:
        scaled = partial(gradient_of, scale=scale)
        return _sum_accumulation_steps(
            scaled, params, batch, key, accumulation, names.trainable
        )

    params = StageParams(state.trainable, state.frozen, state.model_state)
    if not axes_summed_once:
        sums = sum_locally(params, batch, key, scale)
        return sums._replace(gradients=loss_scale.unscaled(sums.gradients, scale))
    pipelined = execution.current().axis_size("pipeline") > 1
    axes = ("pipeline", *axes_summed_once) if pipelined else axes_summed_once
    specs = jax.tree.map(partial(execution.region_spec, axes=axes), params, names)
    gradients, loss = execution.region(
        lambda *arrays: _summed(
            sum_locally(*arrays), names.trainable, axes_summed_once
        ),
        axes,
        in_specs=(specs, P(axes_summed_once), P(), P()),
        out_specs=(specs.trainable, P()),
    )(params, batch, key, scale)
    # At ZeRO 1 a device needs only the part of the sum that it updates: half the bytes,
    # and no second array of the gradient's size.
    now = execution.current()
    gradients = jax.tree.map(
        lambda gradient, dim_names: now.lay_out(gradient, Rules.state, dim_names),
        gradients,
        names.trainable,
    )
    return Sums(loss_scale.unscaled(gradients, scale), loss, state.model_state)


def _sum_accumulation_steps(
    gradient_of: GradientFunction,
    params: StageParams,
    batch: Batch,
    key: jax.Array,
    accumulation: int,
    names: Tree,
) -> Sums:
    trainable, frozen, model_state = params
    if accumulation == 1:
        gradients, (loss, after) = gradient_of(
            trainable, model_state, frozen, batch, key
        )
        return Sums(_shard_gradients(gradients, names), loss, after)

    def sums_after(sums: Tree, accumulation_step: Batch) -> tuple[Tree, Loss]:
        gradients, (loss, _) = gradient_of(
            trainable, model_state, frozen, accumulation_step, key, sums=sums
        )
        return _shard_gradients(gradients, names), loss

    accumulation_steps = split_batch(batch, accumulation)
    first = jax.tree.map(lambda x: x[0], accumulation_steps)
    no_gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trainable)
    no_gradients = _shard_gradients(no_gradients, names)
    _, abstract_loss = jax.eval_shape(sums_after, no_gradients, first)
    no_loss: Loss = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_loss)

    def add(
        total: tuple[Tree, Loss], accumulation_step: Batch
    ) -> tuple[tuple[Tree, Loss], None]:
        gradients, loss = total
        gradients, more = sums_after(gradients, accumulation_step)
        return (gradients, jax.tree.map(jnp.add, loss, more)), None

    (gradients, loss), _ = jax.lax.scan(
        add, (no_gradients, no_loss), accumulation_steps
    )
    return Sums(gradients, loss, model_state)


def _summed(sums: Sums, names: Tree, axes: tuple[str, ...]) -> tuple[Tree, Loss]:
    """Sums the gradients and losses of replicas over manual axes."""
    reduce = execution.current().reduce

    def total(gradient: jax.Array, dim_names: Names) -> jax.Array:
        sent = gradient.astype(reduction.sent_dtype(dim_names, gradient.shape, reduce))
        return execution.sum_over(sent, axes).astype(jnp.float32)

    return jax.tree.map(total, sums.gradients, names), jax.lax.psum(sums.loss, axes)


def _shard_gradients(gradients: Tree, names: Tree) -> Tree:
    """Gives gradients their sharding, in float32. Most ops have done so already."""
    return jax.tree.map(
        lambda gradient, dim_names: execution.scatter(
            gradient.astype(jnp.float32), dim_names
        ),
        gradients,
        names,
    )
