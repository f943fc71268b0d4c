"""From `model.target` to a model: which class, which fields, how to build it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxdist.config import ConfigError, suggest

DEFAULT_TARGET = "jaxdist.models.transformer:Transformer"


def find_model(target: str) -> type[nnx.Module]:
    """Returns the class that `package.module:Class` names.

    Raises:
      ConfigError: no such module or class, or it is not an nnx.Module.
    """
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"model.target={target!r}: must be package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"model.target={target!r}: cannot import {module_name}: {error}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, nnx.Module)):
        models = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nnx.Module)]
        raise ConfigError(
            f"model.target={target!r}: {module_name} has no nnx.Module {class_name!r}."
            f"{suggest(class_name, models)}"
        )
    return found


def options_class(model: type[nnx.Module]) -> type:
    """Returns the class whose fields are the model's options: `Model.Config`, or the model itself."""
    return getattr(model, "Config", model)


def build_function(model: type[nnx.Module], options: Mapping[str, Any]) -> Callable[[nnx.Rngs], Any]:
    """Returns `build(rngs) -> model`."""
    if dataclasses.is_dataclass(config := options_class(model)):
        return lambda rngs: model(config(**options), rngs=rngs)  # type: ignore[call-arg]
    return lambda rngs: model(**options, rngs=rngs)  # type: ignore[call-arg]


def option_faults(model: type[nnx.Module], options: Mapping[str, Any]) -> list[str]:
    """Returns what the model's own config says is wrong with its values."""
    config: Any = options_class(model)
    return config(**options).faults() if hasattr(config, "faults") else []
