"""Typed configuration: frozen dataclasses <-> ConfigDict, differences, fingerprints.

A component declares its options as a frozen dataclass. A field has one default. Its
annotation has the type, ranges and marks, and a comment has the meaning and unit. The
dataclass is the schema; config files and the command line edit a ConfigDict. This
module imports no jax.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict

from jaxdist.config import ConfigError, annotations, suggest
from jaxdist.config.annotations import Mark

MISSING = dataclasses.MISSING

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Mark)
_Kind = type[_M]


@dataclasses.dataclass(frozen=True)
class Field:
    """Key of a config: an option that is no group."""

    path: str  # dotted
    type: object  # the annotation without marks
    default: object  # or MISSING
    meaning: Any  # text, or the class or function whose source has the comment
    marks: tuple[Mark, ...] = ()  # the key's own, then those of its groups

    @property
    def doc(self) -> str:
        """The meaning of the key. Reads sources, so only help and errors ask for it."""
        if isinstance(self.meaning, str):
            return self.meaning
        return annotations.docs(self.meaning).get(self.path.rpartition(".")[2], "")

    def mark(self, kind: _Kind[_M]) -> _M | None:
        """Finds the mark of a kind: the key's own, or that of the nearest group."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    def all_marks(self, kind: _Kind[_M]) -> tuple[_M, ...]:
        """Lists the marks of a kind: the key's own, then those of its groups."""
        return tuple(mark for mark in self.marks if isinstance(mark, kind))

    @property
    def may_change_on_resume(self) -> bool:
        """Whether a run may resume with another value of the key."""
        resume = self.mark(annotations.Resume)
        return resume is not None and resume.change == "harmless"

    @property
    def searched(self) -> bool:
        """Whether the search for a layout tries values of the key."""
        return self.mark(annotations.Searched) is not None

    @property
    def callback(self) -> str:
        """The class of the callback that the key needs; "" if it needs none."""
        needs = self.mark(annotations.Needs)
        return "" if needs is None else needs.callback


@dataclasses.dataclass(frozen=True)
class Change:
    """Difference between two configurations. An absent key has the value MISSING."""

    path: str
    old: object
    new: object

    def __str__(self) -> str:
        return self.text(" -> ")

    def text(self, between: str) -> str:
        """Formats the path and both values, with a word or sign between these."""
        values = ("(absent)" if v is MISSING else repr(v) for v in (self.old, self.new))
        return f"{self.path}: {between.join(values)}"


Schema = dict[str, Field]


# --- Schemas --------------------------------------------------------------------------


def schema_of(cls: type, prefix: str = "") -> Schema:
    """Lists the keys of a component by dotted path, in source order.

    A field of a dataclass that is annotated as a Mapping is an open group. Its keys are
    not listed: the owner of the group adds them.

    For a class that is no dataclass, the keys are the parameters of `__init__`. Left
    out are `rngs`, parameters with neither annotation nor default, and parameters whose
    default is no plain value (functions, dtypes).

    Args:
      cls: a frozen dataclass, whose nested dataclasses are groups, or another class.
      prefix: start of all paths: "", or a group and a dot.
    """
    if dataclasses.is_dataclass(cls):
        fields = _dataclass_fields(cls, prefix)
        return {field.path: field for field in fields if not _is_open_group(field.type)}
    return {field.path: field for field in _parameter_fields(cls, prefix)}


@functools.cache
def _hints(source: Any) -> Mapping[str, tuple[Any, tuple[Mark, ...]]]:
    """Reads the annotations of a class or function: `{name: (type, marks)}`."""
    hints = typing.get_type_hints(source, include_extras=True)
    return {name: annotations.split_marks(hint) for name, hint in hints.items()}


