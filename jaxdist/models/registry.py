"""Models by `model.target`: trust in its code, import, options and building."""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flax import nnx

from jaxdist.config import ConfigError, schema, suggest
from jaxdist.storage.digest import digest

MODEL_KEY = "model.target"
DEFAULT_TARGET = "jaxdist.models.transformer:Transformer"


Kind = TypeVar("Kind")


def is_installed(target: str) -> bool:
    """Checks whether a target belongs to this package.

    This package is imported already, so no other one can take its name.
    """
    module_name = target.rpartition(":")[0]
    if _is_file(module_name):
        return False
    return module_name.partition(".")[0] == __name__.partition(".")[0]


# library -> name of its modules, and the way from there to NNX
_FOREIGN = {
    "flax.linen": ("a flax linen module", "wrap linen by nnx.bridge.ToNNX"),
    "equinox": ("an equinox module", "hold its arrays in nnx.Param"),
    "torch.nn": (
        "a PyTorch module",
        "write it in NNX; weights of known families are read by convert",
    ),
}


def foreign_fault(model: object) -> str:
    """Explains how to use a module of another library than NNX; "" for other objects.

    Args:
      model: a module, or a class of modules.
    """
    kind = model if isinstance(model, type) else type(model)
    for base in kind.__mro__:
        for library, (description, fix) in _FOREIGN.items():
            if f"{base.__module__}.".startswith(f"{library}."):
                return (
                    f"{kind.__name__} is {description}, and jaxdist takes flax NNX; {fix}: see "
                    f"docs/how-to/own-model-details.md, Modules of other libraries"
                )
    return ""


class UserModel(nnx.Module):
    """Placeholder in a config for a model that was passed to `jaxdist.fit`.

    Only the caller of `fit` can build that model.
    """

    def __init__(self, name: str, *, rngs: nnx.Rngs) -> None:
        raise ConfigError(
            f"the model {name} was passed to jaxdist.fit, and only its code can build it again. Pass it here, "
            f"too: load_run(folder, model=...), or --config.model.target=FILE.py:NAME, a class or a function "
            f"of rngs"
        )


USER_TARGET = f"{__name__}:{UserModel.__name__}"


def check_stored_target(
    target: str,
    folder: Path,
    *,
    named: str | None = None,
    trust_code: bool | None = False,
    key: str = MODEL_KEY,
) -> None:
    """Checks that code which a file in `folder` names may be executed.

    The folder may be somebody else's. A class of this package is allowed. Any other
    class must be named by the user, too, or be trusted. A file below `folder` is never
    executed. Nothing is imported here.

    Args:
      target: as the file has it.
      folder: of the run.
      named: the target that the user names; None for none.
      trust_code: whether the user trusts the folder; None: only if the module is
        imported already.
      key: of the config, which has the target.

    Raises:
      ConfigError: the target must not be executed.
    """
    module_name, _ = _split(target, key)
    if is_installed(target):
        return
    if trust_code is None and _module_key(module_name) in sys.modules:
        return
    refuse_inside(target, folder, key=key)
    if trust_code:
        return
    if named is None or _canonical(target) != _canonical(named):
        here = f" (here: {named!r})" if named else ""
        raise ConfigError(
            f"{folder} has {key}={target!r}{here}. It is not of jaxdist, and not executed unasked; if "
            f"you trust it, add --config.{key}={target!r}, or --trust-code (load_run: trust_code)"
        )


def refuse_inside(target: str, folder: Path, *, key: str = MODEL_KEY) -> None:
    """Checks that importing a target executes no file below a run's folder.

    Args:
      target: a module or a file, and a class.
      folder: of the run.
      key: of the config, which has the target.

    Raises:
      ConfigError: it would execute such a file.
    """
    module_name, _ = _split(target, key)
    if is_installed(target):
        return
    above = {os.path.abspath(folder), os.path.realpath(folder)}
    for file in _files_of(module_name):
        places = {Path(os.path.abspath(file)), Path(os.path.realpath(file))}
        if any(place.is_relative_to(run) for place in places for run in above):
            raise ConfigError(
                f"{key}={target!r}: {file} is in the run's folder {folder}, whose files are never "
                f"executed; copy it elsewhere, read it, and name the copy: --config.{key}=..."
            )


