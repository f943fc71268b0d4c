"""What run.json says of where a run comes from: source, command, environment, versions,
machines.
"""

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
_GIT_S = 5.0  # that git may take; on a slow disk a run begins without a commit
_PACKAGE = Path(jaxdist.__file__).parent


def describe(
    model: type, devices: np.ndarray, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Returns the fields of run.json that repeat the run; all processes of a group call
    it.

    Args:
      model: the model's class, whose source counts.
      devices: of the mesh.
    """
    hosts = coordination.gather(socket.gethostname())
    if not hosts:  # only the first process writes it
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
    """Returns a hash of the source of this package and of a model's class."""
    return digest(
        *(
            x
            for name, x in sorted(consistency.code(model).items())
            if name.startswith("source")
        )
    )[:16]


def _topology(devices: np.ndarray) -> dict[str, Any]:
    """Describes how the chips of TPU devices are joined: `plan` compiles for such
    slices.
    """
    chip = chips.chip_for(devices.flat[0].device_kind)
    if chip is None or not chip.torus_dims:
        return {}
    shape, slices = chips.slice_shape(chip, list(devices.flat))
    return {reproduce.TOPOLOGY: {"shape": list(shape), "slices": slices}}


def count_chips(devices: np.ndarray, *, machines: int) -> int:
    """Counts what has a price: chips; where devices are CPUs, which may be emulated,
    machines.
    """
    device = devices.flat[0]
    return (
        machines
        if device.platform == "cpu"
        else chips.count_chips(device.device_kind, devices.size)
    )


def versions() -> dict[str, str]:
    """Returns the versions of Python, jaxdist and the packages under it that are
    installed.
    """
    known = {"jaxdist": jaxdist.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def commit(folder: Path) -> dict[str, Any]:
    """Returns `commit`, and whether tracked files differ from it (`dirty`), of the
    clone that holds a folder.

    {} where the folder is in no clone's index, as in an environment inside of
    somebody's repository.
    """
    # A repository may name a program for git to run here (fsmonitor): none is.
    git = ["git", "-C", str(folder), "-c", "core.fsmonitor=false"]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def ask(*words: str) -> str:
        options: dict[str, Any] = {
            "env": environ,
            "timeout": _GIT_S,
            "stderr": subprocess.DEVNULL,
        }
        return subprocess.check_output(
            [*git, *words], text=True, stdin=subprocess.DEVNULL, **options
        ).strip()

    try:
        ask("ls-files", "--error-unmatch", "__init__.py")
        name = ask("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": name.removesuffix("-dirty"), "dirty": name.endswith("-dirty")}


def _argv() -> list[str]:
    """Returns the command of this process, no secrets; [] in a notebook or shell, which
    none repeats.
    """
    if (
        hasattr(sys, "ps1")
        or "ipykernel" in sys.modules
        or sys.argv[:1] in ([""], ["-"])
    ):
        return []  # the last two: a program from standard input
    return reproduce.without_secrets(sys.orig_argv)


def _folder() -> str:
    """Finds the folder where this process was started; "" if that has been deleted since."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _is_train_command() -> bool:
    return (
        bool(sys.argv)
        and Path(sys.argv[0]).resolve() == (_PACKAGE / "train.py").resolve()
    )
