"""The execution context of a traced program: mesh, sharding rules and dtypes.

A model is single-device code. Inside `activate` its ops find the mesh, the rules and
the dtypes here, and `shard` constrains arrays. Outside nothing is constrained, and
parameters keep their dtype.
"""

import contextlib
import contextvars
import dataclasses
import math
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
from jaxdist.parallel.sharding import Rules, as_entry, axes_in
from jaxdist.protocols.dim_names import FSDP_NAME, Names

# largest number of matrix elements that a device handles in a turn of `map_parts`
_NUMBERS_AT_ONCE = 1 << 23

ONE_DEVICE = Rules(resolve_mesh(MeshConfig(), 1))


@dataclass(frozen=True)
class Execution:
    """The mesh, rules and dtypes in force while a program is traced."""

    mesh: Mesh | None = None  # None: one device, nothing is constrained
    rules: Rules = ONE_DEVICE
    # dtype of matmuls and activations; None: the dtype of the parameters
    compute: str | None = None
    # dtype in which gradients of kernels leave their matmul and cross devices
    reduce: str = "float32"
    # number format of the matmuls of large kernels; None: they are in `compute`
    recipe: Recipe | None = None
    # mesh axes that the active region is manual over; arrays are a device's part there
    manual: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """The platform of the mesh: "tpu", "gpu" or "cpu".

        It is not the host's if the program is compiled ahead of time.
        """
        if self.mesh is None:
            return platform_of(jax.default_backend())
        return platform_of(self.mesh.devices.flat[0].platform)

    @property
    def device(self) -> jax.Device:
        """One of the devices; all are of one kind."""
        if self.mesh is None:
            return jax.devices()[0]
        device: jax.Device = self.mesh.devices.flat[0]
        return device

    @property
    def sparse_core_collectives(self) -> bool:
        """Whether SparseCores of the mesh's chips run collectives during compute."""
        chip = chip_for(self.device.device_kind) if self.mesh else None
        return chip is not None and chip.sparse_core_collectives

    @property
    def sequence_is_split(self) -> bool:
        """Whether devices split the sequence, in the layers or between them."""
        return self.rules.sequence_parallel or self.axis_size("context") > 1

    def axis_size(self, axis: str) -> int:
        """Looks up the size of a mesh axis; 1 for manual axes of the active region."""
        return self.rules.shape.sizes[axis]

    def compute_dtype(self, default: jnp.dtype) -> jnp.dtype:
        """Chooses the compute dtype; `default` if none is set."""
        return jnp.dtype(self.compute or default)

    def vocabulary_axis(self, names: Names) -> str | None:
        """Finds the manual mesh axis that splits a table's vocabulary, if any."""
        is_split = self.rules.vocab_over_stages and "vocab" in names
        if "pipeline" in self.manual and is_split:
            return "pipeline"
        return None

    def splits_width(self, names: Names, *, zero: int) -> bool:
        """Checks whether devices split the width of a table, or of its gradient.

        Args:
          names: logical names of the table.
          zero: 3 for the stored table, 2 for its gradient.
        """
        if self.rules.zero < zero or FSDP_NAME not in names:
            return False
        return bool(self.rules.shard_axes(names))

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        """Constrains x to a spec; on one device it stays unchanged."""
        if self.mesh is None:
            return x
        # In a region the active mesh is the one that shard_map made; a bare spec refers
        # to it.
        sharding = spec if self.manual else NamedSharding(self.mesh, spec)
        constrained: jax.Array = jax.lax.with_sharding_constraint(x, sharding)
        return constrained

    def lay_out(
        self,
        x: jax.Array,
        use: Callable[[Rules, Names, Sequence[int]], P],
        names: Names,
    ) -> jax.Array:
        """Constrains x to the spec of one of its uses.

        Args:
          x: an array; on one device it stays unchanged.
          use: method of `Rules`, such as `Rules.gradient`.
          names: logical names of x.
        """
        if self.mesh is None:
            return x
        return self.constrain(x, use(self.rules, names, x.shape))

    def map_matrices(
        self,
        function: Callable[[jax.Array], jax.Array],
        stack: jax.Array,
        names: Names,
        *,
        matrix_dims: int,
    ) -> jax.Array:
        """Applies a function to each matrix of a stack, divided among the devices.

        Without this method, each device would compute all matrices, or a part of each.

        Args:
          function: from a matrix [*matrix dims] to one of this shape; zeros to zeros.
          stack: [*stack dims, *matrix dims], in the sharding of the optimizer's state.
          names: logical names of the stack's dims; leading ones may be missing.
          matrix_dims: number of dims of one matrix.

        Returns:
          The results, in the sharding of the optimizer's state.
        """
        if self.mesh is None:
            parts = (1,) * (stack.ndim - matrix_dims)
            return map_parts(function, stack, parts)
        way = self.rules.way_to_whole_matrices(names, stack.shape, matrix_dims)
        parts = self.rules.parts(P(*way[-1][:-matrix_dims]))
        rest = [(0, -dim % part) for dim, part in zip(stack.shape, parts, strict=False)]
        rest += [(0, 0)] * matrix_dims
        # At first as the state. Otherwise XLA might move what the stack comes from.
        moved = jnp.pad(self.constrain(stack, way[0]), rest)
        for spec in way:
            moved = self.constrain(moved, spec)
        moved = map_parts(function, moved, parts)
        for spec in reversed(way):
            moved = self.constrain(moved, spec)
        return jax.lax.slice(moved, [0] * stack.ndim, stack.shape)


