"""Config files and command-line overrides: found, executed, applied, and listed for
--help.
"""

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

from jaxdist.config import ConfigError, annotations, suggest
from jaxdist.config.schema import (
    MISSING,
    Schema,
    flatten,
    parse_value,
    to_config_dict,
    unknown_field,
)


def packaged_folders() -> tuple[Path, ...]:
    """Returns where packaged configs lie: `jaxdist/_configs` (wheel), or a checkout's
    `configs`.
    """
    package = Path(__file__).resolve().parent.parent
    shipped, checkout = package / "_configs", package.parent / "configs"
    if shipped.is_dir():
        return (shipped,)
    return (checkout,) if (package.parent / "pyproject.toml").is_file() else ()


def load(spec: str, *, folders: Sequence[Path]) -> ConfigDict:
    """Returns the locked ConfigDict of `NAME`, `PATH.py`, `NAME:ARGUMENT` or
    `PATH.py:ARGUMENT`.

    A path wins, then a packaged name (`-` and `_` are equal). The file's
    `get_config(argument)` is executed: config files are the user's own Python. It may
    return a dataclass instance instead.

    Raises:
      ConfigError: no such config (with the nearest name), or the file fails (with file
        and line).
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
        return to_config_dict(config)
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"{path}: get_config returned {type(config).__name__}, not a ConfigDict."
        )
    return config.lock()


def _find(spec: str, folders: Sequence[Path]) -> tuple[Path, str | None]:
    name, colon, argument = spec.partition(":")
    chosen = argument if colon else None
    if os.path.isfile(name):  # false for what is too long for a path, too
        if Path(name).suffix != ".py":
            raise ConfigError(
                f"--config={spec}: must be a .py or .json file, or a packaged name."
            )
        return Path(name).resolve(), chosen
    packaged = {
        file.stem: file
        for folder in folders
        for file in sorted(folder.glob("[a-z]*.py"))
    }
    stem = name.removesuffix(".py").replace("-", "_")
    if stem in packaged:
        return packaged[stem], chosen
    if os.path.isdir(name):
        inside = (
            "its config.json"
            if (Path(name) / "config.json").is_file()
            else "a .py or .json file"
        )
        raise ConfigError(f"--config={spec}: is a folder; give {inside}.")
    if "/" in name or name.endswith((".py", ".json")):
        raise ConfigError(f"--config={spec}: no such file: {Path(name).resolve()}.")
    known = ", ".join(sorted(packaged)) or "(none)"
    hint = suggest(stem, packaged)
    raise ConfigError(
        f"--config={spec}: no packaged config {name!r}.{hint} There are: {known}."
    )


def _execute(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"_jaxdist_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look their module up here
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
        own = [frame for frame in frames if frame.filename == str(path)]
        line = own[-1].lineno if own else getattr(error, "lineno", 1)
        if own and (key := _unknown_key(frames, error)):
            raise ConfigError(f"{path}:{line}: {own[-1].line}: {key}") from error
        words = " ".join(str(error).split())
        raise ConfigError(f"{path}:{line}: {type(error).__name__}: {words}") from error


def _unknown_key(frames: Sequence[traceback.FrameSummary], error: Exception) -> str:
    """Returns what is wrong with a key that a ConfigDict has not, "" of
    another error.
    """
    if (
        not isinstance(error, AttributeError | KeyError)
        or "ml_collections" not in frames[-1].filename
    ):
        return ""
    # a KeyError's own text is the repr of its words
    words = str(error.args[0]) if error.args else ""
    missing = re.match(r"""\W*(?:Key "([^"]+)" does not exist|(\w+))\b""", words)
    if missing is None:
        return ""
    near = re.search(r'Did you mean "([^"]+)"', words)
    hint = (
        f"Did you mean {near[1]}?" if near else "--config NAME --help lists all fields."
    )
    return f"no such field {missing[1] or missing[2]!r}. {hint}"


def apply_overrides(
    config: ConfigDict, overrides: Mapping[str, str], schema: Schema
) -> None:
    """Sets `--config.path=text` values in place, parsed by the schema's types.

    Raises:
      ConfigError: with the faults of all overrides; then nothing is changed.
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
    config: Mapping | ConfigDict, schema: Schema, *, words: str = "", width: int = 80
) -> str:
    """Returns each field as `--config.path  type  = the config's value  meaning`,
    wrapped.

    Args:
      words: only the fields whose path or meaning has this text; "" = all.
      width: characters of a line at most.

    Raises:
      ConfigError: no field has the text.
    """
    chosen = _fields_with(words, schema)
    values, lines = flatten(config), []
    fold = functools.partial(
        textwrap.wrap, width=width, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    for path, field in chosen.items():
        value = values.get(path, field.default)
        shown = "(required)" if value is MISSING else repr(value)
        head = f"--config.{path}  {annotations.describe(field.type)}  = {shown}"
        whole = f"{head}  {field.doc}".rstrip()
        one_line = len(whole) <= width
        lines += (
            [whole]
            if one_line
            else [*fold(head), *fold(field.doc, initial_indent=" " * 6)]
        )
    return "\n".join(lines)


def _fields_with(words: str, schema: Schema) -> Schema:
    """Returns the fields whose path has a text; if there are none, those whose meaning
    has it.
    """
    text = words.lower().removeprefix("--").removeprefix("config.")
    by_path = {path: field for path, field in schema.items() if text in path.lower()}
    if found := by_path or {
        path: field for path, field in schema.items() if text in field.doc.lower()
    }:
        return found
    names = {part for path in schema for part in (path, *path.split("."))}
    raise ConfigError(
        f"--help {words}: no field has this in its name or meaning.{suggest(text, names)}"
    )
