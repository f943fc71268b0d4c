"""From `model.target` to a model: whose code it is, which class, which fields, how to
build it.
"""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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
    """Checks whether a target is of this package, which is imported, so that none can
    stand before it.
    """
    module_name = target.rpartition(":")[0]
    return (
        not _is_file(module_name)
        and module_name.partition(".")[0] == __name__.partition(".")[0]
    )


_FOREIGN = {  # modules of other libraries: what one is, and the way to NNX
    "flax.linen": ("a flax linen module", "wrap linen by nnx.bridge.ToNNX"),
    "equinox": ("an equinox module", "hold its arrays in nnx.Param"),
    "torch.nn": (
        "a PyTorch module",
        "write it in NNX; weights of known families are read by convert",
    ),
}


def foreign_fault(model: object) -> str:
    """Describes a module, or a class of modules, of a library other than
    NNX; "" of all else.
    """
    kind = model if isinstance(model, type) else type(model)
    for base in kind.__mro__:
        for library, (what, cure) in _FOREIGN.items():
            if f"{base.__module__}.".startswith(f"{library}."):
                return (
                    f"{kind.__name__} is {what}, and jaxdist takes flax NNX; {cure}: see "
                    f"docs/your-own-model.md, Modules of other libraries"
                )
    return ""


class UserModel(nnx.Module):
    """Stands in a config for a model that was given to `jaxdist.fit`: only there it can
    be made.
    """

    def __init__(self, name: str, *, rngs: nnx.Rngs) -> None:
        raise ConfigError(
            f"the model {name} was given to jaxdist.fit, and only its maker can make it again: give it here, "
            f"too, load_run(folder, model=...), or --config.model.target=FILE.py:NAME, a class or a function "
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
    """Refuses to execute code because a file in `folder` names it: that may be somebody
    else's.

    A class of this package is fine. Any other must be `named` by the user, too, or be
    trusted by `trust_code` (None: if its module is imported already); a file below
    `folder` is never executed.

    Raises:
      ConfigError: it is none of these; nothing was imported.
    """
    module_name, _ = _split(target, key)
    if is_installed(target) or (
        trust_code is None and _known_as(module_name) in sys.modules
    ):
        return
    refuse_inside(target, folder, key=key)
    if not trust_code and (named is None or _canonical(target) != _canonical(named)):
        here = f" (here: {named!r})" if named else ""
        raise ConfigError(
            f"{folder} has {key}={target!r}{here}. It is not of jaxdist, and not executed unasked; if "
            f"you trust it, add --config.{key}={target!r}, or --trust-code (load_run: trust_code)"
        )


def refuse_inside(target: str, folder: Path, *, key: str = MODEL_KEY) -> None:
    """Raises ConfigError if to import the target is to execute a file below a run's
    folder.
    """
    module_name, _ = _split(target, key)
    if is_installed(target):
        return
    above = {os.path.abspath(folder), os.path.realpath(folder)}
    for file in _files_of(module_name):
        places = {Path(os.path.abspath(file)), Path(os.path.realpath(file))}
        if any(place.is_relative_to(run) for place in places for run in above):
            raise ConfigError(
                f"{key}={target!r}: {file} lies in the run's folder {folder}, whose files are never "
                f"executed; copy it elsewhere, read it, and name the copy: --config.{key}=..."
            )


def _split(target: str, key: str = MODEL_KEY) -> tuple[str, str]:
    """Returns the module, or file, and the class of a target.

    Raises:
      ConfigError: it is not of that form.
    """
    module_name, _, class_name = target.rpartition(":")
    is_module = all(part.isidentifier() for part in module_name.split("."))
    if (
        not class_name.isidentifier()
        or not (is_module or _is_file(module_name))
        or "\0" in target
    ):
        raise ConfigError(
            f"{key}={target!r}: must be package.module:Class or path/of/file.py:Class"
        )
    return module_name, class_name


def _is_file(module_name: str) -> bool:
    return module_name.endswith(".py")


def _canonical(target: str) -> str:
    """Returns the target with a file as its whole path: one text for each spelling."""
    module_name, class_name = _split(target)
    return (
        f"{_whole(module_name) if _is_file(module_name) else module_name}:{class_name}"
    )


def _whole(file: str) -> Path:
    return Path(os.path.realpath(os.path.expanduser(file)))


def _files_of(module_name: str) -> Iterator[Path]:
    """Yields the files that the import of a module executes, found without executing
    any.
    """
    if _is_file(module_name):
        yield Path(os.path.expanduser(module_name))
        return
    _look_here()
    name = ""
    path = None
    for part in module_name.split("."):
        name = f"{name}.{part}".lstrip(".")
        finders = [
            find
            for finder in sys.meta_path
            if (find := getattr(finder, "find_spec", None))
        ]
        spec = next((spec for find in finders if (spec := find(name, path))), None)
        if spec is None:
            return
        if spec.has_location and spec.origin:
            yield Path(spec.origin)
        inside = spec.submodule_search_locations
        # of a namespace: it would look for its parent's module
        path = getattr(inside, "_path", inside)


def _look_here() -> None:
    """Lets imports look into the current folder, too, as `python -m` does, but after
    all others.

    Only for a model: on the path from the start, a file `numpy.py` there would run in
    any command.
    """
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def find_model(target: str) -> type[nnx.Module]:
    """Returns the class that `package.module:Class` or `path/of/file.py:Class` names;
    executes its module.

    Of a target that a file names, ask `check_stored_target` before.

    Raises:
      ConfigError: no such module or class, or it is not an nnx.Module.
    """
    return find_class(target, nnx.Module, "nnx.Module", key=MODEL_KEY)


def find_class(target: str, base: type[Kind], name: str, *, key: str) -> type[Kind]:
    """Returns the class that a target names; executes its module.

    Args:
      base: what it is a subclass of, called `name` in messages.
      key: of the config, which has the target.

    Raises:
      ConfigError: no such module or class, or it is none of those.
    """
    module_name, class_name = _split(target, key)
    module = _import(target, key)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        fault = foreign_fault(found)
        if fault:
            raise ConfigError(f"{key}={target!r}: {fault}")
        others = [
            n
            for n, v in vars(module).items()
            if isinstance(v, type) and issubclass(v, base)
        ]
        raise ConfigError(
            f"{key}={target!r}: {module_name} has no {name} {class_name!r}.{suggest(class_name, others)}"
        )
    return found


def find_maker(target: str, folder: Path) -> Any:
    """Finds the maker of a model given to `jaxdist.fit`, by its name: a class, or a
    function of rngs.

    Args:
      folder: of the run, whose files are never executed.

    Raises:
      ConfigError: no such name, or nothing that can be called.
    """
    refuse_inside(target, folder)
    module = _import(target)
    name = _split(target)[1]
    if not callable(maker := getattr(module, name, None)):
        raise ConfigError(
            f"model.target={target!r}: {module.__name__} has no class or function {name!r}"
        )
    return maker


def _import(target: str, key: str = MODEL_KEY) -> ModuleType:
    """Returns a target's module, executed; raises ConfigError if it cannot be."""
    module_name, _ = _split(target, key)
    by_path = _is_file(module_name)
    try:
        if not (by_path or is_installed(target)):
            _look_here()
        return (
            _module_of(module_name) if by_path else importlib.import_module(module_name)
        )
    except (ImportError, OSError) as error:
        hint = (
            ""
            if by_path
            else f" (looked from {Path.cwd()}, too; a file is path/of/file.py:Class)"
        )
        raise ConfigError(
            f"{key}={target!r}: cannot import {module_name}: {error}{hint}"
        ) from error


def _known_as(module_name: str) -> str:
    """Returns the key of a module in sys.modules; that of a file holds its whole path's
    digest.
    """
    return (
        f"{Path(module_name).stem}_{digest(_whole(module_name))[:8]}"
        if _is_file(module_name)
        else module_name
    )


def _module_of(file: str) -> ModuleType:
    """Returns the module in a file, executed once; as with `python FILE`, it finds
    those beside it.
    """
    path = _whole(file)
    name = _known_as(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader
    # there, so that its source can be found
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
    """Returns the class whose fields are the model's options: `Model.Config`, or the
    model itself.

    Raises:
      ConfigError: the model's own parameters cannot be options.
    """
    config = getattr(model, "Config", model)
    if config is not model and dataclasses.is_dataclass(config):
        return config
    faults = list(_parameter_faults(model))
    if faults:
        raise ConfigError(faults)
    return model


def _parameter_faults(model: type[nnx.Module]) -> Iterator[str]:
    """Yields which parameters of __init__ a config can neither give nor leave out."""
    for name, parameter in inspect.signature(model.__init__).parameters.items():
        if name in ("self", "rngs") or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"{model.__name__}.__init__: {name} can be given by place only; take it by name"
        elif (
            parameter.annotation is parameter.empty
            and parameter.default is parameter.empty
        ):
            yield (
                f"{model.__name__}.__init__: {name} has no annotation, so model.{name} has no type; "
                f"annotate it ({name}: int), or call it rngs if it is the nnx.Rngs"
            )


def build_function(
    model: type[nnx.Module], options: Mapping[str, Any]
) -> Callable[[nnx.Rngs], Any]:
    """Returns `build(rngs) -> model`."""
    taken = inspect.signature(model.__init__).parameters.values()
    random = any(
        parameter.name == "rngs" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in taken
    )

    def build(rngs: nnx.Rngs):
        streams = {"rngs": rngs} if random else {}
        config: Any = options_class(model)
        make: Any = model
        if config is model:
            return make(**options, **streams)
        return make(_make_config(config, options), **streams)

    return build


def _make_config(config: Any, options: Mapping[str, Any]) -> Any:
    """Makes a model's Config; the options of a group are a mapping in `options`."""
    if any(isinstance(value, Mapping) for value in options.values()):
        return schema.from_config_dict(config, options)
    return config(**options)


def model_config(model: type[nnx.Module], options: Mapping[str, Any]) -> Any:
    """Returns `Model.Config` of the options, with its hooks (see `protocols.model`);
    None without one.

    Raises:
      ConfigError: it refuses them.
    """
    config: Any = options_class(model)
    try:
        return None if config is model else _make_config(config, options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model: cannot be built with these options: {error}"
        ) from error


def model_hook(config: Any, name: str) -> Any:
    """Returns a function of the model's Config by its name; None if it has none, or
    data of that name.
    """
    hook = getattr(config, name, None)
    return hook if callable(hook) else None


def option_faults(model: type[nnx.Module], options: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with the values by the model's annotations, and by its
    config's `faults`.
    """
    config = model_config(model, options)
    if config is not None:
        return schema.faults(config, "model.")
    values = {f"model.{name}": value for name, value in options.items()}
    return list(schema.range_faults(values, schema.schema_of(model, "model.")))
