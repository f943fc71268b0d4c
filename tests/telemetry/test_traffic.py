"""Bytes of compiled programs, and what limits a step."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist.hardware import chips
from jaxdist.telemetry import traffic

N = 256


def program(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_a_product_reads_its_operands_and_writes_its_result():
    x = jax.ShapeDtypeStruct((N, N), jnp.float32)
    found = traffic.program_bytes(program(lambda a, b: a @ b, x, x))
    assert found == pytest.approx(3 * 4 * N * N, rel=0.01)


def test_a_loop_counts_each_time_and_of_a_stack_the_slice():
    layers = 8
    kernels = jax.ShapeDtypeStruct((layers, N, N), jnp.float32)
    x = jax.ShapeDtypeStruct((N, N), jnp.float32)

    def stack(x, kernels):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, kernels)[0]

    layer = 4 * N * N
    found = traffic.program_bytes(program(stack, x, kernels))
    # each layer reads x and its kernel and writes x; tanh may be a pass of its own
    assert 3 * layers * layer <= found <= 8 * layers * layer


ON_CORE = """
HloModule step

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %kept = f32[1024]{0:T(1024)S(1)} copy(f32[1024]{0:T(1024)} %p)
  %pair = (f32[512]{0:T(512)}, f32[1024]{0:T(1024)S(1)}) custom-call(%kept), custom_call_target="x"
  ROOT %out = f32[1024]{0:T(1024)} copy(f32[1024]{0:T(1024)S(1)} %kept)
}
"""


def test_arrays_on_a_tpus_core_are_no_traffic():
    # the parameter is read once, half of the pair and the result are written
    assert traffic.program_bytes(ON_CORE) == 4096 + 2048 + 4096


def test_a_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        traffic.program_bytes("")


def test_a_step_is_bound_by_what_takes_longer():
    a100 = chips.FAMILIES["a100"]
    threshold = 312e12 / 2039e9
    slow = traffic.roofline(1e12, 1e12 / (0.9 * threshold), a100, "bfloat16")
    fast = traffic.roofline(1e12, 1e12 / (1.1 * threshold), a100, "bfloat16")
    assert (slow.bound, fast.bound) == ("memory", "compute")
    assert slow.threshold == fast.threshold == pytest.approx(153, abs=0.1)
    assert slow.text().startswith("memory-bound: 138 FLOPs per byte of memory traffic")
    assert slow.text().endswith("from 153 on, compute is the limit")
    assert slow.to_json()["bound"] == "memory"


@pytest.mark.parametrize(
    ("flops", "moved", "family", "dtype"),
    [
        (None, 1e9, "a100", "bfloat16"),
        (1e12, 0, "a100", "bfloat16"),
        (1e12, 1e9, "t4", "bfloat16"),  # no published peak
    ],
)
def test_without_a_number_nothing_is_said(flops, moved, family, dtype):
    chip = chips.FAMILIES[family]
    assert traffic.roofline(flops, moved, chip, dtype) is None
    assert traffic.roofline(1e12, 1e9, None, dtype) is None
