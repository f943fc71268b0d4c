"""What a program that is traced runs under: mesh, rules and dtypes, and the constraints
that follow.

A model is single-device code: outside `activate` nothing is constrained and parameters
keep their dtype.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.hardware.chips import chip_for, platform_of
from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.mesh import MeshConfig, resolve_mesh
from jaxdist.parallel.sharding import Rules, axes_in
from jaxdist.protocols.param_names import FSDP_NAME, Names

ONE_DEVICE = Rules(resolve_mesh(MeshConfig(), 1))


@dataclass(frozen=True)
class Execution:
    """The mesh, rules and dtypes in force while a program is traced."""

    mesh: Mesh | None = None  # None: one device, nothing is constrained
    rules: Rules = ONE_DEVICE
    # dtype of matrix products and activations; None: that of the parameters
    compute: str | None = None
    # dtype in which kernels' gradients leave their product and cross devices
    reduce: str = "float32"
    recipe: Recipe | None = None  # of large kernels; None: multiplied in `compute`
    # mesh axes of the region: arrays are a device's part along them
    manual: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """Returns "tpu", "gpu" or "cpu": of the mesh (ahead of time it is not the
        host's).
        """
        return platform_of(
            self.mesh.devices.flat[0].platform if self.mesh else jax.default_backend()
        )

    @property
    def device(self) -> jax.Device:
        """Returns one of the devices, all of a kind."""
        return self.mesh.devices.flat[0] if self.mesh else jax.devices()[0]

    @property
    def sparse_core_collectives(self) -> bool:
        """Whether the mesh's chips move collectives beside compute, on their
        SparseCores.
        """
        chip = chip_for(self.mesh.devices.flat[0].device_kind) if self.mesh else None
        return chip is not None and chip.sparse_core_collectives

    @property
    def sequence_is_split(self) -> bool:
        """Whether devices share out the sequence, in the layers or between
        them.
        """
        return self.rules.sequence_parallel or self.axis_size("context") > 1

    def axis_size(self, axis: str) -> int:
        """Returns the size of a mesh axis; 1 for those that the region is
        manual over.
        """
        return self.rules.shape.sizes[axis]

    def compute_dtype(self, default: jnp.dtype) -> jnp.dtype:
        """Returns the compute dtype, or the default (a parameter's own) where none is
        set.
        """
        return jnp.dtype(self.compute or default)

    def vocabulary_axis(self, names: Names) -> str | None:
        """Returns the manual mesh axis that a table's vocabulary is split
        over, if any.
        """
        split = (
            "pipeline" in self.manual
            and self.rules.vocab_over_stages
            and "vocab" in names
        )
        return "pipeline" if split else None

    def splits_width(self, names: Names, *, zero: int) -> bool:
        """Checks whether devices store a table in parts of its width (zero=3), or its
        gradient (zero=2).
        """
        return (
            self.rules.zero >= zero
            and FSDP_NAME in names
            and self.rules.shard_axes(names) != ()
        )

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns x constrained to a spec; unchanged on one device."""
        if self.mesh is None:
            return x
        # In a region the mesh in force is the one that shard_map made: a bare spec
        # means it.
        return jax.lax.with_sharding_constraint(
            x, spec if self.manual else NamedSharding(self.mesh, spec)
        )

    def lay_out(
        self,
        x: jax.Array,
        use: Callable[[Rules, Names, Sequence[int]], P],
        names: Names,
    ):
        """Returns x constrained as a use of it is, for example `Rules.gradient`;
        unchanged on one device.
        """
        return (
            x
            if self.mesh is None
            else self.constrain(x, use(self.rules, names, x.shape))
        )


_current = contextvars.ContextVar("execution", default=Execution())  # noqa: B039 (frozen)


def current() -> Execution:
    """Looks up what is in force; outside a step, one device and the parameters' own
    dtypes.
    """
    return _current.get()


def activate(
    mesh: Mesh | None = None,
    rules: Rules = ONE_DEVICE,
    *,
    compute: str | None = None,
    reduce: str = "float32",
    recipe: Recipe | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Makes models and ops that are traced inside see the mesh, the rules and the
    dtypes.
    """
    # One device needs no constraints, unless it is compiled for from another platform:
    # ops ask the mesh which kernels they may use.
    if (
        mesh is not None
        and mesh.size == 1
        and mesh.devices.flat[0].platform == jax.default_backend()
    ):
        mesh = None
        rules = ONE_DEVICE
    return _entered(Execution(mesh, rules, compute, reduce, recipe))


def per_device(
    function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Makes a function that each device calls with its own part of the arrays.

    The partitioner cannot look into a kernel: it would gather all arrays for it. On one
    device the function is returned as it is. In a region the mesh axes that are not yet
    manual become so.
    """
    now = current()
    if now.mesh is None:
        return function
    where: dict[str, Any] = {"mesh": now.mesh}
    if now.manual:
        where = {"axis_names": set(now.mesh.axis_names) - set(now.manual)}
    # check_vma: kernels do not say over which axes their results vary.
    return jax.shard_map(
        function, **where, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def region(
    function: Callable[..., Any], axes: Sequence[str], *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function in whose program mesh axes are manual: every device computes
    with its own part.

    The other axes stay with the partitioner, and the code is the same: rules and
    constraints inside see the manual axes as of size 1. There is one region around all
    that needs one: jax 0.12 aborts on a region inside another whose axes come later in
    the mesh ("Manual axes must be sorted").

    Args:
      axes: of the mesh.
      in_specs, out_specs: of arguments and results, over these axes alone.
    """
    now = current()
    assert now.mesh is not None and not now.manual, (
        "a region is made in a step, and not in another"
    )

    def local(*arguments):
        with _entered(
            dataclasses.replace(now, rules=now.rules.inside(axes), manual=tuple(axes))
        ):
            return function(*arguments)

    return jax.shard_map(
        local,
        mesh=now.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        # Checked, autodiff would sum gradients over the axes wherever a parameter is
        # used.
        check_vma=False,
    )


def region_spec(x: jax.Array, names: Names, axes: Sequence[str]) -> P:
    """Looks up how manual axes split a stored parameter."""
    stored = current().rules.stored(names, x.shape)
    parts = (tuple(axis for axis in axes_in(entry) if axis in axes) for entry in stored)
    return P(*(part if len(part) > 1 else next(iter(part), None) for part in parts))


@contextlib.contextmanager
def _entered(execution: Execution) -> Iterator[None]:
    token = _current.set(execution)
    try:
        yield
    finally:
        _current.reset(token)


def sum_over(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """Sums x over manual axes, in its own dtype (on CPU in float32)."""
    return jax.lax.psum(summable(x), axes).astype(x.dtype)


def summable(x: jax.Array) -> jax.Array:
    """Casts x to float32 on CPU, where devices cannot sum bfloat16.

    XLA's CPU backend aborts on the bfloat16 all-reduce of a region that is manual over
    some axes only ("Invalid binary instruction opcode copy", hlo_instruction.cc).
    """
    return x.astype(jnp.float32) if current().platform == "cpu" else x


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` constrained to the sharding of its named dims; unchanged outside a
    step.

    Left alone, the partitioner lays out activations by the parameters it meets, which
    costs several times the time and memory; naming the residual stream, heads, hidden
    and logits prevents it.
    """
    return current().lay_out(x, Rules.activation, names)


def gather(kernel: jax.Array, names: Names, dtype: jnp.dtype) -> jax.Array:
    """Returns a parameter as it is computed with: in `dtype`, its fsdp shards gathered.

    The cast is held to the shards, or the partitioner gathers first: twice the bytes
    for bfloat16.
    """
    now = current()
    used = kernel.astype(dtype)
    if used.dtype != kernel.dtype:
        used = now.lay_out(used, Rules.stored, names)
    return now.lay_out(used, Rules.computed, names)


def scatter(gradient: jax.Array, names: Names) -> jax.Array:
    """Returns a parameter's gradient laid out as gradients are (reduce-scattered for
    ZeRO 2, 3).
    """
    return current().lay_out(gradient, Rules.gradient, names)
