"""The origin of a run for run.json: source, command, environment, versions, machines."""

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import jaxdist
from jaxdist.distributed import consistency, coordination
from jaxdist.hardware import chips
from jaxdist.storage.digest import digest
from jaxdist.trainer import reproduce

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "chex",
    "ml-collections",
    "numpy",
    "safetensors",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "tokenizers",
    "datasets",
    "pyarrow",
    "qwix",
    "gcsfs",
)
_GIT_S = 5.0  # seconds that git may take; on a slow disk a run records no commit
_PACKAGE = Path(jaxdist.__file__).parent


def describe(
    model: type, devices: np.ndarray, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Makes the fields of run.json from which the run can be repeated.

    Every process must call it.

    Args:
      model: the model's class, whose source is hashed.
      devices: the devices of the mesh.
      environ: the environment of the process.

    Returns:
      The fields on the first process, {} on others.
    """
    hosts = coordination.gather(socket.gethostname())
    if not hosts:
        return {}
    return {
        **_topology(devices),
        "num_chips": count_chips(devices, machines=len(set(hosts.values()))),
        "versions": versions(),
        reproduce.SOURCE: {"hash": source_hash(model), **commit(_PACKAGE)},
        reproduce.COMMAND: {
            "argv": _argv(),
            "folder": _folder(),
            "trains": _is_train_command(),
        },
        reproduce.ENVIRONMENT: reproduce.recorded(environ),
        reproduce.HOSTS: [hosts[process] for process in sorted(hosts)],
    }


def source_hash(model: type) -> str:
    """Hashes the source of this package and of a model's class."""
    code = sorted(consistency.code(model).items())
    sources = [value for name, value in code if name.startswith("source")]
    return digest(*sources)[:16]


def _topology(devices: np.ndarray) -> dict[str, Any]:
    """Describes the slices of TPU devices, for which `plan` compiles."""
    chip = chips.chip_for(devices.flat[0].device_kind)
    if chip is None or not chip.torus_dims:
        return {}
    shape, slices = chips.slice_shape(chip, list(devices.flat))
    return {reproduce.TOPOLOGY: {"shape": list(shape), "slices": slices}}


def count_chips(devices: np.ndarray, *, machines: int) -> int:
    """Counts the chips that cost money.

    If the devices are CPUs, which may be emulated, the machines count.
    """
    device = devices.flat[0]
    if device.platform == "cpu":
        return machines
    return chips.count_chips(device.device_kind, devices.size)


def versions() -> dict[str, str]:
    """Reads the versions of Python, jaxdist and its installed dependencies."""
    known = {"jaxdist": jaxdist.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def commit(folder: Path) -> dict[str, Any]:
    """Reads the commit of the git clone that a package belongs to.

    Returns:
      `commit`, and whether tracked files differ from it (`dirty`). {} if git does not
      track the package: an environment may be inside of another project's repository.
    """
    # A repository can make git run a program (fsmonitor). This one must not.
    git = ["git", "-C", str(folder), "-c", "core.fsmonitor=false"]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def run_git(*words: str) -> str:
        output: str = subprocess.check_output(
            [*git, *words],
            text=True,
            env=environ,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return output.strip()

    try:
        run_git("ls-files", "--error-unmatch", "__init__.py")
        name = run_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": name.removesuffix("-dirty"), "dirty": name.endswith("-dirty")}


def _argv() -> list[str]:
    """Reads the command of this process, without secrets.

    Returns:
      The words; [] for a notebook, a shell, or a program from standard input, which no
      command repeats.
    """
    is_interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    from_standard_input = sys.argv[:1] in ([""], ["-"])
    if is_interactive or from_standard_input:
        return []
    return reproduce.without_secrets(sys.orig_argv)


def _folder() -> str:
    """Reads the folder where this process was started; "" if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _is_train_command() -> bool:
    if not sys.argv:
        return False
    return Path(sys.argv[0]).resolve() == (_PACKAGE / "train.py").resolve()
