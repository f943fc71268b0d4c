"""JSON that somebody else may have written: read within limits, with one kind of error.

Python's own reader answers hostile text in several ways: `ValueError`, `RecursionError`
(of deep nesting, also later, in code that walks the value), `MemoryError` (a huge file)
and, where a number of 4,000 digits is used, `OverflowError`. Here each is a
`Malformed`.
"""

import json
import os
import stat
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

MAX_BYTES = 64 << 20  # of a document; the manifest of 100,000 files has 15 MB
# containers in containers; documents of ours and of the ecosystem have fewer than ten
MAX_DEPTH = 64
MAX_DIGITS = 40  # of an integer; 2**127 has 39

Kind = TypeVar("Kind")


class Malformed(ValueError):
    """A document is too large or too deep, no JSON, or of another shape than it must
    have.
    """


def parse_json(text: str | bytes, kind: type[Kind]) -> Kind:
    """Parses the value of a JSON text.

    Args:
      kind: what the value must be: dict, list, ...

    Raises:
      Malformed: it is not UTF-8 or no JSON, exceeds a limit above, or is of another
        kind.
    """
    try:
        value = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise Malformed(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # no UTF-8, no JSON
        raise Malformed(f"not JSON: {error}") from None
    if _is_deeper(value, MAX_DEPTH):
        raise Malformed(f"nested deeper than {MAX_DEPTH} levels")
    return of_kind(value, kind)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits; at most {MAX_DIGITS}")
    return int(digits)


def _is_deeper(value: Any, depth: int) -> bool:
    """Checks whether containers nest deeper than that; a level at a time, since
    recursion would fail.
    """
    level = [value]
    for _ in range(depth + 1):
        lists = [x for x in level if isinstance(x, list)]
        lists += [list(x.values()) for x in level if isinstance(x, dict)]
        if not lists:
            return False
        level = list(chain.from_iterable(lists))
    return True


def of_kind(value: object, kind: type[Kind], name: str = "it") -> Kind:
    """Checks that a value is of a kind (a bool is no int), and returns it.

    Raises:
      Malformed: it is not; says what it is.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise Malformed(f"{name} is {type(value).__name__}; required: {kind.__name__}")
    return value


def is_count(value: object, below: int = 2**53) -> bool:
    """Checks whether a value is a whole number >= 0, by default one that a float
    holds.
    """
    return type(value) is int and 0 <= value < below


def is_amount(value: object, below: float) -> bool:
    """Checks whether a value is a number >= 0; a bool is none."""
    return type(value) in (int, float) and 0 <= value < below  # type: ignore[operator]


def named(error: Exception) -> str:
    """Formats an error, with its type where the text alone says little."""
    return str(error) if isinstance(error, Malformed) else repr(error)


def read_json(path: Path, kind: type[Kind], *, max_bytes: int = MAX_BYTES) -> Kind:
    """Reads the value of a JSON file, here or in an object store.

    Raises:
      Malformed: as `parse_json` and `read_bytes`; the message does not name the file.
      FileNotFoundError: there is none.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), kind)


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads the bytes of a file, here or in an object store.

    Raises:
      Malformed: it is larger, no regular file, or cannot be read.
      FileNotFoundError: there is none.
    """
    try:
        with open_regular(path) as file:
            if file.seek(0, os.SEEK_END) > max_bytes:
                raise Malformed(f"more than {max_bytes:,} bytes")
            file.seek(0)
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Malformed(f"cannot be read: {error.strerror or error}") from error


def open_regular(path: Path) -> IO[bytes]:
    """Opens a file to read.

    Raises:
      Malformed: it is a folder, a pipe, which would hold us for ever, or a device; an
        impossible name.
      OSError: it is not there or cannot be opened.
    """
    try:
        if not isinstance(path, Path):  # an object store has nothing else
            return path.open("rb")
        file = open(path, "rb", opener=_open_at_once)
    except IsADirectoryError:
        raise Malformed("no regular file") from None
    except ValueError as error:  # a name that no file can have
        raise Malformed(str(error)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Malformed("no regular file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for a pipe's writer; that of a regular file means
    nothing else.
    """
    return os.open(path, flags | os.O_NONBLOCK)


def printable(text: str) -> str:
    """Replaces what could move a terminal's cursor in a line."""
    return "".join(character if character.isprintable() else "?" for character in text)
