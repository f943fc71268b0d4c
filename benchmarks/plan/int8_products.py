"""Would int8 matmuls be faster than bfloat16 ones on TPUs, with quantising included?

    JAX_PLATFORMS=cpu python benchmarks/plan/int8_products.py --out int8.json

Compiles one matmul of 8,192 x 4,096 x 14,336 for each chip with libtpu, without a TPU, and
prints the compiler's cycles relative to bfloat16. "int8" has operands that are int8
already. "quantised per row" and "quantised per tensor" begin with bfloat16 operands, as a
training step does: they find the scales, round, multiply, and scale the result. Half a
minute.
"""

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a metadata server
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
ROWS = 8192
CONTRACTED = 4096
COLUMNS = 14336
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiplies matrices; int8 operands are summed in int32."""
    integers = left.dtype == jnp.int8
    result = jnp.int32 if integers else left.dtype
    return jnp.matmul(left, right, preferred_element_type=result)


def quantise(x: jax.Array, axis: int | None) -> tuple[jax.Array, jax.Array]:
    """Rounds to int8 with a power of two as scale, along `axis` or for the whole array."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True)
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(largest, 1e-30) / 127)))
    return jnp.round(x / scale).astype(jnp.int8), scale


def multiply_quantised(per_row: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes a bfloat16 matmul that multiplies in int8."""

    def multiply_in_int8(left: jax.Array, right: jax.Array) -> jax.Array:
        left_int8, left_scale = quantise(left, axis=1 if per_row else None)
        right_int8, right_scale = quantise(right, axis=0 if per_row else None)
        product = multiply(left_int8, right_int8).astype(jnp.float32)
        return (product * left_scale * right_scale).astype(jnp.bfloat16)

    return multiply_in_int8


def cycles(function: Callable, dtype: jnp.dtype, device: jax.Device) -> int:
    """Sums the compiler's cycles over a program's instructions."""
    sharding = SingleDeviceSharding(device)
    left = jax.ShapeDtypeStruct((ROWS, CONTRACTED), dtype, sharding=sharding)
    right = jax.ShapeDtypeStruct((CONTRACTED, COLUMNS), dtype, sharding=sharding)
    text = jax.jit(function).lower(left, right).compile().as_text()
    return sum(int(number) for number in _CYCLES.findall(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the numbers to this file, too")
    flags = parser.parse_args()
    rows = {}
    for chip, topology in CHIPS.items():
        device = topologies.get_topology_desc(
            topology_name=topology, platform="tpu"
        ).devices[0]
        bfloat16 = cycles(multiply, jnp.bfloat16, device)
        rows[chip] = {
            "bfloat16 cycles": bfloat16,
            "int8": cycles(multiply, jnp.int8, device) / bfloat16,
            "quantised per row": cycles(
                multiply_quantised(per_row=True), jnp.bfloat16, device
            )
            / bfloat16,
            "quantised per tensor": cycles(
                multiply_quantised(per_row=False), jnp.bfloat16, device
            )
            / bfloat16,
        }
        print(chip, json.dumps(rows[chip]))
    if flags.out:
        record = {"jax": jax.__version__, "rows": rows}
        flags.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
