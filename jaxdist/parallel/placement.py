"""The placement of parameters on the mesh, and the table that explains it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.parallel.axes import (
    BATCH_AXES,
    CHATTY_AXES,
    CROSSING_AXES,
    SEQUENCE_AXES,
    STATE_AXES,
)
from jaxdist.parallel.sharding import Rules, axes_in
from jaxdist.protocols.dim_names import PARAMETER_AXES, Names, unknown_names

COLUMNS = (
    "parameter",
    "dims",
    "names",
    "stored",
    "optimizer state",
    "per device",
    "bytes",
    "copies",
    "why",
)


@dataclass(frozen=True)
class Placement:
    """The placement of a parameter."""

    path: str
    dims: tuple[int, ...]
    names: Names
    stored: P  # spec of the parameter
    state: P  # spec of its optimizer state
    shard_dims: tuple[int, ...]  # dims of a device's part
    shard_bytes: int
    replicated_bytes: int  # bytes beyond one copy, over all devices
    why: str  # why it is not split further


def place(
    parameters: Mapping[str, tuple[jax.ShapeDtypeStruct, Names]], rules: Rules
) -> list[Placement]:
    """Computes the placement of each parameter.

    Args:
      parameters: path -> (abstract array, logical names).
      rules: of the mesh.

    Raises:
      ConfigError: axes do not divide some dims; the message lists all of them.
    """
    faults: list[str] = []
    for path, (x, names) in parameters.items():
        faults += rules.faults(path, names, x.shape)
    if faults:
        raise ConfigError(faults)
    return [
        _placement(path, x, names, rules) for path, (x, names) in parameters.items()
    ]


def _placement(
    path: str, x: jax.ShapeDtypeStruct, names: Names, rules: Rules
) -> Placement:
    stored = rules.stored(names, x.shape)
    shard_dims = rules.shard_dims(stored, x.shape)
    shard_bytes = math.prod(shard_dims) * x.dtype.itemsize
    one_copy = math.prod(x.shape) * x.dtype.itemsize
    return Placement(
        path=path,
        dims=tuple(x.shape),
        names=names,
        stored=stored,
        state=rules.state(names, x.shape),
        shard_dims=shard_dims,
        shard_bytes=shard_bytes,
        replicated_bytes=shard_bytes * rules.shape.num_devices - one_copy,
        why=rules.why(names, x.shape),
    )


def idle_axes(placements: Sequence[Placement], rules: Rules) -> list[str]:
    """Finds mesh axes of several devices that split no parameter and should.

    An axis that splits the sequence has work without one. So has an axis that splits
    the batch, if `mesh.zero=0` keeps all parameters whole.

    Args:
      placements: of all parameters.
      rules: of the mesh.
    """
    splitting = {
        axis
        for placed in placements
        for spec in (placed.stored, placed.state)
        for entry in spec
        for axis in axes_in(entry)
    }
    busy = {*splitting, *SEQUENCE_AXES}
    if rules.zero == 0:
        busy.update(BATCH_AXES)
    sizes = rules.shape.sizes
    return [axis for axis in STATE_AXES if sizes[axis] > 1 and axis not in busy]


def warnings(placements: Sequence[Placement], rules: Rules) -> list[str]:
    """Warns of mesh axes that split no parameter, and of names that mean nothing.

    Args:
      placements: of all parameters.
      rules: of the mesh.
    """
    lines = [
        _idle_warning(axis, rules.shape.sizes[axis])
        for axis in idle_axes(placements, rules)
    ]
    if rules.sequence_parallel and rules.shape.sizes["tensor"] == 1:
        lines.append(
            "mesh.sequence_parallel=true has no effect with mesh.tensor=1. Set it to false"
        )
    unknown = {
        name: placed.path
        for placed in placements
        for name in unknown_names(placed.names)
    }
    if unknown and rules.shape.num_devices > 1:
        # Such names come from annotations of flax, which may be meant for other code.
        examples = ", ".join(f"{name} (of {path})" for name, path in unknown.items())
        lines.append(
            f"names of dims that split nothing: {examples}. Name these dims by "
            f"sharding.rules"
        )
    return lines


def axes_between_hosts(mesh: jax.sharding.Mesh) -> list[str]:
    """Lists axes of a mesh of GPUs that talk in every layer and cross hosts.

    The GPUs of a host, or of several that NVLink joins, have one slice index.
    """
    devices = mesh.devices
    if devices.flat[0].platform != "gpu":
        return []
    hosts = np.vectorize(lambda device: getattr(device, "slice_index", 0))(devices)
    crossing = []
    for axis in CHATTY_AXES:
        neighbours = np.moveaxis(hosts, mesh.axis_names.index(axis), 0)
        if (neighbours != neighbours[0]).any():
            crossing.append(axis)
    return crossing


def slow_axis_warnings(mesh: jax.sharding.Mesh) -> list[str]:
    """Warns of axes that talk in every layer, over the links between hosts of GPUs."""
    *others, last = CROSSING_AXES
    cures = f"mesh.{', mesh.'.join(others)} or mesh.{last}"
    return [
        f"mesh.{axis}={mesh.shape[axis]} crosses hosts of GPUs and communicates in "
        f"every layer, over slow links: keep it within a host, and let {cures} cross them"
        for axis in axes_between_hosts(mesh)
    ]


def _idle_warning(axis: str, size: int) -> str:
    """Formats the warning of an axis that splits no parameter."""
    names = [name for name, splitter in PARAMETER_AXES.items() if splitter == axis]
    if not names:
        return (
            f"mesh.{axis}={size} splits no parameter, because it divides no "
            f"matrix of the model. It splits the batch alone, as mesh.data does"
        )
    return (
        f"mesh.{axis}={size} splits no parameter, so {size} devices compute "
        f"the same. It splits dims that are named {', '.join(names)}: name them in the "
        f'model, nnx.Param(x, logical=("d_model", "d_ff")), or by sharding.rules; or '
        f"set mesh.{axis}=1, and mesh.fsdp or mesh.data to {size} times its size"
    )


def explain(placements: Sequence[Placement]) -> str:
    """Formats placements as a table: a line per parameter, then totals per device."""
    rows = [COLUMNS, *map(_row, placements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    total = sum(p.shard_bytes for p in placements)
    copies = sum(p.replicated_bytes for p in placements)
    lines.append(
        f"total: {total:,} bytes of parameters per device; {copies:,} bytes are copies, over all devices"
    )
    return "\n".join(lines)


def _row(p: Placement) -> tuple[str, ...]:
    return (
        p.path,
        "x".join(map(str, p.dims)),
        ",".join(name or "-" for name in p.names) or "-",
        spec_text(p.stored),
        spec_text(p.state),
        "x".join(map(str, p.shard_dims)),
        f"{p.shard_bytes:,}",
        f"{p.replicated_bytes:,}",
        p.why,
    )


def spec_text(spec: P) -> str:
    """Formats the axes that split each dim: "(-,fsdp+tensor)"; "-" is a whole dim."""
    return f"({','.join('+'.join(axes_in(entry)) or '-' for entry in spec)})"
