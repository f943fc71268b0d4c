"""Matmuls in 8-bit floats by an `Fp8Recipe`: codes, scales and gradients.

A scale is computed from the largest value that it scales, so there is no state. It is a
power of two, rounded down. Such a scale changes exponents and rounds nothing. So a
layout or a microbatch may change a scale without changing the result, except for values
2**14 times smaller than the largest.

Operands enter a matmul in 8 bits, and its result is scaled afterwards. XLA compiles
this to 8-bit matmuls, instead of a pair of conversions. A kernel has three matmuls.
Each has its own codes, because a scale belongs to the dims that a matmul sums over.

Letters: `K` inputs of a kernel, `N` its outputs, each with all dims merged; `M` rows of
activations.
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
    Kernel,
    kernel_gradient,
    matrix_of,
    rows_of,
    side_by_side,
)
from jaxdist.parallel import execution
from jaxdist.parallel.formats.fp8 import Fp8Recipe
from jaxdist.parallel.remat import FP8_PRODUCTS
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import Names

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)
# exponent of the largest value, which is 1.75 times a power of two
_TOP = {E4M3: 8, E5M2: 15}
# layout of float32
_MANTISSA = 23  # bits
_BIAS = 127  # offset of the exponent
_SPECIAL = 255  # exponent of inf and NaN
# largest exponent of a scale: the scale and its inverse are normal numbers
_LARGEST = 126


class Codes(NamedTuple):
    """Arrays in 8-bit floats with common scales: a value is its code times `inverse`."""

    codes: tuple[jax.Array, ...]
    # float32 powers of two, one for each index of the dims that are not scaled together
    inverse: jax.Array


def quantise(
    arrays: Sequence[jax.Array],
    axes: Sequence[Sequence[int]],
    dtype: Any,
    *,
    tensorwise: bool = False,
) -> Codes:
    """Converts arrays to codes, with one scale for all values along `axes`.

    A value that is not finite makes all codes of its scale NaN, so that the step is
    skipped. Zeros stay zeros.

    Args:
      arrays: arrays of any float dtype.
      axes: for each array, the dims that share a scale; the other dims are equal in all
        arrays.
      dtype: E4M3 or E5M2.
      tensorwise: whether all values have one scale; `inverse` is then a scalar.
    """
    axes = [
        range(x.ndim) if tensorwise else dims
        for x, dims in zip(arrays, axes, strict=True)
    ]
    pairs = list(zip(arrays, map(tuple, axes), strict=True))
    # The maximum over devices is in float32, too: XLA for CPUs aborts on some
    # collectives of bfloat16 (see `execution.summable`).
    amax, *others = (jnp.max(jnp.abs(x).astype(jnp.float32), dims) for x, dims in pairs)
    for other in others:
        amax = jnp.maximum(amax, other)
    scale, inverse = _powers_of_two(amax, dtype)
    values = (x.astype(jnp.float32) * jnp.expand_dims(scale, dims) for x, dims in pairs)
    return Codes(tuple(x.astype(dtype) for x in values), inverse)


def _powers_of_two(amax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the largest powers of two that scale values into a dtype's range.

    They are computed from the bits of a float: the last digit of a logarithm depends on
    the backend.

    Args:
      amax: float32 largest absolute values.
      dtype: E4M3 or E5M2.

    Returns:
      The powers (NaN where amax is not finite), and their inverses.
    """
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    exponent = (bits >> _MANTISSA) & _SPECIAL
    # whether amax is more than 1.75 times its power of two
    above = (bits & ((1 << _MANTISSA) - 1)) > 3 << (_MANTISSA - 2)
    power = jnp.clip(_TOP[dtype] + _BIAS - exponent - above, -_LARGEST, _LARGEST)

    def two_to_the(power: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((power + _BIAS) << _MANTISSA, jnp.float32)

    scale = jnp.where(exponent == _SPECIAL, jnp.nan, two_to_the(power))
    return scale, two_to_the(-power)


def gather(
    kernels: Sequence[jax.Array],
    names: Sequence[Names],
    axes: Sequence[Sequence[int]],
    *,
    tensorwise: bool = False,
) -> Codes:
    """Converts kernels to codes and gathers these from fsdp shards, one byte per element.

    Scales are those of the whole kernel: shards first compute the largest value
    together, in float32.

    Args:
      kernels: kernels, as they are stored.
      names: logical names of each kernel.
      axes: see `quantise`.
      tensorwise: see `quantise`.
    """
    now = execution.current()
    codes, inverse = quantise(kernels, axes, E4M3, tensorwise=tensorwise)
    # Bytes are gathered: for 8-bit floats, some partitioners gather the values that
    # were cast, at four bytes each.
    stored = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in codes)
    stored = (
        now.lay_out(x, Rules.stored, n) for x, n in zip(stored, names, strict=True)
    )
    gathered = (
        now.lay_out(x, Rules.computed, n) for x, n in zip(stored, names, strict=True)
    )
    if now.mesh is not None and not tensorwise:
        spec = now.rules.computed(names[0], kernels[0].shape)
        scale_spec = P(*(entry for i, entry in enumerate(spec) if i not in axes[0]))
        inverse = now.constrain(inverse, scale_spec)
    codes = tuple(jax.lax.bitcast_convert_type(x, E4M3) for x in gathered)
    return Codes(codes, inverse)


