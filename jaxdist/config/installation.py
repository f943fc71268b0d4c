"""Where this package is installed, and the folders that come with it."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def clone() -> Path | None:
    """Finds the clone, or unpacked sdist, that holds this package; None in a wheel."""
    root = _PACKAGE.parent
    if _in_wheel("configs").is_dir() or not (root / "pyproject.toml").is_file():
        return None
    return root


def shipped_folder(name: str) -> Path | None:
    """Finds a folder that comes with the package; None if there is none.

    A clone has it at its top. A wheel has it in the package, as `jaxdist/_NAME`
    (`pyproject.toml`, `force-include`).

    Args:
      name: `configs`, `examples` or `deploy`.
    """
    root = clone()
    folder = _in_wheel(name) if root is None else root / name
    return folder if folder.is_dir() else None


def shipped_file(path: str) -> str:
    """Writes where a file that comes with the package is stored.

    Args:
      path: the file's path in a clone, for example `examples/ray_train.py`. It is
        returned unchanged if the package came without the file.
    """
    name, _, rest = path.partition("/")
    folder = shipped_folder(name)
    return path if folder is None else str(folder / rest)


def _in_wheel(name: str) -> Path:
    return _PACKAGE / f"_{name}"
