"""Untrusted JSON, read within limits and with one type of error.

Python's reader answers hostile text in several ways. It raises `ValueError`. Deep
nesting raises `RecursionError`, also later in code that walks the value. A huge file
raises `MemoryError`. A number of 4,000 digits raises `OverflowError` in its use. Here
each of these is a `Malformed`.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

from jaxdist.storage.paths import is_local

MAX_BYTES = 64 << 20  # bytes of a document; a manifest of 100,000 files has 15 MB
# Levels of nested containers. Documents of jaxdist and of other libraries have fewer
# than ten.
MAX_DEPTH = 64
_BLOCK_BYTES = 1 << 18  # bytes of a file of lines that are read at once
MAX_DIGITS = 40  # digits of an integer; 2**127 has 39

Kind = TypeVar("Kind")


class Malformed(ValueError):
    """Error of a document that is no JSON, has another form, or exceeds a limit."""


def parse_json(text: str | bytes, kind: type[Kind]) -> Kind:
    """Parses the value of a JSON text.

    Args:
      text: the text.
      kind: type that the value must have: dict, list, ...

    Raises:
      Malformed: the text is not UTF-8 or not JSON, exceeds a limit above, or has
        another type.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        value = _DECODER.decode(text)
    except RecursionError:
        raise Malformed(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise Malformed(f"not JSON: {error}") from None
    if _is_deeper(value, MAX_DEPTH):
        raise Malformed(f"nested deeper than {MAX_DEPTH} levels")
    return of_kind(value, kind)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits; at most {MAX_DIGITS}")
    return int(digits)


# json.loads would make one for each text
_DECODER = json.JSONDecoder(parse_int=_parse_int)


def _is_deeper(value: Any, depth: int) -> bool:
    """Tests whether containers nest deeper than `depth`, without recursion."""
    level = [value]
    for _ in range(depth + 1):
        lists = []
        for item in level:
            if isinstance(item, dict):
                lists.append(list(item.values()))
            elif isinstance(item, list):
                lists.append(item)
        if not lists:
            return False
        level = list(chain.from_iterable(lists))
    return True


def of_kind(value: object, kind: type[Kind], name: str = "it") -> Kind:
    """Checks that a value has a type, and returns it. A bool is no int.

    Raises:
      Malformed: it has another type. The message has `name` and both types.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise Malformed(f"{name} is {type(value).__name__}; required: {kind.__name__}")
    return value


def is_count(value: object, below: int = 2**53) -> bool:
    """Tests whether a value is an integer >= 0 and below a limit.

    By default, a float holds it exactly.
    """
    return type(value) is int and 0 <= value < below


def is_amount(value: object, below: float) -> bool:
    """Tests whether a value is a number >= 0 and below a limit. A bool is no number."""
    is_number = type(value) in (int, float)
    # mypy does not narrow by `type`, which excludes bool and numpy's floats.
    return is_number and 0 <= value < below  # type: ignore[operator]


def named(error: Exception) -> str:
    """Formats an error, with its type unless it is a Malformed."""
    return str(error) if isinstance(error, Malformed) else repr(error)


def read_json(path: Path, kind: type[Kind], *, max_bytes: int = MAX_BYTES) -> Kind:
    """Reads the value of a JSON file, here or in an object store.

    Raises:
      Malformed: as in `parse_json` and `read_bytes`. The message does not name the
        file.
      FileNotFoundError: the file is absent.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), kind)


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads the bytes of a file, here or in an object store.

    Raises:
      Malformed: the file is too large, no regular file, or cannot be read.
      FileNotFoundError: the file is absent.
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
    """Opens a regular file to read.

    Raises:
      Malformed: the path is a folder, a device, a pipe (which would block), or an
        impossible name.
      OSError: the file is absent or cannot be opened.
    """
    try:
        if not is_local(path):  # an object store only has regular files
            return path.open("rb")
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 (the caller closes it)
    except IsADirectoryError:
        raise Malformed("no regular file") from None
    except ValueError as error:  # a name that no file can have
        raise Malformed(str(error)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Malformed("no regular file")
    return file


def bounded_lines(
    file: IO[bytes],
    max_bytes: int,
    is_wanted: Callable[[bytes], object] | None = None,
) -> Iterator[bytes | None]:
    """Yields the lines of a file, without their ends; memory is bounded.

    Args:
      file: the file.
      max_bytes: bytes of the longest line; None is yielded in place of a longer one.
      is_wanted: searches a text of several lines for a wanted one. Texts without one
        are skipped. Default: all lines are wanted.
    """
    rest = b""  # of the last block: the beginning of a line
    is_too_long = False  # the current line is, and its beginning was dropped
    while block := file.read(_BLOCK_BYTES):
        if is_too_long:
            _, newline, block = block.partition(b"\n")
            if not newline:
                continue
            is_too_long = False
            yield None
        whole, newline, beginning = block.rpartition(b"\n")
        if newline:
            whole = rest + whole
            rest = b""
            if is_wanted is None or is_wanted(whole):
                for line in whole.split(b"\n"):
                    yield line if len(line) <= max_bytes else None
        rest += beginning
        if len(rest) > max_bytes:
            rest = b""
            is_too_long = True
    if is_too_long:
        yield None
    elif rest:
        yield rest


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for the writer of a pipe.

    The flag has no effect on regular files.
    """
    return os.open(path, flags | os.O_NONBLOCK)


def visible(text: str) -> str:
    """Replaces control characters by their pictures; tabs and line breaks stay."""
    return text.translate(_PICTURES)


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES[0x7F] = 0x2421
# others that move a terminal's cursor
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Replaces characters that could move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
