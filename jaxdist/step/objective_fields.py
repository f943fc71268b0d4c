"""The fields that an objective adds to a batch, without the layout of the step.

`step.prepare` computes them in the step. Checks of a model only need their shapes.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.parallel import execution
from jaxdist.protocols.model import Batch, staged_output
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.objective import (
    COUNT_PER_AUX,
    COUNT_PER_METRIC,
    TARGETS_PER_COUNT,
    FrozenModule,
    Terms,
    TokenObjective,
    as_terms,
    module_terms,
)


def abstract_batch(spec: ModelSpec, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a batch with the objective's fields as ShapeDtypeStructs.

    Args:
      spec: the model with flat blocks.
      batch: arrays or their shapes by name, without these fields.

    Raises:
      ConfigError: the fields do not fit the batch.
    """
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}

    def fields(
        arrays: Mapping[str, Tree], policy: tuple[Tree, Tree, Tree], batch: Batch
    ) -> Terms:
        modules: dict[str, FrozenModule] = {
            name: partial(
                module_terms, spec.objective, module.assemble({}, {}, arrays[name])
            )
            for name, module in spec.modules.items()
        }
        if spec.objective.base_module:
            base = partial(module_terms, spec.objective, spec.assemble(*policy))
            modules[spec.objective.base_module] = base
        added = (
            objective_fields(spec, modules, batch) if spec.objective.prepares else {}
        )
        return added | ratios_of_counts(spec, {**batch, **added})

    arrays = {name: module.frozen for name, module in spec.modules.items()}
    policy = (spec.trainable, spec.model_state, spec.frozen)
    added: dict[str, Any] = jax.eval_shape(fields, arrays, policy, shapes)
    return shapes | added


def objective_fields(
    spec: ModelSpec, modules: Mapping[str, FrozenModule], batch: Batch
) -> Terms:
    """Computes the fields that the objective adds to a batch.

    Raises:
      ConfigError: a field has the name of another, or is not [B, S] or [B, S, k].
    """
    fields = spec.objective.prepare(modules, batch)
    taken = sorted(fields.keys() & batch.keys())
    if taken:
        name = type(spec.objective).__name__
        raise ConfigError(
            f"{name}.prepare returned {', '.join(taken)}, which batches have; rename it"
        )
    return as_terms(fields, batch)


def ratios_of_counts(spec: ModelSpec, batch: Batch) -> dict[str, jax.Array]:
    """Computes the ratios of counts by which sums with another count are multiplied.

    TARGETS_PER_COUNT is for aux terms of blocks, COUNT_PER_AUX for those of the
    objective, and COUNT_PER_METRIC for its metrics.

    Args:
      spec: the model with flat blocks.
      batch: the whole batch of a step, with the objective's fields.

    Returns:
      The fields by name; {} if none is needed.
    """
    own_counts = {
        COUNT_PER_AUX + name: count for name, count in aux_counts(spec, batch).items()
    }
    own_counts |= {
        COUNT_PER_METRIC + name: count
        for name, count in metric_counts(spec, batch).items()
    }
    over_targets = aux_over_targets(spec, batch)
    if not own_counts and not over_targets:
        return {}
    counts = _row_counts(spec, batch)
    count = counts.sum()
    fields = {}
    for name, own_count in own_counts.items():
        ratio = count / jnp.maximum(own_count, 1)
        fields[name] = jnp.full(len(counts), ratio)
    if over_targets:
        ratio = batch["weights"].sum() / count
        fields[TARGETS_PER_COUNT] = jnp.full(len(counts), ratio)
    return fields


def aux_counts(spec: ModelSpec, batch: Batch) -> dict[str, jax.Array]:
    """Counts what aux terms are divided by whose count is not the objective's."""
    return spec.objective.counts_of_aux(spec.abstract_model, batch)


def metric_counts(spec: ModelSpec, batch: Batch) -> dict[str, jax.Array]:
    """Counts what metrics are divided by whose count is not the objective's."""
    objective = spec.objective
    if not isinstance(objective, TokenObjective):
        return {}
    return objective.metric_counts(batch)


def _row_counts(spec: ModelSpec, batch: Batch) -> jax.Array:
    """Counts what the loss is divided by, for each row, [B]."""
    objective = spec.objective
    if not isinstance(objective, TokenObjective):
        return batch["weights"].sum(1)
    _, terms = _policy_outputs(spec, batch)
    # The counts do not depend on the values of the terms.
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in terms.items()}
    return objective.row_losses(zeros, batch).count


def aux_over_targets(spec: ModelSpec, batch: Batch) -> list[str]:
    """Lists the aux terms of blocks that the objective's count cannot divide."""
    objective = spec.objective
    if objective.counts_targets or not isinstance(objective, TokenObjective):
        return []
    if not objective.can_count_targets(batch):
        return []
    aux, _ = _policy_outputs(spec, batch)
    return [*aux]


def _policy_outputs(spec: ModelSpec, batch: Batch) -> tuple[Terms, Terms]:
    """Describes the aux terms of the policy's blocks, and the policy's terms."""
    objective = spec.objective
    assert isinstance(objective, TokenObjective)

    def outputs(arrays: tuple[Tree, Tree, Tree], batch: Batch) -> tuple[Terms, Terms]:
        model = spec.assemble(*arrays)
        x, aux, _ = staged_output(model, batch, None)
        return aux, as_terms(objective.terms_of_policy(model, x, batch), batch)

    arrays = (spec.trainable, spec.model_state, spec.frozen)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    with execution.activate():
        described: tuple[Terms, Terms] = jax.eval_shape(outputs, arrays, shapes)
    return described
