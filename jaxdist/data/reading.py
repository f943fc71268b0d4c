"""Errors of files from elsewhere: one type of error, which names the file."""

import contextlib
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxdist.config import ConfigError

# Errors of Python's readers for files that are cut off, damaged, malicious, or of
# another format.
READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@contextlib.contextmanager
def reading(name: object, *more_types: type[Exception]) -> Iterator[None]:
    """Turns every error of reading a file into a ConfigError that names it.

    Args:
      name: name of the file in the message.
      *more_types: types of errors in addition to READ_ERRORS.

    Raises:
      ConfigError: the body failed on the file.
    """
    types: tuple[type[Exception], ...] = (*READ_ERRORS, *more_types)
    try:
        yield
    except ConfigError:
        raise
    except types as error:
        raise ConfigError(
            f"{name}: cannot be read ({one_line(error)}). Mend or replace it."
        ) from error


def one_line(text: object) -> str:
    """Shortens a text, or an error of another program, to one line of a message."""
    return " ".join(str(text)[:1000].split())[:300] or type(text).__name__


def expanded(path: str) -> Path:
    """Resolves `~` in a path. The `~name` of an unknown user stays."""
    return Path(os.path.expanduser(path))
