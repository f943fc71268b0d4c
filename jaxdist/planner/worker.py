"""The child process of `compiler`, which compiles one step and caches the result.

`python -m jaxdist.planner.worker FOLDER` reads config.json and request.json in FOLDER.
It writes each stage of the work to `stage`, and at the end result.json. The step is
traced from shapes, so no array is allocated.
"""

import gzip
import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.planner import memory, observed, targets
from jaxdist.planner.compiler import (
    compiler_sizes,
    most_bytes,
    read_entry,
    read_log,
    versions,
)
from jaxdist.planner.state import host_state_bytes
from jaxdist.planner.targets import Target
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest_bytes
from jaxdist.trainer import compose, run_config, validation, workdir

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(folder: Path) -> None:
    """Compiles the step of a folder's request, and writes the result or the error."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        result = _work(folder, json.loads((folder / "request.json").read_text()))
    except ConfigError as error:
        result = {"faults": list(error.faults)}
    except Exception as error:
        traceback.print_exc()
        text = next(iter(str(error).splitlines()), "")
        result = {"error": f"{type(error).__name__}: {text[:500]}"}
    workdir.write_text(folder / "result.json", json.dumps(result))


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Finds the step's result in the cache, or compiles the step.

    Returns:
      The path of the result, whether it was cached, and the warnings of the trace.
    """
    _say(folder, "tracing")
    run = workdir.read_config(folder, trust_code=True)  # the parent wrote it
    target = targets.parse(request["target"])
    devices = targets.devices(target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        mesh, lowered, state_on_host = _lower(run, devices, target)
    messages = [str(w.message) for w in caught if w.category is UserWarning]
    mesh_ids = [device.id for device in mesh.devices.flat]
    content = [
        # These files decide how a result is read; a change makes older entries useless.
        Path(__file__).read_text(),
        Path(observed.__file__).read_text(),
        target.text.partition("@")[0],
        mesh_ids,
        targets.topology_options(target),
        sorted(request["flags"].items()),
        os.environ["XLA_FLAGS"],
        versions(),
    ]
    key = digest_bytes(json.dumps(content).encode() + lowered.as_text().encode())
    path = Path(request["cache"]) / f"{key[:32]}.json.gz"
    cached = read_entry(path) is not None
    if not cached:
        _say(folder, f"compiling for {request['target']}")
        entry = _compile(lowered, request["flags"], target, state_on_host)
        entry |= {"mesh_ids": mesh_ids, "log": read_log(folder)}
        # The write is atomic, because another plan may write the same file.
        atomic.write_bytes(path, gzip.compress(json.dumps(entry).encode(), 4))
    return {
        "entry": str(path),
        "cached": cached,
        "notes": list(dict.fromkeys(messages)),
    }


def _lower(
    run: run_config.RunConfig, devices: Any, target: Target
) -> tuple[jax.sharding.Mesh, Any, int]:
    """Lowers the run's step for a target from shapes.

    Returns:
      The mesh, the lowered step, and the bytes of state that each device keeps on its
      host.
    """
    composition = validation.validate(run, devices, with_data=False)
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(run))
    traced = built.step.trace(built.abstract_state, batch)
    lowered = traced.lower(lowering_platforms=(target.compiler,))
    components = memory.components(composition, target)
    return built.mesh, lowered, host_state_bytes(components)


def _compile(
    lowered: Any, flags: dict[str, Any], target: Target, state_on_host: int
) -> dict[str, Any]:
    """Compiles a lowered step without the flags that the compiler refuses.

    Args:
      lowered: the step.
      flags: compiler options.
      target: the hardware.
      state_on_host: bytes of state that each device keeps on its host.

    Returns:
      Times, sizes, refused flags and the program; or, for a step that does not fit, the
      bytes needed and available.
    """
    began = time.monotonic()
    cpu_began = time.process_time()
    refused: list[str] = []
    while True:
        options = {name: value for name, value in flags.items() if name not in refused}
        try:
            compiled = lowered.compile(compiler_options=options)
            break
        except jax.errors.JaxRuntimeError as error:
            match = observed.OUT_OF_MEMORY.search(str(error))
            if match:
                needed = round(float(match[1]) * _UNITS[match[2]])
                capacity = round(float(match[3]) * _UNITS[match[4]])
                return {"does_not_fit": [needed, capacity]}
            newly_refused = [
                name for name in options if observed.refuses(str(error), name)
            ]
            if not newly_refused:
                raise
            refused += newly_refused
    times = {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu_began,
    }
    sizes = _sizes(compiled.memory_analysis(), target, state_on_host)
    return times | sizes | {"refused": refused, "hlo": _text(compiled)}


def _sizes(analysis: Any, target: Target, state_on_host: int) -> dict[str, int]:
    """Reads the sizes of a compiled step in bytes, and its peak on the device.

    Args:
      analysis: the step's `memory_analysis()`.
      target: the hardware.
      state_on_host: bytes of state that each device keeps on its host.
    """
    sizes = compiler_sizes(analysis)
    bound = most_bytes(sizes)
    # The peak of XLA's CPU compiler omits the temporaries. A TPU's peak below their sum
    # is right: they are not all alive at once.
    peak = 0
    if target.platform != "cpu":
        peak = getattr(analysis, "peak_memory_in_bytes", 0)
    if target.platform == "tpu" and peak:
        # libtpu's peak (0.0.42.1, 0.0.50.1) is that of device and host together.
        # Arguments on the host always exist, but temporaries on the host may not exist
        # at the peak. A step that libtpu accepts does fit.
        peak -= sizes["host_argument_bytes"]
        if sizes["host_temp_bytes"]:
            capacity = target.chip.capacity_bytes if target.chip else bound
            peak = min(bound, capacity)
    elif sizes["host_temp_bytes"]:
        # XLA's peak for GPUs is that of the larger of the two memories.
        peak = min(peak, bound)
    # A GPU from a description has no host memory, so its compiler keeps that state on
    # the device.
    if state_on_host and not sizes["host_argument_bytes"]:
        for name in ("argument", "output", "alias"):
            sizes[f"{name}_bytes"] -= state_on_host
        sizes["host_argument_bytes"] = state_on_host
        peak = max(peak - state_on_host, 0)
        bound -= state_on_host
    return sizes | {"peak_bytes": peak or bound}


def _text(compiled: jax.stages.Compiled) -> str:
    """Prints the program; "" if the versions of jax and libtpu do not match."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        traceback.print_exc()
        return ""


def _say(folder: Path, stage: str) -> None:
    """Reports a stage of the work to the parent."""
    (folder / "stage").write_text(stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
