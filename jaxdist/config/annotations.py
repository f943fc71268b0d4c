"""What a class says about its fields: annotations are types and ranges, trailing
comments are docs.

A range is metadata of the annotation, in the words of `annotated-types`:
`Annotated[int, Ge(1)]`.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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

# A kind of limit -> its attribute, whether (value, limit) conform, and the limit in
# words.
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
_TRUE = dict.fromkeys(("true", "1", "yes"), True)
_WORDS = {**_TRUE, **dict.fromkeys(("false", "0", "no"), False), "none": None}


# what `convert` and `parse` raise of a value that does not conform
MISMATCH = (ValueError, OverflowError)


def describe(annotation: object) -> str:
    """Returns an annotation in words: "tuple of int", "one of dots, none", "float > 0
    or none".
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        limits = [f"{words} {limit}" for _, words, limit in _limits(args[1:])]
        return f"{describe(args[0])} {' and '.join(limits)}".rstrip()
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(str(arg) for arg in args)
    if origin is tuple:
        inner = [describe(arg) for arg in args if arg is not Ellipsis]
        return (
            f"tuple of {inner[0]}"
            if Ellipsis in args
            else f"tuple ({', '.join(inner)})"
        )
    if origin in _UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if annotation in (type(None), None):
        return "none"
    return (
        "true or false"
        if annotation is bool
        else getattr(annotation, "__name__", "any value")
    )


def _limits(
    metadata: Iterable[object],
) -> Iterator[tuple[Callable[[Any, Any], bool], str, Any]]:
    """Yields (whether a value conforms, words, limit); metadata of other packages is
    left out.
    """
    for entry in metadata:
        if isinstance(entry, GroupedMetadata):  # Interval, Len
            yield from _limits(entry)
        elif type(entry) in _LIMITS:
            name, conforms, words = _LIMITS[type(entry)]
            yield conforms, words, getattr(entry, name)


def convert(value: Any, annotation: Any, *, check_range: bool = False) -> Any:
    """Returns `value` as the annotation's type (int as float, list as tuple) or raises
    MISMATCH.

    Ranges are looked at last, so that a run reports them beside all other faults. A
    number with a range is finite; where absence is allowed, the range is of what is
    there.
    """
    args = typing.get_args(annotation)
    kind = typing.get_origin(annotation) or annotation
    if kind is Annotated:
        value = convert(value, args[0], check_range=check_range)
        if check_range and value is not None:
            # nan differs from itself
            finite = value == value and value not in (math.inf, -math.inf)
            conforms = finite and all(
                holds(value, limit) for holds, _, limit in _limits(args[1:])
            )
        else:
            conforms = True
    elif kind in _UNIONS:
        return _first(((value, arg) for arg in args), check_range)
    elif kind is tuple and isinstance(value, (tuple, list)):
        pairs = zip(value, _element_types(args, value), strict=True)
        return tuple(convert(item, arg, check_range=check_range) for item, arg in pairs)
    elif kind is Literal:
        conforms = any(value == arg and type(value) is type(arg) for arg in args)
    elif kind in (None, type(None)):
        conforms = value is None
    elif kind in _NUMBERS:  # bool is an int to Python, not to us
        conforms = isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    else:
        conforms = kind in (Any, object) or isinstance(value, kind)
    if not conforms or kind is not float and is_too_large(value):
        raise ValueError(f"it is no {describe(annotation)}")
    return kind(value) if kind in _NUMBERS else value


def is_too_large(value: object) -> bool:
    """Returns whether a value is an integer that no array holds."""
    return isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**63


def _element_types(args: tuple, value: Collection) -> tuple:
    """Returns the annotation of each element of a tuple whose type has these
    arguments.
    """
    variadic = not args or args[-1] is Ellipsis
    return (args[0] if args else Any,) * len(value) if variadic else args


def parse(text: str, annotation: object) -> Any:
    """Returns command-line text as the annotation's type, or raises MISMATCH."""
    return _first((reading, annotation) for reading in _readings(text))


def _first(
    candidates: Iterable[tuple[object, object]], check_range: bool = False
) -> Any:
    """Returns the first (value, annotation) pair that converts."""
    for value, annotation in candidates:
        with contextlib.suppress(*MISMATCH):
            return convert(value, annotation, check_range=check_range)
    raise ValueError("no reading of the value conforms")


def _readings(text: str) -> Iterator[object]:
    """Yields what text may stand for, the most specific first; the field's type
    chooses.
    """
    yield (value := literal(text))
    yield _WORDS.get(text.lower(), text)
    try:
        number = float(text)
        yield int(number) if number.is_integer() else number  # "1e6" is a good int
        yield number  # inf, nan
    except (ValueError, OverflowError):
        pass
    yield text
    parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
    yield (value,)
    yield tuple(literal(part) for part in parts)
    yield tuple(parts)


def literal(text: str) -> object:
    """Returns what a Python literal stands for; else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        # the last two of deep nesting
        return text


@functools.cache
def docs(source: Any) -> Mapping[str, str]:
    """Returns `{name: comment}` of a class's fields, or of a function's parameters.

    The comment is the one that trails the field, else the comment lines right above it.
    Without source code at hand (a REPL, a zip) the result is empty.
    """
    documented: dict[str, str] = {}
    for part in reversed(source.__mro__[:-1]) if isinstance(source, type) else [source]:
        try:
            documented |= _comments(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):
            continue
    return documented


def _comments(source: str) -> dict[str, str]:
    words: dict[int, str] = {}  # line -> its comment
    alone = set()  # lines that hold nothing else
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            words[line] = token.string.lstrip("#: ").rstrip()
            if not token.line[:column].strip():
                alone.add(line)
    comments: dict[str, str] = {}
    # breadth first: a field wins over a method's parameter
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            above = " ".join(words[line] for line in range(first, node.lineno))
            comments.setdefault(name, words.get(node.end_lineno or 0, above))
    return comments
