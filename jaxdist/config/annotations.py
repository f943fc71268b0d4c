"""Facts of a config key, all stated at its field: type, range, marks and meaning.

The annotation has the type, ranges and marks, and a comment has the meaning:

    every: Annotated[int, Ge(1), Resume("harmless")] = 10  # steps between rows

Ranges are those of `annotated-types`, marks are the classes of this file. A mark at a
group holds for each key in it that has no mark of the same kind.
"""

import ast
import contextlib
import functools
import inspect
import io
import math
import numbers
import operator
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import (
    Ge,
    GroupedMetadata,
    Gt,
    Interval,
    Le,
    Lt,
    MaxLen,
    MinLen,
    MultipleOf,
)

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]
Seed = Annotated[int, Interval(ge=0, lt=2**63)]


# --- Marks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Fact of a key other than its type, range and meaning."""


@dataclass(frozen=True)
class Resume(Mark):
    """Rule for a resume with another value. A key without this mark refuses a change.

    With `harmless`, another value leaves the losses up to the checkpoint as they are.
    """

    change: Literal["harmless", "refused"]


@dataclass(frozen=True)
class Searched(Mark):
    """Mark of a key whose values `jaxdist plan --search` tries."""


@dataclass(frozen=True)
class Needs(Mark):
    """Mark of a key that has no effect without a callback.

    A run that sets the key needs the callback.
    """

    callback: str  # dotted path of the callback's class


@dataclass(frozen=True)
class ReadWith(Mark):
    """Mark of a key that is read only with some values of another key.

    A key may have several: it is read where all of them hold.
    """

    key: str  # dotted path of the other key
    values: tuple[str, ...]


@dataclass(frozen=True)
class OutsideStep(Mark):
    """Mark of a key that changes neither a step's program nor its speed."""


@dataclass(frozen=True)
class NamesWeights(Mark):
    """Mark of a key that names a folder of initial weights for a `WeightSource`."""


@dataclass(frozen=True)
class TrainingOnly(Mark):
    """Mark of a key of a model that changes its training, and none of its logits."""


