"""Matmuls of activations with kernels in the compute dtype, as training needs them.

`multiply` is an einsum with four properties that plain autodiff under a partitioner
lacks:

- Kernels are cast to the activations' dtype and gathered from their fsdp shards here,
  and again in the backward pass. So neither a cast nor a gathered copy is kept.
- A kernel's gradient leaves its matmul in the dtype `precision.reduce`.
- It is reduced across devices in this dtype, in shards.
- Several kernels of one input (query, key and value; gate and up) compute their input's
  gradient by one matmul. So a tensor-parallel layer reduces once instead of once per
  kernel (Megatron-LM's f operator, arXiv:1909.08053).

CPU and GPU multiply matrices [rows, columns]. If a kernel's gradient sums over two dims
at once (batch and sequence), XLA's CPU backend copies an operand transposed, which
costs a quarter of the step. TPU multiplies arrays without reshaping: merging heads with
their size would copy both operands, which costs 5 % of a step. On TPU the sum over
devices is written out, too.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution, sharding
from jaxdist.parallel.axes import BATCH_AXES
from jaxdist.protocols.dim_names import Names


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenKernel:
    """Kernel that gets no gradient, in the form in which it is stored."""

    parts: tuple[jax.Array, ...]
    names: tuple[Names, ...] = field(metadata={"static": True})  # of the parts' dims
    # function of the parts that computes the kernel
    restored: Callable[..., jax.Array] = field(
        default=jnp.asarray, metadata={"static": True}
    )

    @property
    def is_plain(self) -> bool:
        """Whether the only part is the kernel itself."""
        return len(self.parts) == 1 and self.restored is jnp.asarray

    def gathered(self, dtype: jnp.dtype) -> jax.Array:
        """Gathers the kernel for a matmul; its parts cross devices in stored form."""
        if len(self.parts) == 1:
            return execution.gather(self.parts[0], self.names[0], dtype)
        parts = [
            execution.gather(x, n, x.dtype)
            for x, n in zip(self.parts, self.names, strict=True)
        ]
        return self.restored(*parts).astype(dtype)


Kernel = jax.Array | FrozenKernel
_Residuals = tuple[jax.Array, Sequence[Kernel]]  # x, kernels


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply(
    x: jax.Array, kernels: Sequence[Kernel], names: tuple[Names, ...], contract: int
) -> tuple[jax.Array, ...]:
    """Multiplies `x` with each kernel, in the dtype of `x`.

    Args:
      x: [..., *K]; the last `contract` dims are summed over.
      kernels: [*K, *N] each, as they are stored.
      names: logical names of each kernel.
      contract: number of dims in K.
    """
    return forward(x, kernels, names, contract)[0]


def forward(
    x: jax.Array, kernels: Sequence[Kernel], names: tuple[Names, ...], contract: int
) -> tuple[tuple[jax.Array, ...], _Residuals]:
    """Multiplies like `multiply`, and also returns the residuals of `backward`."""
    gathered = _gather_kernels(kernels, names, x.dtype)
    with _matmul_precision(x):
        outputs = tuple(_matmul(x, kernel, contract) for kernel in gathered)
        return outputs, (x, kernels)


def backward(
    names: tuple[Names, ...],
    contract: int,
    residuals: _Residuals,
    cotangents: Sequence[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Computes the gradients of x and of the kernels; None for frozen kernels."""
    with _matmul_precision(residuals[0]):
        return _gradients(names, contract, residuals, cotangents)


def _matmul_precision(x: jax.Array) -> contextlib.AbstractContextManager[object]:
    """Chooses the precision of a matmul with x, as a context.

    If x is wider than the compute dtype (routers), float32 is meant. TPUs would multiply
    it in bfloat16.
    """
    is_wide = x.dtype.itemsize > execution.current().compute_dtype(x.dtype).itemsize
    if not is_wide:
        return contextlib.nullcontext()
    highest: contextlib.AbstractContextManager[object] = jax.default_matmul_precision(
        "highest"
    )
    return highest


