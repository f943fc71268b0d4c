"""Files and folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxdist.storage.paths import is_local


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a path next to `target`, where the body makes a file or folder.

    If the body ends without an error, the result takes the place of `target`. Otherwise
    it is removed. A folder replaces only an empty one.

    Raises:
      OSError: the result cannot be moved to `target`.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    _remove(partial)  # the leftover of a dead process with the same id
    try:
        yield partial
        os.replace(partial, target)
    finally:
        _remove(partial)


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a file that readers see whole or not at all, here or in an object store.

    Args:
      path: the file.
      data: its content.
      durable: whether the file must survive a power failure. The function then returns
        once file and folder are on the disk.

    Raises:
      OSError: the file cannot be written. A file that was there is unchanged.
    """
    if not is_local(path):  # an object store: one put is atomic
        path.write_bytes(data)
        return
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes UTF-8 text as `write_bytes` does. Lone surrogates are escaped."""
    write_bytes(path, text.encode(errors="backslashreplace"), durable=durable)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
