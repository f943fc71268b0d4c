"""The layout of an elastic run, which trains on another number of devices.

A refit changes the sizes of mesh axes and the accumulation. It also changes `mesh.zero`
1 or 2 to 3 if the new mesh no longer shards parameters. The global batch, the learning
rate, the order of data and the step's random key stay: they depend only on the other
keys and on the step.

A model that draws from its own nnx.Rngs is an exception. Each accumulation step seeds
these streams with its first sample (`step.gradients.build_objective`). So a refit that
changes the accumulation changes their random numbers. With `data.balance=attention` any
refit may, because the order of a batch's rows depends on the layout.

This module is arithmetic without jax: the supervisor uses it before it starts the
processes.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
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
from jaxdist.telemetry.metrics import iter_events

_LARGEST = 1 << 24  # largest axis or batch, so that `divisors` stays fast
# Variable that `launch --min-processes` sets: the processes of a full run. 0 = the
# number of the first start.
FULL_PROCESSES = "JAXDIST_FULL_PROCESSES"

Config = TypeVar("Config", bound=Any)  # a config with `mesh`, `pipeline` and `batch`


@dataclasses.dataclass(frozen=True)
class ElasticLayout:
    """The sizes of the mesh axes, and the accumulation of a step."""

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
    """Chooses the layout with the same global batch for a number of devices.

    Each axis but `data` keeps its size or shrinks to a divisor of it, so it still
    divides the dims of the model. `data` takes the remaining devices. Among the valid
    layouts, this chooses the one with the most model shards: a device's part of the
    state then grows least. The accumulation is the smallest that keeps the sequences
    per device and part at or below those of the full layout.

    Args:
      full: the layout of the config, with known sizes.
      devices: number of devices.
      global_size: sequences of the global batch.
      microbatches: microbatches of an accumulation step; 0 = 4 x pipeline.
      dcn: parts of axes across slices. The sizes of these axes stay multiples of them.

    Returns:
      The layout; None if no valid layout has the same global batch.
    """
    if devices == math.prod(full.axes.values()):
        return full
    full_parts = _parts(full.axes, microbatches) * full.accumulation
    most = max(global_size // full_parts, 1)
    choices = [
        [n for n in divisors(full.axes[axis]) if n % max(dcn.get(axis, 1), 1) == 0]
        for axis in KEPT_AXES
    ]
    best: tuple[tuple[int, tuple[int, ...]], ElasticLayout] | None = None
    for sizes in itertools.product(*choices):
        shards = math.prod(sizes)
        if devices % shards:
            continue
        axes = dict(zip(KEPT_AXES, sizes, strict=True))
        axes[REST_AXIS] = devices // shards
        accumulation = _smallest_accumulation(
            global_size, parts=_parts(axes, microbatches), most=most
        )
        rank = (shards, sizes)
        if accumulation and (best is None or rank > best[0]):
            best = (rank, ElasticLayout(axes, accumulation))
    return best[1] if best else None


def _smallest_accumulation(global_size: int, *, parts: int, most: int) -> int | None:
    """Finds the smallest accumulation with at most `most` sequences in each part.

    Args:
      global_size: sequences of the global batch.
      parts: parts of an accumulation step.
      most: sequences of a part, at most.

    Returns:
      The accumulation; None if the batch cannot be divided.
    """
    if global_size % parts:
        return None
    for accumulation in divisors(global_size // parts):
        if global_size // (parts * accumulation) <= most:
            return accumulation
    return None


def _parts(axes: Mapping[str, int], microbatches: int) -> int:
    """Counts the batch shards and microbatches that divide an accumulation step."""
    shards = math.prod(axes[axis] for axis in BATCH_AXES)
    if axes["pipeline"] == 1:
        return shards
    return shards * (microbatches or 4 * axes["pipeline"])


# --- configs --------------------------------------------------------------------------


def fit_config(
    config: Mapping[str, Any], *, devices: int, full_devices: int
) -> ElasticLayout | None:
    """Calls `fit` for a run's config as nested mappings, such as config.json.

    Returns:
      The layout; None if none fits, or if the mapping is no valid config.
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


def refit(config: Config, *, devices: int, full_devices: int | None) -> Config:
    """Changes the layout of an elastic run to fit its devices.

    Args:
      config: the run's config.
      devices: number of devices.
      full_devices: number of devices that the config was written for; None: the run is
        not elastic.

    Returns:
      The changed config. It is unchanged at full size, or if no layout fits.
    """
    if full_devices is None or full_devices == devices:
        return config
    layout = fit_config(
        dataclasses.asdict(config), devices=devices, full_devices=full_devices
    )
    if layout is None:
        return config  # the validation reports that the devices do not fit
    shards = math.prod(layout.axes[axis] for axis in PARAMETER_SHARDS)
    zero = 3 if config.mesh.zero in (1, 2) and shards == 1 else config.mesh.zero
    mesh = dataclasses.replace(config.mesh, **layout.axes, zero=zero)
    batch = dataclasses.replace(config.batch, accumulation=layout.accumulation)
    return dataclasses.replace(config, mesh=mesh, batch=batch)


def full_devices(
    environ: Mapping[str, str], folder: Path, *, per_process: int
) -> int | None:
    """Finds the number of devices that the config of an elastic run was written for.

    Args:
      environ: the environment of the process.
      folder: the workdir.
      per_process: devices of each process.

    Returns:
      The number; None if the run is not elastic, or if this is its first start.
    """
    processes = environ.get(FULL_PROCESSES)
    if processes is None:
        return None
    if int(processes):
        return int(processes) * per_process
    return next(iter(_devices_of_starts(folder)), None)


def resized(folder: Path, config: Config, devices: int) -> dict[str, Any] | None:
    """Makes the fields of the event `resize`.

    Returns:
      The fields; None if the previous start had as many devices, or if there is none.
    """
    starts = _devices_of_starts(folder)
    if not starts or starts[-1] == devices:
        return None
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    return {
        "devices_before": starts[-1],
        "devices": devices,
        "mesh": {axis: size for axis, size in sizes.items() if size != 1},
        "accumulation": config.batch.accumulation,
    }


def _devices_of_starts(folder: Path) -> list[int]:
    """Reads the number of devices of each start of a run."""
    numbers = [
        line.row.get("devices")
        for line in iter_events(folder, ["start"])
        if line.row is not None
    ]
    return [number for number in numbers if isinstance(number, int) and number > 0]
