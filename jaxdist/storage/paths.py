"""Paths of files, on this machine or in an object store."""

from pathlib import Path


def is_local(path: Path) -> bool:
    """Tests whether a path is on a file system of this machine.

    Paths of an object store have the interface of `Path`, but are of another class.
    """
    return isinstance(path, Path)
