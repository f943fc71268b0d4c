"""Fingerprint of a state, computed on its devices: the same value on any mesh.

The bits of each element are mixed with a hash of its global index, and summed in uint32
with wrap-around. The sum does not depend on its order, so sharding, device count and
process count change nothing.

The mix is one-to-one. A change of a single element, such as a flipped bit, therefore
always changes the sum. Any other difference stays unseen with probability 2^-32 per
array.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.parallel.offload import to_device

# {bytes of an element: type that its bits are read as}
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
# Constants of murmur3's finalizer.
_GOLDEN = 0x9E3779B1
_MIX1 = 0x85EBCA6B
_MIX2 = 0xC2B2AE35
# Slices of an array on a single CPU device that are added before the sum. XLA does not
# vectorise a sum over all elements, but it does so for an addition of arrays. With more
# slices it stores each of them.
_SLICES = 8


@jax.jit
def start(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Computes one sum per array, in the order of names, as uint32 `[len(arrays)]`.

    All arrays are on one mesh. With several processes, each makes the same call. The
    function does not wait for the device, and may be compiled ahead of time.
    """
    return jnp.stack([array_sum(array) for _, array in sorted(arrays.items())])


def finish(names: Iterable[str], sums: jax.Array) -> dict[str, str]:
    """Waits for the sums of `start`, and returns {name: 8 hex digits}.

    Args:
      names: names of the arrays of `start`, in any order.
      sums: result of `start`.
    """
    return {
        name: f"{int(x):08x}"
        for name, x in zip(sorted(names), np.asarray(sums), strict=True)
    }


def of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Computes the fingerprints of arrays: {name: 8 hex digits}."""
    return finish(arrays, start(arrays))


def array_sum(array: jax.Array) -> jax.Array:
    """Computes the uint32 sum of an array, or of the part on one device.

    A change of one element always changes the sum.
    """
    array = to_device(array)  # offloaded optimizer state is in host memory
    if array.dtype == jnp.bool_ or (
        jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize == 1
    ):
        array = array.astype(jnp.uint8)  # this includes types of less than a byte
    uint = _UINTS[array.dtype.itemsize]
    # Elements of 8 bytes become [..., 2].
    bits = lax.bitcast_convert_type(array, uint).astype(jnp.uint32)
    if bits.size % _SLICES == 0 and _has_one_cpu():
        return _sum_in_slices(bits)
    index = jnp.uint32(0)
    stride = 1
    for dim in reversed(range(bits.ndim)):
        index = index + lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(
            stride % 2**32
        )
        stride *= bits.shape[dim]
    return jnp.sum(_mix(bits, index), dtype=jnp.uint32)


def _mix(bits: jax.Array, index: jax.Array) -> jax.Array:
    """Mixes the bits of elements with their global indices, both uint32."""
    x = bits ^ (index * jnp.uint32(_GOLDEN) + jnp.uint32(_MIX1))
    x = (x ^ (x >> 16)) * jnp.uint32(_MIX1)
    x = (x ^ (x >> 13)) * jnp.uint32(_MIX2)
    mixed: jax.Array = x ^ (x >> 16)
    return mixed


def _has_one_cpu() -> bool:
    """Checks whether there is one device, a CPU. So no array is split."""
    return jax.device_count() == 1 and jax.default_backend() == "cpu"


def _sum_in_slices(bits: jax.Array) -> jax.Array:
    """Computes the sum of an array that is on one device, in a third of the time.

    The order of a sum in uint32 does not matter, so the value is the same.
    """
    flat = bits.reshape(-1)
    size = flat.size // _SLICES
    index = lax.iota(jnp.uint32, size)
    sums = jnp.zeros(size, jnp.uint32)
    for number in range(_SLICES):
        first = number * size
        part = flat[first : first + size]
        sums = sums + _mix(part, index + jnp.uint32(first % 2**32))
    # without a barrier, XLA makes one slow sum of it again
    sums = lax.optimization_barrier(sums)
    return jnp.sum(sums, dtype=jnp.uint32)