def _dataclass_fields(
    cls: Any,
    prefix: str,
    *,
    group_default: object = MISSING,
    group_marks: tuple[Mark, ...] = (),
) -> Iterator[Field]:
    """Yields the leaves and open groups of a dataclass.

    Args:
      cls: dataclass to read.
      prefix: start of all paths.
      group_default: the owner's default for the whole group. Its values replace the
        group's own defaults.
      group_marks: marks of the enclosing groups.
    """
    hints = _hints(cls)
    for item in dataclasses.fields(cls):
        path = prefix + item.name
        annotation, own_marks = hints[item.name]
        marks = (*own_marks, *group_marks)
        if group_default is MISSING:
            default = _default(item)
        else:
            default = getattr(group_default, item.name)
        if dataclasses.is_dataclass(annotation):
            yield from _dataclass_fields(
                annotation, path + ".", group_default=default, group_marks=marks
            )
        else:
            yield Field(path, annotation, default, meaning=cls, marks=marks)


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _parameter_fields(cls: type, prefix: str) -> Iterator[Field]:
    """Yields the parameters of `__init__` as fields; see `schema_of`."""
    # mypy warns of `cls.__init__`, as a subclass may replace it. Only its signature is
    # read.
    init: Any = vars(cls).get("__init__", cls.__init__)  # type: ignore[misc]
    try:
        hints = _hints(init)
    except NameError as error:
        raise ConfigError(
            f"{cls.__name__}.__init__: its annotations cannot be read: {error}"
        ) from error
    for name, parameter in inspect.signature(init).parameters.items():
        if name in ("self", "rngs") or parameter.kind in _VARIADIC:
            continue
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if default is not MISSING and not _is_plain(default):
            continue
        if name in hints:
            annotation, marks = hints[name]
            yield Field(prefix + name, annotation, default, meaning=init, marks=marks)
        elif default is not None and default is not MISSING:
            yield Field(prefix + name, type(default), default, meaning=init)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _default(item: dataclasses.Field[Any]) -> object:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def _is_open_group(annotation: object) -> bool:
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, (Mapping, ConfigDict))


# --- Values ---------------------------------------------------------------------------


def parse_value(text: str, field: Field) -> Any:
    """Parses the text of `--config.path=text` as the field's type.

    Booleans are true/false/1/0/yes/no, and absence is `none`. `annotations.parse` has
    the rule of tuples.

    Raises:
      ConfigError: the text does not parse. The error names the field, the text and the
        rule.
    """
    try:
        return annotations.parse(text, field.type)
    except annotations.MISMATCH:
        form = annotations.tuple_form(field.type)
        raise ConfigError(_wrong(field, text, form)) from None


def _wrong(field: Field, value: object, more: str = "") -> str:
    """Formats the fault of a value that does not have its field's type or range.

    Args:
      field: the key.
      value: the wrong value.
      more: a part of the rule that the annotation does not state.
    """
    required = annotations.describe(field.type) + more
    hint = ""
    number = value
    if isinstance(value, str):
        choices = [arg for arg in typing.get_args(field.type) if isinstance(arg, str)]
        hint = suggest(value, choices)
        number = annotations.literal(value)
    if "int" in required and annotations.is_too_large(number):
        required += " of 64 bits"
    meaning = ""
    is_plain_type = isinstance(field.type, type)  # such as int: the rule is enough
    if not is_plain_type and not hint and field.doc:
        meaning = f" Meaning: {field.doc}."
    return f"{field.path}: got {_shown(value)}, required {required}.{hint}{meaning}"


def _shown(value: object) -> str:
    """Formats a value for a message and shortens a long one."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text):,} characters)"


def faults(config: Any, prefix: str = "") -> list[str]:
    """Lists the faults of a dataclass and of the dataclasses in it, one line each.

    It checks types, ranges, and the rules between values. A dataclass with such rules
    has a method `faults`.
    """
    values = {prefix + path: value for path, value in flatten(_to_dict(config)).items()}
    return [
        *range_faults(values, schema_of(type(config), prefix)),
        *_rule_faults(config),
    ]


def range_faults(values: Mapping[str, Any], schema: Schema) -> Iterator[str]:
    """Yields a line for each value that does not have its field's type or range.

    Args:
      values: {dotted path: value}. Absent keys are not checked.
      schema: fields by dotted path.
    """
    for path, field in schema.items():
        if path not in values:
            continue
        value = values[path]
        try:
            annotations.convert(value, field.type, check_range=True)
        except annotations.MISMATCH:
            infinite = isinstance(value, float) and not math.isfinite(value)
            yield _wrong(field, value, ", finite" if infinite else "")


def _rule_faults(config: Any) -> Iterator[str]:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from _rule_faults(value)
    if hasattr(config, "faults"):
        yield from config.faults()


_MOST_SIBLINGS = 12  # keys of a group that an error lists; mesh has 9


def unknown_field(path: str, schema: Iterable[str]) -> str:
    """Formats the fault of a path that is no key, and suggests keys."""
    schema = list(schema)
    inside = [name for name in schema if name.startswith(path + ".")]
    if inside:
        return f"{path}: is a group. Set one of its fields: {', '.join(inside[:8])}."
    hint = suggest(path, schema)
    if not hint:
        group = path.rpartition(".")[0]
        siblings = [
            name for name in schema if group and name.rpartition(".")[0] == group
        ]
        if 0 < len(siblings) <= _MOST_SIBLINGS:
            hint = f" There are {', '.join(siblings)}."
        else:
            hint = " --help with this --config lists all fields."
    return f"{path}: no such field.{hint}"


# --- Dataclasses <-> ConfigDict -------------------------------------------------------


def to_config_dict(instance: object) -> ConfigDict:
    """Converts a dataclass instance to a nested, locked ConfigDict.

    It takes values of any type, because a key may have several, such as 100 and "auto".
    `from_config_dict` checks the types of all keys.
    """
    return ConfigDict(_to_dict(instance), type_safe=False).lock()


def _to_dict(value: Any) -> Any:
    """Converts dataclasses and mappings to nested dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, (Mapping, ConfigDict)):
        return {key: _to_dict(item) for key, item in value.items()}
    return value


