"""What a class says about its fields: annotations are types and ranges, trailing comments are docs.

A range is metadata of the annotation, in the words of `annotated-types`: `Annotated[int, Ge(1)]`.
"""

import ast
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, GroupedMetadata, Gt, Interval, Le, Lt, MaxLen, MinLen, MultipleOf

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]

# A kind of limit -> its attribute, whether (value, limit) conform, and the limit in words.
_LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, ">="),
    Gt: ("gt", operator.gt, ">"),
    Le: ("le", operator.le, "<="),
    Lt: ("lt", operator.lt, "<"),
    MultipleOf: ("multiple_of", lambda value, factor: value % factor == 0, "a multiple of"),
    MinLen: ("min_length", lambda value, length: len(value) >= length, "of length >="),
    MaxLen: ("max_length", lambda value, length: len(value) <= length, "of length <="),
}
_UNIONS = (typing.Union, types.UnionType)
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_TRUE = dict.fromkeys(("true", "1", "yes"), True)
_WORDS = {**_TRUE, **dict.fromkeys(("false", "0", "no"), False), "none": None}


class Mismatch(Exception):
    """A value that does not conform to an annotation; the text says what is required."""


def describe(annotation: object) -> str:
    """Returns an annotation in words: "tuple of int", "one of dots, none", "float > 0 or none"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        limits = [f"{words} {limit}" for _, words, limit in _limits(args[1:])]
        return f"{describe(args[0])} {' and '.join(limits)}".rstrip()
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        inner = [describe(arg) for arg in args if arg is not Ellipsis]
        return f"tuple of {inner[0]}" if Ellipsis in args else f"tuple ({', '.join(inner)})"
    if origin in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if annotation in (type(None), None):
        return "none"
    return "true or false" if annotation is bool else getattr(annotation, "__name__", "any value")


def _limits(metadata: Iterable[object]) -> Iterator[tuple[Callable[[Any, Any], bool], str, Any]]:
    """Yields (whether a value conforms, words, limit); metadata of other packages is left out."""
    for entry in metadata:
        if isinstance(entry, GroupedMetadata):  # Interval, Len
            yield from _limits(entry)
        elif type(entry) in _LIMITS:
            name, conforms, words = _LIMITS[type(entry)]
            yield conforms, words, getattr(entry, name)


def in_range(value: Any, annotation: Any) -> bool:
    """Returns whether a value has the annotation's type and range; a float with a range is finite."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        if value is None:  # where absence is allowed, the range is of what is there
            return in_range(None, args[0])
        finite = value == value and value not in (math.inf, -math.inf)  # nan differs from itself
        limits = _limits(args[1:])
        return in_range(value, args[0]) and finite and all(holds(value, limit) for holds, _, limit in limits)
    if origin in _UNIONS:
        return any(in_range(value, arg) for arg in args)
    try:
        convert(value, annotation)
    except Mismatch:
        return False
    return origin is not tuple or all(map(in_range, value, _element_types(args, value)))


def convert(value: Any, annotation: Any) -> Any:
    """Returns `value` as the annotation's type (int as float, list as tuple) or raises Mismatch.

    Ranges are not looked at: `in_range` does, so that a run reports them beside all other faults.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _first([(value, args[0])], annotation)
    kind = origin or annotation
    if kind in _UNIONS:
        return _first(((value, arg) for arg in args), annotation)
    if kind is tuple:
        return _convert_tuple(value, args, annotation)
    if kind is Literal:
        accepted = any(value == arg and type(value) is type(arg) for arg in args)
    elif kind in (Any, object):
        accepted = True
    elif kind in (None, type(None)):
        accepted = value is None
    elif kind in _NUMBERS:  # bool is an int to Python, not to us
        accepted = isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    else:
        accepted = isinstance(value, kind)
    if not accepted:
        raise Mismatch(describe(annotation))
    try:
        return kind(value) if kind in _NUMBERS else value
    except OverflowError:  # an int beyond all floats
        raise Mismatch(describe(annotation)) from None


def _convert_tuple(value: Any, args: tuple, annotation: object) -> tuple:
    if not isinstance(value, (tuple, list)):
        raise Mismatch(describe(annotation))
    try:
        return tuple(convert(v, a) for v, a in zip(value, _element_types(args, value), strict=True))
    except (Mismatch, ValueError):  # an element, or their number
        raise Mismatch(describe(annotation)) from None


def _element_types(args: tuple, value: Collection) -> tuple:
    """Returns the annotation of each element of a tuple whose type has these arguments."""
    variadic = not args or args[-1] is Ellipsis
    return (args[0] if args else Any,) * len(value) if variadic else args


def parse(text: str, annotation: object) -> Any:
    """Returns command-line text as the annotation's type, or raises Mismatch."""
    return _first(((reading, annotation) for reading in _readings(text)), annotation)


def _first(candidates: Iterable[tuple[object, object]], annotation: object) -> Any:
    """Returns the first (value, annotation) pair that converts."""
    for value, candidate in candidates:
        try:
            return convert(value, candidate)
        except Mismatch:
            continue
    raise Mismatch(describe(annotation))


def _readings(text: str) -> Iterator[object]:
    """Yields what text may stand for, the most specific first; the field's type chooses."""
    yield (literal := _literal(text))
    yield _WORDS.get(text.lower(), text)
    try:
        number = float(text)
        yield int(number) if number.is_integer() else number  # "1e6" is a good int
        yield number  # inf, nan
    except (ValueError, OverflowError):
        pass
    yield text
    parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
    yield (literal,)
    yield tuple(_literal(part) for part in parts)
    yield tuple(parts)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@functools.cache
def docs(source: Any) -> Mapping[str, str]:
    """Returns `{name: comment}` of a class's fields, or of a function's parameters.

    The comment is the one that trails the field, else the comment lines right above it. Without
    source code at hand (a REPL, a zip) the result is empty.
    """
    comments: dict[str, str] = {}
    for part in reversed(source.__mro__[:-1]) if isinstance(source, type) else [source]:
        try:
            text = textwrap.dedent(inspect.getsource(part))
            comments |= _comments_by_name(ast.parse(text), *_comments(text))
        except (OSError, TypeError, SyntaxError):
            continue
    return comments


def _comments_by_name(tree: ast.AST, trailing: dict[int, str], alone: dict[int, str]) -> dict[str, str]:
    comments: dict[str, str] = {}
    for node in ast.walk(tree):  # breadth first: a field wins over a method's parameter
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            above = " ".join(alone[line] for line in range(first, node.lineno))
            comments.setdefault(name, trailing.get(node.end_lineno or 0, above))
    return comments


def _comments(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Returns `{line: words}` of the comments behind code, and of those on lines of their own."""
    trailing: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            kind = trailing if token.line[:column].strip() else alone
            kind[line] = token.string.lstrip("#: ").rstrip()
    return trailing, alone
