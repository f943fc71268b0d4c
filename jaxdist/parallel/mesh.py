"""The device mesh.

It has the axes of `axes.TABLE`. Each has a part inside a slice (ICI) and a part across
slices (DCN). `mesh.<axis>` is the whole size of an axis, and `mesh.dcn.<axis>` is the
size of its part across slices. Axes are ordered outermost first, so neighbouring
devices are on `tensor`, which talks most.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxdist.config import ConfigError
from jaxdist.config.annotations import Searched
from jaxdist.parallel.axes import (
    AXES,
    BATCH_AXES,
    CHATTY_AXES,
    CROSSING_AXES,
    PARAMETER_SHARDS,
)

_EMULATE = "--xla_force_host_platform_device_count"
SearchedInt = Annotated[int, Searched()]


@dataclass(frozen=True)
class DcnConfig:
    """Sizes of the axes across slices; their product is the number of slices."""

    # parts of the axis that are on different slices, >= 1
    pipeline: SearchedInt = 1
    data: SearchedInt = -1  # -1: the slices that the other axes leave
    fsdp: SearchedInt = 1  # >= 1, divides mesh.fsdp
    expert: int = 1  # >= 1, needs force
    context: int = 1  # >= 1, needs force
    tensor: int = 1  # >= 1, needs force
    force: bool = False  # allow expert, context and tensor across slices, however slow

    @property
    def num_slices(self) -> int:
        """The number of slices that these sizes require."""
        sizes = [getattr(self, axis) for axis in AXES]
        return math.prod(size for size in sizes if size > 0)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    pipeline: SearchedInt = 1  # stages of layers, >= 1
    # replicas of the parameters; -1: the devices that the other axes leave
    data: SearchedInt = -1
    # shards of parameters, gradients and optimizer state (see zero), >= 1
    fsdp: SearchedInt = 1
    # shards of the experts; shards other parameters like fsdp; divides
    # model.num_experts, >= 1
    expert: SearchedInt = 1
    # shards of the sequence, divides batch.sequence_length, >= 1
    context: SearchedInt = 1
    tensor: SearchedInt = 1  # shards of heads, feed-forward and vocabulary, >= 1
    dcn: DcnConfig = field(default_factory=DcnConfig)
    # what fsdp shards; 0: nothing, 1: optimizer state, 2: also gradients, 3: also
    # parameters
    zero: SearchedInt = 3
    # whether tensor also splits the sequence of the residual stream
    sequence_parallel: Annotated[bool, Searched()] = False
    # how often a step sums gradients over data, and over fsdp at zero 0 and 1. once =
    # at its end; each = for each part of the batch; auto = once if the model's loss is
    # a sum over samples
    reduce: Literal["auto", "each", "once"] = "auto"


@dataclass(frozen=True)
class MeshShape:
    """A resolved mesh: whole size and cross-slice size of every axis."""

    sizes: Mapping[str, int]
    dcn: Mapping[str, int]

    @property
    def num_devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """The number of devices, or groups of devices, that split the batch."""
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(used) or "one device"


def resolve_mesh(
    config: MeshConfig,
    num_devices: int,
    num_slices: int = 1,
    *,
    emulates: bool = False,
) -> MeshShape:
    """Replaces -1 in the sizes of a mesh and checks them.

    Args:
      config: sizes of the axes.
      num_devices: number of devices.
      num_slices: number of slices that these devices form.
      emulates: whether the devices are CPU devices, of which jax emulates any number.

    Raises:
      ConfigError: all faults of the sizes, each with its fix.
    """
    sizes, size_faults = _fill(
        {axis: getattr(config, axis) for axis in AXES},
        total=num_devices,
        prefix="mesh",
        unit="devices",
        emulates=emulates,
    )
    dcn, dcn_faults = _fill(
        {axis: getattr(config.dcn, axis) for axis in AXES},
        total=num_slices,
        prefix="mesh.dcn",
        unit="slices",
    )
    faults = size_faults + dcn_faults
    if not faults:
        shards = math.prod(sizes[axis] for axis in PARAMETER_SHARDS)
        faults += _dcn_faults(sizes, dcn, config.dcn.force)
        faults += _zero_faults(config.zero, shards)
    if faults:
        raise ConfigError(faults)
    return MeshShape(sizes, dcn)


def _fill(
    sizes: dict[str, int],
    *,
    total: int,
    prefix: str,
    unit: str,
    emulates: bool = False,
) -> tuple[dict[str, int], list[str]]:
    """Replaces one -1 in sizes so that their product is `total`.

    Returns:
      The sizes, and their faults.
    """
    faults = [
        f"{prefix}.{axis}={size}: must be >= 1, or -1 once"
        for axis, size in sizes.items()
        if size < 1 and size != -1
    ]
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        names = " and ".join(f"{prefix}.{axis}" for axis in unknown)
        faults.append(
            f"{names} are both -1; at most one can be 'the rest': give the other a size"
        )
    if faults:
        return sizes, faults
    known = math.prod(size for size in sizes.values() if size > 0)
    filled = sizes | dict.fromkeys(unknown, total // known)
    if math.prod(filled.values()) == total:
        return filled, []
    fix = f"set sizes whose product is {total}, or start with {known} {unit}"
    if unknown:
        fix = f"choose sizes whose product divides {total}"
    if emulates and known > total:
        fix += (
            f"; or emulate {known} on this CPU: start with XLA_FLAGS={_EMULATE}={known}"
        )
    used = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    sizes_text = " x ".join(used) or "all 1"
    return sizes, [
        f"{prefix}: {sizes_text} needs {known} {unit}, there are {total}; {fix}"
    ]


def _dcn_faults(
    sizes: Mapping[str, int], dcn: Mapping[str, int], force: bool
) -> list[str]:
    faults = [
        f"mesh.dcn.{axis}={dcn[axis]} does not divide mesh.{axis}={sizes[axis]}; "
        f"make mesh.{axis} a multiple of {dcn[axis]}"
        for axis in AXES
        if sizes[axis] % dcn[axis]
    ]
    if force:
        return faults
    *others, last = CROSSING_AXES
    faults += [
        f"mesh.dcn.{axis}={dcn[axis]}: {axis} talks inside every layer and slices are joined "
        f"by slow links; put slices on {', '.join(others)} or {last}, or set mesh.dcn.force=true"
        for axis in CHATTY_AXES
        if dcn[axis] > 1
    ]
    return faults


def _zero_faults(zero: int, shards: int) -> list[str]:
    if zero not in (0, 1, 2, 3):
        return [f"mesh.zero={zero}: must be 0, 1, 2 or 3"]
    if zero in (1, 2) and shards == 1:
        return [
            f"mesh.zero={zero} with mesh.fsdp=1 shards nothing; set mesh.fsdp to the number of shards"
        ]
    return []


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Counts the slices of TPUs, which are groups joined by ICI; 1 for other devices.

    GPUs have a slice index, too: jax counts their hosts. It is ignored, because a mesh
    of GPUs needs only the order of the devices, host by host.
    """
    slices = {
        getattr(device, "slice_index", 0)
        for device in devices
        if device.platform == "tpu"
    }
    return max(len(slices), 1)


