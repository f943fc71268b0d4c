"""Typed configuration: frozen dataclasses <-> ConfigDict, diff, fingerprint.

A component declares its options as a frozen dataclass. A field has one default, its
annotation says type and range, and a trailing comment meaning and unit. The dataclass
is the schema; ConfigDict is only the form that config files and the command line edit.
Nothing here imports jax.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import inspect
import json
import math
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict

from jaxdist.config import ConfigError, annotations, suggest

MISSING = dataclasses.MISSING

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf option: its dotted path, type annotation, default (or MISSING) and
    meaning.
    """

    path: str
    type: object
    default: object
    meaning: Any  # text, or the class or function whose source has it

    @property
    def doc(self) -> str:
        """Returns what the option means: sources are read only when help or an error
        asks.
        """
        if isinstance(self.meaning, str):
            return self.meaning
        return annotations.docs(self.meaning).get(self.path.rpartition(".")[2], "")


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two configurations; MISSING stands for an absent key."""

    path: str
    old: object
    new: object

    def __str__(self) -> str:
        return self.text(" -> ")

    def text(self, between: str) -> str:
        """Returns the path, and what was and is there with a word or sign between."""
        values = ("(absent)" if v is MISSING else repr(v) for v in (self.old, self.new))
        return f"{self.path}: {between.join(values)}"


Schema = dict[str, Field]


# --- Schemas --------------------------------------------------------------------------


def schema_of(cls: type, prefix: str = "") -> Schema:
    """Returns the leaves of a component: `{dotted path: Field}`, in source order.

    `cls` is a frozen dataclass (nested dataclasses become groups), or any other class,
    whose options are the parameters of `__init__` except `rngs` that are annotated, or
    whose default says the type; a default that is no plain value (a function) cannot be
    changed. A dataclass field annotated as a Mapping is an open group: it has no leaves
    here, its owner adds them.
    """
    if dataclasses.is_dataclass(cls):
        fields = _dataclass_fields(cls, prefix, MISSING)
        return {field.path: field for field in fields if not _is_open_group(field.type)}
    return {field.path: field for field in _parameter_fields(cls, prefix)}


@functools.cache
def _hints(source: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(source, include_extras=True)


def _dataclass_fields(cls: Any, prefix: str, instance: object) -> Iterator[Field]:
    """Yields leaves and open groups; an owner's default `instance` of a group beats the
    group's own.
    """
    hints = _hints(cls)
    for item in dataclasses.fields(cls):
        path, annotation = prefix + item.name, hints[item.name]
        default = (
            _default(item) if instance is MISSING else getattr(instance, item.name)
        )
        if dataclasses.is_dataclass(annotation):
            yield from _dataclass_fields(annotation, path + ".", default)
        else:
            yield Field(path, annotation, default, cls)


def _parameter_fields(cls: type, prefix: str) -> Iterator[Field]:
    init: Any = vars(cls).get("__init__", cls.__init__)  # type: ignore[misc]
    try:
        hints = _hints(init)
    except NameError as error:
        raise ConfigError(
            f"{cls.__name__}.__init__: its annotations cannot be read: {error}"
        ) from error
    for name, parameter in inspect.signature(init).parameters.items():
        default = MISSING if parameter.default is parameter.empty else parameter.default
        known = hints.get(
            name, MISSING if default in (None, MISSING) else type(default)
        )
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if (
            name in ("self", "rngs")
            or variadic
            or not (default is MISSING or _is_plain(default))
        ):
            continue  # what no config can hold (a function, a dtype) keeps its default
        if known is not MISSING:
            yield Field(prefix + name, known, default, init)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _default(item: dataclasses.Field) -> object:
    return (
        item.default_factory() if item.default_factory is not MISSING else item.default
    )


def _is_open_group(annotation: object) -> bool:
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, (Mapping, ConfigDict))


# --- Values ---------------------------------------------------------------------------


def parse_value(text: str, field: Field) -> Any:
    """Returns the text of `--config.path=text` as the field's type.

    Tuples are written `1,2` or `(1, 2)`; booleans true/false/1/0/yes/no; absence
    `none`.

    Raises:
      ConfigError: naming the field, the text and what is required.
    """
    try:
        return annotations.parse(text, field.type)
    except annotations.MISMATCH:
        raise ConfigError(_wrong(field, text)) from None


def _wrong(field: Field, value: object, more: str = "") -> str:
    choices = [arg for arg in typing.get_args(field.type) if isinstance(arg, str)]
    hint = suggest(value, choices) if isinstance(value, str) else ""
    plain = isinstance(field.type, type)  # "int" says enough
    meaning = "" if plain or hint or not field.doc else f" Meaning: {field.doc}."
    number = annotations.literal(value) if isinstance(value, str) else value
    required = annotations.describe(field.type)
    more += " of 64 bits" * ("int" in required and annotations.is_too_large(number))
    return (
        f"{field.path}: got {_shown(value)}, required {required}{more}.{hint}{meaning}"
    )


def _shown(value: object) -> str:
    """Returns a value for a message, cut off where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text):,} characters)"


def faults(config: Any, prefix: str = "") -> list[str]:
    """Returns all that is wrong with a dataclass and the dataclasses in it, one line
    each.

    That is the values outside their field's type or range, and what the method `faults`
    of a dataclass says, if it has one: the rules between its values.
    """
    values = {prefix + path: value for path, value in flatten(_to_dict(config)).items()}
    return [
        *range_faults(values, schema_of(type(config), prefix)),
        *_rule_faults(config),
    ]


