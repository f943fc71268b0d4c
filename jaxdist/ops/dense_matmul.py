"""Matmuls of activations with kernels in the compute dtype, laid out and rounded as
training wants them.

`multiply` is an einsum with four habits that plain autodiff under a partitioner does
not have: kernels are cast to the activations' dtype and gathered from their fsdp shards
here, and again in the backward pass, so that neither a cast nor a gathered copy is
kept; a kernel's gradient leaves its product in `precision.reduce` and is reduced across
devices in it, in shards; and several kernels of one input (query, key and value; gate
and up) give their input's gradient by one product, so that a tensor-parallel layer
reduces once, not once a kernel (Megatron-LM's f operator, arXiv:1909.08053).

What suits a backend differs in two ways. CPU and GPU multiply [rows, columns]: with two
dims summed over at once (batch and sequence, in a kernel's gradient) XLA's CPU backend
copies an operand transposed, which costs a quarter of the step. TPU multiplies arrays
as they are: merging heads with their size copies both, 5 % of a step. And there the sum
over devices is written out.
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
from jaxdist.protocols.param_names import Names


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenKernel:
    """A kernel that gets no gradient, in the form that it is stored in."""

    parts: tuple[jax.Array, ...]
    names: tuple[Names, ...] = field(metadata={"static": True})  # of the parts' dims
    restored: Callable[..., jax.Array] = field(
        default=jnp.asarray, metadata={"static": True}
    )

    @property
    def is_plain(self) -> bool:
        """Whether it is stored as one array, as it is computed with."""
        return len(self.parts) == 1 and self.restored is jnp.asarray

    def gathered(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the kernel as it is computed with; its parts cross devices as they
        are stored.
        """
        if len(self.parts) == 1:
            return execution.gather(self.parts[0], self.names[0], dtype)
        parts = [
            execution.gather(x, n, x.dtype)
            for x, n in zip(self.parts, self.names, strict=True)
        ]
        return self.restored(*parts).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply(x, kernels, names: tuple[Names, ...], contract: int):
    """Multiplies `x` with each kernel, in the dtype of `x`.

    Args:
      x: [..., *K], its last `contract` dims are summed over.
      kernels: [*K, *N] each, as they are stored.
      names: logical names of each kernel.
      contract: number of dims in K.
    """
    return forward(x, kernels, names, contract)[0]


def forward(x, kernels, names, contract):
    """Multiplies as `multiply` does, and also returns what `backward` needs."""
    gathered = _gathered(kernels, names, x.dtype)
    with _precision(x):
        return tuple(_product(x, kernel, contract) for kernel in gathered), (x, kernels)


def backward(names, contract, residuals, cotangents):
    """Computes the gradients of x and of the kernels; of frozen ones None."""
    with _precision(residuals[0]):
        return _gradients(names, contract, residuals, cotangents)


def _precision(x) -> contextlib.AbstractContextManager[object]:
    """Returns the setting of a product: float32 that is wider than the compute dtype is
    meant (routers).

    TPUs would multiply it in bfloat16.
    """
    wide = x.dtype.itemsize > execution.current().compute_dtype(x.dtype).itemsize
    return jax.default_matmul_precision("highest") if wide else contextlib.nullcontext()


def _gradients(names, contract, residuals, cotangents):
    x, kernels = residuals
    gathered = _gathered(kernels, names, x.dtype)
    gradients: list[jax.Array | None] = []
    for kernel, name, dy in zip(kernels, names, cotangents, strict=True):
        if isinstance(kernel, FrozenKernel):
            gradients.append(None)
            continue
        gradient = kernel_gradient(x, dy, kernel, name, contract)
        if waits_for_sums() and execution.current().axis_size("tensor") == 1:
            # One after another, or the compiler multiplies first and reduces later:
            # GiBs of gradients. (A tensor shard's are small, and there the compiler
            # recomputes less under a fixed order.)
            gradient, cotangents = jax.lax.optimization_barrier(
                (gradient, tuple(cotangents))
            )
        gradients.append(gradient)
    return _input_gradient(cotangents, gathered, contract).astype(x.dtype), tuple(
        gradients
    )


multiply.defvjp(forward, backward)


