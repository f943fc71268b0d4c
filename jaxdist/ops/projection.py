"""Matrix products of activations with parameters, laid out and rounded as training wants them.

`project` is an einsum with four habits that plain autodiff under a partitioner does not have:
kernels are cast to the activations' dtype and gathered from their fsdp shards here, and again in
the backward pass, so that neither a cast nor a gathered copy is kept; a kernel's gradient leaves
its product in float32 and is reduced across devices in float32, in shards; and several kernels of
one input (query, key and value; gate and up) give their input's gradient by one product, so that a
tensor-parallel layer reduces once, not once a kernel (Megatron-LM's f operator, arXiv:1909.08053).

Products run on [rows, columns]: with two dims summed over at once (batch and sequence, in a
kernel's gradient) XLA's CPU backend copies an operand transposed, which costs a quarter of the
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import sharding

Names = tuple[str | None, ...]


def project(x: jax.Array, *kernels: nnx.Variable, contract: int = 1) -> tuple[jax.Array, ...]:
    """Returns the product of `x` with each kernel, in the dtype of `x`.

    Args:
      x: [..., *K], its last `contract` dims are summed over.
      kernels: parameters [*K, *out], with their logical names as metadata.
      contract: number of dims summed over.
    """
    names = tuple(getattr(kernel, "logical", ()) for kernel in kernels)
    return _project(x, tuple(kernel[...] for kernel in kernels), names, contract)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _project(x, kernels, names: tuple[Names, ...], contract: int):
    return _forward(x, kernels, names, contract)[0]


def _forward(x, kernels, names, contract):
    rows = _rows(x, contract)
    outputs = tuple(
        (rows @ _matrix(sharding.gather(kernel, name, x.dtype), contract)).reshape(
            *x.shape[: x.ndim - contract], *kernel.shape[contract:]
        )
        for kernel, name in zip(kernels, names, strict=True)
    )
    return outputs, (x, kernels)


def _backward(names, contract, residuals, cotangents):
    x, kernels = residuals
    gathered = [sharding.gather(kernel, name, x.dtype) for kernel, name in zip(kernels, names, strict=True)]
    columns = [_rows(dy, dy.ndim - x.ndim + contract) for dy in cotangents]
    rows = _rows(x, contract)
    gradients = tuple(
        _kernel_gradient(rows, dy, kernel, name)
        for kernel, name, dy in zip(kernels, names, columns, strict=True)
    )
    dx = _input_gradient(columns, [_matrix(k, contract) for k in gathered], _parts(kernels, contract))
    return dx.astype(x.dtype).reshape(x.shape), gradients


def _kernel_gradient(rows, dy, kernel, names: Names):
    """Returns the gradient of one kernel, summed in float32 on the device and across devices."""
    axes = tuple(range(rows.ndim - 1))
    product = jnp.tensordot(rows, dy, (axes, axes), preferred_element_type=jnp.float32)
    return sharding.scatter(product.reshape(kernel.shape), names).astype(kernel.dtype)


def _input_gradient(columns: Sequence[jax.Array], matrices: Sequence[jax.Array], parts: int):
    """Returns the sum over kernels of dy @ kernel.T; with tensor parts as one product."""
    if parts > 1 and len(matrices) > 1:
        # Every tensor shard stacks its own columns: nothing moves, and one sum crosses shards.
        lead, rows = columns[0].shape[:-1], matrices[0].shape[0]
        kernel = jnp.concatenate([m.reshape(rows, parts, -1) for m in matrices], axis=2)
        dy = jnp.concatenate([d.reshape(*lead, parts, -1) for d in columns], axis=-1)
        return jnp.einsum("...tn,rtn->...r", dy, kernel)
    products = [dy @ matrix.T for dy, matrix in zip(columns, matrices, strict=True)]
    return sum(products[1:], products[0])


def _parts(kernels, contract: int) -> int:
    """Returns the number of tensor shards if it divides the first output dim of every kernel."""
    size = sharding.axis_size("tensor")
    return size if all(kernel.shape[contract] % size == 0 for kernel in kernels) else 1


def _rows(x: jax.Array, trailing: int) -> jax.Array:
    """Returns [rows, columns], the last `trailing` dims merged, and the others where they may be.

    Where devices share out the sequence, merging it with the batch would shuffle samples about.
    """
    columns = math.prod(x.shape[x.ndim - trailing :])
    if sharding.sequence_is_split():
        return x.reshape(*x.shape[: x.ndim - trailing], columns)
    return x.reshape(-1, columns)


def _matrix(kernel: jax.Array, contract: int) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[:contract]), -1)


_project.defvjp(_forward, _backward)
