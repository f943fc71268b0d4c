"""Eight emulated CPU devices and strict JAX switches, set before anything imports jax."""

import os
import tempfile
from pathlib import Path

import hypothesis


def _set_environment() -> None:
    # `pytest -m gpu` keeps the machine's own platform; everything else runs on emulated CPUs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu: do not ask a metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # ahead-of-time tests run beside others
    wanted = {
        "xla_force_host_platform_device_count": 8,
        # On a loaded machine an emulated device may arrive late; the default kills at 40 s.
        "xla_cpu_collective_call_terminate_timeout_seconds": 60,
    }
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={value}" for name, value in wanted.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    # Threads to spare for collectives that wait: see jaxdist.machine.add_threads.
    os.environ.setdefault("NPROC", "32")
    # Compiled programs outlive the run, so a second `pytest` is faster. Read by jax at import.
    cache = Path(tempfile.gettempdir()) / f"jaxdist-test-cache-{os.getuid()}"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


_set_environment()

# The same examples on every run and no deadline: a loaded machine changes no result.
hypothesis.settings.register_profile("jaxdist", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxdist")
