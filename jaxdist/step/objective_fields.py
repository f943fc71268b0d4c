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
            name: partial(module_terms, module.assemble({}, {}, arrays[name]))
            for name, module in spec.modules.items()
        }
        if spec.objective.base_module:
            base = partial(module_terms, spec.assemble(*policy))
            modules[spec.objective.base_module] = base
        added = (
            objective_fields(spec, modules, batch) if spec.objective.prepares else {}
        )
        return added | targets_per_count(spec, {**batch, **added})

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


def targets_per_count(spec: ModelSpec, batch: Batch) -> dict[str, jax.Array]:
    """Computes the field TARGETS_PER_COUNT if aux terms of blocks need it.

    Args:
      spec: the model with flat blocks.
      batch: the whole batch of a step, with the objective's fields.

    Returns:
      The field by name; {} if it is not needed.
    """
    if not aux_over_targets(spec, batch):
        return {}
    assert isinstance(spec.objective, TokenObjective)
    _, terms = _policy_outputs(spec, batch)
    # The counts do not depend on the values of the terms.
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in terms.items()}
    count = spec.objective.row_losses(zeros, batch).count.sum()
    weights = batch["weights"]
    return {TARGETS_PER_COUNT: jnp.full(len(weights), weights.sum() / count)}


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

    def outputs(arrays: tuple[Tree, Tree, Tree], batch: Batch) -> tuple[Terms, Terms]:
        model = spec.assemble(*arrays)
        x, aux, _ = staged_output(model, batch, None)
        return aux, as_terms(model.token_terms(x, batch), batch)

    arrays = (spec.trainable, spec.model_state, spec.frozen)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    with execution.activate():
        described: tuple[Terms, Terms] = jax.eval_shape(outputs, arrays, shapes)
    return described
