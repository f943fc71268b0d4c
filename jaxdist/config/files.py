"""Config files, overrides of the command line, and the list of keys for --help."""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdist.config import (
    ConfigError,
    annotations,
    assigned,
    installation,
    redact,
    suggest,
)
from jaxdist.config.schema import (
    MISSING,
    Schema,
    flatten,
    parse_value,
    unknown_field,
)


def packaged_folders() -> tuple[Path, ...]:
    """Finds the folder of packaged configs; empty if there is none."""
    folder = installation.shipped_folder("configs")
    return () if folder is None else (folder,)


def packaged_configs(folders: Sequence[Path]) -> dict[str, Path]:
    """Lists packaged configs by name."""
    return {
        file.stem: file
        for folder in folders
        for file in sorted(folder.glob("[a-z]*.py"))
    }


def is_packaged(spec: str, *, folders: Sequence[Path]) -> bool:
    """Tests whether `NAME` or `NAME:ARGUMENT` names a packaged config, and not a file.

    Raises:
      ConfigError: there is no such config.
    """
    path, _ = _find(spec, folders)
    return path in packaged_configs(folders).values()


def load(spec: str, *, folders: Sequence[Path]) -> ConfigDict:
    """Loads the config that `NAME`, `PATH.py` or either with `:ARGUMENT` names.

    Executes the file's `get_config(argument)`: config files are the user's own Python.
    It may also return a dataclass instance. A path comes before a packaged name; in
    names `-` equals `_`.

    Returns:
      A locked ConfigDict.

    Raises:
      ConfigError: there is no such config, or the file fails.
    """
    path, argument = _find(spec, folders)
    module = _execute(path)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ConfigError(
            f"{path}: no get_config. Define get_config(argument=None) -> ConfigDict."
        )
    takes_argument = bool(inspect.signature(get_config).parameters)
    if argument is not None and not takes_argument:
        raise ConfigError(
            f"--config={spec}: {path.name} takes no argument. Remove ':{argument}'."
        )
    with _faults_of(path):
        config = get_config(argument) if takes_argument else get_config()
    if dataclasses.is_dataclass(config):
        return assigned.of_dataclass(config).lock()
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"{path}: get_config returned {type(config).__name__}, not a ConfigDict."
        )
    return config.lock()


def _find(spec: str, folders: Sequence[Path]) -> tuple[Path, str | None]:
    """Finds the file of a config, and the argument for it."""
    name, colon, text = spec.partition(":")
    argument = text if colon else None
    if os.path.isfile(name):  # false for a name that is too long for a path, too
        if Path(name).suffix != ".py":
            raise ConfigError(
                f"--config={spec}: must be a .py or .json file, or a packaged name."
            )
        return Path(name).resolve(), argument
    packaged = packaged_configs(folders)
    stem = name.removesuffix(".py").replace("-", "_")
    if stem in packaged:
        return packaged[stem], argument
    if os.path.isdir(name):
        inside = "a .py or .json file"
        if (Path(name) / "config.json").is_file():
            inside = "its config.json"
        raise ConfigError(f"--config={spec}: is a folder; give {inside}.")
    if "/" in name or name.endswith((".py", ".json")):
        raise ConfigError(f"--config={spec}: no such file: {Path(name).resolve()}.")
    known = ", ".join(sorted(packaged)) or "(none)"
    hint = suggest(stem, packaged)
    raise ConfigError(
        f"--config={spec}: no packaged config {name!r}.{hint} There are: {known}."
    )