def resolve(config: Mapping[str, Any] | ConfigDict, schema: Schema) -> dict[str, Any]:
    """Makes {path: value} of all keys of the schema, converted to their types.

    Raises:
      ConfigError: the unknown paths, wrong types, and missing keys without a default.
    """
    settings = flatten(config)
    values = {}
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


def from_config_dict(cls: type[_T], config: Mapping[str, Any] | ConfigDict) -> _T:
    """Makes the dataclass that a configuration describes. Absent keys take defaults.

    A ValueError of a `__post_init__` counts as a fault of its group.

    Raises:
      ConfigError: all faults at once.
    """
    settings = flatten(config)
    open_groups = tuple(
        f"{field.path}."
        for field in _dataclass_fields(cls, "")
        if _is_open_group(field.type)
    )
    closed = {
        path: value
        for path, value in settings.items()
        if not path.startswith(open_groups)
    }
    values = unflatten(settings | resolve(closed, schema_of(cls)))
    faults: list[str] = []
    instance = _build(cls, values, prefix="", faults=faults)
    if faults:
        raise ConfigError(faults)
    return typing.cast(_T, instance)


def _build(
    cls: Any, values: Mapping[str, Any], *, prefix: str, faults: list[str]
) -> object:
    """Makes a dataclass and those in it.

    The result is None if one has faults. These are added to `faults`.
    """
    known_faults = len(faults)
    arguments = {}
    for item in dataclasses.fields(cls):
        group, _ = _hints(cls)[item.name]
        if dataclasses.is_dataclass(group):
            inside = values.get(item.name, {})
            inner_prefix = f"{prefix}{item.name}."
            arguments[item.name] = _build(
                group, inside, prefix=inner_prefix, faults=faults
            )
        elif item.name in values:
            arguments[item.name] = values[item.name]
        else:  # an open group without values
            arguments[item.name] = _default(item)
    if len(faults) > known_faults:
        return None
    try:
        return cls(**arguments)
    except ConfigError as error:
        faults.extend(error.faults)
    except ValueError as error:
        faults.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
    return None


# --- Comparing ------------------------------------------------------------------------


def flatten(config: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Makes {dotted path: leaf} of a nested mapping. A flat one stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= {f"{key}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the nested dict of {dotted path: leaf}: the inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *groups, name = path.split(".")
        owner = nested
        for group in groups:
            owner = owner.setdefault(group, {})
        owner[name] = value
    return nested


def diff(
    old: Mapping[str, Any] | ConfigDict, new: Mapping[str, Any] | ConfigDict
) -> list[Change]:
    """Lists the differences between two configurations.

    A list equals a tuple, because JSON has only lists.
    """
    before = flatten(old)
    after = flatten(new)
    changes = []
    for path in before | after:
        change = Change(path, before.get(path, MISSING), after.get(path, MISSING))
        if _as_lists(change.old) != _as_lists(change.new):
            changes.append(change)
    return changes


def _as_lists(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_as_lists(item) for item in value]
    return value


def fingerprint(config: Mapping[str, Any]) -> str:
    """Hashes a configuration to a sha256 hex digest that ignores the order of keys."""
    text = json.dumps(flatten(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
