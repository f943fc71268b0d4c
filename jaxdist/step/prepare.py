"""The forward program by which frozen modules add an objective's fields to a batch.

It runs in the step, before the program of the policy (the model that is trained).
Frozen modules compute a batch in the same accumulation steps and microbatches as the
policy, and in the stages of the same pipeline. Nothing is differentiated, so no
activation is kept for a backward pass.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.executor import pipeline_sums
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.stage import Pipeline
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.protocols.model import Batch, Loss, staged_output
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.objective import (
    TARGETS_PER_COUNT,
    FrozenModule,
    Terms,
    TokenObjective,
    as_terms,
    module_terms,
)
from jaxdist.step.batch_parts import dim_names, join_parts, split_batch
from jaxdist.step.gradients import assemble_model, build_assemble, names_of

# (arrays of a module, batch) -> the module's terms
_TermsOf = Callable[[Tree, Batch], Terms]
# prefix of terms among the stats of a pipeline, where blocks may have stats, too
_TERMS = "token_terms/"

# (arrays of the frozen modules, arrays of the policy, batch) -> (arrays of the policy,
# batch with the objective's fields)
Prepare = Callable[[Tree, Tree, Batch], tuple[Tree, Batch]]


def build_prepare(
    spec: ModelSpec,
    staging: Staging | None,
    *,
    compute: str,
    accumulation: int,
    counts_targets: bool = True,
) -> Prepare:
    """Builds the function that adds the objective's fields to a batch.

    It returns the policy's arrays unchanged, but the policy's program waits for the
    fields. So the collectives of the two programs run in one order.

    Args:
      spec: the model with flat blocks.
      staging: the pipeline's partition of the policy; None: no pipeline.
      compute: dtype of the modules' matrix products and activations.
      accumulation: number of accumulation steps of the batch.
      counts_targets: whether to add the field TARGETS_PER_COUNT if aux terms of blocks
        need it.
    """
    prepares = spec.objective.prepares
    terms: dict[str, _TermsOf] = {}
    for name, module in spec.modules.items():
        if staging is None:
            terms[name] = _whole_terms(module, compute)
        else:
            terms[name] = _pipelined_terms(module, staging.for_model(module), compute)

    def prepare(modules: Tree, policy: Tree, batch: Batch) -> tuple[Tree, Batch]:
        def fields_of(accumulation_part: Batch) -> Terms:
            frozen = {
                name: partial(terms_of, modules[name])
                for name, terms_of in terms.items()
            }
            return _fields(spec, frozen, accumulation_part)

        extended = {**batch}
        if prepares and accumulation == 1:
            extended |= fields_of(batch)
        elif prepares:
            accumulation_parts = split_batch(batch, accumulation)
            extended |= join_parts(jax.lax.map(fields_of, accumulation_parts))
        if counts_targets:
            extended |= _targets_per_count(spec, extended)
        if len(extended) == len(batch):
            return policy, batch
        extended = _shard_fields(extended)
        policy, extended = jax.lax.optimization_barrier((policy, extended))
        return policy, extended

    return prepare


def abstract_batch(spec: ModelSpec, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a batch with the objective's fields as ShapeDtypeStructs.

    Args:
      spec: the model with flat blocks.
      batch: arrays or their shapes by name, without these fields.

    Raises:
      ConfigError: the fields do not fit the batch.
    """
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}

    def fields(arrays: Mapping[str, Tree], batch: Batch) -> Terms:
        modules = {
            name: partial(module_terms, module.assemble({}, {}, arrays[name]))
            for name, module in spec.modules.items()
        }
        added = _fields(spec, modules, batch) if spec.objective.prepares else {}
        return added | _targets_per_count(spec, {**batch, **added})

    arrays = {name: module.frozen for name, module in spec.modules.items()}
    added: dict[str, Any] = jax.eval_shape(fields, arrays, shapes)
    return shapes | added


def _fields(
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


def _targets_per_count(spec: ModelSpec, batch: Batch) -> dict[str, jax.Array]:
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


def _whole_terms(module: ModelSpec, compute: str) -> _TermsOf:
    """Builds the function that computes a module's terms without a pipeline."""

    def terms_of(arrays: Tree, batch: Batch) -> Terms:
        model = assemble_model(module, compute, {}, {}, arrays, key=None)
        return module_terms(model, batch)

    return terms_of


def _pipelined_terms(module: ModelSpec, staging: Staging, compute: str) -> _TermsOf:
    """Builds the function that computes a module's terms in a pipeline."""
    program = staging.program()
    by_stage = staging.spec_by_stage(module)
    names = names_of(by_stage)

    def score(model: Any, x: jax.Array, microbatch: Batch, number: jax.Array) -> Loss:
        """Computes the terms of a microbatch as stats, [microbatches, ...].

        The rows of other microbatches are zero, so the pipeline's sum over microbatches
        has the terms of all.
        """
        terms = as_terms(model.token_terms(x, microbatch), microbatch)
        rows = {}
        for name, term in terms.items():
            zeros = jnp.zeros((staging.microbatches, *term.shape), term.dtype)
            rows[_TERMS + name] = zeros.at[number].set(term)
        return Loss(sum=jnp.float32(0), count=jnp.float32(0), aux={}, stats=rows)

    def terms_of(arrays: Tree, batch: Batch) -> Terms:
        pipeline = Pipeline(
            staging, program, build_assemble(by_stage, compute, None), score
        )
        params = StageParams({}, arrays, {})
        microbatches = split_batch(batch, staging.microbatches)
        _, loss = pipeline_sums(
            pipeline, params, names, microbatches, None, backward=False
        )
        return join_parts(
            {
                name.removeprefix(_TERMS): x
                for name, x in loss.stats.items()
                if name.startswith(_TERMS)
            }
        )

    return terms_of


def _shard_fields(batch: Batch) -> dict[str, jax.Array]:
    """Gives each field of a batch the sharding of the step."""
    names = dim_names(batch)
    return {name: execution.shard(x, *names[name]) for name, x in batch.items()}
