"""Compiles a run's step for a target that need not be here: in a child process, kept by
content.

The child (`worker`) may be killed by its caps or die in the compiler; its output goes
to a log that is shown only when it fails.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, extras, schema
from jaxdist.hardware import flags as platform_flags
from jaxdist.planner.observed import NOISE, WINDOWED_EINSUM
from jaxdist.planner.targets import Target
from jaxdist.storage import untrusted
from jaxdist.telemetry.units import GIB
from jaxdist.trainer import workdir
from jaxdist.trainer.run_config import RunConfig

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
_VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS"}
_NOT_INHERITED = ("--xla_gpu", "--xla_force_host_platform_device_count")
_LOG_LINES = 300
_TAIL_LINES = 15


class DoesNotFit(Exception):
    """The compiler refused the step; args: bytes that it needs of a device, and bytes
    that there are.
    """


class CannotTell(Exception):
    """The compiler did not answer: it crashed, or took more than its caps. Ends with
    the end of its log.
    """


@dataclass(frozen=True)
class CompileOptions:
    """How to compile, and what the child may take."""

    # compiler options over those that train sets
    flags: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 1800
    memory_bytes: int = 3 * GIB  # resident memory of the child
    cache: Path | None = None  # folder of results; None: ~/.cache/jaxdist/plans


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step, per device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # arguments given back as results: the donated state
    temp_bytes: int
    peak_bytes: int
    host_argument_bytes: int
    host_temp_bytes: int
    hlo: str  # the scheduled program; "" where this pair of versions cannot print it
    # [g] = device id of member g of the program's replica groups
    mesh_ids: tuple[int, ...]
    seconds: float = 0.0  # of wall time to compile
    cpu_seconds: float = 0.0
    child_peak_bytes: int = 0  # resident memory of the child that was just run
    cached: bool = False
    # a line each: dropped flags, versions that do not belong together
    notes: tuple[str, ...] = ()
    log: str = ""  # what the compiler wrote


def compile_run(
    run: RunConfig,
    target: Target,
    options: CompileOptions | None = None,
    *,
    say: Callable[[str], None] = lambda stage: None,
) -> Compiled:
    """Returns what the target's compiler makes of the very step that `train` would run
    there.

    `say` gets each stage of the work as it begins.

    Raises:
      DoesNotFit: the compiler refuses it for its size.
      CannotTell: no answer from the compiler.
      ConfigError: the run cannot be laid out on the target.
      MissingExtra: the target's compiler is not installed.
    """
    options = options or CompileOptions()
    notes = list(check_versions(target.platform))
    with tempfile.TemporaryDirectory(prefix="jaxdist-plan-") as name:
        folder = Path(name)
        workdir.write_json(
            folder / workdir.CONFIG, schema.to_config_dict(run).to_dict()
        )
        flags, run_only = compiler_flags(target, options, os.environ)
        notes += run_only
        request = {
            "target": target.text,
            "cache": str(_cache(options) or folder),
            "flags": flags,
        }
        workdir.write_text(folder / "request.json", json.dumps(request))
        result = _watch(folder, _environment(target, os.environ), options, say)
        if "faults" in result:
            raise ConfigError(result["faults"])
        if "error" in result:
            tail = read_log(folder).splitlines()[-_TAIL_LINES:]
            ending = "\n".join(["; the end of its log:", *tail]) if tail else ""
            raise CannotTell(result["error"] + ending)
        entry = read_entry(Path(result.pop("entry")))
    if entry is None:
        raise CannotTell(
            "the compiler's result was taken out of the cache before it was read; plan again"
        )
    if refusal := entry.pop("does_not_fit", None):
        raise DoesNotFit(*refusal)
    notes += result.pop("notes") + [
        f"{flag}: refused by this compiler and left out; take it out of your flags as well"
        for flag in entry.pop("refused")
    ]
    return Compiled(
        **entry | result | {"mesh_ids": tuple(entry["mesh_ids"]), "notes": tuple(notes)}
    )


def _cache(options: CompileOptions) -> Path | None:
    """Returns the folder of kept results, None where it cannot be written."""
    try:
        folder = options.cache or Path.home() / ".cache" / "jaxdist" / "plans"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder if os.access(folder, os.W_OK) else None


def read_entry(path: Path) -> dict[str, Any] | None:
    """Returns a kept result; None where it is absent or damaged."""
    try:
        return untrusted.parse_json(gzip.decompress(untrusted.read_bytes(path)), dict)
    except (OSError, EOFError, ValueError, zlib.error):
        return None


def compiler_sizes(analysis: Any) -> dict[str, int]:
    """Reads the bytes by name of a compiled step's `memory_analysis`."""
    return {
        f"{name}_bytes": getattr(analysis, f"{name}_size_in_bytes")
        for name in (
            "argument",
            "output",
            "alias",
            "temp",
            "host_argument",
            "host_temp",
        )
    }


def most_bytes(sizes: Mapping[str, int]) -> int:
    """Bounds the peak of a step: as if all temporaries lived at once."""
    kept = sizes["argument_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"]
    return kept + sizes["temp_bytes"]


# --- what is compiled with ------------------------------------------------------------


