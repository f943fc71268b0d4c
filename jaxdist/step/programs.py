"""The functions that `TrainStep` compiles: the step, and the evaluation of a batch.

The body of the step is the function `inspect` in `build_step_with_gradients`. It
returns (state, metrics, mean gradients). `TrainStep.step` is the same function without
the gradients in its result, so XLA need not keep them.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh

from jaxdist.parallel import execution
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch, as_metrics, has_metrics
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.objective import Terms
from jaxdist.step import model_checks, reduction
from jaxdist.step.assembly import assemble_model, names_of
from jaxdist.step.evaluation import LossSums
from jaxdist.step.gradients import (
    GradientFunction,
    SumsFunction,
    build_objective,
    build_pipelined,
    differentiate,
    sum_gradients,
)
from jaxdist.step.loss_scale import factor
from jaxdist.step.objective_fields import aux_counts, aux_over_targets
from jaxdist.step.prepare import build_prepare, build_terms
from jaxdist.step.state import Metrics, State
from jaxdist.step.step_config import STEPS, StepConfig, key_of
from jaxdist.step.update import UpdateRule, apply_stats


def build_step_with_gradients(
    spec: ModelSpec,
    gradient_of: GradientFunction,
    rule: UpdateRule,
    *,
    mesh: Mesh,
    rules: Rules,
    config: StepConfig,
    spec_by_stage: ModelSpec,
) -> Callable[[State, Batch], tuple[State, Metrics, Tree]]:
    """Builds the step: it updates the state, and also returns the mean gradients.

    Args:
      spec: the model with flat blocks.
      gradient_of: computes the gradients of an accumulation step of a batch.
      rule: updates the state by the gradients.
      mesh: the devices.
      rules: the sharding rules.
      config: the step's settings.
      spec_by_stage: the model as the step holds its arrays: with a pipeline, its
        blocks by stage.
    """
    staging = config.staging
    accumulation = config.accumulation
    stages = staging.stages if staging else 1
    prepare = build_prepare(
        spec, staging, compute=config.compute, accumulation=accumulation
    )
    setting = config.reduce_over_replicas
    microbatches = config.total_microbatches
    chosen = reduction.choose(spec, rules, setting, microbatches=microbatches)

    def inspect(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        model_checks.check_model(spec, batch, accumulation=accumulation, stages=stages)
        with execution.activate(
            mesh,
            rules,
            compute=config.compute,
            reduce=config.reduce,
            recipe=config.recipe,
        ):
            key = jax.random.fold_in(key_of(config.seed, STEPS), state.step)
            axes = reduction.axes_for(chosen, batch, rules, setting, microbatches)
            loss_scale = state.opt_state.loss_scale
            scale = None if loss_scale is None else factor(loss_scale, batch)
            fetched = rule.on_device(state.trainable, config.compute)
            policy = (fetched, state.model_state, state.frozen)
            policy, batch = prepare(state.modules, policy, batch)
            trainable, _, frozen = policy
            sums = sum_gradients(
                gradient_of,
                state._replace(trainable=trainable, frozen=frozen),
                batch,
                key,
                accumulation=accumulation,
                names=names_of(spec_by_stage),
                axes_summed_once=axes,
                scale=scale,
            )
            gradients = jax.tree.map(lambda g: g / sums.loss.count, sums.gradients)
            sums = sums._replace(model_state=apply_stats(spec, staging, state, sums))
            after, metrics = rule.apply(state, sums, batch)
            return after, metrics, gradients

    return inspect


def build_evaluate(
    spec: ModelSpec,
    loss_of: SumsFunction,
    rule: UpdateRule,
    mesh: Mesh,
    rules: Rules,
    config: StepConfig,
) -> Callable[[State, Batch], LossSums]:
    """Builds the function `TrainStep.evaluate`.

    Args:
      spec: the model with flat blocks.
      loss_of: computes the loss of a batch.
      rule: copies parameters from the host's memory.
      mesh: the devices.
      rules: the sharding rules.
      config: the step's settings.
    """
    staging = config.staging
    model_has_metrics = has_metrics(spec.model_class)
    # The caller adds the sums of several batches, so the loss keeps the objective's
    # count.
    prepare = build_prepare(
        spec, staging, compute=config.compute, accumulation=1, adds_ratios=False
    )

    def evaluate(state: State, batch: Batch) -> LossSums:
        with execution.activate(
            mesh, rules, compute=config.compute, recipe=config.recipe
        ):
            fetched = rule.on_device(state.trainable, config.compute)
            arrays = state._replace(trainable=fetched).model_arrays
            arrays, batch = prepare(state.modules, arrays, batch)
            trainable, model_state, frozen = arrays
            _, (loss, _) = loss_of(trainable, model_state, frozen, batch, None)
            counts = dict.fromkeys((*loss.aux, *loss.metrics), loss.count)
            counts |= aux_counts(spec, batch)
            for name in aux_over_targets(spec, batch):
                counts[name] = batch["weights"].sum()
            others = {
                f"aux/{name}": (value, counts[name]) for name, value in loss.aux.items()
            }
            others |= {name: (x, counts[name]) for name, x in loss.metrics.items()}
            if model_has_metrics:
                if staging:
                    trainable, model_state, frozen = map(staging.flat, arrays)
                model = assemble_model(
                    spec, config.compute, trainable, model_state, frozen, key=None
                )
                others |= as_metrics(model.metrics(batch), loss.count)
        return loss.sum, loss.count, others

    return evaluate


def build_policy_terms(
    spec: ModelSpec, rule: UpdateRule, mesh: Mesh, rules: Rules, config: StepConfig
) -> Callable[[State, Batch], Terms]:
    """Builds the function `TrainStep.terms`.

    Args:
      spec: the model with flat blocks.
      rule: copies parameters from the host's memory.
      mesh: the devices.
      rules: the sharding rules.
      config: the step's settings.
    """
    terms_of = build_terms(spec.objective, spec, config.staging, config.compute)

    def terms(state: State, batch: Batch) -> Terms:
        with execution.activate(
            mesh, rules, compute=config.compute, recipe=config.recipe
        ):
            trainable = rule.on_device(state.trainable, config.compute)
            return terms_of((trainable, state.model_state, state.frozen), batch)

    return terms


def build_gradients(
    spec: ModelSpec, config: StepConfig
) -> tuple[GradientFunction, SumsFunction]:
    """Builds the gradients of the objective, and the objective without gradients.

    Args:
      spec: the model; with a pipeline, its blocks are by stage.
      config: the step's settings.

    Returns:
      The function that computes gradients, and the function that computes the loss.
    """
    if config.staging is None:
        objective = build_objective(spec, compute=config.compute, remat=config.remat)
        return differentiate(objective), objective
    build = partial(build_pipelined, spec, config.staging, compute=config.compute)
    return build(backward=True), build(backward=False)
