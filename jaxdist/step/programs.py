"""What a step computes: the functions that `train_step` compiles."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdist.config import ConfigError
from jaxdist.parallel import execution
from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch, as_metrics, has_metrics
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step import model_checks, reduction
from jaxdist.step.evaluation import LossSums
from jaxdist.step.gradients import (
    PartSums,
    assembled,
    build_objective,
    build_pipelined,
    names_of,
    sum_gradients,
)
from jaxdist.step.loss_scale import factor
from jaxdist.step.prepare import abstract_batch, aux_over_targets, build_prepare
from jaxdist.step.state import Metrics, State
from jaxdist.step.step_config import STEPS, StepConfig, key_of
from jaxdist.step.update import UpdateRule, apply_stats


def build_inspect(
    spec: ModelSpec,
    gradient_of: PartSums,
    rule: UpdateRule,
    mesh: Mesh,
    rules: Rules,
    config: StepConfig,
    staged: ModelSpec,
) -> Callable[[State, Batch], tuple[State, Metrics, Tree]]:
    """Returns the step that hands out its gradients, too.

    Args:
      spec: with flat blocks.
      staged: the spec as the step holds the arrays, blocks by stage.
    """
    cut = config.staging
    accumulation = config.accumulation
    stages = cut.stages if cut else 1
    prepare = build_prepare(
        spec, cut, compute=config.compute, accumulation=accumulation
    )
    setting = config.reduce_over_replicas
    chosen = reduction.choose(spec, rules, setting, parts=config.parts)

    def inspect(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        faults = model_checks.check_model(
            spec, batch, accumulation=accumulation, stages=stages
        )
        if faults:
            raise ConfigError(faults)
        with execution.activate(
            mesh,
            rules,
            compute=config.compute,
            reduce=config.reduce,
            recipe=config.recipe,
        ):
            key = jax.random.fold_in(key_of(config.seed, STEPS), state.step)
            once = reduction.axes_for(chosen, batch, rules, setting, config.parts)
            scaled = state.opt_state.loss_scale
            scale = None if scaled is None else factor(scaled, batch)
            policy = (state.trainable, state.frozen)
            policy, batch = prepare(state.modules, policy, batch)
            state = state._replace(trainable=policy[0], frozen=policy[1])
            sums = sum_gradients(
                gradient_of,
                state,
                batch,
                key,
                accumulation=accumulation,
                names=names_of(staged),
                once=once,
                scale=scale,
            )
            gradients = jax.tree.map(lambda g: g / sums.loss.count, sums.gradients)
            sums = sums._replace(model_state=apply_stats(spec, cut, state, sums))
            return *rule.apply(state, sums, batch), gradients

    return inspect


def build_evaluate(
    spec: ModelSpec, loss_of: PartSums, mesh: Mesh, rules: Rules, config: StepConfig
) -> Callable[[State, Batch], LossSums]:
    """Returns the function `TrainStep.evaluate`.

    Args:
      spec: with flat blocks.
    """
    cut = config.staging
    measures = has_metrics(spec.model_class)
    # Sums of several batches are added up: the loss keeps the objective's count.
    prepare = build_prepare(
        spec, cut, compute=config.compute, accumulation=1, counts_targets=False
    )

    def evaluate(state: State, batch: Batch) -> LossSums:
        with execution.activate(
            mesh, rules, compute=config.compute, recipe=config.recipe
        ):
            arrays, batch = prepare(state.modules, state.model_arrays, batch)
            _, (loss, _) = loss_of(*arrays, batch, None)
            counts = dict.fromkeys(loss.aux, loss.count)
            for name in aux_over_targets(spec, batch):
                counts[name] = batch["weights"].sum()
            others = {
                f"aux/{name}": (value, counts[name]) for name, value in loss.aux.items()
            }
            if measures:
                parts = [*map(cut.flat, arrays)] if cut else [*arrays]
                model = assembled(
                    spec, config.compute, parts[0], parts[1], parts[2], None
                )
                others |= as_metrics(model.metrics(batch), loss.count)
        return loss.sum, loss.count, others

    return evaluate


def build_gradients(spec: ModelSpec, config: StepConfig) -> tuple[PartSums, PartSums]:
    """Returns the functions that compute the gradients of a part of a batch, and its
    loss alone.

    Args:
      spec: with blocks by stage, where a pipeline cuts them up.
    """
    if config.staging is None:
        objective = build_objective(spec, compute=config.compute, remat=config.remat)
        return jax.grad(objective, has_aux=True), objective
    build = partial(build_pipelined, spec, config.staging, compute=config.compute)
    return build(backward=True), build(backward=False)


def forward_program(
    spec: ModelSpec,
    batch: Mapping[str, Any],
    *,
    compute: str,
    recipe: Recipe | None = None,
) -> Any:
    """Traces the objective of a batch, without gradients; returns the jaxpr.

    Args:
      spec: with flat blocks.
      batch: arrays or their shapes, without the objective's fields.
      compute: dtype of matrix products.
      recipe: of large kernels; None: they are multiplied in `compute`.
    """
    objective = build_objective(spec, compute=compute, remat="none")
    forward = jax.make_jaxpr(lambda t, m, f, b: objective(t, m, f, b, None)[0])
    with execution.activate(compute=compute, recipe=recipe):
        whole = abstract_batch(spec, batch)
        return forward(spec.trainable, spec.model_state, spec.frozen, whole)