def _split(target: str, key: str = MODEL_KEY) -> tuple[str, str]:
    """Splits a target into its module, or file, and its class.

    Raises:
      ConfigError: the target does not have this form.
    """
    module_name, _, class_name = target.rpartition(":")
    is_module = all(part.isidentifier() for part in module_name.split("."))
    is_valid = class_name.isidentifier() and (is_module or _is_file(module_name))
    if not is_valid or "\0" in target:
        raise ConfigError(
            f"{key}={target!r}: must be package.module:Class or path/of/file.py:Class"
        )
    return module_name, class_name


def _is_file(module_name: str) -> bool:
    return module_name.endswith(".py")


def _canonical(target: str) -> str:
    """Writes a target's file as its real path: one text for all spellings."""
    module_name, class_name = _split(target)
    if _is_file(module_name):
        return f"{_real_path(module_name)}:{class_name}"
    return f"{module_name}:{class_name}"


def _real_path(file: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(file)))


def _files_of(module_name: str) -> Iterator[Path]:
    """Yields the files that importing a module would execute; executes none."""
    if _is_file(module_name):
        yield Path(os.path.expanduser(module_name))
        return
    _add_current_folder()
    name = ""
    path = None
    for part in module_name.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _find_spec(name, path)
        if spec is None:
            return
        if spec.has_location and spec.origin:
            yield Path(spec.origin)
        locations: Any = spec.submodule_search_locations
        # the locations of a namespace package would look for its parent's module
        path = getattr(locations, "_path", locations)