def _gathered(kernels, names, dtype) -> list[jax.Array]:
    return [
        kernel.gathered(dtype)
        if isinstance(kernel, FrozenKernel)
        else execution.gather(kernel, name, dtype)
        for kernel, name in zip(kernels, names, strict=True)
    ]


def _product(x, kernel, contract: int):
    """Returns x [..., *K] times the kernel [*K, *out]."""
    if _keeps_dims():
        return jnp.tensordot(x, kernel, contract)
    rows = rows_of(x, contract) @ matrix_of(kernel, contract)
    return rows.reshape(*x.shape[: x.ndim - contract], *kernel.shape[contract:])


def _input_gradient(
    cotangents: Sequence[jax.Array], kernels: Sequence[jax.Array], contract: int
):
    """Returns the sum over kernels of dy times the kernel transposed, with tensor parts
    as one product.
    """
    outs = [kernel.ndim - contract for kernel in kernels]
    parts = execution.current().axis_size("tensor")
    if _keeps_dims():
        axes = [(list(range(-n, 0)),) * 2 for n in outs]
        products = [
            jnp.tensordot(*pair) for pair in zip(cotangents, kernels, axes, strict=True)
        ]
        return sum(products[1:], products[0])
    lead = cotangents[0].shape[: cotangents[0].ndim - outs[0]]
    columns = [rows_of(dy, n) for dy, n in zip(cotangents, outs, strict=True)]
    matrices = [matrix_of(kernel, contract) for kernel in kernels]
    if (
        parts > 1
        and len(kernels) > 1
        and not any(kernel.shape[contract] % parts for kernel in kernels)
    ):
        # One sum crosses shards.
        kernel = side_by_side(matrices, parts)
        dy = side_by_side(columns, parts)
        products = [jnp.einsum("...tn,rtn->...r", dy, kernel)]
    else:
        products = [dy @ matrix.T for dy, matrix in zip(columns, matrices, strict=True)]
    return sum(products[1:], products[0]).reshape(*lead, *kernels[0].shape[:contract])


def kernel_gradient(x, dy, kernel, names: Names, contract: int):
    """Returns the gradient of one kernel, summed on the device and, in
    `precision.reduce`, across them.
    """
    dtype = jnp.dtype(execution.current().reduce)
    if _keeps_dims():
        lead = tuple(range(x.ndim - contract))
        product = partial(
            jnp.tensordot, axes=(lead, lead), preferred_element_type=dtype
        )
        return _summed_in_shards(product, x, dy, names, contract).astype(kernel.dtype)
    x = rows_of(x, contract)
    dy = rows_of(dy, kernel.ndim - contract)
    axes = tuple(range(x.ndim - 1))
    gradient = jnp.tensordot(x, dy, (axes, axes), preferred_element_type=dtype)
    return execution.scatter(gradient.reshape(kernel.shape), names).astype(kernel.dtype)


def _summed_in_shards(
    product: Callable[..., jax.Array], x, dy, names: Names, contract: int
) -> jax.Array:
    """Returns a parameter's gradient product(x, dy), summed over devices and laid out
    as gradients are.

    Args:
      product: sums over the leading dims of its arguments, on one device.
      x, dy: [batch, sequence, *K] and [batch, sequence, *out] for a parameter [*K,
      *out].
      contract: the number of dims in K.
    """
    now = execution.current()
    lead = x.ndim - contract
    dims = (*x.shape[lead:], *dy.shape[lead:])
    if now.mesh is None:
        return product(x, dy)
    rows = now.rules.activation(
        ("batch", "sequence", *(None,) * lead)[:lead], x.shape[:lead]
    )
    used = now.rules.computed(names, dims)
    specs = P(*rows, *used[:contract]), P(*rows, *used[contract:])
    return sum_in_shards(product, (x, dy), specs, rows, names, dims)


