"""Where each parameter lies on the mesh, and the table that explains it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.param_names import Names

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
    """Where one parameter lies."""

    path: str
    dims: tuple[int, ...]
    names: Names
    stored: P
    state: P
    shard_dims: tuple[int, ...]
    shard_bytes: int
    replicated_bytes: int  # bytes held beyond one copy, over all devices
    why: str  # why it is not split further


def place(
    parameters: Mapping[str, tuple[jax.ShapeDtypeStruct, Names]], rules: Rules
) -> list[Placement]:
    """Returns the placement of every parameter (path -> (abstract array, logical
    names)).

    Raises:
      ConfigError: dims that an axis does not divide, all at once.
    """
    faults = [
        f
        for path, (x, names) in parameters.items()
        for f in rules.faults(path, names, x.shape)
    ]
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
    extra = (
        shard_bytes * rules.shape.num_devices - math.prod(x.shape) * x.dtype.itemsize
    )
    state = rules.state(names, x.shape)
    why = rules.why(names, x.shape)
    return Placement(
        path, tuple(x.shape), names, stored, state, shard_dims, shard_bytes, extra, why
    )


def explain(placements: Sequence[Placement]) -> str:
    """Returns the placements as a table: one line a parameter, then the totals per
    device.
    """
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
    dims, shard_dims = ("x".join(map(str, dims)) for dims in (p.dims, p.shard_dims))
    names = ",".join(name or "-" for name in p.names) or "-"
    specs = _spec_text(p.stored), _spec_text(p.state)
    return (
        p.path,
        dims,
        names,
        *specs,
        shard_dims,
        f"{p.shard_bytes:,}",
        f"{p.replicated_bytes:,}",
        p.why,
    )


def _spec_text(spec: P) -> str:
    return "(" + ",".join("-" if axis is None else str(axis) for axis in spec) + ")"
