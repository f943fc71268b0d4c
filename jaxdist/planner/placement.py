"""Which device `mesh.build_mesh` would put where, computed without any device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

SLICE_ID = 100_000  # with several slices libtpu numbers device i of slice s (s + 1) * 100,000 + i


class Machine(NamedTuple):
    """What decides where devices go."""

    platform: str
    device_kind: str
    shape: tuple[int, ...]  # chips of a slice
    num_slices: int
    devices_per_chip: int


def coords(chip: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns where a chip lies in its slice: libtpu numbers them along the first dim first."""
    return tuple(int(n) for n in np.unravel_index(chip, tuple(shape), order="F"))


@functools.lru_cache(maxsize=256)
def arrange(machine: Machine, sizes: tuple[int, ...], dcn: tuple[int, ...]) -> np.ndarray:
    """Returns the `jax.Device.id` at each position of a mesh, [sizes of the axes]."""
    from jax.experimental import mesh_utils  # not at the top: a target is parsed before jax starts

    made_up = stand_ins(machine)
    inner = tuple(size // parts for size, parts in zip(sizes, dcn, strict=True))
    if machine.platform != "tpu":  # no slices: neighbours, outermost first
        grid = np.array([device.id for device in made_up]).reshape(dcn + inner)
        return grid.transpose([axis for pair in enumerate(range(6, 12)) for axis in pair]).reshape(sizes)
    for split in (False, True):  # True: where an axis is no product of ICI dims
        options: Any = {"devices": made_up, "allow_split_physical_axes": split}
        try:
            if machine.num_slices > 1:
                found = mesh_utils.create_hybrid_device_mesh(inner, dcn, **options)
            else:
                found = mesh_utils.create_device_mesh(sizes, **options)
            return np.vectorize(lambda device: device.id)(found)
        except NotImplementedError:
            if split:
                raise
    raise AssertionError("the second attempt returns or raises")


def stand_ins(machine: Machine) -> list[Any]:
    """Returns objects that look to `mesh_utils` like the machine's devices."""
    platform, kind, shape, slices, per_chip = machine
    devices = []
    for index, local in np.ndindex(slices, math.prod(shape) * per_chip):
        place = coords(local // per_chip, shape) if platform == "tpu" else ()
        device = SimpleNamespace(
            id=local if slices == 1 else (index + 1) * SLICE_ID + local,
            platform=platform,
            device_kind=kind,
            coords=(*place, 0)[:3],
            core_on_chip=local % per_chip,
            slice_index=index,
        )
        devices.append(device)
    return devices
