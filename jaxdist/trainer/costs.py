"""What the ops of a run's model declare that they need."""

import jax.numpy as jnp

from jaxdist.models import registry
from jaxdist.ops.costs import Cost
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer.compose import targets_per_sample
from jaxdist.trainer.run_config import RunConfig


def costs_of(run: RunConfig) -> list[Cost]:
    """Returns the costs of the model's ops, of all sequences; [] if it declares none."""
    costs = registry.model_hook(run.model_config, "costs")
    return costs(targets_per_sample(run)) if costs else []


def module_costs(run: RunConfig, module: ModelSpec) -> list[Cost]:
    """Returns the costs of a frozen module's ops; [] if its model declares none."""
    config = getattr(module.abstract_model, "config", None)
    costs = registry.model_hook(config, "costs")
    return costs(targets_per_sample(run)) if costs else []


def itemsize_of(run: RunConfig) -> int:
    """Returns the bytes of an activation's element."""
    return jnp.dtype(run.precision.compute).itemsize


def undeclared_lines(run: RunConfig) -> list[str]:
    """Returns the line that says that a model declares no costs; none if it does."""
    if costs_of(run) or registry.model_hook(run.model_config, "flops_per_token"):
        return []
    return [
        f"costs: {run.model_class.__name__} declares none (Config.costs); its FLOPs are "
        f"counted in its program, and what its layers send is left out"
    ]