def _find_spec(name: str, path: Any) -> ModuleSpec | None:
    """Finds a module with `sys.meta_path`, without importing its parent."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, path) if find_spec else None
        if spec is not None:
            return spec
    return None


def _add_current_folder() -> None:
    """Adds the current folder to the end of the import path.

    `python -m` puts it first; here installed packages win. This is done only for a
    model: on the path from the start, a file `numpy.py` in the folder could run in any
    command.
    """
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def find_model(target: str) -> type[nnx.Module]:
    """Imports the class that a target names, which executes its module.

    If a file names the target, call `check_stored_target` first.

    Args:
      target: `package.module:Class` or `path/of/file.py:Class`.

    Raises:
      ConfigError: the module or class does not exist, or is no nnx.Module.
    """
    return find_class(target, nnx.Module, "nnx.Module", key=MODEL_KEY)


def find_class(target: str, base: type[Kind], name: str, *, key: str) -> type[Kind]:
    """Imports the class that a target names, which executes its module.

    Args:
      target: `package.module:Class` or `path/of/file.py:Class`.
      base: required base class.
      name: of the base class in messages.
      key: of the config, which has the target.

    Raises:
      ConfigError: the module or class does not exist, or is no subclass of `base`.
    """
    module_name, class_name = _split(target, key)
    module = _import(target, key)
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    fault = foreign_fault(found)
    if fault:
        raise ConfigError(f"{key}={target!r}: {fault}")
    others = [
        other
        for other, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base)
    ]
    raise ConfigError(
        f"{key}={target!r}: {module_name} has no {name} {class_name!r}.{suggest(class_name, others)}"
    )


def find_maker(target: str, folder: Path) -> Any:
    """Imports the class, or the function of rngs, that built a model for `jaxdist.fit`.

    Args:
      target: `package.module:name` or `path/of/file.py:name`.
      folder: of the run, whose files are never executed.

    Raises:
      ConfigError: the name does not exist, or cannot be called.
    """
    refuse_inside(target, folder)
    module = _import(target)
    name = _split(target)[1]
    maker = getattr(module, name, None)
    if not callable(maker):
        raise ConfigError(
            f"model.target={target!r}: {module.__name__} has no class or function {name!r}"
        )
    return maker


def _import(target: str, key: str = MODEL_KEY) -> ModuleType:
    """Imports the module of a target.

    Raises:
      ConfigError: the module cannot be imported.
    """
    module_name, _ = _split(target, key)
    is_file = _is_file(module_name)
    try:
        if is_file:
            return _import_file(module_name)
        if not is_installed(target):
            _add_current_folder()
        return importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        hint = ""
        if not is_file:
            hint = f" (looked from {Path.cwd()}, too; a file is path/of/file.py:Class)"
        raise ConfigError(
            f"{key}={target!r}: cannot import {module_name}: {error}{hint}"
        ) from error


def _module_key(module_name: str) -> str:
    """Makes the key of a module in sys.modules.

    The key of a file contains a digest of its real path.
    """
    if not _is_file(module_name):
        return module_name
    return f"{Path(module_name).stem}_{digest(_real_path(module_name))[:8]}"


def _import_file(file: str) -> ModuleType:
    """Imports a file once. It can import the modules of its folder, as a script can."""
    path = _real_path(file)
    name = _module_key(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    # in sys.modules, so that `inspect` finds its source
    module = sys.modules[name] = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def options_class(model: type[nnx.Module]) -> type:
    """Finds the class whose fields are the model's options.

    It is `Model.Config` if that is a dataclass, otherwise the model itself.

    Raises:
      ConfigError: parameters of the model's __init__ cannot be options.
    """
    config = getattr(model, "Config", model)
    if config is not model and dataclasses.is_dataclass(config):
        return config
    faults = list(_parameter_faults(model))
    if faults:
        raise ConfigError(faults)
    return model


def _parameter_faults(model: type[nnx.Module]) -> Iterator[str]:
    """Yields a message for each parameter of __init__ that cannot be an option."""
    for name, parameter in inspect.signature(model.__init__).parameters.items():
        variadic = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name in ("self", "rngs") or parameter.kind in variadic:
            continue
        has_type = parameter.annotation is not parameter.empty
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"{model.__name__}.__init__: {name} is positional only; take it by name"
        elif not has_type and not has_default:
            yield (
                f"{model.__name__}.__init__: {name} has no annotation, so model.{name} has no type; "
                f"annotate it ({name}: int), or call it rngs if it is the nnx.Rngs"
            )


def build_function(
    model: type[nnx.Module], options: Mapping[str, Any]
) -> Callable[[nnx.Rngs], Any]:
    """Creates a function that builds the model with its options from `nnx.Rngs`."""
    parameters = inspect.signature(model.__init__).parameters.values()
    takes_rngs = any(
        parameter.name == "rngs" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )

    def build(rngs: nnx.Rngs) -> Any:
        streams = {"rngs": rngs} if takes_rngs else {}
        config_class: Any = options_class(model)
        model_class: Any = model
        if config_class is model:
            return model_class(**options, **streams)
        return model_class(_make_config(config_class, options), **streams)

    return build


def _make_config(config_class: Any, options: Mapping[str, Any]) -> Any:
    """Creates a model's Config. The options of a group are a mapping in `options`."""
    if any(isinstance(value, Mapping) for value in options.values()):
        return schema.from_config_dict(config_class, options)
    return config_class(**options)


def model_config(model: type[nnx.Module], options: Mapping[str, Any]) -> Any:
    """Creates the model's Config, with its hooks (see `protocols.model`).

    Returns:
      The Config; None for a model without one.

    Raises:
      ConfigError: the Config refuses the options.
    """
    config_class: Any = options_class(model)
    if config_class is model:
        return None
    try:
        return _make_config(config_class, options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model: cannot be built with these options: {error}"
        ) from error


def model_hook(config: Any, name: str) -> Any:
    """Looks up a function of the model's Config; None if it has none of that name."""
    hook = getattr(config, name, None)
    return hook if callable(hook) else None


def option_faults(model: type[nnx.Module], options: Mapping[str, Any]) -> list[str]:
    """Lists faults of the options, by annotations and by the Config's `faults`."""
    config = model_config(model, options)
    if config is not None:
        return schema.faults(config, "model.")
    values = {f"model.{name}": value for name, value in options.items()}
    return list(schema.range_faults(values, schema.schema_of(model, "model.")))