def _gradients(
    names: tuple[Names, ...],
    contract: int,
    residuals: _Residuals,
    cotangents: Sequence[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    x, kernels = residuals
    gathered = _gather_kernels(kernels, names, x.dtype)
    gradients: list[jax.Array | None] = []
    for kernel, kernel_names, dy in zip(kernels, names, cotangents, strict=True):
        if isinstance(kernel, FrozenKernel):
            gradients.append(None)
            continue
        gradient = kernel_gradient(x, dy, kernel, kernel_names, contract)
        if waits_for_sums() and execution.current().axis_size("tensor") == 1:
            # The barrier orders the gradients. Without it the compiler multiplies first
            # and reduces later, and holds GiBs of gradients. Tensor shards get no
            # barrier: their gradients are small, and in a fixed order the compiler
            # recomputes less.
            gradient, cotangents = jax.lax.optimization_barrier(
                (gradient, tuple(cotangents))
            )
        gradients.append(gradient)
    dx = _input_gradient(cotangents, gathered, contract).astype(x.dtype)
    return dx, tuple(gradients)


multiply.defvjp(forward, backward)


def _gather_kernels(
    kernels: Sequence[Kernel], names: Sequence[Names], dtype: jnp.dtype
) -> list[jax.Array]:
    return [
        kernel.gathered(dtype)
        if isinstance(kernel, FrozenKernel)
        else execution.gather(kernel, kernel_names, dtype)
        for kernel, kernel_names in zip(kernels, names, strict=True)
    ]


def _matmul(x: jax.Array, kernel: jax.Array, contract: int) -> jax.Array:
    """Multiplies x [..., *K] with a kernel [*K, *N]."""
    if _keeps_dims():
        return jnp.tensordot(x, kernel, contract)
    rows = rows_of(x, contract) @ matrix_of(kernel, contract)
    return rows.reshape(*x.shape[: x.ndim - contract], *kernel.shape[contract:])


def _input_gradient(
    cotangents: Sequence[jax.Array], kernels: Sequence[jax.Array], contract: int
) -> jax.Array:
    """Sums dy times the transposed kernel over kernels; one matmul for tensor shards."""
    out_dims = [kernel.ndim - contract for kernel in kernels]
    parts = execution.current().axis_size("tensor")
    if _keeps_dims():
        axes = [(list(range(-n, 0)),) * 2 for n in out_dims]
        terms = [
            jnp.tensordot(*operands)
            for operands in zip(cotangents, kernels, axes, strict=True)
        ]
        return sum(terms[1:], terms[0])
    lead = cotangents[0].shape[: cotangents[0].ndim - out_dims[0]]
    columns = [rows_of(dy, n) for dy, n in zip(cotangents, out_dims, strict=True)]
    matrices = [matrix_of(kernel, contract) for kernel in kernels]
    divides = not any(kernel.shape[contract] % parts for kernel in kernels)
    if parts > 1 and len(kernels) > 1 and divides:
        # One matmul, so that the tensor shards sum once.
        kernel = side_by_side(matrices, parts)
        dy = side_by_side(columns, parts)
        terms = [jnp.einsum("...tn,rtn->...r", dy, kernel)]
    else:
        terms = [dy @ matrix.T for dy, matrix in zip(columns, matrices, strict=True)]
    return sum(terms[1:], terms[0]).reshape(*lead, *kernels[0].shape[:contract])


def kernel_gradient(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, names: Names, contract: int
) -> jax.Array:
    """Computes the gradient of one kernel, summed over rows and devices.

    The sum over devices is in the dtype `precision.reduce`.

    Args:
      x: [..., *K].
      dy: [..., *N].
      kernel: [*K, *N].
      names: logical names of the kernel.
      contract: number of dims in K.
    """
    dtype = jnp.dtype(execution.current().reduce)
    if _keeps_dims():
        lead = tuple(range(x.ndim - contract))
        matmul = partial(jnp.tensordot, axes=(lead, lead), preferred_element_type=dtype)
        return _sum_rows_in_shards(matmul, x, dy, names, contract).astype(kernel.dtype)
    x = rows_of(x, contract)
    dy = rows_of(dy, kernel.ndim - contract)
    axes = tuple(range(x.ndim - 1))
    gradient = jnp.tensordot(x, dy, (axes, axes), preferred_element_type=dtype)
    return execution.scatter(gradient.reshape(kernel.shape), names).astype(kernel.dtype)


def _sum_rows_in_shards(
    product: Callable[..., jax.Array],
    x: jax.Array,
    dy: jax.Array,
    names: Names,
    contract: int,
) -> jax.Array:
    """Computes a parameter's gradient product(x, dy), summed over devices, in shards.

    Args:
      product: function that sums over the leading dims of its arguments, on one device.
      x: [batch, sequence, *K].
      dy: [batch, sequence, *N].
      names: logical names of the parameter [*K, *N].
      contract: number of dims in K.
    """
    now = execution.current()
    lead = x.ndim - contract
    dims = (*x.shape[lead:], *dy.shape[lead:])
    if now.mesh is None:
        return product(x, dy)
    rows = now.rules.activation(
        ("batch", "sequence", *(None,) * lead)[:lead], x.shape[:lead]
    )
    computed = now.rules.computed(names, dims)
    specs = (P(*rows, *computed[:contract]), P(*rows, *computed[contract:]))
    return sum_in_shards(
        product, arrays=(x, dy), specs=specs, rows=rows, names=names, dims=dims
    )


def sum_in_shards(
    product: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    specs: Sequence[P],
    rows: P,
    names: Names,
    dims: Sequence[int],
) -> jax.Array:
    """Computes product(*arrays), summed over devices, in the layout of gradients.

    The sum over fsdp is a written-out reduce-scatter. libtpu's partitioner would sum
    whole gradients on every device and slice them afterwards: twice the bytes on the
    wire, and a whole gradient in memory. (From 64 devices in several dims of a torus
    on, libtpu does the same to a written-out reduce-scatter, but on the SparseCore.)

    Args:
      product: function that sums over the rows of its arguments, on one device.
      arrays: arguments of the function.
      specs: specs of these arguments.
      rows: spec of the dims that the function sums over.
      names: logical names of the parameter.
      dims: shape of the parameter, and of the result.
    """
    now = execution.current()
    row_axes = [axis for entry in rows for axis in sharding.axes_in(entry)]
    shard_axes = now.rules.shard_axes(names)
    if any(
        now.rules.shape.sizes[axis] > 1 and axis not in row_axes
        for axis in (*BATCH_AXES, *shard_axes)
    ):
        # Devices of such an axis have the same rows, and a written-out sum would count
        # them several times.
        return execution.scatter(product(*arrays), names)
    out = now.rules.gradient(names, dims)
    shard_dims = [
        dim
        for dim, entry in enumerate(out)
        if shard_axes and set(shard_axes) <= {*sharding.axes_in(entry)}
    ]

    def sum_locally(*arrays: jax.Array) -> jax.Array:
        total = product(*arrays)
        # Dims of size 1 are removed: with one head per device, libtpu 0.0.50.1 does not
        # compile a reduce-scatter of [1, 128, d] along d in shards of part lanes
        # ("AllReduceScatterFusion not implemented for 2nd-minor compaction").
        unit_dims = [
            dim
            for dim, size in enumerate(total.shape)
            if size == 1 and dim not in shard_dims
        ]
        total = jax.lax.squeeze(total, unit_dims)
        for dim in shard_dims:
            removed = sum(unit_dim < dim for unit_dim in unit_dims)
            total = _scatter_dim(total, dim - removed, shard_axes)
        total = jax.lax.expand_dims(total, unit_dims)
        other_axes = [
            axis for axis in row_axes if not (shard_dims and axis in shard_axes)
        ]
        return jax.lax.psum(total, other_axes) if other_axes else total

    summed = execution.per_device(sum_locally, tuple(specs), out)
    gradient: jax.Array = summed(*arrays)
    return gradient


# sizes of a tile, in which TPUs store the last two dims of an array
_SUBLANES = 8
_LANES = 128


def _scatter_dim(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Sums x over mesh axes and returns the device's shard of a dim; in a manual region.

    The SparseCore cuts rows into pieces of equal size. If it finds no such size (for
    11,008 or 128,256 columns), it sums whole arrays. So it gets the tiles of a matrix
    as rows, which have the same order in memory.
    """
    now = execution.current()
    parts = math.prod(now.axis_size(axis) for axis in axes)
    rows = x.shape[dim]
    columns = math.prod(x.shape) // x.shape[dim]
    if (
        not (now.sparse_core_collectives and x.ndim == 2)
        or rows % (parts * _SUBLANES)
        or columns % _LANES
    ):
        part: jax.Array = jax.lax.psum_scatter(
            x, axes, scatter_dimension=dim, tiled=True
        )
        return part
    # Without the barrier the matmul would write tiles, at 1.5 times its cost.
    x = jax.lax.optimization_barrier(jnp.moveaxis(x, dim, 0))
    tiles = x.reshape(rows // _SUBLANES, _SUBLANES, columns // _LANES, _LANES)
    tiles = tiles.swapaxes(1, 2).reshape(-1, _LANES)
    tiles = jax.lax.psum_scatter(tiles, axes, scatter_dimension=0, tiled=True)
    tiles = tiles.reshape(-1, columns // _LANES, _SUBLANES, _LANES).swapaxes(1, 2)
    return jnp.moveaxis(tiles.reshape(rows // parts, columns), 0, dim)


def _keeps_dims() -> bool:
    return execution.current().platform == "tpu"


def waits_for_sums() -> bool:
    """Checks whether compute waits for the sums of gradients over devices.

    On SparseCores the sums run concurrently with compute, and a fixed order would only
    delay compute.
    """
    return _keeps_dims() and not execution.current().sparse_core_collectives


def rows_of(x: jax.Array, trailing: int) -> jax.Array:
    """Merges the last `trailing` dims to columns, and the others to rows.

    If devices split the sequence, the other dims are kept: merging sequence and batch
    would move samples between devices.
    """
    columns = math.prod(x.shape[x.ndim - trailing :])
    if execution.current().sequence_is_split:
        return x.reshape(*x.shape[: x.ndim - trailing], columns)
    return x.reshape(-1, columns)


def side_by_side(arrays: Sequence[jax.Array], parts: int) -> jax.Array:
    """Joins columns [..., N] of several kernels to [..., parts, sum of N / parts].

    Every tensor shard joins its own columns, so nothing is moved.
    """
    split = [x.reshape(*x.shape[:-1], parts, -1) for x in arrays]
    return jnp.concatenate(split, axis=-1)


def matrix_of(kernel: jax.Array, contract: int) -> jax.Array:
    """Reshapes a kernel [*K, *N] to a matrix."""
    return kernel.reshape(math.prod(kernel.shape[:contract]), -1)
