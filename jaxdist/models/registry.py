"""From `model.target` to a model: which class, which fields, how to build it."""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from flax import nnx

from jaxdist.config import ConfigError, schema, suggest
from jaxdist.storage.digest import digest

DEFAULT_TARGET = "jaxdist.models.transformer:Transformer"
MOVED = {"jaxdist.models.registry:Given": "jaxdist.models.registry:UserModel"}  # targets in older run folders


def is_installed(target: str) -> bool:
    """Returns whether a target's code is part of this package, so that naming it runs no other code."""
    module = target.partition(":")[0]
    return module.startswith("jaxdist.") and not module.endswith(".py") and "/" not in module


class UserModel(nnx.Module):
    """Stands in a config for a model that was given to `jaxdist.fit`: only there it can be made."""

    def __init__(self, name: str, *, rngs: nnx.Rngs):
        raise ConfigError(
            f"the model {name} was given to jaxdist.fit: use what fit returns, or call it again"
        )


USER_TARGET = f"{__name__}:{UserModel.__name__}"


def find_model(target: str) -> type[nnx.Module]:
    """Returns the class that `package.module:Class` or `path/of/file.py:Class` names.

    Raises:
      ConfigError: no such module or class, or it is not an nnx.Module.
    """
    module_name, _, class_name = target.rpartition(":")
    if not module_name or not class_name:
        raise ConfigError(f"model.target={target!r}: must be package.module:Class or path/of/file.py:Class")
    try:
        by_path = module_name.endswith(".py")
        module = _module_of(Path(module_name)) if by_path else importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        hint = "" if by_path else f" (looked from {Path.cwd()}, too; a file is path/of/file.py:Class)"
        raise ConfigError(f"model.target={target!r}: cannot import {module_name}: {error}{hint}") from error
    model = getattr(module, class_name, None)
    if not (isinstance(model, type) and issubclass(model, nnx.Module)):
        models = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nnx.Module)]
        raise ConfigError(
            f"model.target={target!r}: {module_name} has no nnx.Module {class_name!r}."
            f"{suggest(class_name, models)}"
        )
    return model


def _module_of(file: Path) -> ModuleType:
    """Returns the module in a file, executed once; as with `python FILE`, it finds those beside it."""
    path = file.expanduser().resolve()
    name = f"{path.stem}_{digest(path)[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)  # there, so that its source can be found
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def options_class(model: type[nnx.Module]) -> type:
    """Returns the class whose fields are the model's options: `Model.Config`, or the model itself.

    Raises:
      ConfigError: the model's own parameters cannot be options.
    """
    config = getattr(model, "Config", model)
    if config is not model and dataclasses.is_dataclass(config):
        return config
    if faults := list(_parameter_faults(model)):
        raise ConfigError(faults)
    return model


def _parameter_faults(model: type[nnx.Module]) -> Iterator[str]:
    """Yields which parameters of __init__ a config can neither give nor leave out."""
    for name, parameter in inspect.signature(model.__init__).parameters.items():
        if name in ("self", "rngs") or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"{model.__name__}.__init__: {name} can be given by place only; take it by name"
        elif parameter.annotation is parameter.empty and parameter.default is parameter.empty:
            yield (
                f"{model.__name__}.__init__: {name} has no annotation, so model.{name} has no type; "
                f"annotate it ({name}: int), or call it rngs if it is the nnx.Rngs"
            )


def build_function(model: type[nnx.Module], options: Mapping[str, Any]) -> Callable[[nnx.Rngs], Any]:
    """Returns `build(rngs) -> model`."""
    taken = inspect.signature(model.__init__).parameters.values()
    random = any(parameter.name == "rngs" or parameter.kind is parameter.VAR_KEYWORD for parameter in taken)

    def build(rngs: nnx.Rngs):
        streams = {"rngs": rngs} if random else {}
        config: Any = options_class(model)
        make: Any = model
        return make(**options, **streams) if config is model else make(config(**options), **streams)

    return build


def model_config(model: type[nnx.Module], options: Mapping[str, Any]) -> Any:
    """Returns `Model.Config` of the options, with its hooks (see `protocols.model`); None without one.

    Raises:
      ConfigError: it refuses them.
    """
    config: Any = options_class(model)
    try:
        return None if config is model else config(**options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: cannot be built with these options: {error}") from error


def model_hook(config: Any, name: str) -> Any:
    """Returns a function of the model's Config by its name; None if it has none, or data of that name."""
    hook = getattr(config, name, None)
    return hook if callable(hook) else None


def option_faults(model: type[nnx.Module], options: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the values by the model's annotations, and by its config's `faults`."""
    config = model_config(model, options)
    if config is not None:
        return schema.faults(config, "model.")
    values = {f"model.{name}": value for name, value in options.items()}
    return list(schema.range_faults(values, schema.schema_of(model, "model.")))
