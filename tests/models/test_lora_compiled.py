"""Memory of quantised bases, by the compiler for an H100 that is not here.

One child process compiles all cases and prints a JSON line per case.
"""

import importlib.util
import json
import math

import pytest

from support.compilers import compiled_apart

LAYERS, D, F, VOCAB, S = 8, 1024, 4096, 512, 64
MODEL = {
    "num_layers": LAYERS,
    "d_model": D,
    "d_ff": F,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
}
# The smallest kernel of a layer. All else is smaller: activations, adapters, scales.
KERNEL = D * D
DEVICES = {"one": 1, "sharded": 4}
BASES = ("nf4", "int8", "none")
DTYPES = {"nf4": "u8", "int8": "s8", "none": "bf16"}  # of the stored kernels
FLOATS = ("f32", "bf16")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None,
        reason="ahead-of-time GPU compiles need its plugin: jaxdist[aot-gpu]",
    ),
]


def _compile(where: str, base: str) -> dict:
    """Returns sizes, loops and gathers of a case's program; runs in the child."""
    from jaxdist.planner import targets
    from jaxdist.telemetry import hlo
    from jaxdist.trainer import compose, run_config, validation

    devices = targets.devices(targets.parse(f"h100:1x{DEVICES[where]}"))
    config = run_config.default_config()
    config.update_from_flattened_dict(
        {f"model.{key}": value for key, value in MODEL.items()}
        | {
            "mesh.data": 1,
            "mesh.fsdp": DEVICES[where],
            "batch.global_size": DEVICES[where],
            "batch.sequence_length": S,
            "precision.compute": "bfloat16",
            "precision.params": "bfloat16",
            "remat.policy": "full",
            "lora.rank": 4,
            "lora.base": base,
        }
    )
    run = run_config.from_config(config)
    composition = validation.validate(run, devices, with_data=False)
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(run, DEVICES[where]))
    traced = built.step.trace(built.abstract_state, batch)
    program = traced.lower(lowering_platforms=("cuda",)).compile()
    carried: list = []
    gathered: list = []
    for instructions in hlo.parse(program.as_text()).computations.values():
        for step in instructions.values():
            if step.opcode == "while":
                carried += step.types
            if step.opcode in ("all-gather", "all-gather-start"):
                gathered += step.types
    analysis = program.memory_analysis()
    return {
        "case": f"{where}-{base}",
        "peak": analysis.peak_memory_in_bytes,
        "temp": analysis.temp_size_in_bytes,
        "carried": carried,
        "gathered": gathered,
    }


def _row(where: str, base: str) -> dict:
    return compiled_apart(__file__, timeout=1800)[f"{where}-{base}"]


def _whole(types: list) -> list[str]:
    """Returns the dtypes of arrays with at least as many elements as a kernel."""
    return [dtype for dtype, shape in types if math.prod(shape) >= KERNEL]


@pytest.mark.parametrize("where", DEVICES)
def test_fewer_bits_take_less_memory(where):
    nf4, int8, plain = (_row(where, base)["peak"] for base in BASES)
    assert nf4 < 0.9 * int8
    assert int8 < 0.9 * plain


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("where", DEVICES)
def test_one_layer_is_whole_at_a_time(where, base):
    row = _row(where, base)
    carried = _whole(row["carried"])
    assert DTYPES[base] in carried  # the stacks of codes
    assert not {*carried} & {*FLOATS}
    float32_layer = 4 * (4 * D * D + 3 * D * F)
    assert row["temp"] < float32_layer


@pytest.mark.parametrize("base", BASES)
def test_kernels_cross_devices_as_they_are_stored(base):
    assert {*_whole(_row("sharded", base)["gathered"])} == {DTYPES[base]}


if __name__ == "__main__":
    for where in DEVICES:
        for base in BASES:
            print(json.dumps(_compile(where, base)), flush=True)
