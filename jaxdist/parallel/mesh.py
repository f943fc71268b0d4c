"""The device mesh: the axes of `axes.TABLE`, each with a part inside a slice (ICI) and
a part across (DCN).

`mesh.<axis>` is the whole size of an axis; `mesh.dcn.<axis>` says how much of it
crosses slices. Axes are ordered outermost first, so neighbouring devices end up on
`tensor`, which talks most.
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

SearchedInt = Annotated[int, Searched()]


@dataclass(frozen=True)
class DcnConfig:
    """How much of each axis crosses slices; the product is the number of slices."""

    # parts of the axis that lie on different slices, >= 1
    pipeline: SearchedInt = 1
    data: SearchedInt = -1  # -1: whatever the other axes leave of the slices
    fsdp: SearchedInt = 1  # >= 1, divides mesh.fsdp
    expert: int = 1  # >= 1, needs force
    context: int = 1  # >= 1, needs force
    tensor: int = 1  # >= 1, needs force
    force: bool = False  # allow expert, context and tensor across slices, however slow

    @property
    def num_slices(self) -> int:
        """Returns the slices that these sizes ask for."""
        return math.prod(size for axis in AXES if (size := getattr(self, axis)) > 0)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    pipeline: SearchedInt = 1  # stages of layers, >= 1
    # replicas of the parameters; -1: the devices that the others leave
    data: SearchedInt = -1
    # shards of parameters, gradients and optimizer state (see zero), >= 1
    fsdp: SearchedInt = 1
    # shards of the experts, and of all else as fsdp; divides model.num_experts, >= 1
    expert: SearchedInt = 1
    # shards of the sequence, divides batch.sequence_length, >= 1
    context: SearchedInt = 1
    tensor: SearchedInt = 1  # shards of heads, feed-forward and vocabulary, >= 1
    dcn: DcnConfig = field(default_factory=DcnConfig)
    # fsdp shards 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
    zero: SearchedInt = 3
    # residual stream's sequence over tensor as well
    sequence_parallel: Annotated[bool, Searched()] = False
    # how often a step sums gradients over data (at zero 0 and 1 also fsdp): with each
    # part of the batch, or once; auto: once if the model's loss is a sum over samples
    reduce: Literal["auto", "each", "once"] = "auto"


@dataclass(frozen=True)
class MeshShape:
    """A resolved mesh: whole and cross-slice size of every axis."""

    sizes: Mapping[str, int]
    dcn: Mapping[str, int]

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        return math.prod(self.sizes[axis] for axis in BATCH_AXES)

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(used) or "one device"


def resolve_mesh(
    config: MeshConfig, num_devices: int, num_slices: int = 1
) -> MeshShape:
    """Returns the mesh with its -1 filled in.

    Raises:
      ConfigError: all that is wrong with the sizes, each with its cure.
    """
    sizes, size_faults = _fill(
        {a: getattr(config, a) for a in AXES}, num_devices, "mesh", "devices"
    )
    dcn, dcn_faults = _fill(
        {a: getattr(config.dcn, a) for a in AXES}, num_slices, "mesh.dcn", "slices"
    )
    faults = size_faults + dcn_faults
    if not size_faults and not dcn_faults:
        faults += _dcn_faults(sizes, dcn, config.dcn.force)
        faults += _zero_faults(
            config.zero, math.prod(sizes[axis] for axis in PARAMETER_SHARDS)
        )
    if faults:
        raise ConfigError(faults)
    return MeshShape(sizes, dcn)


def _fill(
    sizes: dict[str, int], total: int, prefix: str, what: str
) -> tuple[dict, list[str]]:
    """Returns the sizes with one -1 replaced, and what is wrong with them."""
    bad = [
        f"{prefix}.{a}={n}: must be >= 1, or -1 once"
        for a, n in sizes.items()
        if n < 1 and n != -1
    ]
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        names = " and ".join(f"{prefix}.{axis}" for axis in unknown)
        bad.append(
            f"{names} are both -1; at most one can be 'the rest': give the other a size"
        )
    if bad:
        return sizes, bad
    known = math.prod(size for size in sizes.values() if size > 0)
    filled = sizes | dict.fromkeys(unknown, total // known)
    if math.prod(filled.values()) == total:
        return filled, []
    cure = f"set sizes whose product is {total}, or start with {known} {what}"
    if unknown:
        cure = f"choose sizes whose product divides {total}"
    sizes_text = " x ".join(f"{a} {n}" for a, n in sizes.items() if n > 1) or "all 1"
    return sizes, [
        f"{prefix}: {sizes_text} needs {known} {what}, there are {total}; {cure}"
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
    if not force:
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
    """Returns the number of slices among the devices: groups of TPUs joined by ICI,
    else one.

    On GPUs jax counts hosts: their order, host by host, is all that a mesh there needs.
    """
    return len(
        {
            getattr(device, "slice_index", 0)
            for device in devices
            if device.platform == "tpu"
        }
        or {0}
    )


def slices_of(config: MeshConfig, devices: Sequence[jax.Device]) -> int:
    """Returns the slices among TPUs; elsewhere there are none, so as many as the mesh
    asks for.
    """
    return (
        count_slices(devices) if devices[0].platform == "tpu" else config.dcn.num_slices
    )


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over the devices (default: all), every axis present, axis type
    Auto.

    On real slices the ICI part of every axis stays inside a slice. GPUs and emulated
    CPU devices have no slices: there `mesh.dcn` groups neighbours, hosts or none.

    Raises:
      ConfigError: see `resolve_mesh`.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = resolve_mesh(config, len(devices), slices_of(config, devices))
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(shape: MeshShape, devices: list[jax.Device]) -> np.ndarray:
    """Returns the devices at each position of a mesh, [sizes of the axes]."""
    sizes = tuple(shape.sizes.values())
    dcn = tuple(shape.dcn.values())
    if math.prod(dcn) == 1:
        return _on_torus(partial(mesh_utils.create_device_mesh, sizes, devices))
    ici = tuple(size // parts for size, parts in zip(sizes, dcn, strict=True))
    if count_slices(devices) > 1:
        return _on_torus(
            partial(mesh_utils.create_hybrid_device_mesh, ici, dcn, devices)
        )
    # Neighbours stand in for slices: slice outermost, then interleave to [dcn, ici] per
    # axis.
    grid = np.asarray(devices).reshape(dcn + ici)
    order = np.arange(2 * len(AXES)).reshape(2, -1).T.ravel()
    return grid.transpose(order).reshape(sizes)


def _on_torus(arrange: Callable[..., np.ndarray]) -> np.ndarray:
    """Returns the arrangement with whole torus dims for every axis, else with split
    ones.
    """
    try:
        return arrange()
    except NotImplementedError:  # an axis that is no product of torus dims
        return arrange(allow_split_physical_axes=True)
