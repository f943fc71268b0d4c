"""The functions that `TrainStep` compiles beside the step; they change no state."""

from collections.abc import Callable

from jax.sharding import Mesh

from jaxdist.parallel import execution
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch, as_metrics, has_metrics
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.objective import Terms
from jaxdist.step.assembly import assemble_model
from jaxdist.step.evaluation import LossSums
from jaxdist.step.gradients import SumsFunction
from jaxdist.step.objective_fields import (
    aux_counts,
    aux_over_targets,
    metric_counts,
)
from jaxdist.step.prepare import build_prepare, build_terms
from jaxdist.step.state import State
from jaxdist.step.step_config import StepConfig
from jaxdist.step.update import UpdateRule


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
            counts |= aux_counts(spec, batch) | metric_counts(spec, batch)
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
