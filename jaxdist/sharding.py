"""From logical names to shardings: one rule table, for parameters and for activations.

A model names its dims; `Rules` turns names into PartitionSpecs for a mesh of given sizes. Four
uses of a parameter have a spec each: stored, computed with (fsdp gathered), its gradient, its
optimizer state; `mesh.zero` says which of them the fsdp axis shards (ZeRO, arXiv:1910.02054).
While a step is traced inside `activate(mesh, rules)`, `shard` constrains activations by name.
Outside it does nothing, so a model stays single-device code.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.mesh import BATCH_AXES, MeshConfig, MeshShape

Names = tuple[str | None, ...]

# Dims split by an axis that computes on its shard. d_model is what fsdp prefers to store in shards.
PARAMETER_AXES = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "d_ff": "tensor",
    "experts": "expert",
}
STACKS = ("chunks", "stages", "layers", "")  # names of stack dims; "" where a model names none
FSDP_NAME = "d_model"


@dataclass(frozen=True)
class Rules:
    """The rule table for one mesh; all methods take logical names of the trailing dims."""

    shape: MeshShape
    zero: int = 3
    sequence_parallel: bool = False
    vocab_over_stages: bool = True  # a pipeline's stages share out the vocabulary

    def inside_stage(self) -> Rules:
        """Returns the rules inside a pipeline stage, where every array is the stage's part."""
        sizes = dict(self.shape.sizes) | {"pipeline": 1}
        return dataclasses.replace(self, shape=MeshShape(sizes, self.shape.dcn))

    def stored(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter at rest."""
        return self._parameter(names, dims, fsdp=self.zero >= 3)

    def computed(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter in use: fsdp gathered, tensor still split."""
        return self._parameter(names, dims, fsdp=False)

    def gradient(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter's gradient."""
        return self._parameter(names, dims, fsdp=self.zero >= 2)

    def state(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter's optimizer state and moving average."""
        return self._parameter(names, dims, fsdp=self.zero >= 1)

    def activation(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of an activation; axes that don't divide a dim are left out."""
        axes: dict[str | None, tuple[str, ...]] = {n: (a,) for n, a in PARAMETER_AXES.items()}
        axes |= {"batch": BATCH_AXES, "sequence": ("context",)}
        # Where a table is split by width, so are its rows: a part of all samples of an fsdp group.
        axes |= {"batch_of_group": ("data", "expert"), "width": ("fsdp",)}
        axes["residual"] = ("context", "tensor") if self.sequence_parallel else ("context",)
        return P(*(self._fitting(axes.get(n, ()), d) for n, d in zip(names, dims, strict=True)))

    def _fitting(self, axes: Sequence[str], dim: int) -> tuple[str, ...] | str | None:
        used = [axis for axis in axes if self.shape.sizes[axis] > 1]
        while used and dim % math.prod(self.shape.sizes[axis] for axis in used):
            used.pop()
        return (tuple(used) if len(used) > 1 else used[0]) if used else None

    def _parameter(self, names: Names, dims: Sequence[int], *, fsdp: bool) -> P:
        names = _padded(names, dims)
        spec: list[Any] = [self._tensor_axis(n, d) for n, d in zip(names, dims, strict=True)]
        if fsdp and self.shape.sizes["fsdp"] > 1:
            where = self._fsdp_dim(names, dims, spec)
            if where is not None:
                spec[where] = "fsdp"
        return P(*spec)

    def _tensor_axis(self, name: str | None, dim: int) -> str | tuple[str, ...] | None:
        """Returns the axes that split a dim, all of them or none."""
        axes = tuple(axis for axis in self._axes_of(name) if self.shape.sizes[axis] > 1)
        if not axes or dim % math.prod(self.shape.sizes[axis] for axis in axes):
            return None
        return axes if len(axes) > 1 else axes[0]

    def _axes_of(self, name: str | None) -> tuple[str, ...]:
        if name == "stages":
            return ("pipeline",)
        axis = PARAMETER_AXES.get(name or "")
        if name == "vocab" and self.vocab_over_stages:
            return ("pipeline", "tensor")
        return (axis,) if axis else ()

    def _fsdp_dim(self, names: Names, dims: Sequence[int], spec: Sequence) -> int | None:
        """Returns the dim that fsdp shards: d_model, or else the largest that divides."""
        own = _own_dims(names, dims)
        if len(own) < 2:  # a vector: gathering it costs more than keeping it
            return None
        if FSDP_NAME in names:
            where = names.index(FSDP_NAME)
            return where if dims[where] % self.shape.sizes["fsdp"] == 0 else None
        free = [i for i in own if spec[i] is None and dims[i] % self.shape.sizes["fsdp"] == 0]
        return max(free, key=lambda i: dims[i], default=None)

    def faults(self, path: str, names: Names, dims: Sequence[int]) -> list[str]:
        """Returns why this parameter can't be laid out, naming the dim, axis and legal sizes."""
        names = _padded(names, dims)
        found = []
        for name, dim in zip(names, dims, strict=True):
            axes = [axis for axis in self._axes_of(name) if self.shape.sizes[axis] > 1]
            size = math.prod(self.shape.sizes[axis] for axis in axes)
            if dim % size and not (name == "kv_heads" and size % dim == 0):
                found.append(_divisibility(path, str(name), dim, " x mesh.".join(axes), size))
        fsdp, vector = self.shape.sizes["fsdp"], len(_own_dims(names, dims)) < 2
        if self.zero and FSDP_NAME in names and not vector and (dim := dims[names.index(FSDP_NAME)]) % fsdp:
            found.append(_divisibility(path, FSDP_NAME, dim, "fsdp", fsdp))
        return found

    def why(self, names: Names, dims: Sequence[int]) -> str:
        """Returns why a parameter is not split further ("" if it is split by all it can)."""
        sizes, named = self.shape.sizes, any(names)
        names = _padded(names, dims)
        reasons = []
        if sizes["fsdp"] * sizes["tensor"] > 1 and len(_own_dims(names, dims)) > 1 and not named:
            reasons.append("no names: fsdp takes the largest dim that divides, tensor none")
        for name, dim in zip(names, dims, strict=True):
            if name == "kv_heads" and sizes["tensor"] > 1 and dim % sizes["tensor"]:
                reasons.append(f"{dim} kv heads < tensor {sizes['tensor']}: copied")
        if sizes["fsdp"] > 1:
            if len(_own_dims(names, dims)) < 2:
                reasons.append("a vector: gathering costs more than keeping")
            elif self.zero < 3:
                reasons.append(f"zero {self.zero} keeps parameters whole")
            elif "fsdp" not in self.stored(names, dims):
                reasons.append(f"no dim divides by fsdp {sizes['fsdp']}")
        if sizes["data"] > 1:
            reasons.append(f"data {sizes['data']} replicates")
        return "; ".join(reasons)


def _padded(names: Names, dims: Sequence[int]) -> Names:
    """Returns names for all dims: missing leading ones are stack dims, none at all are unknown."""
    if not names:
        return (None,) * len(dims)
    if len(names) > len(dims):
        raise ValueError(f"{len(names)} logical names {names} for {len(dims)} dims {tuple(dims)}")
    return ("",) * (len(dims) - len(names)) + tuple(names)


def _own_dims(names: Names, dims: Sequence[int]) -> list[int]:
    """Returns the dims but stack dims; head_dim counts with its heads (their bias is a vector)."""
    return [i for i in range(len(dims)) if names[i] not in (*STACKS, "head_dim")]


def _divisibility(path: str, name: str | None, dim: int, axis: str, size: int) -> str:
    lower, upper = dim // size * size, -(-dim // size) * size
    legal = f"{lower} or {upper}" if lower else f"{upper}"
    divisors = [n for n in range(1, size + 1) if dim % n == 0]
    return (
        f"{path}: dim {name}={dim} is not divisible by mesh.{axis}={size}; "
        f"nearest legal {name}: {legal}; or set mesh.{axis} to {divisors[-1]}"
    )


def build_rules(config: MeshConfig, shape: MeshShape, *, vocab_over_stages: bool = True) -> Rules:
    """Returns the rule table for a resolved mesh."""
    return Rules(shape, config.zero, config.sequence_parallel, vocab_over_stages)


# --- while a step is traced -----------------------------------------------------------------------


@dataclass(frozen=True)
class Active:
    """The mesh and rules in force while a program is traced."""

    mesh: Mesh
    rules: Rules
    in_stage: bool = False  # inside shard_map over pipeline: arrays are the stage's part

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        # Inside a stage the mesh in force is the one that shard_map made: a bare spec means it.
        where = spec if self.in_stage else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(x, where)

    def manual_region(self) -> dict[str, Any]:
        """Returns the arguments of `shard_map` for a region that is manual over all that is not yet."""
        if not self.in_stage:
            return {"mesh": self.mesh}
        return {"axis_names": set(self.mesh.axis_names) - {"pipeline"}}


_active: contextvars.ContextVar[Active | None] = contextvars.ContextVar("active", default=None)


def active() -> Active | None:
    """Returns the mesh and rules in force, or None (single-device code)."""
    return _active.get()


@contextlib.contextmanager
def activate(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Makes `shard`, `gather` and the ops that ask `active()` work for what is traced inside."""
    # One device needs no constraints, unless it is compiled for from another platform: ops ask the
    # mesh which kernels they may use.
    foreign = mesh.devices.flat[0].platform != jax.default_backend()
    token = _active.set(Active(mesh, rules) if mesh.size > 1 or foreign else None)
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def inside_stage() -> Iterator[None]:
    """Makes what is traced inside see a pipeline stage's part of all arrays."""
    now = active()
    assert now is not None, "a pipeline runs inside a step"
    token = _active.set(Active(now.mesh, now.rules.inside_stage(), in_stage=True))
    try:
        yield
    finally:
        _active.reset(token)


def in_stage() -> bool:
    """Returns whether what is traced runs inside a pipeline stage."""
    now = active()
    return now is not None and now.in_stage


def sum_over(axis: str, x: jax.Array) -> jax.Array:
    """Returns x summed over a manual axis, in its own dtype (on CPU summed in float32).

    XLA's CPU backend aborts on the bfloat16 all-reduce of a region that is manual over some axes
    only ("Invalid binary instruction opcode copy", hlo_instruction.cc).
    """
    now = active()
    wide = now is not None and now.mesh.devices.flat[0].platform == "cpu"
    return jax.lax.psum(x.astype(jnp.float32), axis).astype(x.dtype) if wide else jax.lax.psum(x, axis)


def vocabulary_axis(names: Names) -> str | None:
    """Returns the manual mesh axis that a table's vocabulary is split over here, if any."""
    now = active()
    split = now is not None and now.in_stage and now.rules.vocab_over_stages and "vocab" in names
    return "pipeline" if split else None


def platform() -> str:
    """Returns "tpu", "gpu" or "cpu": of the mesh in force (ahead of time it is not the host's)."""
    now = active()
    name = jax.default_backend() if now is None else now.mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` constrained to the sharding of its named dims; unchanged outside a step.

    Left alone, the partitioner lays out activations by the parameters it meets, which costs several
    times the time and memory; naming the residual stream, heads, hidden and logits prevents it.
    """
    now = active()
    return x if now is None else now.constrain(x, now.rules.activation(names, x.shape))


def gather(kernel: jax.Array, names: Names, dtype: jnp.dtype) -> jax.Array:
    """Returns a parameter as it is computed with: in `dtype`, its fsdp shards gathered.

    The cast is held to the shards, or the partitioner gathers first: twice the bytes for bfloat16.
    """
    now, used = active(), kernel.astype(dtype)
    if now is None:
        return used
    if used.dtype != kernel.dtype:
        used = now.constrain(used, now.rules.stored(names, kernel.shape))
    return now.constrain(used, now.rules.computed(names, kernel.shape))


def scatter(gradient: jax.Array, names: Names) -> jax.Array:
    """Returns a parameter's gradient laid out as gradients are (reduce-scattered for ZeRO 2, 3)."""
    now = active()
    return gradient if now is None else now.constrain(gradient, now.rules.gradient(names, gradient.shape))


def stored_in_shards(names: Names, dims: Sequence[int]) -> bool:
    """Returns whether a parameter must be gathered before it is computed with."""
    now = active()
    return now is not None and now.rules.stored(names, dims) != now.rules.computed(names, dims)


def stored_by_fsdp(names: Names) -> bool:
    """Returns whether a table with these names lies split by width over fsdp."""
    now = active()
    return now is not None and now.rules.zero >= 3 and FSDP_NAME in names and axis_size("fsdp") > 1


def gradient_by_fsdp(names: Names) -> bool:
    """Returns whether the gradient of a table with these names is split by width over fsdp."""
    now = active()
    return now is not None and now.rules.zero >= 2 and FSDP_NAME in names and axis_size("fsdp") > 1


def sequence_is_split() -> bool:
    """Returns whether devices share out the sequence, in the layers or between them."""
    now = active()
    return now is not None and (now.rules.sequence_parallel or axis_size("context") > 1)


def axis_size(axis: str) -> int:
    """Returns the size of a mesh axis in the step being traced; 1 outside."""
    now = active()
    return 1 if now is None else now.rules.shape.sizes[axis]


# --- the explain table ----------------------------------------------------------------------------


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
        path, tuple(x.shape), names, stored, rules.state(names, x.shape), shard_dims,
        shard_bytes, extra, rules.why(names, x.shape),
    )  # fmt: skip


def axes_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


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
