"""The accelerator that tests of `-m gpu` compare with CPU devices; they are skipped
where there is none.

JAXDIST_GPU_TESTS_ON=cpu runs them with an emulated CPU device in its place: what they
say of GPUs is then not tested, but their code is.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from support.runs import command

ON = os.environ.get("JAXDIST_GPU_TESTS_ON", "gpu")
IS_GPU = ON == "gpu"
# Products of float32 in float32: a GPU rounds them to TF32 by default.
HIGHEST = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def accelerator() -> jax.Device:
    """Returns the accelerator, of which no CPU mesh of `cpus` is a part, or skips the
    test.
    """
    if not IS_GPU:
        return jax.devices("cpu")[-1]
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip(
            f"no GPU: jax has {jax.default_backend()}; JAXDIST_GPU_TESTS_ON=cpu runs the code on CPU"
        )


def cpus(count: int) -> list[jax.Device]:
    """Returns emulated CPU devices."""
    return jax.devices("cpu")[:count]


def environment() -> dict[str, str]:
    """Returns that of a process that has the accelerator alone, and gives equal bits
    for equal runs.
    """
    flags = [
        flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag
    ]
    # a call from the device to the host places its arrays on a CPU device
    platform = "cuda,cpu" if IS_GPU else "cpu"
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": platform}
    return (
        os.environ | shared | HIGHEST | {"XLA_FLAGS": " ".join([*flags, DETERMINISTIC])}
    )


def start_train(workdir: Path, **changes) -> subprocess.Popen:
    """Starts a tiny run on the accelerator; its output is `WORKDIR.log`."""
    accelerator()
    with open(workdir.parent / f"{workdir.name}.log", "ab") as log:
        return subprocess.Popen(
            command(workdir, **changes), env=environment(), stdout=log, stderr=log
        )


def run_python(
    code: str, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess:
    """Returns what a script on the accelerator did."""
    accelerator()
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