def map_parts(
    function: Callable[[jax.Array], jax.Array], stack: jax.Array, parts: Sequence[int]
) -> jax.Array:
    """Maps a function over the matrices of a stack whose dims are split in parts.

    A loop goes over the matrices of each part. All at once would need memory for all,
    and a TPU's compiler takes minutes for a product of many large matrices.

    Args:
      function: from a matrix to one of the same shape.
      stack: [*stack dims, *matrix dims].
      parts: number of equal parts of each stack dim; each device holds one part.
    """
    dims = len(parts)
    matrix = stack.shape[dims:]
    held = [dim // part for dim, part in zip(stack.shape, parts, strict=False)]
    split = [size for pair in zip(parts, held, strict=True) for size in pair]
    # [part, held, part, held, ..., *matrix] -> [held, held, ..., part, part, ..., *matrix]
    order = [*range(1, 2 * dims, 2), *range(0, 2 * dims, 2)]
    order += range(2 * dims, 2 * dims + len(matrix))
    by_turn = stack.reshape(*split, *matrix).transpose(order)
    by_turn = by_turn.reshape(-1, *parts, *matrix)
    for _ in range(dims):
        function = jax.vmap(function)
    turns = max(1, -(-by_turn.size // max(1, _NUMBERS_AT_ONCE * math.prod(parts))))
    together = max(1, -(-len(by_turn) // turns))
    mapped: jax.Array = jax.lax.map(function, by_turn, batch_size=together)
    mapped = mapped.reshape(*held, *parts, *matrix)
    return mapped.transpose([order.index(dim) for dim in range(len(order))]).reshape(
        stack.shape
    )


_current = contextvars.ContextVar("execution", default=Execution())  # noqa: B039 (frozen)


def current() -> Execution:
    """Finds the active context; outside a step it is one device and no dtypes."""
    return _current.get()


def activate(
    mesh: Mesh | None = None,
    rules: Rules = ONE_DEVICE,
    *,
    compute: str | None = None,
    reduce: str = "float32",
    recipe: Recipe | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Activates a context for models and ops that are traced inside it.

    Args:
      mesh: None for one device.
      rules: sharding rules of the mesh.
      compute: see `Execution`.
      reduce: see `Execution`.
      recipe: see `Execution`.
    """
    # One device needs no constraints. A mesh of one device of another platform stays,
    # because ops ask it for the kernels that they may use.
    if (
        mesh is not None
        and mesh.size == 1
        and mesh.devices.flat[0].platform == jax.default_backend()
    ):
        mesh = None
        rules = ONE_DEVICE
    return _enter(Execution(mesh, rules, compute, reduce, recipe))


def per_device(
    function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Wraps a function so that each device calls it with its part of the arrays.

    The partitioner cannot look into a kernel: it would gather all arrays for it. On one
    device the function is returned as it is. In a region the wrapper makes the mesh
    axes manual that are not manual yet.

    Args:
      function: takes and returns arrays.
      in_specs: PartitionSpecs of its arguments.
      out_specs: PartitionSpecs of its results.
    """
    now = current()
    if now.mesh is None:
        return function
    options: dict[str, Any] = {"mesh": now.mesh}
    if now.manual:
        options = {"axis_names": set(now.mesh.axis_names) - set(now.manual)}
    # check_vma: kernels do not declare the axes that their results vary over.
    return jax.shard_map(
        function, **options, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def region(
    function: Callable[..., Any], axes: Sequence[str], *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Wraps a function in a region that is manual over some mesh axes.

    In the region every device computes with its part of the arrays along these axes.
    The other axes stay with the partitioner. The function needs no changes: rules and
    constraints see manual axes as axes of size 1.

    Regions cannot be nested: jax 0.12 aborts if the axes of the outer region come later
    in the mesh ("Manual axes must be sorted"). So one region encloses all code that
    needs one.

    Args:
      function: takes and returns trees of arrays.
      axes: mesh axes that are manual in the region.
      in_specs: PartitionSpecs of the arguments, over `axes` only.
      out_specs: PartitionSpecs of the results, over `axes` only.
    """
    now = current()
    assert now.mesh is not None, "a region needs a mesh; enter `activate` first"
    assert not now.manual, "a region cannot be inside another region"
    inside = dataclasses.replace(now, rules=now.rules.inside(axes), manual=tuple(axes))

    def local(*arguments: Any) -> Any:
        with _enter(inside):
            return function(*arguments)

    return jax.shard_map(
        local,
        mesh=now.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        # With the check, autodiff would sum gradients over the axes at each use of a
        # parameter.
        check_vma=False,
    )


def region_spec(x: jax.Array, names: Names, axes: Sequence[str]) -> P:
    """Computes the spec of a stored parameter over manual axes only."""
    stored = current().rules.stored(names, x.shape)
    entries = [
        as_entry(tuple(axis for axis in axes_in(entry) if axis in axes))
        for entry in stored
    ]
    return P(*entries)


@contextlib.contextmanager
def _enter(execution: Execution) -> Iterator[None]:
    token = _current.set(execution)
    try:
        yield
    finally:
        _current.reset(token)


def sum_over(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """Sums x over manual axes, in its dtype (on CPU in float32)."""
    total: jax.Array = jax.lax.psum(summable(x), axes)
    return total.astype(x.dtype)


def summable(x: jax.Array) -> jax.Array:
    """Casts x to float32 on CPU, where devices cannot sum bfloat16.

    XLA's CPU backend aborts on the bfloat16 all-reduce of a region that is manual over
    only some axes ("Invalid binary instruction opcode copy", hlo_instruction.cc).
    """
    return x.astype(jnp.float32) if current().platform == "cpu" else x


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation by the logical names of its dims.

    Outside a step it stays unchanged. Without constraints, the partitioner would lay
    out activations like the parameters that they meet, at several times the time and
    memory. Names for the residual stream, heads, hidden activations and logits prevent
    that.
    """
    return current().lay_out(x, Rules.activation, names)


def gather(kernel: jax.Array, names: Names, dtype: jnp.dtype) -> jax.Array:
    """Casts a parameter to `dtype` and gathers its fsdp shards, for computing.

    A constraint keeps the cast in the shards. Otherwise the partitioner gathers first,
    which moves twice the bytes for bfloat16.
    """
    now = current()
    used = kernel.astype(dtype)
    if used.dtype != kernel.dtype:
        used = now.lay_out(used, Rules.stored, names)
    return now.lay_out(used, Rules.computed, names)


def scatter(gradient: jax.Array, names: Names) -> jax.Array:
    """Constrains a gradient to its spec; at ZeRO 2 and 3 this reduce-scatters it."""
    return current().lay_out(gradient, Rules.gradient, names)
