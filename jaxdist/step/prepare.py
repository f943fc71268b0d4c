"""The forward program by which frozen modules add an objective's fields to a batch.

It runs in the step, before the program of the policy (the model that is trained).
Frozen modules compute a batch in the same accumulation steps and microbatches as the
policy, and in the stages of the same pipeline. Nothing is differentiated, so no
activation is kept for a backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.executor import pipeline_sums
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.stage import Pipeline
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.protocols.model import Batch, Loss
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.objective import (
    Objective,
    Terms,
    as_terms,
    module_terms,
)
from jaxdist.step.assembly import assemble_model, build_assemble, names_of
from jaxdist.step.batch_parts import dim_names, join_parts, split_batch
from jaxdist.step.objective_fields import objective_fields, ratios_of_counts

# (trained arrays, model state, frozen arrays)
Arrays = tuple[Tree, Tree, Tree]
# (arrays of a model, batch) -> its terms
TermsOf = Callable[[Arrays, Batch], Terms]
# prefix of terms among the stats of a pipeline, where blocks may have stats, too
_TERMS = "token_terms/"

# (arrays of the frozen modules, arrays of the policy, batch) -> (arrays of the policy,
# batch with the objective's fields)
Prepare = Callable[[Tree, Arrays, Batch], tuple[Arrays, Batch]]


def build_prepare(
    spec: ModelSpec,
    staging: Staging | None,
    *,
    compute: str,
    accumulation: int,
    adds_ratios: bool = True,
) -> Prepare:
    """Builds the function that adds the objective's fields to a batch.

    It returns the policy's arrays unchanged, but the policy's program waits for the
    fields. So the collectives of the two programs run in one order.

    Args:
      spec: the model with flat blocks.
      staging: the pipeline's partition of the policy; None: no pipeline.
      compute: dtype of the modules' matrix products and activations.
      accumulation: number of accumulation steps of the batch.
      adds_ratios: whether to add the ratios of counts that aux terms and metrics need.
    """
    prepares = spec.objective.prepares
    base_name = spec.objective.base_module
    called = dict(spec.modules)
    if base_name:
        called[base_name] = spec
    terms = {
        name: build_terms(spec.objective, module, staging, compute)
        for name, module in called.items()
    }

    def prepare(modules: Tree, policy: Arrays, batch: Batch) -> tuple[Arrays, Batch]:
        arrays: dict[str, Arrays] = {
            name: ({}, {}, frozen) for name, frozen in modules.items()
        }
        if base_name:
            arrays[base_name] = _base_of(policy)

        def fields_of(accumulation_part: Batch) -> Terms:
            frozen = {
                name: partial(terms_of, arrays[name])
                for name, terms_of in terms.items()
            }
            return objective_fields(spec, frozen, accumulation_part)

        extended = {**batch}
        if prepares and accumulation == 1:
            extended |= fields_of(batch)
        elif prepares:
            accumulation_parts = split_batch(batch, accumulation)
            extended |= join_parts(jax.lax.map(fields_of, accumulation_parts))
        if adds_ratios:
            extended |= ratios_of_counts(spec, extended)
        if len(extended) == len(batch):
            return policy, batch
        extended = _shard_fields(extended)
        policy, extended = jax.lax.optimization_barrier((policy, extended))
        return policy, extended

    return prepare


def _base_of(policy: Arrays) -> Arrays:
    """Sets the adapters of a policy to 0: its terms are those of its base."""
    trainable, model_state, frozen = policy
    return jax.tree.map(jnp.zeros_like, trainable), model_state, frozen


def build_terms(
    objective: Objective, spec: ModelSpec, staging: Staging | None, compute: str
) -> TermsOf:
    """Builds the function that computes a model's terms without gradients.

    Args:
      objective: the objective, which chooses the terms (`terms_of_module`).
      spec: the model with flat blocks.
      staging: the pipeline's partition of any model; None: no pipeline.
      compute: dtype of matrix products and activations.
    """
    if staging is None:
        return _whole_terms(objective, spec, compute)
    return _pipelined_terms(objective, spec, staging.for_model(spec), compute)


def _whole_terms(objective: Objective, module: ModelSpec, compute: str) -> TermsOf:
    """Builds the function that computes a module's terms without a pipeline."""

    def terms_of(arrays: Arrays, batch: Batch) -> Terms:
        model = assemble_model(module, compute, *arrays, key=None)
        return module_terms(objective, model, batch)

    return terms_of


def _pipelined_terms(
    objective: Objective, module: ModelSpec, staging: Staging, compute: str
) -> TermsOf:
    """Builds the function that computes a module's terms in a pipeline."""
    program = staging.program()
    by_stage = staging.spec_by_stage(module)
    names = names_of(by_stage)

    def score(model: Any, x: jax.Array, microbatch: Batch, number: jax.Array) -> Loss:
        """Computes the terms of a microbatch as stats, [microbatches, ...].

        The rows of other microbatches are zero, so the pipeline's sum over microbatches
        has the terms of all.
        """
        terms = as_terms(objective.terms_of_module(model, x, microbatch), microbatch)
        rows = {}
        for name, term in terms.items():
            zeros = jnp.zeros((staging.microbatches, *term.shape), term.dtype)
            rows[_TERMS + name] = zeros.at[number].set(term)
        return Loss(sum=jnp.float32(0), count=jnp.float32(0), stats=rows)

    def terms_of(arrays: Arrays, batch: Batch) -> Terms:
        trainable, model_state, frozen = arrays
        pipeline = Pipeline(
            staging, program, build_assemble(by_stage, compute, None), score
        )
        params = StageParams(trainable, frozen, model_state)
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