def split_marks(annotation: object) -> tuple[object, tuple[Mark, ...]]:
    """Separates an annotation's marks from its type and ranges."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, ()
    inner, *metadata = typing.get_args(annotation)
    marks = tuple(entry for entry in metadata if isinstance(entry, Mark))
    ranges = [entry for entry in metadata if not isinstance(entry, Mark)]
    if not ranges:
        return inner, marks
    return Annotated[inner, *ranges], marks


# --- Types and ranges -----------------------------------------------------------------

# {kind of limit: (its attribute, the test of (value, limit), words before the limit)}
_LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, ">="),
    Gt: ("gt", operator.gt, ">"),
    Le: ("le", operator.le, "<="),
    Lt: ("lt", operator.lt, "<"),
    MultipleOf: (
        "multiple_of",
        lambda value, factor: value % factor == 0,
        "a multiple of",
    ),
    MinLen: ("min_length", lambda value, length: len(value) >= length, "of length >="),
    MaxLen: ("max_length", lambda value, length: len(value) <= length, "of length <="),
}
_UNIONS = (typing.Union, types.UnionType)
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
    "none": None,
}

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_QUOTES = ("'", '"')
_PYTHON = ("(", "[", *_QUOTES)  # beginnings of a tuple that is written as in Python

# Errors of `convert` and `parse` for a value that does not conform.
MISMATCH = (ValueError, OverflowError)


def describe(annotation: object) -> str:
    """Describes an annotation in words.

    For example "tuple of int", "one of dots, none" or "float > 0 or none".
    """
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        limits = [f"{words} {limit}" for _, words, limit in _limits(args[1:])]
        return f"{describe(args[0])} {' and '.join(limits)}".rstrip()
    if origin is Literal:
        choices = ", ".join(str(arg) for arg in args)
        return f"one of {choices}" if len(args) > 1 else choices
    if origin is tuple and Ellipsis in args:
        return f"tuple of {describe(args[0])}"
    if origin is tuple:
        return f"tuple ({', '.join(describe(arg) for arg in args)})"
    if origin in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if annotation in (type(None), None):
        return "none"
    if annotation is bool:
        return "true or false"
    return getattr(annotation, "__name__", "any value")


def _limits(
    metadata: Iterable[object],
) -> Iterator[tuple[Callable[[Any, Any], bool], str, Any]]:
    """Yields the test, the words and the value of each limit.

    Metadata of other packages is ignored.
    """
    for entry in metadata:
        if isinstance(entry, GroupedMetadata):  # Interval, Len
            yield from _limits(entry)
        elif type(entry) in _LIMITS:
            name, conforms, words = _LIMITS[type(entry)]
            yield conforms, words, getattr(entry, name)


def convert(value: Any, annotation: Any, *, check_range: bool = False) -> Any:
    """Converts a value to the type of an annotation: int to float, list to tuple.

    A number with a range must be finite. `None` has no range.

    Args:
      value: value of a config file, a dataclass or JSON.
      annotation: type of a field, with ranges and without marks.
      check_range: whether to check ranges, too. A run checks them later than types,
        together with all other faults.

    Raises:
      MISMATCH: the value does not conform.
    """
    args = typing.get_args(annotation)
    kind = typing.get_origin(annotation) or annotation
    if kind is Annotated:
        value = convert(value, args[0], check_range=check_range)
        if check_range and value is not None and not _in_range(value, args[1:]):
            raise ValueError(f"out of range: {describe(annotation)}")
        return value
    if kind in _UNIONS:
        pairs = ((value, arg) for arg in args)
        return _first(pairs, check_range=check_range)
    if kind is tuple and isinstance(value, (tuple, list)):
        element_types = _element_types(args, len(value))
        return tuple(
            convert(item, element_type, check_range=check_range)
            for item, element_type in zip(value, element_types, strict=True)
        )
    too_large = kind is not float and is_too_large(value)
    if too_large or not _has_type(value, kind, args):
        raise ValueError(f"another type: {describe(annotation)}")
    return kind(value) if kind in _NUMBERS else value


def _in_range(value: Any, metadata: tuple[object, ...]) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return all(conforms(value, limit) for conforms, _, limit in _limits(metadata))


def _has_type(value: Any, kind: Any, args: tuple[object, ...]) -> bool:
    """Tests whether a value has a type, without a conversion between types."""
    if kind is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if kind is None:
        return value is None
    if kind in _NUMBERS:  # a bool is an int in Python, but not in a config
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return kind in (Any, object) or isinstance(value, kind)


def is_too_large(value: object) -> bool:
    """Tests whether a value is an integer that does not fit into 64 bits."""
    return isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**63


def _element_types(args: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Lists the types of the elements of a tuple with these type arguments."""
    if not args:
        return (Any,) * length
    if args[-1] is Ellipsis:
        return (args[0],) * length
    return args


def parse(text: str, annotation: object) -> Any:
    """Parses command-line text as the type of an annotation.

    All tuples follow one rule. Values stand between commas: `1,2` or `query,value`.
    A comma inside (), [] or {} is part of its value, so a regex may hold one:
    `layers/.{1,2}/query`. A text that begins with a bracket or a quote is Python, such
    as `("a,b", "c")` or `"(a|b)/c"`. An empty text is the empty tuple.

    Raises:
      MISMATCH: no reading of the text conforms.
    """
    kind = typing.get_origin(annotation) or annotation
    args = typing.get_args(annotation)
    if kind is Annotated:
        return parse(text, args[0])
    if kind is tuple:
        return _parse_tuple(text, annotation)
    if kind in _UNIONS and any(map(_is_tuple, args)):
        for arg in sorted(args, key=_is_tuple):  # a tuple of str would take "none"
            with contextlib.suppress(*MISMATCH):
                return parse(text, arg)
        raise ValueError("no reading of the value conforms")
    return _first((reading, annotation) for reading in _readings(text))


def _is_tuple(annotation: object) -> bool:
    if typing.get_origin(annotation) is Annotated:
        return _is_tuple(typing.get_args(annotation)[0])
    return tuple in (annotation, typing.get_origin(annotation))


def _parse_tuple(text: str, annotation: Any) -> Any:
    """Parses the text of a tuple; see `parse` for the rule."""
    text = text.strip()
    if text.startswith(_PYTHON):
        value = literal(text)
        if value is text:
            raise ValueError("not a value of Python")
        return _first(((value, annotation), ((value,), annotation)))
    words = _split(text) if text else []
    element_types = _element_types(typing.get_args(annotation), len(words))
    return tuple(
        parse(word, element_type)
        for word, element_type in zip(words, element_types, strict=True)
    )


