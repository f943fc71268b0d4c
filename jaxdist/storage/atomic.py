"""Files and folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a path beside `target` for the body to make a file or folder at.

    It takes the place of `target` if the body ends without an error, and is removed
    otherwise. A folder replaces only an empty one.

    Raises:
      OSError: it cannot be moved there.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    _remove(partial)  # of a dead process with the same number
    try:
        yield partial
        os.replace(partial, target)
    finally:
        _remove(partial)


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a file that readers see whole or not at all, here or in an object store.

    Args:
      durable: whether it must outlive a power failure: returns once file and folder are
        on the disk.

    Raises:
      OSError: it cannot be written; what was there before is unchanged.
    """
    if not isinstance(path, Path):  # an object store: one put is atomic
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
    """Writes UTF-8 text as `write_bytes` does; what UTF-8 cannot write (lone
    surrogates) is escaped.
    """
    write_bytes(path, text.encode(errors="backslashreplace"), durable=durable)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
