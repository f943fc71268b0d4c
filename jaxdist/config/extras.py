"""Optional packages and late imports; errors name the extra to install."""

import importlib
import re
import types
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from jaxdist.config import EXIT_CONFIG, installation
from jaxdist.config.late_imports import LATE_IMPORTS

# {package: extra of pyproject.toml that installs it}
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


# Whether a package index has jaxdist. Until then nobody owns its name there, so no
# message may install it by name.
PUBLISHED = False


def install_command(extra: str) -> str:
    """Writes the command that installs an extra.

    It installs by name if `PUBLISHED` is true, and otherwise from the clone that holds
    this package. Outside of a clone it installs what the extra requires.
    """
    if PUBLISHED:
        return f'pip install "jaxdist[{extra}]"'
    clone = installation.clone()
    if clone is not None:
        folder = "." if Path.cwd() == clone else clone
        return f'pip install -e "{folder}[{extra}]"'
    required = [f"'{requirement}'" for requirement in requirements(extra)]
    if not required:
        return f'pip install -e ".[{extra}]" in a clone of jaxdist'
    return f"pip install {' '.join(required)}"


def requirements(extra: str) -> list[str]:
    """Lists the requirements of an extra, as the installed package declares them.

    The list is empty if nothing declares them: the package was copied, not installed.
    """
    try:
        declared = metadata.requires("jaxdist") or []
    except metadata.PackageNotFoundError:
        return []
    condition = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    found = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        if condition.search(marker):
            found.append(requirement.strip())
    return found


def install_package(package: str) -> str:
    """Writes the command that installs an optional package, by its extra if it has one."""
    if package in EXTRAS:
        return install_command(EXTRAS[package])
    return f"pip install {package}"


class MissingExtra(ImportError):
    """Error of a package that is not installed, with the command that installs it."""

    exit_code = EXIT_CONFIG


def load(module: str) -> types.ModuleType:
    """Imports a module of `LATE_IMPORTS`.

    Raises:
      MissingExtra: the optional package that the module needs is not installed.
      KeyError: the module is not in the list.
    """
    late = LATE_IMPORTS[module]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == "jaxdist" or late.why == "slow":
            raise
        raise _missing(missing, install_package(late.package)) from error


def require(module: str) -> None:
    """Checks that an optional package is installed, without importing it.

    Raises:
      MissingExtra: the package is not installed.
    """
    if find_spec(module) is None:
        raise _missing(module, install_package(module))


def _missing(module: str, command: str) -> MissingExtra:
    return MissingExtra(
        f"{module} is not installed. Install it with: {command}", name=module
    )