def _split(text: str) -> list[str]:
    """Splits a text at the commas that stand outside of brackets.

    Raises:
      ValueError: a part is empty, a bracket has no partner, or a quote begins a part.
    """
    parts = []
    start = 0  # of the part
    closing: list[str] = []  # the brackets that are due, the innermost last
    places = iter(range(len(text)))
    for place in places:
        character = text[place]
        in_class = closing[-1:] == ["]"]  # of a regex, where brackets are characters
        if character == "\\":
            next(places, None)
        elif closing[-1:] == [character]:
            closing.pop()
        elif character in _BRACKETS and not in_class:
            closing.append(_BRACKETS[character])
        elif character in _BRACKETS.values() and not in_class:
            raise ValueError("a bracket has no partner")
        elif character == "," and not closing:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    parts = [part.strip() for part in parts]
    if closing or "" in parts or any(part.startswith(_QUOTES) for part in parts):
        raise ValueError("no values between commas")
    return parts


def tuple_form(annotation: object) -> str:
    """Shows how the command line writes a tuple of this type; "" for other types."""
    if not _is_tuple(annotation):
        return ""
    value = _example(annotation, 0)
    python = f'"{value!r}"'
    if any(isinstance(item, tuple) for item in value):
        return f", such as {python}"
    return f", such as {','.join(map(str, value))} or {python}"


def _example(annotation: Any, number: int) -> Any:
    """Makes the example with a number, from 0, of a type."""
    args = typing.get_args(annotation)
    kind = typing.get_origin(annotation) or annotation
    if kind is Annotated or kind in _UNIONS:
        return _example(args[0], number)
    if kind is Literal:
        return args[number % len(args)]
    if kind is tuple:
        count = 1 if args and _is_tuple(args[0]) else 2
        element_types = _element_types(args, count)
        return tuple(map(_example, element_types, range(len(element_types))))
    if kind is int:
        return number + 1
    if kind is float:
        return number + 0.5
    return "abcdef"[number % 6]


def flag_text(value: object) -> str:
    """Writes a value so that the command line reads it back, without a shell's quotes."""
    if isinstance(value, str):
        # A text that looks like a value of Python stands in quotes.
        return value if literal(value) is value else repr(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and not any(isinstance(x, tuple) for x in value):
        words = [x if isinstance(x, str) else flag_text(x) for x in value]
        plain = ",".join(words)
        with contextlib.suppress(ValueError):
            if _split(plain) == words and not plain.startswith(_PYTHON):
                return plain
    return repr(value)


def _first(
    candidates: Iterable[tuple[object, object]], *, check_range: bool = False
) -> Any:
    """Converts the first (value, annotation) pair that conforms."""
    for value, annotation in candidates:
        with contextlib.suppress(*MISMATCH):
            return convert(value, annotation, check_range=check_range)
    raise ValueError("no reading of the value conforms")


def _readings(text: str) -> Iterator[object]:
    """Yields the values that a text may stand for, the most specific first."""
    yield literal(text)
    yield _WORDS.get(text.lower(), text)
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        if number.is_integer():
            yield int(number)  # "1e6" may be an int
        yield number
    yield text


def literal(text: str) -> object:
    """Evaluates a text that is a Python literal; any other stays as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        # Deep nesting raises the last two errors.
        return text


@functools.cache
def docs(source: Any) -> Mapping[str, str]:
    """Reads the comments of a class's fields, or of a function's parameters, by name.

    A comment on the line of the field counts, or else the comment lines right above it.
    The result is empty if there is no source code (a REPL, a zip).
    """
    parts = [source]
    if isinstance(source, type):
        parts = list(reversed(source.__mro__[:-1]))
    documented: dict[str, str] = {}
    for part in parts:
        try:
            documented |= _comments(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):
            continue
    return documented


def _comments(source: str) -> dict[str, str]:
    """Reads the comments of annotated names in a source text: {name: comment}."""
    texts: dict[int, str] = {}  # {line: its comment}
    full_lines: set[int] = set()  # lines with nothing but a comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            texts[line] = token.string.lstrip("#: ").rstrip()
            if not token.line[:column].strip():
                full_lines.add(line)
    comments: dict[str, str] = {}
    # Breadth first: a field comes before a method's parameter.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            first = node.lineno
            while first - 1 in full_lines:
                first -= 1
            above = " ".join(texts[line] for line in range(first, node.lineno))
            comments.setdefault(name, texts.get(node.end_lineno or 0, above))
    return comments