def product(
    x: jax.Array, y: jax.Array, dims: tuple[Sequence[int], Sequence[int]], dtype: Any
) -> jax.Array:
    """Multiplies codes and sums over `dims` of each, without applying scales."""
    return jax.lax.dot_general(x, y, (dims, ((), ())), preferred_element_type=dtype)


def apply_scales(codes: jax.Array, *inverses: jax.Array) -> jax.Array:
    """Applies the inverse scales of both operands to a product of codes, in its dtype.

    An inverse has as many dims as the product, or none. It is a power of two, so
    nothing is rounded again.
    """
    for inverse in inverses:
        codes = codes * inverse.astype(codes.dtype)
    return codes


# --- multiplying ----------------------------------------------------------------------

_Residuals = tuple[jax.Array, Sequence[Kernel]]  # x, kernels


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def multiply(
    x: jax.Array,
    kernels: Sequence[Kernel],
    names: Sequence[Names],
    contract: int,
    recipe: Fp8Recipe,
) -> tuple[jax.Array, ...]:
    """Multiplies `x` with each kernel by a recipe.

    Args:
      x: [..., *K]; the last `contract` dims are summed over.
      kernels: [*K, *N] each, as they are stored.
      names: logical names of each kernel.
      contract: number of dims in K.
      recipe: formats and scales of the codes.
    """
    return _forward(x, kernels, names, contract, recipe)[0]


def _forward(
    x: jax.Array,
    kernels: Sequence[Kernel],
    names: Sequence[Names],
    contract: int,
    recipe: Fp8Recipe,
) -> tuple[tuple[jax.Array, ...], _Residuals]:
    tensorwise = recipe.scales == "tensor"
    rows = rows_of(x, contract)
    last = rows.ndim - 1
    (codes,), inverse = quantise([rows], [[last]], E4M3, tensorwise=tensorwise)
    outputs = []
    for kernel, kernel_names in zip(_plain(kernels), names, strict=True):
        (kernel_codes,), inverse_N = gather(
            [kernel], [kernel_names], [range(contract)], tensorwise=tensorwise
        )
        y = product(codes, matrix_of(kernel_codes, contract), ([last], [0]), x.dtype)
        inverse_N = inverse_N.ravel()
        y = apply_scales(
            y, _expand(inverse, y.ndim, 0), _expand(inverse_N, y.ndim, last)
        )
        y = checkpoint_name(y, FP8_PRODUCTS)
        outputs.append(
            y.reshape(*x.shape[: x.ndim - contract], *kernel.shape[contract:])
        )
    return tuple(outputs), (x, kernels)