def _execute(path: Path) -> types.ModuleType:
    """Imports a config file as a module."""
    spec = importlib.util.spec_from_file_location(f"_jaxdist_config_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look it up there
    with _faults_of(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turns an exception of a config file into a ConfigError that names the line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        in_file = [frame for frame in frames if frame.filename == str(path)]
        line = in_file[-1].lineno if in_file else getattr(error, "lineno", 1)
        unknown_key = _unknown_key(frames, error)
        if in_file and unknown_key:
            text = f"{path}:{line}: {in_file[-1].line}: {unknown_key}"
            raise ConfigError(text) from error
        words = " ".join(str(error).split())
        raise ConfigError(f"{path}:{line}: {type(error).__name__}: {words}") from error


def _unknown_key(frames: Sequence[traceback.FrameSummary], error: Exception) -> str:
    """Formats the error of a ConfigDict without a key; "" for another error."""
    if not isinstance(error, AttributeError | KeyError) or not error.args:
        return ""
    if "ml_collections" not in frames[-1].filename:
        return ""
    words = str(error.args[0])  # str(error) is a repr for a KeyError
    missing = re.match(r"""\W*(?:Key "([^"]+)" does not exist|(\w+))\b""", words)
    if missing is None:
        return ""
    near = re.search(r'Did you mean "([^"]+)"', words)
    hint = "--config NAME --help lists all fields."
    if near:
        hint = f"Did you mean {near[1]}?"
    return f"no such field {missing[1] or missing[2]!r}. {hint}"


def apply_overrides(
    config: ConfigDict, overrides: Mapping[str, str], schema: Schema
) -> None:
    """Sets the values of `--config.path=text` in a config.

    Args:
      config: config to change. It stays unchanged if there is a fault.
      overrides: {path: text}.
      schema: fields by path, whose types parse the texts.

    Raises:
      ConfigError: the faults of all overrides.
    """
    faults: list[str] = []
    values: dict[str, Any] = {}
    for path, text in overrides.items():
        try:
            if path not in schema:
                raise ConfigError(unknown_field(path, schema))
            values[path] = parse_value(text, schema[path])
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    with config.unlocked(), config.ignore_type():
        for path, value in values.items():
            *groups, name = path.split(".")
            owner = config
            for group in groups:
                if group not in owner:
                    owner[group] = ConfigDict()
                owner = owner[group]
            owner[name] = value


def help_text(
    config: Mapping[str, Any] | ConfigDict,
    schema: Schema,
    *,
    words: str = "",
    width: int = 80,
) -> str:
    """Lists fields as `--config.path  type  = the config's value  meaning`.

    Secrets of URLs are hidden.

    Args:
      config: values to show. A field without a value shows its default.
      schema: fields to list.
      words: text that the path or the meaning of a listed field holds; "" lists all.
      width: the longest line in characters.

    Raises:
      ConfigError: no field has the text.
    """
    values = flatten(config)
    indent = " " * 6
    fold = functools.partial(
        textwrap.wrap, width=width, subsequent_indent=indent, break_on_hyphens=False
    )
    lines = []
    for path, field in _fields_with(words, schema).items():
        value = values.get(path, field.default)
        value_text = "(required)" if value is MISSING else repr(value)
        head = f"--config.{path}  {annotations.describe(field.type)}  = {value_text}"
        meaning = field.doc
        if field.may_change_on_resume:
            meaning = f"{meaning} (may change on resume)".lstrip()
        line = f"{head}  {meaning}".rstrip()
        if len(line) <= width:
            lines.append(line)
        else:
            lines += fold(head)
            lines += fold(meaning, initial_indent=indent)
    return redact.without_secrets("\n".join(lines))


def _fields_with(words: str, schema: Schema) -> Schema:
    """Finds the fields with a text in their path, or else in their meaning.

    Raises:
      ConfigError: no field has it.
    """
    text = words.lower().removeprefix("--").removeprefix("config.")
    matches = {path: field for path, field in schema.items() if text in path.lower()}
    if not matches:
        matches = {p: field for p, field in schema.items() if text in field.doc.lower()}
    if matches:
        return matches
    names = {part for path in schema for part in (path, *path.split("."))}
    raise ConfigError(
        f"--help {words}: no field has this in its name or meaning.{suggest(text, names)}"
    )
