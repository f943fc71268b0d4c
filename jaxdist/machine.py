"""What is set up before the first device is touched: flags, compile cache, process group."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path

import jax

from jaxdist import hardware

LAUNCH = "jaxdist launch"


def prepare(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets the platform's flags, keeps compiled programs on disk, and joins a process group.

    The user's own flags and cache settings win. Returns a line that says which launcher was
    found, or None for a process on its own.
    """
    platform = hardware.detect_platform(environ)
    environ.update(hardware.flag_environment(platform, environ))
    skip_absent_tpu(environ)
    if folder := compile_cache_folder(environ):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return join_processes(environ)


def skip_absent_tpu(environ: Mapping[str, str]) -> None:
    """Keeps jax from a long, loud search for TPUs where libtpu is only here for its compiler."""
    cpu = hardware.detect_platform(environ) == "cpu"
    if cpu and "JAX_PLATFORMS" not in environ and find_spec("libtpu"):
        jax.config.update("jax_platforms", "cpu")


def compile_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Returns where compiled programs are kept; None where the user has said where, or not to."""
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    return Path.home() / ".cache" / "jaxdist" / "xla"


def join_processes(environ: Mapping[str, str] = os.environ) -> str | None:
    """Joins the process group if a launcher is detected; returns a line that says which, or None.

    Detected are `jaxdist launch` (JAXDIST_COORDINATOR, JAXDIST_NUM_PROCESSES, JAXDIST_PROCESS_ID)
    and what `jax.distributed` knows itself: Slurm, Open MPI, Kubernetes, a multi-host TPU.
    """
    launcher = detect_launcher(environ)
    if launcher == LAUNCH:
        number, rank = int(environ["JAXDIST_NUM_PROCESSES"]), int(environ["JAXDIST_PROCESS_ID"])
        jax.distributed.initialize(environ["JAXDIST_COORDINATOR"], number, rank)
        return f"process {rank} of {number}, joined through {LAUNCH}"
    if launcher is None:
        return None
    jax.distributed.initialize()
    return f"process {jax.process_index()} of {jax.process_count()}, joined through {launcher}"


def detect_launcher(environ: Mapping[str, str]) -> str | None:
    """Returns what started this process as one of several, or None."""
    if "JAXDIST_COORDINATOR" in environ:
        return LAUNCH
    if int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ:
        return "Slurm"
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if "JOB_COMPLETION_INDEX" in environ and "KUBERNETES_SERVICE_HOST" in environ:
        return "Kubernetes"
    if "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return "a multi-host TPU"
    return None
