"""Codes and scales of products in 8-bit floats, and which kernels are multiplied so.

The recipes are torchao's (torchao.float8, 0.18): a scale is taken anew from the largest
value of what it scales, so there is no state, and it is a power of two, rounded down.
Such a scale moves an exponent and rounds nothing: what a layout or a part of a batch
changes of a scale, codes and products do not feel, but where values are 2**14 times
smaller than the largest. Operands go to the product as they are multiplied, in 8 bits,
and its result is scaled after: XLA compiles that, and not a pair of conversions, into
8-bit products.

Letters: K the inputs of a kernel and N its outputs, each all dims of them together; M
rows of activations.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution
from jaxdist.parallel.precision import Matmul
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.param_names import Names

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# exponent of the largest value, which is 1.75 times that power of two
_TOP = {E4M3: 8, E5M2: 15}
_MULTIPLE = 16  # of K and N, as the tensor cores take them
# of float32: bits, exponent's offset, exponent of inf and NaN
_MANTISSA, _BIAS, _SPECIAL = 23, 127, 255
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
    now, (codes, inverse) = (
        execution.current(),
        quantise(kernels, axes, E4M3, tensorwise=tensorwise),
    )
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


# --- which kernels --------------------------------------------------------------------


def why_not(
    names: Names, dims: Sequence[int], contract: int, recipe: Matmul, *, small: bool
) -> str:
    """Returns why a kernel is multiplied in the compute dtype; "" if it is in 8-bit
    floats.

    Sizes as torchao's filters for H100 have them (`_auto_filter_for_recipe`): below,
    taking the scales costs more than the product saves.

    Args:
      names: its logical names; () if it has none.
      dims: [*K, *N].
      contract: number of dims in K.
      small: kernels below these sizes, too.
    """
    if "vocab" in names:
        return "scores of the vocabulary"
    if names and None in names:
        return "adapter, router, patches or classes"
    K, N = math.prod(dims[:contract]), math.prod(dims[contract:])
    if K % _MULTIPLE or N % _MULTIPLE:
        return f"{K} x {N}: not multiples of {_MULTIPLE}"
    if small or not _is_small(K, N, recipe):
        return ""
    return f"{K} x {N}: too small to gain"


def _is_small(K: int, N: int, recipe: Matmul) -> bool:
    if recipe == "fp8_tensorwise":
        return K <= 4096 and N <= 1024
    return N <= 2048 or K <= 1024 or (N <= 4096 and K <= 2048)
