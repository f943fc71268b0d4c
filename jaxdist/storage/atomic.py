"""Files and folders that appear whole or not at all."""

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from jaxdist.storage.paths import is_local

# Unfinished files and folders that nobody has written for this long are leftovers of dead
# processes.
_LEFTOVER_S = 3600


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a path next to `target`, where the body makes a file or folder.

    If the body ends without an error, the result takes the place of `target`. Otherwise
    it is removed. A folder replaces only an empty one. Several processes may replace a
    target at once: the last one to end wins.

    Raises:
      OSError: the result cannot be moved to `target`.
    """
    # Containers that share a folder may have equal process ids, and equal host names.
    host = socket.gethostname().replace(".", "-")
    writer = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
    partial = target.with_name(f".{target.name}.{writer}.partial")
    _remove_leftovers(target)
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


def _remove_leftovers(target: Path) -> None:
    """Removes what dead processes have left of `target`."""
    partial = re.compile(rf"\.{re.escape(target.name)}\.[^.]+\.partial")
    with contextlib.suppress(OSError):  # another process may remove them, too
        for path in target.parent.iterdir():
            if not partial.fullmatch(path.name):
                continue
            if time.time() - _last_write_s(path) > _LEFTOVER_S:
                _remove(path)


def _last_write_s(path: Path) -> float:
    """Finds when a file was last written, or a folder or one of its files."""
    last_s = path.stat().st_mtime
    if path.is_dir():
        for file in path.iterdir():
            last_s = max(last_s, file.stat().st_mtime)
    return last_s


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
