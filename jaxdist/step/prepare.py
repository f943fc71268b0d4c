"""The forward program that adds an objective's fields to a batch.

It runs in the step, before the policy's own program: frozen modules compute in the
parts of the step's accumulation and, where the policy is pipelined, in the stages of
the same pipeline. Nothing is differentiated, so no activation outlives its layer.
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
from jaxdist.step.gradients import assembled, assembler, names_of

# A module's terms for a batch, from the module's arrays.
_TermsOf = Callable[[Tree, Batch], Terms]
_TERMS = "token_terms/"  # before their names, where blocks have stats of their own

# (arrays of the frozen modules, those that the policy computes with, batch) -> (the
# policy's arrays, batch)
Prepare = Callable[[Tree, Tree, Batch], tuple[Tree, Batch]]


def build_prepare(
    spec: ModelSpec,
    cut: Staging | None,
    *,
    compute: str,
    accumulation: int,
    counts_targets: bool = True,
) -> Prepare:
    """Returns `prepare(modules, policy, batch) -> (policy, batch)`.

    The batch that comes out has the objective's fields. The policy's arrays have the
    same values; what is computed from them waits for the fields, so that collectives of
    the two programs keep one order.

    Args:
      spec: with flat blocks.
      cut: how the pipeline cuts up the policy; None: no pipeline.
      compute: dtype of the modules' products and activations.
      accumulation: sequential parts of the batch.
      counts_targets: False leaves the count to the objective where blocks have aux
        terms, too.
    """
    prepares = spec.objective.prepares
    terms = {
        name: _whole_terms(module, compute)
        if cut is None
        else _pipelined_terms(module, cut.for_model(module), compute)
        for name, module in spec.modules.items()
    }

    def prepare(modules: Tree, policy: Tree, batch: Batch) -> tuple[Tree, Batch]:
        def of_part(part: Batch) -> Terms:
            frozen = {
                name: partial(terms_of, modules[name])
                for name, terms_of in terms.items()
            }
            return _fields(spec, frozen, part)

        whole = {**batch}
        if prepares and accumulation == 1:
            whole |= of_part(batch)
        elif prepares:
            parts = split_batch(batch, accumulation)
            whole |= join_parts(jax.lax.map(of_part, parts))
        if counts_targets:
            whole |= _targets_per_count(spec, whole)
        if len(whole) == len(batch):
            return policy, batch
        whole = _laid_out(whole)
        return jax.lax.optimization_barrier((policy, whole))

    return prepare


def abstract_batch(spec: ModelSpec, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns shapes and dtypes of a batch with the objective's fields.

    Args:
      spec: with flat blocks.
      batch: arrays or their shapes, without these fields.

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
    return shapes | jax.eval_shape(fields, arrays, shapes)


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
    """Computes the field of that name where aux terms of blocks need it; else {}.

    Args:
      batch: the whole batch of a step, with the objective's fields.
    """
    if not aux_over_targets(spec, batch):
        return {}
    assert isinstance(spec.objective, TokenObjective)
    _, terms = _policy_outputs(spec, batch)
    # Counts depend on the batch alone.
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in terms.items()}
    count = spec.objective.row_losses(zeros, batch).count.sum()
    weights = batch["weights"]
    return {TARGETS_PER_COUNT: jnp.full(len(weights), weights.sum() / count)}


def aux_over_targets(spec: ModelSpec, batch: Batch) -> list[str]:
    """Names the aux terms of blocks that the objective's own count cannot divide."""
    objective = spec.objective
    if objective.counts_targets or not isinstance(objective, TokenObjective):
        return []
    if not objective.can_count_targets(batch):
        return []
    aux, _ = _policy_outputs(spec, batch)
    return [*aux]


def _policy_outputs(spec: ModelSpec, batch: Batch) -> tuple[Terms, Terms]:
    """Returns the shapes of the aux terms of the policy's blocks, and of its terms."""

    def outputs(parts: tuple[Tree, Tree, Tree], batch: Batch) -> tuple[Terms, Terms]:
        model = spec.assemble(*parts)
        x, aux, _ = staged_output(model, batch, None)
        return aux, as_terms(model.token_terms(x, batch), batch)

    parts = (spec.trainable, spec.model_state, spec.frozen)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    with execution.activate():
        return jax.eval_shape(outputs, parts, shapes)


def _whole_terms(module: ModelSpec, compute: str) -> _TermsOf:
    """Returns the terms of a module that no pipeline cuts up."""

    def terms_of(arrays: Tree, batch: Batch) -> Terms:
        return module_terms(assembled(module, compute, {}, {}, arrays, None), batch)

    return terms_of


def _pipelined_terms(module: ModelSpec, cut: Staging, compute: str) -> _TermsOf:
    """Returns the terms of a module whose layers lie on the stages of a pipeline."""
    program = cut.program()
    staged = cut.staged_spec(module)
    names = names_of(staged)

    def score(model: Any, x: jax.Array, microbatch: Batch, number: jax.Array) -> Loss:
        """Puts the terms of a microbatch at its number; others are zeros, so that the
        sum over microbatches has the terms of all.
        """
        terms = as_terms(model.token_terms(x, microbatch), microbatch)
        placed = {}
        for name, x in terms.items():
            zeros = jnp.zeros((cut.microbatches, *x.shape), x.dtype)
            placed[_TERMS + name] = zeros.at[number].set(x)
        return Loss(jnp.float32(0), jnp.float32(0), {}, placed)

    def terms_of(arrays: Tree, batch: Batch) -> Terms:
        pipeline = Pipeline(cut, program, assembler(staged, compute, None), score)
        params = StageParams({}, arrays, {})
        parts = split_batch(batch, cut.microbatches)
        _, loss = pipeline_sums(pipeline, params, names, parts, None, backward=False)
        return join_parts(
            {
                name.removeprefix(_TERMS): x
                for name, x in loss.stats.items()
                if name.startswith(_TERMS)
            }
        )

    return terms_of


def _laid_out(batch: Batch) -> dict[str, jax.Array]:
    """Returns a batch with each field laid out as the step takes it."""
    names = dim_names(batch)
    return {name: execution.shard(x, *names[name]) for name, x in batch.items()}
