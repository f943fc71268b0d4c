"""Matmuls in 8-bit floats, as an `Fp8Recipe` says: codes, scales and gradients.

A scale is taken anew from the largest value of what it scales, so there is no state,
and it is a power of two, rounded down.
Such a scale moves an exponent and rounds nothing: what a layout or a part of a batch
changes of a scale, codes and products do not feel, but where values are 2**14 times
smaller than the largest. Operands go to the product as they are multiplied, in 8 bits,
and its result is scaled after: XLA compiles that, and not a pair of conversions, into
8-bit products. A kernel has three products, each with codes of its own, since a scale
belongs to what a product sums over.

Letters: K the inputs of a kernel and N its outputs, each all dims of them together; M
rows of activations.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.ops.dense_matmul import (
    FrozenKernel,
    kernel_gradient,
    matrix_of,
    rows_of,
    side_by_side,
)
from jaxdist.parallel import execution
from jaxdist.parallel.formats.fp8 import Fp8Recipe
from jaxdist.parallel.remat import FP8_PRODUCTS
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.param_names import Names

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)
# exponent of the largest value, which is 1.75 times that power of two
_TOP = {E4M3: 8, E5M2: 15}
# of float32: bits, exponent's offset, exponent of inf and NaN
_MANTISSA = 23
_BIAS = 127
_SPECIAL = 255
_LARGEST = 126  # exponent of a scale: it and its inverse are normal numbers


class Codes(NamedTuple):
    """Arrays in 8-bit floats that share their scales: a value is its code times
    `inverse`.
    """

    codes: tuple[jax.Array, ...]
    # float32 powers of two, of the dims that a scale is not taken over
    inverse: jax.Array


def quantise(
    arrays: Sequence[jax.Array],
    axes: Sequence[Sequence[int]],
    dtype: Any,
    *,
    tensorwise: bool = False,
) -> Codes:
    """Returns the codes of arrays, with one scale for all that lies along `axes`.

    What is not finite makes all codes of its scale NaN, so that the step is skipped;
    zeros stay zeros.

    Args:
      arrays: of any float dtype.
      axes: of each array, the dims that a scale is taken over; the others are alike in
        all arrays.
      dtype: E4M3 or E5M2.
      tensorwise: one scale for all values instead, and `inverse` is a scalar.
    """
    axes = [
        range(x.ndim) if tensorwise else own
        for x, own in zip(arrays, axes, strict=True)
    ]
    pairs = list(zip(arrays, map(tuple, axes), strict=True))
    # Across devices in float32, too: some of XLA for CPUs in bfloat16 abort (see
    # `execution.sum_over`).
    first, *rest = (jnp.max(jnp.abs(x).astype(jnp.float32), own) for x, own in pairs)
    for amax in rest:
        first = jnp.maximum(first, amax)
    scale, inverse = _powers_of_two(first, dtype)
    scaled = (x.astype(jnp.float32) * jnp.expand_dims(scale, own) for x, own in pairs)
    return Codes(tuple(x.astype(dtype) for x in scaled), inverse)


def _powers_of_two(amax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the largest powers of two that take values up to amax into the dtype's
    range, and 1 / them.

    From the bits: a logarithm's last digit is another on each backend.
    """
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    exponent = (bits >> _MANTISSA) & _SPECIAL
    # more than 1.75 times its power of two
    above = (bits & ((1 << _MANTISSA) - 1)) > 3 << (_MANTISSA - 2)
    power = jnp.clip(_TOP[dtype] + _BIAS - exponent - above, -_LARGEST, _LARGEST)

    def two_to_the(power: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((power + _BIAS) << _MANTISSA, jnp.float32)

    return jnp.where(exponent == _SPECIAL, jnp.nan, two_to_the(power)), two_to_the(
        -power
    )


def gather(
    kernels: Sequence[jax.Array],
    names: Sequence[Names],
    axes: Sequence[Sequence[int]],
    *,
    tensorwise: bool = False,
) -> Codes:
    """Returns the codes of kernels as they are computed with: their fsdp shards are
    gathered as one byte.

    Scales are of the whole kernel: shards agree on the largest value first, in float32.
    """
    now = execution.current()
    codes, inverse = quantise(kernels, axes, E4M3, tensorwise=tensorwise)
    # Bytes: of 8-bit floats some partitioners gather what they were cast from, four
    # bytes each.
    stored = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in codes)
    stored = (
        now.lay_out(x, Rules.stored, n) for x, n in zip(stored, names, strict=True)
    )
    used = (
        now.lay_out(x, Rules.computed, n) for x, n in zip(stored, names, strict=True)
    )
    if now.mesh is not None and not tensorwise:
        spec = now.rules.computed(names[0], kernels[0].shape)
        inverse = now.constrain(
            inverse, P(*(s for i, s in enumerate(spec) if i not in axes[0]))
        )
    return Codes(tuple(jax.lax.bitcast_convert_type(x, E4M3) for x in used), inverse)


def product(
    x: jax.Array, y: jax.Array, dims: tuple[Sequence[int], Sequence[int]], dtype: Any
) -> jax.Array:
    """Returns the product of codes, summed over `dims` of each; its scales are not in
    it.
    """
    return jax.lax.dot_general(x, y, (dims, ((), ())), preferred_element_type=dtype)


def scaled(codes: jax.Array, *inverses: jax.Array) -> jax.Array:
    """Returns a product of codes in its own dtype times the inverses of both sides'
    scales.

    Both have as many dims as the product, or none. Powers of two: nothing is rounded
    again.
    """
    for inverse in inverses:
        codes = codes * inverse.astype(codes.dtype)
    return codes


