"""A run on another number of devices than its config was written for: same batch, other
layout.

The global batch, the learning rate, the order of data and all keys are functions of the
config and the step, so only two things move: the sizes of mesh axes, and the
accumulation. Pure arithmetic, without jax: the supervisor asks the same function before
it starts the processes.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxdist.parallel.axes import (
    AXES,
    BATCH_AXES,
    KEPT_AXES,
    PARAMETER_SHARDS,
    REST_AXIS,
    divisors,
)
from jaxdist.telemetry.metrics import read_events

_LARGEST = 1 << 24  # size of an axis or a batch; more would keep `divisors` busy
# set by launch --min-processes; 0: as at the first start
FULL_PROCESSES = "JAXDIST_FULL_PROCESSES"

Run = TypeVar("Run", bound=Any)  # a config with `mesh`, `pipeline` and `batch`


@dataclasses.dataclass(frozen=True)
class ElasticLayout:
    """Whole sizes of the mesh axes, and the sequential parts of a step."""

    axes: Mapping[str, int]
    accumulation: int


def fit(
    full: ElasticLayout,
    *,
    devices: int,
    global_size: int,
    microbatches: int,
    dcn: Mapping[str, int],
) -> ElasticLayout | None:
    """Returns the layout for `devices`, or None if no legal one has the same global
    batch.

    Axes other than data keep their size or shrink to a divisor of it (what divided the
    model's dims still does); data takes the rest. Of the legal ones it has the most
    model shards, so that a device's part of the state grows as little as can be. The
    accumulation is the smallest that keeps the sequences of a device at a time at or
    below those of the full layout.

    Args:
      full: the config's own layout, every size known.
      microbatches: of an accumulation step; 0 = 4 x pipeline (1 without a pipeline).
      dcn: parts of axes across slices, where more than 1: axes stay multiples of them.
    """
    if devices == math.prod(full.axes.values()):
        return full
    most = max(global_size // (_parts(full.axes, microbatches) * full.accumulation), 1)
    choices = [
        [n for n in divisors(full.axes[a]) if n % max(dcn.get(a, 1), 1) == 0]
        for a in KEPT_AXES
    ]
    layouts = []
    for sizes in itertools.product(*choices):
        rest, odd = divmod(devices, math.prod(sizes))
        axes = dict(zip(KEPT_AXES, sizes, strict=True)) | {REST_AXIS: rest}
        if odd or global_size % (parts := _parts(axes, microbatches)):
            continue
        legal = (
            n
            for n in divisors(global_size // parts)
            if global_size // (parts * n) <= most
        )
        # none of a global size of 0, which is refused elsewhere
        accumulation = next(legal, None)
        if accumulation:
            layouts.append((math.prod(sizes), sizes, ElasticLayout(axes, accumulation)))
    return max(layouts, key=lambda entry: entry[:2])[2] if layouts else None


def _parts(axes: Mapping[str, int], microbatches: int) -> int:
    """Returns the parts of an accumulation step's batch: one for each batch shard and
    microbatch.
    """
    flow = 1 if axes["pipeline"] == 1 else microbatches or 4 * axes["pipeline"]
    return flow * math.prod(axes[axis] for axis in BATCH_AXES)


# --- configs --------------------------------------------------------------------------


def fit_config(
    config: Mapping[str, Any], *, devices: int, full_devices: int
) -> ElasticLayout | None:
    """Returns `fit` for a run's config as nested mappings (config.json); None also if
    it is no config.
    """
    try:
        mesh = config["mesh"]
        batch = config["batch"]
        axes = {axis: _size(mesh[axis]) for axis in AXES}
        known = math.prod(size for size in axes.values() if size > 0)
        axes = {
            axis: full_devices // known if size == -1 else size
            for axis, size in axes.items()
        }
        return fit(
            ElasticLayout(axes, _size(batch["accumulation"])),
            devices=devices,
            global_size=_size(batch["global_size"]),
            microbatches=_size(config["pipeline"]["microbatches"]),
            dcn={
                axis: _size(size)
                for axis, size in dict(mesh["dcn"]).items()
                if axis != "force"
            },
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _size(value: Any) -> int:
    if type(value) is not int or not -1 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.40} is no size")
    return value


def refit(run: Run, *, devices: int, full_devices: int | None) -> Run:
    """Returns the run for the devices there are; as it is at full size, or if nothing
    fits.

    Args:
      full_devices: what its config was written for; None: it is not elastic.
    """
    if full_devices is None or full_devices == devices:
        return run
    layout = fit_config(
        dataclasses.asdict(run), devices=devices, full_devices=full_devices
    )
    if layout is None:
        return run  # what is wrong is said where every config is checked
    shards = math.prod(layout.axes[axis] for axis in PARAMETER_SHARDS)
    zero = 3 if run.mesh.zero in (1, 2) and shards == 1 else run.mesh.zero
    mesh = dataclasses.replace(run.mesh, **layout.axes, zero=zero)
    batch = dataclasses.replace(run.batch, accumulation=layout.accumulation)
    return dataclasses.replace(run, mesh=mesh, batch=batch)


def full_devices(
    environ: Mapping[str, str], folder: Path, *, per_process: int
) -> int | None:
    """Returns the devices that an elastic run's config was written for; None for any
    other run.

    Args:
      per_process: devices of this process; all have as many.
    """
    processes = environ.get(FULL_PROCESSES)
    if processes is None:
        return None
    return int(processes) * per_process or next(
        (start["devices"] for start in _starts(folder)), None
    )


def resized(folder: Path, run: Run, devices: int) -> dict[str, Any] | None:
    """Returns the fields of the event `resize` if the last start had other devices,
    else None.
    """
    before = [start["devices"] for start in _starts(folder)][-1:]
    if before in ([], [devices]):
        return None
    mesh = {axis: size for axis in AXES if (size := getattr(run.mesh, axis)) != 1}
    sizes = {"devices_before": before[0], "devices": devices}
    return sizes | {"mesh": mesh, "accumulation": run.batch.accumulation}


def _starts(folder: Path) -> Sequence[dict[str, Any]]:
    starts = (event for event in read_events(folder) if event["event"] == "start")
    return [
        start
        for start in starts
        if isinstance(start.get("devices"), int) and start["devices"] > 0
    ]
