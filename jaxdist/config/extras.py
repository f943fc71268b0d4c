"""Optional packages, and late imports of own modules; an error names the extra to
install.
"""

import importlib
import types
from importlib.util import find_spec
from pathlib import Path

from jaxdist.config import EXIT_CONFIG
from jaxdist.config.late_imports import LATE_IMPORTS

# The module to load -> the extra of pyproject.toml that brings it.
EXTRAS = {
    "datasets": "hf",
    "gcsfs": "gcs",
    "jinja2": "chat",
    "jax_cuda12_plugin": "aot-gpu",
    "libtpu": "aot",
    "lm_eval": "eval",
    "pyarrow": "hf",
    "qwix": "lora",
    "s3fs": "s3",
    "sklearn": "vision",
    "tensorboardX": "tensorboard",
    "tokenizers": "text",
    "trackio": "trackio",
    "wandb": "wandb",
}


# whether a package index has jaxdist: until then it is installed from a clone
PUBLISHED = False
_CLONE = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """Writes the command that installs an extra: by name, or from the clone that this
    code is part of.
    """
    if PUBLISHED:
        return f'pip install "jaxdist[{extra}]"'
    if not (_CLONE / "pyproject.toml").is_file():
        return f'pip install -e ".[{extra}]" in a clone of jaxdist'
    folder = "." if Path.cwd() == _CLONE else _CLONE
    return f'pip install -e "{folder}[{extra}]"'


class MissingExtra(ImportError):
    """An optional package is not installed; the text is the command that
    installs it.
    """

    exit_code = EXIT_CONFIG


def load(module: str) -> types.ModuleType:
    """Imports an own module of `LATE_IMPORTS`.

    Raises:
      MissingExtra: the optional package that it needs is not installed.
      KeyError: the module is not in the list.
    """
    package = LATE_IMPORTS[module].package
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == "jaxdist" or package not in EXTRAS:
            raise
        raise _missing(missing, EXTRAS[package]) from error


def require(module: str) -> None:
    """Checks that an optional package is installed, without importing it.

    Raises:
      MissingExtra: it is not installed.
    """
    if find_spec(module) is None:
        raise _missing(module, EXTRAS[module])


def _missing(module: str, extra: str) -> MissingExtra:
    command = install_command(extra)
    return MissingExtra(
        f"{module} is not installed. Install it with: {command}", name=module
    )
