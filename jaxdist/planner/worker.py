"""The child of `compiler`: `python -m jaxdist.planner.worker FOLDER` compiles one step,
keeps it, ends.

FOLDER holds config.json and request.json; it gets `stage`, and last of all result.json.
No array is ever made: the step is traced from shapes.
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
from jaxdist.planner.state import HOST_STATE
from jaxdist.planner.targets import Target
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest_bytes
from jaxdist.trainer import compose, run_config, validation, workdir

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(folder: Path) -> None:
    """Does the work of FOLDER/request.json."""
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
    """Ends this process when nobody waits for it any more."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Returns where the result is kept, new or from before."""
    _say(folder, "tracing")
    run = workdir.read_config(folder, trust_code=True)  # our parent's
    target = targets.parse(request["target"])
    devices = targets.devices(target)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default", UserWarning)
        mesh, lowered, waiting = _lower(run, devices, target)
    notes = list(
        dict.fromkeys(
            str(warning.message) for warning in said if warning.category is UserWarning
        )
    )
    mesh_ids = [device.id for device in mesh.devices.flat]
    # These files say how results are read, so entries from before they were changed are
    # not found.
    content: list[Any] = [
        Path(__file__).read_text(),
        Path(observed.__file__).read_text(),
        target.text.partition("@")[0],
        mesh_ids,
    ]
    content += [targets.topology_options(target)]
    content += [sorted(request["flags"].items()), os.environ["XLA_FLAGS"], versions()]
    key = digest_bytes(json.dumps(content).encode() + lowered.as_text().encode())
    path = Path(request["cache"]) / f"{key[:32]}.json.gz"
    cached = read_entry(path) is not None
    if not cached:
        _say(folder, f"compiling for {request['target']}")
        entry = {"mesh_ids": mesh_ids} | _compile(
            lowered, request["flags"], target, waiting
        )
        document = json.dumps(entry | {"log": read_log(folder)}).encode()
        # another plan may write the same
        atomic.write_bytes(path, gzip.compress(document, 4))
    return {"entry": str(path), "cached": cached, "notes": notes}


def _lower(
    run: run_config.RunConfig, devices: Any, target: Target
) -> tuple[jax.sharding.Mesh, Any, int]:
    """Returns the mesh over these devices, the run's step lowered for it, made from
    shapes, and the bytes of its state on each device's host."""
    composition = validation.validate(run, devices, with_data=False)
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(run))
    traced = built.step.trace(built.abstract_state, batch)
    components = memory.components(composition, target)
    waiting = components.get(HOST_STATE, 0)
    return built.mesh, traced.lower(lowering_platforms=(target.compiler,)), waiting


def _compile(
    lowered: Any, flags: dict[str, Any], target: Target, waiting: int
) -> dict[str, Any]:
    """Returns sizes, program and times of a lowered step; of one that does not fit, two
    sizes.
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
            if match := observed.OUT_OF_MEMORY.search(str(error)):
                needed, capacity = (
                    round(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3)
                )
                return {"does_not_fit": [needed, capacity]}
            more = [name for name in options if observed.refuses(str(error), name)]
            if not more:
                raise
            refused += more
    seconds = {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu_began,
    }
    sizes = _sizes(compiled.memory_analysis(), target, waiting)
    return seconds | sizes | {"refused": refused, "hlo": _text(compiled)}


def _sizes(analysis: Any, target: Target, waiting: int) -> dict[str, int]:
    """Returns bytes by name of a compiled step, and its peak on the device.

    Args:
      waiting: bytes of its state on the host.
    """
    sizes = compiler_sizes(analysis)
    bound = most_bytes(sizes)
    # XLA's CPU compiler leaves the temporaries out of its peak. On TPU a peak below
    # them is right: they do not all live at once.
    peak = (
        0 if target.platform == "cpu" else getattr(analysis, "peak_memory_in_bytes", 0)
    )
    if target.platform == "tpu" and peak:
        # libtpu's peak (0.0.42.1, 0.0.50.1) is of device and host together: arguments
        # on the host are always there, but of temporaries nobody knows whether they
        # were at the peak. What it takes does fit.
        fits = target.chip.capacity_bytes if target.chip else bound
        peak -= sizes["host_argument_bytes"]
        peak = min(bound, fits) if sizes["host_temp_bytes"] else peak
    elif sizes["host_temp_bytes"]:
        # XLA's for GPUs is that of the larger of the two memories
        peak = min(peak, bound)
    # described GPUs have no memory but their own
    if waiting and not sizes["host_argument_bytes"]:
        for name in ("argument", "output", "alias"):
            sizes[f"{name}_bytes"] -= waiting
        sizes["host_argument_bytes"] = waiting
        peak = max(peak - waiting, 0)
        bound -= waiting
    return sizes | {"peak_bytes": peak or bound}


def _text(compiled: jax.stages.Compiled) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:  # jax and libtpu that do not belong together
        traceback.print_exc()
        return ""


def _say(folder: Path, stage: str) -> None:
    (folder / "stage").write_text(stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
