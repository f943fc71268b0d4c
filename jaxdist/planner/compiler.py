"""Compilation of a run's step for hardware that is not here.

A child process (`worker`) compiles, because the compiler may crash or need too much
time or memory. Its output goes to a log that is shown only if it fails. Results are
cached by the content of the program.
"""

import contextlib
import gzip
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, extras
from jaxdist.hardware import flags as platform_flags
from jaxdist.hardware import host
from jaxdist.planner.observed import (
    NOISE,
    OLD_PTXAS,
    PTXAS_FIX,
    WINDOWED_EINSUM,
)
from jaxdist.planner.targets import Target
from jaxdist.storage import untrusted
from jaxdist.telemetry.units import GIB
from jaxdist.trainer import workdir
from jaxdist.trainer.run_config import RunConfig, document_of

Say = Callable[[str], None]  # reports a stage of the work, or a line

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "numpy",
)
_VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS"}  # where flags are set
_FLAG_VALUES = {"true": True, "": True, "false": False}
_NOT_INHERITED = ("--xla_gpu", "--xla_force_host_platform_device_count")
SAY_EVERY_S = 10.0  # seconds of silence after which a stage is told again
_LOG_LINES = 300  # of the compiler's log, kept with a result
_TAIL_LINES = 15  # of the log, shown after a failure


class DoesNotFit(Exception):
    """The compiler's refusal of a step that needs too much memory.

    Its args are the bytes needed on each device and the bytes available.
    """


class CannotTell(Exception):
    """A compiler without an answer: it crashed or exceeded a limit.

    The message ends with the last lines of the compiler's log.
    """


