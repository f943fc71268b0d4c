"""Eight emulated CPU devices and strict JAX switches, set before anything
imports jax.
"""

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

# A train step compiles in a sixth of the time (6.6 to 1.1 CPU seconds): LLVM optimises
# nothing, and loops come from the plain emitters where jaxlib has them. Arithmetic and
# collectives stay; TPU programs, too.
QUICK = {"xla_backend_optimization_level": 0}
if version("jaxlib").startswith("0.10."):
    QUICK["xla_cpu_use_fusion_emitters"] = "false"
    # a module for LLVM, not 32: 7 to 12 % of all CPU time
    QUICK["xla_cpu_parallel_codegen_split_count"] = 1


# memory maps of this process between two modules; one module adds up to 15,000
MOST_MAPS = 20_000

# `-m fast`: unit tests that start no process, run no command and train nothing.
# Beginnings of their paths ...
FAST = (
    "config/",
    "data/test_",
    "hardware/",
    "optim/",
    "operations/page/",
    "telemetry/",
    "docs/test_pages.py",
    "parallel/test_mesh.py",
    "parallel/test_sharding.py",
    "parallel/pipeline/test_schedules.py",
    "trainer/test_model_flops.py",
    "trainer/test_run_config.py",
    "planner/test_targets.py",
    "planner/test_formulas.py",
    "planner/test_communication.py",
    "checkpoint/test_state_dict.py",
    "checkpoint/test_manifest.py",
    "interop/test_interop.py",
    "ops/test_ops.py",
)
# ... without those of their tests that compile much or start a process.
NOT_FAST = {
    "test_a_tiny_config_trains",
    "test_goldens",
    "test_the_state_lies_where_the_table_says",
    "test_a_rule_renames_for_the_op_what_it_renames_for_storage",
    "test_rules_hold_in_a_pipeline",
    "test_jaxlib_knows_the_gpu_flags",
    "test_what_python_prints_is_read_back",
    "test_init_does_not_depend_on_the_mesh",
    "test_the_fast_tests_are_most_of_the_unit_tests",
    "test_the_compiled_step_does_the_model_flops_and_what_attention_recomputes",
    "test_a_harmful_tokenizer_is_refused_before_it_is_used",
    "test_a_tokenizer_is_tried_out_once",
    "test_a_tokenizer_that_fails_on_a_text_alone_is_named",
    "test_names_and_ids_that_are_not_utf8",
    "test_a_vocabulary_with_gaps_has_the_size_of_its_largest_id",
    "test_ids_that_no_batch_can_hold_are_refused",
    "test_bpe_is_trained_once_and_saved_with_the_run",
    "test_bpe_round_trips_text_that_spells_a_special_token",
    "test_the_end_of_a_bpe_document_is_learned_and_never_read",
    "test_bytes_per_bpe_token_are_counted_for_each_split",
    "test_a_vocabulary_smaller_than_that_of_bpe_is_refused",
}


def _is_fast(file: Path) -> bool:
    return file.relative_to(Path(__file__).parent).as_posix().startswith(FAST)


def pytest_ignore_collect(collection_path, config) -> bool | None:
    """Imports no module that `-m fast` would leave out."""
    is_module = collection_path.suffix == ".py" and config.option.markexpr == "fast"
    return True if is_module and not _is_fast(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """Marks the fast tests."""
    for item in items:
        others = any(item.get_closest_marker(name) for name in ("slow", "gpu", "chaos"))
        if _is_fast(item.path) and item.originalname not in NOT_FAST and not others:
            item.add_marker("fast")


def pytest_configure(config) -> None:
    """Gives the default selection, `-m fast` and `-m chaos` the quick compiler; `-m slow`
    and GPUs have the users'.
    """
    on_gpu = (
        config.option.markexpr == "gpu"
        and os.environ.get("JAXDIST_GPU_TESTS_ON") != "cpu"
    )
    quick = (
        config.option.markexpr in ("fast", "gpu", "chaos")
        or "not slow" in config.option.markexpr
    )
    if quick and not on_gpu:
        _add_flags(QUICK)
    if on_gpu:
        # jax is not imported yet. CPU devices are what a GPU is compared with; runs of
        # their own share it.
        if _PLATFORM_IS_OURS and importlib.util.find_spec("jax_plugins"):
            os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        # jax's own code around cuDNN's kernels is not ours
        os.environ["JAX_NUMPY_RANK_PROMOTION"] = "allow"


def pytest_collection_finish() -> None:
    """Spares 10 % of all CPU time: what is imported now stays, and tracing makes much
    and few cycles. Describes each model of ours once, and compiles `init` quickly.
    """
    if "jaxdist.trainer.compose" in sys.modules:
        importlib.import_module("support.shared_specs").share()
        if "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""):
            importlib.import_module("support.quick_init").install()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # by default 700, 10, 10


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem) -> None:
    """Lets go of compiled programs, between modules, before the process has as many
    maps as it may have.

    A program takes 25 to 75 of Linux's 65,530 (vm.max_map_count); XLA aborts where one
    more is refused.
    """
    if nextitem is None or nextitem.path == item.path or _num_memory_maps() < MOST_MAPS:
        return
    for module in (item.module, sys.modules.get("support.models")):
        for name, value in list(vars(module).items()) if module else []:
            if name != "pytestmark" and callable(getattr(value, "cache_clear", None)):
                value.cache_clear()
    sys.modules["jax"].clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def shared_steps():
    """Lets runs of a module with equal configs share their step, which is compiled
    once.
    """
    with importlib.import_module("support.shared_steps").shared_steps():
        yield


def _num_memory_maps() -> int:
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # not Linux
        return 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a worker tests that follow each other: what those of a file share is made
    once, not twice.
    """
    if config.option.dist == "load":  # what `-n 2` means by itself
        return importlib.import_module("xdist.scheduler").WorkStealingScheduling(
            config, log
        )
    return None


def _add_flags(wanted: dict[str, object]) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [
        f"--{name}={value}" for name, value in wanted.items() if name not in flags
    ]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


def _heed_signals() -> None:
    """Undoes what nohup and a shell's `&` do: processes that tests start would ignore
    these, too.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_environment() -> None:
    # `pytest -m gpu` chooses the machine's GPU later; everything else runs on emulated
    # CPUs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # libtpu: do not ask a metadata server
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # ahead-of-time tests run beside others
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    wanted = {
        "xla_force_host_platform_device_count": 8,
        # On a loaded machine an emulated device may arrive late; the default kills at
        # 40 s.
        "xla_cpu_collective_call_terminate_timeout_seconds": 60,
    }
    _add_flags(wanted)
    # Threads to spare for collectives that wait: see
    # jaxdist.distributed.initialize.add_threads.
    os.environ.setdefault("NPROC", "32")
    # Compiled programs outlive the run, so a second `pytest` is faster. Read by jax at
    # import.
    cache = Path(tempfile.gettempdir()) / f"jaxdist-test-cache-{os.getuid()}"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
    # Programs without the lines of Python that made them: 6 % of all CPU time.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


_PLATFORM_IS_OURS = "JAX_PLATFORMS" not in os.environ
pytest.register_assert_rewrite("support")  # its asserts say as much as those of tests
_heed_signals()
_set_environment()

# The same examples on every run and no deadline: a loaded machine changes no result.
hypothesis.settings.register_profile("jaxdist", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxdist")
