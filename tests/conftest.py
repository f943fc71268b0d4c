"""Eight emulated CPU devices and strict JAX switches, set before anything imports jax."""

import importlib
import os
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

# A train step compiles in a sixth of the time (6.6 to 1.1 CPU seconds): LLVM optimises nothing, and loops
# come from the plain emitters where jaxlib has them. Arithmetic and collectives stay; TPU programs, too.
QUICK = {"xla_backend_optimization_level": 0}
if version("jaxlib").startswith("0.10."):
    QUICK["xla_cpu_use_fusion_emitters"] = "false"


def pytest_configure(config) -> None:
    """Gives the default selection the quick compiler; `-m slow` and `-m gpu` have that of users."""
    if "not slow" in config.option.markexpr:
        _add_flags(QUICK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a worker tests that follow each other: what those of a file share is made once, not twice."""
    if config.option.dist == "load":  # what `-n 2` means by itself
        return importlib.import_module("xdist.scheduler").WorkStealingScheduling(config, log)
    return None


def _add_flags(wanted: dict[str, object]) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={value}" for name, value in wanted.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


def _heed_signals() -> None:
    """Undoes what nohup and a shell's `&` do: processes that tests start would ignore these, too."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
    _add_flags(wanted)
    # Threads to spare for collectives that wait: see jaxdist.distributed.initialize.add_threads.
    os.environ.setdefault("NPROC", "32")
    # Compiled programs outlive the run, so a second `pytest` is faster. Read by jax at import.
    cache = Path(tempfile.gettempdir()) / f"jaxdist-test-cache-{os.getuid()}"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


pytest.register_assert_rewrite("support")  # its asserts say as much as those of tests
_heed_signals()
_set_environment()

# The same examples on every run and no deadline: a loaded machine changes no result.
hypothesis.settings.register_profile("jaxdist", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxdist")