def slices_of(config: MeshConfig, devices: Sequence[jax.Device]) -> int:
    """Counts the slices of TPUs; other devices have as many as the mesh requires."""
    if devices[0].platform == "tpu":
        return count_slices(devices)
    return config.dcn.num_slices


def can_emulate(devices: Sequence[jax.Device]) -> bool:
    """Tests whether jax can emulate any number of these devices: of a CPU."""
    platform: str = devices[0].platform
    return platform == "cpu"


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh with all axes, of axis type Auto.

    On real slices the ICI part of every axis stays inside a slice. GPUs and emulated
    CPU devices have no slices: there `mesh.dcn` groups neighbouring devices.

    Args:
      config: sizes of the axes.
      devices: in the order of jax; None: all devices.

    Raises:
      ConfigError: see `resolve_mesh`.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = resolve_mesh(
        config,
        len(devices),
        slices_of(config, devices),
        emulates=can_emulate(devices),
    )
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(shape: MeshShape, devices: list[jax.Device]) -> np.ndarray:
    """Arranges the devices in an array with the sizes of the axes."""
    sizes = tuple(shape.sizes.values())
    dcn = tuple(shape.dcn.values())
    if math.prod(dcn) == 1:
        return _on_torus(partial(mesh_utils.create_device_mesh, sizes, devices))
    ici = tuple(size // parts for size, parts in zip(sizes, dcn, strict=True))
    if count_slices(devices) > 1:
        return _on_torus(
            partial(mesh_utils.create_hybrid_device_mesh, ici, dcn, devices)
        )
    # Groups of neighbours replace slices. In the grid the dcn parts of all axes come
    # first; the transpose puts the two parts of each axis next to each other.
    grid = np.asarray(devices).reshape(dcn + ici)
    order = np.arange(2 * len(AXES)).reshape(2, -1).T.ravel()
    return grid.transpose(order).reshape(sizes)


def _on_torus(arrange: Callable[..., np.ndarray]) -> np.ndarray:
    """Arranges devices, with whole torus dims for every axis if that is possible."""
    try:
        return arrange()
    except NotImplementedError:  # the size of an axis is no product of torus dims
        return arrange(allow_split_physical_axes=True)
