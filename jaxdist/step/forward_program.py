"""The forward program of a model on one device, traced to count what it computes."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxdist.parallel import execution
from jaxdist.parallel.formats.format import Recipe
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step.gradients import build_objective
from jaxdist.step.objective_fields import abstract_batch


def forward_program(
    spec: ModelSpec,
    batch: Mapping[str, Any],
    *,
    compute: str,
    recipe: Recipe | None = None,
) -> Any:
    """Traces the objective of a batch without gradients.

    Args:
      spec: the model with flat blocks.
      batch: arrays or their shapes by name, without the objective's fields.
      compute: dtype of matrix products.
      recipe: number format of large kernels' products; None = `compute`.

    Returns:
      The jaxpr.
    """
    objective = build_objective(spec, compute=compute, remat="none")

    def forward(trainable: Tree, model_state: Tree, frozen: Tree, batch: Batch) -> Any:
        total, _ = objective(trainable, model_state, frozen, batch, None)
        return total

    with execution.activate(compute=compute, recipe=recipe):
        prepared = abstract_batch(spec, batch)
        return jax.make_jaxpr(forward)(
            spec.trainable, spec.model_state, spec.frozen, prepared
        )