def compiler_flags(
    target: Target, options: CompileOptions, environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the compiler options and notes: what train sets, the user's own over it,
    the options' last.

    A flag that only a process can start with is none of them; one of the user's gets a
    note.
    """
    platform = target.platform
    family = target.chip.family if target.chip else ""
    run_only = {
        f.name.lstrip("-")
        for f in platform_flags.flags_for(platform, family)
        if not f.compile_option
    }
    notes = platform_flags.left_to_the_user(platform, environ, family=family)
    flags: dict[str, Any] = {}
    if variable := _VARIABLES.get(platform):
        changed = platform_flags.flag_environment(platform, environ, family=family)
        users = environ.get(variable, "")
        for word in (dict(environ) | changed).get(variable, "").split():
            name, _, value = word.lstrip("-").partition("=")
            if name in run_only:
                if word in users:
                    notes.append(
                        f"{name}: no option of one compilation; planned without it"
                    )
            elif platform == "tpu" or name.startswith("xla_gpu"):
                flags[name] = {"true": True, "": True, "false": False}.get(value, value)
    if platform == "tpu":
        flags[WINDOWED_EINSUM] = "1000000"
    return flags | dict(options.flags), notes


def versions() -> dict[str, str]:
    """Returns the versions of the packages that make a program."""
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def check_versions(platform: str) -> Iterator[str]:
    """Yields a warning for each compiler that is not the one that this jax belongs to.

    Raises:
      MissingExtra: there is no compiler for the platform.
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
    """Returns which of the installed packages do not belong together, each with its
    cure.

    jax runs with a jaxlib of its own number (it allows some older ones), a CUDA plugin
    must have jaxlib's number, and jax's metadata says which libtpu it was tested with.
    """
    jax_version = versions.get("jax")
    jaxlib = versions.get("jaxlib")
    faults = []
    if _numbers(jaxlib) != _numbers(jax_version):
        faults.append(
            f"jaxlib {jaxlib} with jax {jax_version}: pip install jaxlib=={jax_version}"
        )
    for plugin in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        if (version := versions.get(plugin)) and _numbers(version) != _numbers(jaxlib):
            faults.append(
                f"{plugin} {version} with jaxlib {jaxlib}: pip install {plugin}=={jaxlib}"
            )
    wanted = required_libtpu(importlib.metadata.requires("jax") or [])
    libtpu = versions.get("libtpu")
    if libtpu and wanted and not (libtpu + ".").startswith(wanted + "."):
        faults.append(
            f"libtpu {libtpu} with jax {jax_version}, which was tested with {wanted}: "
            f'pip install "jax[tpu]=={jax_version}"'
        )
    return faults


def _numbers(version: str | None) -> list[str]:
    """Returns the first three numbers of a version."""
    return re.findall(r"\d+", version or "")[:3]


def required_libtpu(requirements: list[str]) -> str | None:
    """Returns the libtpu version (or its beginning) that jax's extra `tpu` asks for."""
    pattern = r"libtpu\s*\(?==\s*([\d.]+?)(\.\*)?\)?\s*(;|$)"
    return next(
        (match[1] for line in requirements if (match := re.match(pattern, line))), None
    )


def _environment(target: Target, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the child's environment: a compiler without devices, and its flags given
    by name only.

    An unknown word in LIBTPU_INIT_ARGS aborts the process; a flag given by name may be
    refused.
    """
    words = [
        w
        for w in environ.get("XLA_FLAGS", "").split()
        if not w.startswith(_NOT_INHERITED)
    ]
    if target.platform == "cpu":
        words.append(f"--xla_force_host_platform_device_count={target.num_devices}")
    kept = {
        name: value for name, value in environ.items() if name != "LIBTPU_INIT_ARGS"
    }
    return kept | {
        "JAX_PLATFORMS": "cpu",  # with `cuda,cpu` the CUDA plugin wants a GPU
        "XLA_FLAGS": " ".join(words),
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server for minutes
        # else two plans collide on libtpu's lock file
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # it cannot read ahead-of-time programs back
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


# --- the child ------------------------------------------------------------------------


def _watch(
    folder: Path,
    environ: dict[str, str],
    options: CompileOptions,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the child's result, or {"error": why there is none}."""
    began = time.monotonic()
    peak = 0
    stage = ""
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
                fault = f"the compiler took more than {options.memory_bytes / GIB:.3g} GiB of this machine"
            elif time.monotonic() - began > options.timeout_s:
                fault = f"the compiler took more than {options.timeout_s:g} s"
            if (now := _read(folder / "stage")) and now != stage:
                say(stage := now)
    finally:
        child.kill()
        code = child.wait()
    if not fault and (text := _read(folder / "result.json")):
        return json.loads(text) | {"child_peak_bytes": peak}
    end = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return {
        "error": fault or f"the compiler's process {end} while {stage or 'starting'}"
    }


def _resident_bytes(process: int) -> int:
    """Returns a process's resident memory now; 0 where the system does not say."""
    pages = _read(Path(f"/proc/{process}/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_log(folder: Path) -> str:
    """Returns the end of the child's log without what libtpu says on every machine."""
    lines = [
        line
        for line in _read(folder / "log").splitlines()
        if line and not NOISE.match(line)
    ]
    return "\n".join(lines[-_LOG_LINES:])