def sum_in_shards(
    product: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    specs: Sequence[P],
    rows: P,
    names: Names,
    dims: Sequence[int],
) -> jax.Array:
    """Returns product(*arrays), summed over the devices that share out its rows, as
    gradients are laid out.

    The sum over fsdp is a reduce-scatter written out: libtpu's partitioner sums whole
    gradients on every device and cuts them then, twice the bytes on the wire and the
    whole in memory. (For 64 and more devices of several dims of a torus libtpu makes
    the same of a written-out one, but on the SparseCore.)

    Args:
      product: sums over the rows of its arguments, on one device.
      arrays, specs: its arguments, and how they are split.
      rows: how the dims that it sums over are split.
      names, dims: of the parameter, and of the result.
    """
    now = execution.current()
    axes = [axis for entry in rows for axis in sharding.axes_in(entry)]
    over = now.rules.shard_axes(names)
    if any(
        now.rules.shape.sizes[axis] > 1 and axis not in axes
        for axis in (*BATCH_AXES, *over)
    ):
        # Written out, devices with the same samples, or parts of them, would add up.
        return execution.scatter(product(*arrays), names)
    out = now.rules.gradient(names, dims)
    shards = [
        i
        for i, entry in enumerate(out)
        if over and set(over) <= {*sharding.axes_in(entry)}
    ]

    def local(*arrays):
        total = product(*arrays)
        # libtpu 0.0.50.1 does not compile a reduce-scatter of [1, 128, d] along d in
        # shards of part lanes ("AllReduceScatterFusion not implemented for 2nd-minor
        # compaction"): one head a device.
        ones = [
            i for i, size in enumerate(total.shape) if size == 1 and i not in shards
        ]
        total = jax.lax.squeeze(total, ones)
        for dim in shards:
            total = _scatter_dim(total, dim - sum(one < dim for one in ones), over)
        total = jax.lax.expand_dims(total, ones)
        rest = [axis for axis in axes if not (shards and axis in over)]
        return jax.lax.psum(total, rest) if rest else total

    return execution.per_device(local, tuple(specs), out)(*arrays)


# of a tile, in which TPUs hold the last two dims of an array
_SUBLANES = 8
_LANES = 128


def _scatter_dim(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Returns the device's shard, along a dim, of the sum of x over mesh axes; in a
    manual region.

    The SparseCore cuts rows into pieces of equal size. Where it finds none (11,008
    columns, or 128,256) it sums whole arrays, so it gets the tiles of a matrix as rows:
    they lie in memory just like that.
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
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    # The barrier keeps the product as it is: made in tiles, it would cost half as much
    # again.
    x = jax.lax.optimization_barrier(jnp.moveaxis(x, dim, 0))
    tiles = x.reshape(rows // _SUBLANES, _SUBLANES, columns // _LANES, _LANES)
    tiles = tiles.swapaxes(1, 2).reshape(-1, _LANES)
    tiles = jax.lax.psum_scatter(tiles, axes, scatter_dimension=0, tiled=True)
    tiles = tiles.reshape(-1, columns // _LANES, _SUBLANES, _LANES).swapaxes(1, 2)
    return jnp.moveaxis(tiles.reshape(rows // parts, columns), 0, dim)


def _keeps_dims() -> bool:
    return execution.current().platform == "tpu"


def waits_for_sums() -> bool:
    """Checks whether the sums of gradients over devices are part of the order of
    compute.

    On SparseCores they run beside it, and a fixed order would only make compute wait
    for them.
    """
    return _keeps_dims() and not execution.current().sparse_core_collectives


def rows_of(x: jax.Array, trailing: int) -> jax.Array:
    """Returns [rows, columns], the last `trailing` dims merged, and the others where
    they may be.

    Where devices share out the sequence, merging it with the batch would shuffle
    samples about.
    """
    columns = math.prod(x.shape[x.ndim - trailing :])
    if execution.current().sequence_is_split:
        return x.reshape(*x.shape[: x.ndim - trailing], columns)
    return x.reshape(-1, columns)


def side_by_side(arrays: Sequence[jax.Array], parts: int) -> jax.Array:
    """Joins columns [..., N] of several kernels as [..., parts, N of all / parts].

    Every tensor shard stacks its own columns: nothing moves.
    """
    split = [x.reshape(*x.shape[:-1], parts, -1) for x in arrays]
    return jnp.concatenate(split, axis=-1)


def matrix_of(kernel: jax.Array, contract: int) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[:contract]), -1)