def _memory_for_the_compiler() -> int:
    """Chooses the memory that a compiler may take, in bytes: half of what is free.

    It is at least 4 GiB, since most steps take less than that.
    """
    free = host.free_memory()
    return max(4 * GIB, free.bytes // 2 if free else 0)


@dataclass(frozen=True)
class CompileOptions:
    """Flags of a compilation, and limits of the child process."""

    # compiler options that override those that `train` sets
    flags: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 1800  # most wall time of the child
    # most resident memory of the child
    memory_bytes: int = field(default_factory=_memory_for_the_compiler)
    cache: Path | None = None  # folder of results; None: ~/.cache/jaxdist/plans


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its memory per device, and its program."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that reuse the memory of arguments: the donated state
    temp_bytes: int
    peak_bytes: int
    host_argument_bytes: int
    host_temp_bytes: int
    hlo: str  # the scheduled program; "" if these versions cannot print it
    # device id of each member number in the program's replica groups
    mesh_ids: tuple[int, ...]
    seconds: float = 0.0  # wall time of the compilation
    cpu_seconds: float = 0.0  # CPU time of the compilation
    child_peak_bytes: int = 0  # peak resident memory of this call's child process
    cached: bool = False  # whether the result came from the cache
    # one line for each dropped flag and each mismatch of versions
    notes: tuple[str, ...] = ()
    log: str = ""  # the end of the compiler's output


def compile_run(
    run: RunConfig,
    target: Target,
    options: CompileOptions | None = None,
    *,
    say: Say = lambda stage: None,
) -> Compiled:
    """Compiles the step that `train` would run on a target, with the target's compiler.

    Args:
      run: the config.
      target: the hardware.
      options: compiler flags and limits; default `CompileOptions()`.
      say: called with each stage of the work as it begins.

    Raises:
      DoesNotFit: the compiler refuses the step because of its size.
      CannotTell: the compiler crashed or exceeded a limit.
      ConfigError: the run cannot be laid out on the target.
      MissingExtra: the target's compiler is not installed.
    """
    options = options or CompileOptions()
    notes = list(check_versions(target.platform))
    flags, flag_notes = compiler_flags(target, options, os.environ)
    notes += flag_notes
    with tempfile.TemporaryDirectory(prefix="jaxdist-plan-") as name:
        folder = Path(name)
        workdir.write_json(folder / workdir.CONFIG, document_of(run))
        request = {
            "target": target.text,
            "cache": str(_cache(options) or folder),
            "flags": flags,
        }
        workdir.write_text(folder / "request.json", json.dumps(request))
        result = _watch(folder, _environment(target, os.environ), options, say)
        _raise_error(result, folder)
        entry = read_entry(Path(result.pop("entry")))
    if entry is None:
        raise CannotTell(
            "the compiler's result was deleted from the cache before it was read; plan again"
        )
    refusal = entry.pop("does_not_fit", None)
    if refusal:
        raise DoesNotFit(*refusal)
    notes += result.pop("notes")
    notes += [
        f"{flag}: this compiler does not know the flag, so the plan is without it; remove it from your flags as well"
        for flag in entry.pop("refused")
    ]
    entry["mesh_ids"] = tuple(entry["mesh_ids"])
    return Compiled(**entry, **result, notes=tuple(notes))


def _raise_error(result: Mapping[str, Any], folder: Path) -> None:
    """Raises the error of a child's result, if any.

    Args:
      result: the child's result.
      folder: holds the child's log.

    Raises:
      CannotTell: the compiler crashed or exceeded a limit.
      ConfigError: the run cannot be laid out on the target.
    """
    if "faults" in result:
        raise ConfigError(result["faults"])
    if "error" in result:
        message = result["error"]
        if OLD_PTXAS in message:
            message += PTXAS_FIX
        tail = read_log(folder).splitlines()[-_TAIL_LINES:]
        if tail:
            message += "\n".join(["; the end of its log:", *tail])
        raise CannotTell(message)


def _cache(options: CompileOptions) -> Path | None:
    """Makes the folder of cached results, or returns None if it cannot be written."""
    try:
        folder = options.cache or Path.home() / ".cache" / "jaxdist" / "plans"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder if os.access(folder, os.W_OK) else None


def read_entry(path: Path) -> dict[str, Any] | None:
    """Reads a cached result; None if it is absent or damaged."""
    try:
        content = gzip.decompress(untrusted.read_bytes(path))
        entry: dict[str, Any] = untrusted.parse_json(content, dict)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return entry


_SIZES = ("argument", "output", "alias", "temp", "host_argument", "host_temp")


def compiler_sizes(analysis: Any) -> dict[str, int]:
    """Reads the sizes in bytes, by name, from a step's `memory_analysis()`."""
    return {
        f"{name}_bytes": getattr(analysis, f"{name}_size_in_bytes") for name in _SIZES
    }


def most_bytes(sizes: Mapping[str, int]) -> int:
    """Bounds the peak of a step from above: all temporaries are alive at once."""
    kept = sizes["argument_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"]
    return kept + sizes["temp_bytes"]


# --- flags and versions ---------------------------------------------------------------


def compiler_flags(
    target: Target, options: CompileOptions, environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Collects the compiler options of a plan.

    The flags that `train` sets come first, the environment's override them, and
    `options.flags` override both. Some flags are read only when a process starts, so
    they cannot be options of a compilation: they are skipped.

    Returns:
      The options by name, and notes: a line for each flag that needs the user's
      attention.
    """
    platform = target.platform
    family = target.chip.family if target.chip else ""
    process_flags = {
        flag.name.lstrip("-")
        for flag in platform_flags.flags_for(platform, family)
        if not flag.compile_option
    }
    notes = platform_flags.left_to_the_user(platform, environ, family=family)
    flags: dict[str, Any] = {}
    variable = _VARIABLES.get(platform)
    if variable:
        changed = platform_flags.flag_environment(platform, environ, family=family)
        users = environ.get(variable, "")
        for word in (dict(environ) | changed).get(variable, "").split():
            name, _, value = word.lstrip("-").partition("=")
            if name in process_flags:
                if word in users:
                    notes.append(
                        f"{name} works only for a whole process; planned without it"
                    )
            elif platform == "tpu" or name.startswith("xla_gpu"):
                flags[name] = _FLAG_VALUES.get(value, value)
    if platform == "tpu":
        flags[WINDOWED_EINSUM] = "1000000"
    return flags | dict(options.flags), notes


def versions() -> dict[str, str]:
    """Reads the versions of the installed packages that influence a program."""
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def check_versions(platform: str) -> Iterator[str]:
    """Yields a warning for each installed compiler that does not match this jax.

    Raises:
      MissingExtra: no compiler for the platform is installed.
    """
    modules: dict[str, tuple[str, ...]] = {"tpu": ("libtpu",), "gpu": CUDA_PLUGINS}
    compilers = modules.get(platform, ())
    installed = [name.replace("_", "-") for name in compilers if find_spec(name)]
    if compilers and not installed:
        extras.require(compilers[0])
    for fault in version_faults(versions()):
        if fault.partition(" ")[0] in installed:
            yield f"{fault}; until then the program may not be printable"


def version_faults(versions: Mapping[str, str | None]) -> list[str]:
    """Lists mismatches between versions of jax packages, each with its fix.

    jaxlib should have jax's version (jax allows some older ones). A CUDA plugin must
    have jaxlib's version. jax's metadata names the libtpu that it was tested with.
    """
    jax_version = versions.get("jax")
    jaxlib = versions.get("jaxlib")
    faults = []
    if _numbers(jaxlib) != _numbers(jax_version):
        faults.append(
            f"jaxlib {jaxlib} with jax {jax_version}: pip install jaxlib=={jax_version}"
        )
    for plugin in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        version = versions.get(plugin)
        if version and _numbers(version) != _numbers(jaxlib):
            faults.append(
                f"{plugin} {version} with jaxlib {jaxlib}: pip install {plugin}=={jaxlib}"
            )
    tested = required_libtpu(importlib.metadata.requires("jax") or [])
    libtpu = versions.get("libtpu")
    if libtpu and tested and not (libtpu + ".").startswith(tested + "."):
        faults.append(
            f"libtpu {libtpu} with jax {jax_version}, which was tested with {tested}: "
            f'pip install "jax[tpu]=={jax_version}"'
        )
    return faults


def _numbers(version: str | None) -> list[str]:
    """Splits a version into its first three numbers."""
    return re.findall(r"\d+", version or "")[:3]


def required_libtpu(requirements: list[str]) -> str | None:
    """Finds the libtpu version, or its first numbers, that jax's extra `tpu` requires.

    Args:
      requirements: the lines of jax's package metadata.
    """
    pattern = r"libtpu\s*\(?==\s*([\d.]+?)(\.\*)?\)?\s*(;|$)"
    for line in requirements:
        match = re.match(pattern, line)
        if match:
            return match[1]
    return None


def _environment(target: Target, environ: Mapping[str, str]) -> dict[str, str]:
    """Makes the child's environment, in which it has a compiler but no accelerator.

    The child gets compiler flags as options instead of through variables: an unknown
    flag in LIBTPU_INIT_ARGS aborts the process, an unknown option raises an error.
    """
    words = [
        word
        for word in environ.get("XLA_FLAGS", "").split()
        if not word.startswith(_NOT_INHERITED)
    ]
    if target.platform == "cpu":
        words.append(f"--xla_force_host_platform_device_count={target.num_devices}")
    kept = {
        name: value for name, value in environ.items() if name != "LIBTPU_INIT_ARGS"
    }
    return kept | {
        "JAX_PLATFORMS": "cpu",  # with `cuda,cpu` the CUDA plugin requires a GPU
        "XLA_FLAGS": " ".join(words),
        # otherwise libtpu queries a metadata server for minutes
        "TPU_SKIP_MDS_QUERY": "1",
        # otherwise two plans collide on libtpu's lock file
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # jax's cache cannot read programs back that were compiled ahead of time
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


# --- the child ------------------------------------------------------------------------


def _watch(
    folder: Path,
    environ: dict[str, str],
    options: CompileOptions,
    say: Say,
) -> dict[str, Any]:
    """Runs the child within its limits.

    Args:
      folder: holds the child's request; gets its log, stage and result.
      environ: the child's environment.
      options: the limits.
      say: called with each new stage.

    Returns:
      The child's result, or {"error": the reason why there is none}.
    """
    began = time.monotonic()
    peak = 0
    stage = ""
    said = began  # time of the last line
    fault = ""
    command = [sys.executable, "-m", "jaxdist.planner.worker", str(folder)]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        while not fault and child.poll() is None:
            time.sleep(0.1)
            peak = max(peak, _resident_bytes(child.pid))
            if peak > options.memory_bytes:
                fault = (
                    f"the compiler took more than {options.memory_bytes / GIB:.3g} GiB of this machine's memory; "
                    "free some, or plan on a larger machine"
                )
            elif time.monotonic() - began > options.timeout_s:
                fault = f"the compiler took more than {options.timeout_s:g} s; --limit sets the minutes"
            latest = _read(folder / "stage")
            now = time.monotonic()
            if latest and latest != stage:
                stage = latest
                said = now
                say(stage)
            elif now - said >= SAY_EVERY_S:
                said = now
                say(f"{stage or 'starting the compiler'}, {now - began:.0f} s so far")
    finally:
        child.kill()
        code = child.wait()
    if fault:
        return {"error": fault}
    text = _read(folder / "result.json")
    if text:
        result: dict[str, Any] = json.loads(text)
        return result | {"child_peak_bytes": peak}
    end = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return {"error": f"the compiler's process {end} while {stage or 'starting'}"}


def _resident_bytes(process: int) -> int:
    """Reads a process's resident memory from /proc; 0 if the system has no such file."""
    pages = _read(Path(f"/proc/{process}/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_log(folder: Path) -> str:
    """Reads the end of the child's log, without lines that libtpu prints everywhere."""
    lines = [
        line
        for line in _read(folder / "log").splitlines()
        if line and not NOISE.match(line)
    ]
    return "\n".join(lines[-_LOG_LINES:])
