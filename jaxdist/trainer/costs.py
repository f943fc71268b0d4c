"""The costs that the ops of a run's model declare."""

from typing import Any

import jax.numpy as jnp

from jaxdist.models import registry
from jaxdist.ops.costs import Cost
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer.compose import targets_per_sample
from jaxdist.trainer.run_config import RunConfig


def costs_of(config: RunConfig) -> list[Cost]:
    """Lists the costs of the model's ops; [] if the model declares none."""
    return _declared_costs(config, config.model_config)


def module_costs(config: RunConfig, module: ModelSpec) -> list[Cost]:
    """Lists the costs of a frozen module's ops; [] if its model declares none."""
    return _declared_costs(config, getattr(module.abstract_model, "config", None))


def _declared_costs(config: RunConfig, model_config: Any) -> list[Cost]:
    hook = registry.model_hook(model_config, "costs")
    if hook is None:
        return []
    costs: list[Cost] = hook(targets_per_sample(config))
    return costs


def itemsize_of(config: RunConfig) -> int:
    """Computes the bytes of an element of activations."""
    return jnp.dtype(config.precision.compute).itemsize


def undeclared_lines(config: RunConfig, name: str = "") -> list[str]:
    """Warns that a model declares no costs; [] if it does, or if it counts its FLOPs.

    Args:
      config: the run's config.
      name: the model's class; default: that of the config.
    """
    if costs_of(config) or registry.model_hook(config.model_config, "flops_per_token"):
        return []
    return [
        f"costs: {name or config.model_class.__name__} declares none (Config.costs); its FLOPs are "
        f"counted in its program, and what its layers send is not counted"
    ]