def range_faults(values: Mapping[str, Any], schema: Schema) -> Iterator[str]:
    """Yields one line per value, by dotted path, that has not its field's type or
    range.
    """
    for field in [field for path, field in schema.items() if path in values]:
        value = values[field.path]
        try:
            annotations.convert(value, field.type, check_range=True)
        except annotations.MISMATCH:
            infinite = isinstance(value, float) and not math.isfinite(value)
            yield _wrong(field, value, ", finite" * infinite)


def _rule_faults(config: Any) -> Iterator[str]:
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, item.name)):
            yield from _rule_faults(value)
    if hasattr(config, "faults"):
        yield from config.faults()


def unknown_field(path: str, schema: Iterable[str]) -> str:
    schema = list(schema)
    inside = [name for name in schema if name.startswith(path + ".")]
    if inside:
        return f"{path}: is a group. Set one of its fields: {', '.join(inside[:8])}."
    group = path.rpartition(".")[0]
    beside = [name for name in schema if group and name.rpartition(".")[0] == group]
    listed = f" There are {', '.join(beside)}." if 0 < len(beside) <= 8 else ""
    hint = (
        suggest(path, schema)
        or listed
        or " --help with this --config lists all fields."
    )
    return f"{path}: no such field.{hint}"


# --- Dataclasses <-> ConfigDict -------------------------------------------------------


def to_config_dict(instance: object) -> ConfigDict:
    """Returns a dataclass instance as a nested, locked ConfigDict; tuples stay
    tuples.
    """
    return ConfigDict(_to_dict(instance)).lock()


def _to_dict(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, (Mapping, ConfigDict)):
        return {key: _to_dict(item) for key, item in value.items()}
    return value


def resolve(config: Mapping | ConfigDict, schema: Schema) -> dict[str, Any]:
    """Returns `{path: value}` for every field of the schema, checked and converted to
    its type.

    Raises:
      ConfigError: with every unknown path, wrong type and missing required field.
    """
    settings, values = flatten(config), {}
    faults = [unknown_field(path, schema) for path in settings if path not in schema]
    for path, field in schema.items():
        value = settings.get(path, field.default)
        if value is MISSING:
            faults.append(
                f"{path}: not set, required {annotations.describe(field.type)}."
            )
            continue
        try:
            values[path] = annotations.convert(value, field.type)
        except annotations.MISMATCH:
            faults.append(_wrong(field, value))
    if faults:
        raise ConfigError(faults)
    return values


def from_config_dict(cls: type[_T], config: Mapping | ConfigDict) -> _T:
    """Returns the dataclass that a configuration describes; absent fields take their
    defaults.

    A ValueError of a `__post_init__` counts as a fault of its group.

    Raises:
      ConfigError: with all faults at once.
    """
    settings = flatten(config)
    fields = _dataclass_fields(cls, "", MISSING)
    groups = tuple(field.path + "." for field in fields if _is_open_group(field.type))
    closed = {
        path: value for path, value in settings.items() if not path.startswith(groups)
    }
    values = resolve(closed, schema_of(cls))
    faults: list[str] = []
    instance = _build(cls, unflatten(settings | values), "", faults)
    if faults:
        raise ConfigError(faults)
    return typing.cast(_T, instance)


def _build(
    cls: Any, values: Mapping[str, Any], prefix: str, faults: list[str]
) -> object:
    arguments, before = {}, len(faults)
    for item in dataclasses.fields(cls):
        group = _hints(cls)[item.name]
        if dataclasses.is_dataclass(group):
            inside = values.get(item.name, {})
            arguments[item.name] = _build(
                group, inside, f"{prefix}{item.name}.", faults
            )
        else:  # without a value: an open group
            arguments[item.name] = (
                values[item.name] if item.name in values else _default(item)
            )
    if len(faults) > before:
        return None
    try:
        return cls(**arguments)
    except ConfigError as error:
        faults.extend(error.faults)
    except ValueError as error:
        faults.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
    return None


# --- Comparing ------------------------------------------------------------------------


def flatten(config: Mapping | ConfigDict) -> dict[str, Any]:
    """Returns `{dotted path: leaf}`; a mapping that is flat already comes back as it
    is.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= {f"{key}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of `{dotted path: leaf}`: the inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *groups, name = path.split(".")
        owner = nested
        for group in groups:
            owner = owner.setdefault(group, {})
        owner[name] = value
    return nested


def diff(old: Mapping | ConfigDict, new: Mapping | ConfigDict) -> list[Change]:
    """Returns what differs, by path; a list equals a tuple, as one has been through
    JSON.
    """
    before, after = flatten(old), flatten(new)
    changes = (
        Change(p, before.get(p, MISSING), after.get(p, MISSING)) for p in before | after
    )
    return [change for change in changes if _plain(change.old) != _plain(change.new)]


def _plain(value: Any) -> Any:
    return (
        [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
    )


def fingerprint(flat: Mapping[str, Any], *, ignore: Collection[str] = ()) -> str:
    """Returns the sha256 hex digest of a configuration without the paths that match
    `ignore`.

    `ignore` holds fnmatch patterns such as `mesh.*`. The order of the keys does not
    matter.
    """
    kept = {
        path: value
        for path, value in flatten(flat).items()
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in ignore)
    }
    return hashlib.sha256(
        json.dumps(kept, sort_keys=True, default=str).encode()
    ).hexdigest()