def _backward(
    names: Sequence[Names],
    contract: int,
    recipe: Fp8Recipe,
    residuals: _Residuals,
    cotangents: Sequence[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    x, kernels = residuals
    plain = _plain(kernels)
    columns = [
        rows_of(dy, kernel.ndim - contract)
        for dy, kernel in zip(cotangents, plain, strict=True)
    ]
    dx = _input_gradient(
        columns, plain, names=names, contract=contract, dtype=x.dtype, recipe=recipe
    )
    dx = dx.reshape(x.shape)
    gradients: list[jax.Array | None] = []
    for i, kernel in enumerate(kernels):
        if isinstance(kernel, FrozenKernel):
            gradients.append(None)
        elif recipe.has_kernel_gradients:
            rows = rows_of(x, contract)
            gradients.append(
                _kernel_gradient(
                    rows,
                    columns[i],
                    kernel,
                    names=names[i],
                    contract=contract,
                    recipe=recipe,
                )
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
    """Sums dy times the transposed kernel over kernels, like one wide kernel.

    It is one matmul, so that a tensor-parallel layer sums once. So all kernels have
    common scales.

    Args:
      columns: [rows, N] cotangents of each output.
      kernels: [*K, *N] each, as they are stored.
      names: logical names of each kernel.
      contract: number of dims in K.
      dtype: dtype of the result.
      recipe: formats and scales of the codes.

    Returns:
      [rows, K].
    """
    last = columns[0].ndim - 1
    dy_codes, inverse = quantise(
        columns,
        [[last]] * len(columns),
        jnp.dtype(recipe.gradient_codes),
        tensorwise=recipe.scales == "tensor",
    )
    kernel_codes, inverse_K = gather(
        kernels,
        names,
        [range(contract, kernel.ndim) for kernel in kernels],
        tensorwise=recipe.kernel_scales_backward == "tensor",
    )
    matrices = [matrix_of(codes, contract) for codes in kernel_codes]
    parts = execution.current().axis_size("tensor")
    if any(kernel.shape[contract] % parts for kernel in kernels):
        parts = 1
    dx = product(
        side_by_side(dy_codes, parts),
        side_by_side(matrices, parts),
        ([last, last + 1], [1, 2]),
        dtype,
    )
    return apply_scales(
        dx, _expand(inverse, dx.ndim, 0), _expand(inverse_K.ravel(), dx.ndim, last)
    )


def _kernel_gradient(
    x: jax.Array,
    dy: jax.Array,
    kernel: jax.Array,
    names: Names,
    contract: int,
    recipe: Fp8Recipe,
) -> jax.Array:
    """Computes a kernel's gradient.

    Args:
      x: [rows, K] inputs.
      dy: [rows, N] cotangents of the outputs.
      kernel: [*K, *N].
      names: logical names of the kernel.
      contract: number of dims in K.
      recipe: formats and scales of the codes.
    """
    dtype = jnp.dtype(execution.current().reduce)
    tensorwise = recipe.scales == "tensor"
    dy_format = jnp.dtype(recipe.gradient_codes)
    axes = tuple(range(x.ndim - 1))
    (x_codes,), inverse_K = quantise([x], [axes], E4M3, tensorwise=tensorwise)
    (dy_codes,), inverse_N = quantise([dy], [axes], dy_format, tensorwise=tensorwise)
    # The sum over devices precedes the scaling: then it is the sum of the matmul
    # itself, and can be scattered.
    gradient = product(x_codes, dy_codes, (axes, axes), dtype).reshape(kernel.shape)
    gradient = execution.scatter(gradient, names)
    dims_K = kernel.shape[:contract]
    dims_N = kernel.shape[contract:]
    inverses = []
    for inverse, dims, at in ((inverse_K, dims_K, 0), (inverse_N, dims_N, contract)):
        if not tensorwise:
            inverse = inverse.reshape(dims)
        inverses.append(_expand(inverse, gradient.ndim, at))
    return apply_scales(gradient, *inverses).astype(kernel.dtype)


def _plain(kernels: Sequence[Kernel]) -> list[jax.Array]:
    return [
        kernel.parts[0] if isinstance(kernel, FrozenKernel) else kernel
        for kernel in kernels
    ]


def _expand(scales: jax.Array, ndim: int, at: int) -> jax.Array:
    """Adds dims of size 1 to scales, so that theirs begin at dim `at` of `ndim`.

    A scalar is returned unchanged.
    """
    if not scales.ndim:
        return scales
    return scales.reshape((1,) * at + scales.shape + (1,) * (ndim - at - scales.ndim))
