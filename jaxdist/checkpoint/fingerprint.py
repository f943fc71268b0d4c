"""A fingerprint of a state, computed where it lies: the same value on any mesh.

Each element's bits are mixed with a hash of its global index and summed in wrap-around
uint32. The sum does not know its order, so sharding, device count and process count
change nothing. The mix is one-to-one, so a change of one element, a flipped bit say,
always changes the sum; any other difference goes unseen with probability 2^-32 an
array.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.parallel.offload import to_device

# by bytes an element
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
# murmur3's finalizer
_GOLDEN = 0x9E3779B1
_MIX1 = 0x85EBCA6B
_MIX2 = 0xC2B2AE35


@jax.jit
def start(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Returns uint32 [len(arrays)], one sum an array, in the order of names; does not
    wait for the device.

    All arrays lie on one mesh, and with several processes each makes the same call. May
    be compiled before.
    """
    return jnp.stack([array_sum(array) for _, array in sorted(arrays.items())])


def finish(names: Iterable[str], sums: jax.Array) -> dict[str, str]:
    """Returns {name: 8 hex digits} of what `start` returned for these arrays."""
    return {
        name: f"{int(x):08x}"
        for name, x in zip(sorted(names), np.asarray(sums), strict=True)
    }


def of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns {name: 8 hex digits}."""
    return finish(arrays, start(arrays))


def array_sum(array: jax.Array) -> jax.Array:
    """Returns the uint32 sum of an array, or of one device's part; a change of one
    element changes it.
    """
    array = to_device(array)  # optimizer state may wait on the host
    if array.dtype == jnp.bool_ or (
        jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize == 1
    ):
        array = array.astype(jnp.uint8)  # also what is smaller than a byte
    kind = _UINTS[array.dtype.itemsize]
    bits = lax.bitcast_convert_type(array, kind).astype(jnp.uint32)  # 8 bytes: [..., 2]
    index = jnp.uint32(0)
    stride = 1
    for dim in reversed(range(bits.ndim)):
        index = index + lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(
            stride % 2**32
        )
        stride *= bits.shape[dim]
    x = bits ^ (index * jnp.uint32(_GOLDEN) + jnp.uint32(_MIX1))
    x = (x ^ (x >> 16)) * jnp.uint32(_MIX1)
    x = (x ^ (x >> 13)) * jnp.uint32(_MIX2)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)
