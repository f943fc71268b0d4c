"""What a program that is traced sees of the mesh: the sharding constraints that ops and models ask for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.param_names import FSDP_NAME, Names


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
