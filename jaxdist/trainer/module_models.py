"""The models of an objective's frozen modules.

Each module has the model of the run, unless `_CONFIGS` names another.
"""

from collections.abc import Callable, Mapping, Sequence

from jaxdist.models import registry
from jaxdist.objectives.distill import TEACHER
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.teacher_model import teacher_config

# by module: makes the config of a run that trains the module's model
_CONFIGS: Mapping[str, Callable[[RunConfig], RunConfig]] = {TEACHER: teacher_config}


def describe_modules(
    config: RunConfig, names: Sequence[str], policy: ModelSpec
) -> dict[str, ModelSpec]:
    """Describes the models of frozen modules, by the names of the modules.

    Args:
      config: the run's config.
      names: the modules of the objective.
      policy: the run's model.

    Raises:
      ConfigError: a model cannot be built.
    """
    return {
        name: describe_module(config, name) if name in _CONFIGS else policy
        for name in names
    }


def describe_module(config: RunConfig, name: str) -> ModelSpec:
    """Describes the model of a frozen module that is not the run's model.

    Raises:
      ConfigError: the model cannot be built.
    """
    other = _CONFIGS[name](config)
    build = registry.build_function(other.model_class, other.model_options)
    is_same_class = other.model["target"] == config.model["target"]
    return describe(build, rules=config.sharding.rules if is_same_class else ())