# --- multiplying ----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def multiply(
    x: jax.Array,
    kernels: Sequence[jax.Array | FrozenKernel],
    names: Sequence[Names],
    contract: int,
    recipe: Fp8Recipe,
) -> tuple[jax.Array, ...]:
    """Multiplies `x` with each kernel by a recipe.

    Args:
      x: [..., *K], its last `contract` dims are summed over.
      kernels: [*K, *N] each, as they are stored.
      names: logical names of each kernel.
    """
    return _forward(x, kernels, names, contract, recipe)[0]


def _forward(x, kernels, names, contract, recipe):
    tensorwise = recipe.scales == "tensor"
    rows = rows_of(x, contract)
    last = rows.ndim - 1
    (codes,), inverse = quantise([rows], [[last]], E4M3, tensorwise=tensorwise)
    outputs = []
    for kernel, name in zip(_plain(kernels), names, strict=True):
        (used,), inverse_N = gather(
            [kernel], [name], [range(contract)], tensorwise=tensorwise
        )
        y = product(codes, matrix_of(used, contract), ([last], [0]), x.dtype)
        inverse_N = inverse_N.ravel()
        y = scaled(y, _expanded(inverse, y.ndim, 0), _expanded(inverse_N, y.ndim, last))
        y = checkpoint_name(y, FP8_PRODUCTS)
        outputs.append(
            y.reshape(*x.shape[: x.ndim - contract], *kernel.shape[contract:])
        )
    return tuple(outputs), (x, kernels)


def _backward(names, contract, recipe, residuals, cotangents):
    x, kernels = residuals
    plain = _plain(kernels)
    columns = [
        rows_of(dy, kernel.ndim - contract)
        for dy, kernel in zip(cotangents, plain, strict=True)
    ]
    dx = _input_gradient(columns, plain, names, contract, x.dtype, recipe)
    dx = dx.reshape(x.shape)
    gradients: list[jax.Array | None] = []
    for i, kernel in enumerate(kernels):
        if isinstance(kernel, FrozenKernel):
            gradients.append(None)
        elif recipe.has_kernel_gradients:
            rows = rows_of(x, contract)
            gradients.append(
                _kernel_gradient(rows, columns[i], kernel, names[i], contract, recipe)
            )
        else:
            gradients.append(
                kernel_gradient(x, cotangents[i], kernel, names[i], contract)
            )
    return dx, tuple(gradients)


multiply.defvjp(_forward, _backward)


def _input_gradient(
    columns: Sequence[jax.Array],
    kernels: Sequence[jax.Array],
    names: Sequence[Names],
    contract: int,
    dtype: Any,
    recipe: Fp8Recipe,
) -> jax.Array:
    """Sums dy times the kernel transposed over kernels, [rows.., K], as of one wide
    kernel.

    It is one product, so that a tensor-parallel layer sums once; for that all kernels
    share their scales.
    """
    last = columns[0].ndim - 1
    dy, inverse = quantise(
        columns,
        [[last]] * len(columns),
        jnp.dtype(recipe.gradient_codes),
        tensorwise=recipe.scales == "tensor",
    )
    used, inverse_K = gather(
        kernels,
        names,
        [range(contract, kernel.ndim) for kernel in kernels],
        tensorwise=recipe.kernel_scales_backward == "tensor",
    )
    matrices = [matrix_of(codes, contract) for codes in used]
    parts = execution.current().axis_size("tensor")
    if any(kernel.shape[contract] % parts for kernel in kernels):
        parts = 1
    dx = product(
        side_by_side(dy, parts),
        side_by_side(matrices, parts),
        ([last, last + 1], [1, 2]),
        dtype,
    )
    return scaled(
        dx, _expanded(inverse, dx.ndim, 0), _expanded(inverse_K.ravel(), dx.ndim, last)
    )


def _kernel_gradient(
    x: jax.Array,
    dy: jax.Array,
    kernel: jax.Array,
    names: Names,
    contract: int,
    recipe: Fp8Recipe,
) -> jax.Array:
    """Multiplies rows of a kernel's inputs and of its outputs' cotangents to its
    gradient.
    """
    dtype = jnp.dtype(execution.current().reduce)
    tensorwise = recipe.scales == "tensor"
    codes_of_dy = jnp.dtype(recipe.gradient_codes)
    axes = tuple(range(x.ndim - 1))
    (x,), inverse_K = quantise([x], [axes], E4M3, tensorwise=tensorwise)
    (dy,), inverse_N = quantise([dy], [axes], codes_of_dy, tensorwise=tensorwise)
    # Summed over devices before it is scaled: so the sum is the product's own, and can
    # be scattered.
    gradient = execution.scatter(
        product(x, dy, (axes, axes), dtype).reshape(kernel.shape), names
    )
    dims_K = kernel.shape[:contract]
    dims_N = kernel.shape[contract:]
    inverses = []
    for inverse, dims, at in ((inverse_K, dims_K, 0), (inverse_N, dims_N, contract)):
        if not tensorwise:
            inverse = inverse.reshape(dims)
        inverses.append(_expanded(inverse, gradient.ndim, at))
    return scaled(gradient, *inverses).astype(kernel.dtype)


def _plain(kernels: Sequence[jax.Array | FrozenKernel]) -> list[jax.Array]:
    return [
        kernel.parts[0] if isinstance(kernel, FrozenKernel) else kernel
        for kernel in kernels
    ]


def _expanded(scales: jax.Array, ndim: int, at: int) -> jax.Array:
    """Gives scales dims of size 1, so that theirs begin at dim `at` of `ndim`; leaves a
    scalar as it is.
    """
    if not scales.ndim:
        return scales
    return scales.reshape((1,) * at + scales.shape + (1,) * (ndim - at - scales.ndim))
