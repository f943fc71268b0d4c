"""Where each parameter lies on the mesh, and the table that explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.parallel.sharding import Rules, axes_in
from jaxdist.protocols.param_names import Names


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


def place(parameters: Mapping[str, tuple[jax.ShapeDtypeStruct, Names]], rules: Rules) -> list[Placement]:
    """Returns the placement of every parameter (path -> (abstract array, logical names)).

    Raises:
      ConfigError: dims that an axis does not divide, all at once.
    """
    faults = [f for path, (x, names) in parameters.items() for f in rules.faults(path, names, x.shape)]
    if faults:
        raise ConfigError(faults)
    return [_placement(path, x, names, rules) for path, (x, names) in parameters.items()]


def _placement(path: str, x: jax.ShapeDtypeStruct, names: Names, rules: Rules) -> Placement:
    stored = rules.stored(names, x.shape)
    parts = [math.prod(rules.shape.sizes[axis] for axis in axes_in(entry)) for entry in stored]
    shard_dims = tuple(d // n for d, n in zip(x.shape, parts, strict=True))
    shard_bytes = math.prod(shard_dims) * x.dtype.itemsize
    extra = shard_bytes * rules.shape.num_devices - math.prod(x.shape) * x.dtype.itemsize
    return Placement(
        path,
        tuple(x.shape),
        names,
        stored,
        rules.state(names, x.shape),
        shard_dims,
        shard_bytes,
        extra,
        rules.why(names, x.shape),
    )


def explain(placements: Sequence[Placement]) -> str:
    """Returns the placements as a table: one line a parameter, then the totals per device."""
    header = (
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
    rows = [header] + [
        (
            p.path,
            "x".join(map(str, p.dims)),
            ",".join(n or "-" for n in p.names) or "-",
            _spec_text(p.stored),
            _spec_text(p.state),
            "x".join(map(str, p.shard_dims)),
            f"{p.shard_bytes:,}",
            f"{p.replicated_bytes:,}",
            p.why,
        )
        for p in placements
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(p.shard_bytes for p in placements)
    copies = sum(p.replicated_bytes for p in placements)
    lines.append(
        f"total: {total:,} bytes of parameters per device; {copies:,} bytes are copies, over all devices"
    )
    return "\n".join(lines)


def _spec_text(spec: P) -> str:
    return "(" + ",".join("-" if axis is None else str(axis) for axis in spec) + ")"
