"""A train step with products of 8-bit floats, compiled ahead of time for an H100 that
is not here.
"""

import importlib.util
import json

import pytest

from support.compilers import compiled_apart

D, F, HEADS, KV_HEADS, B, S = 4096, 12288, 32, 8, 8, 512
MODEL = {
    "num_layers": 2,
    "d_model": D,
    "d_ff": F,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": 128,
    "vocab_size": 512,
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None,
        reason="ahead-of-time GPU compiles need its plugin: jaxdist[aot-gpu]",
    ),
]


def _compile() -> dict:
    """Returns the products and gathers of the program by dtype, runs in the child."""
    from jaxdist.planner import targets
    from jaxdist.telemetry import flops, hlo
    from jaxdist.trainer import compose, run_config, validation

    devices = targets.devices(targets.parse("h100:1x4"))
    config = run_config.default_config()
    values = {f"model.{key}": value for key, value in MODEL.items()} | {
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
    }
    values |= {
        "mesh.data": 1,
        "batch.global_size": B,
        "batch.sequence_length": S,
        "remat.policy": "full",
    }
    values |= {"precision.compute": "bfloat16", "precision.matmul": "fp8_rowwise"}
    config.update_from_flattened_dict(values)
    run = run_config.from_config(config)
    composition = validation.validate(run, devices, with_data=False)
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(run, B))
    lowered = built.step.trace(built.abstract_state, batch).lower(
        lowering_platforms=("cuda",)
    )
    module = hlo.parse(lowered.compile().as_text())
    products: dict[str, float] = {}
    gathers: list[tuple[str, tuple[int, ...]]] = []
    for instructions in module.computations.values():
        for step in instructions.values():
            if count := flops.instruction_flops(instructions, step):
                sides = {instructions[name].types[0][0] for name in step.operands[:2]}
                kind = "+".join(sorted(sides))
                products[kind] = products.get(kind, 0) + count
            if step.opcode in ("all-gather", "all-gather-start"):
                # A start has its operands first, and a lone operand and result in no
                # tuple of their own.
                gathers += step.types[
                    len(step.types) // 2 if step.opcode.endswith("start") else 0 :
                ]
    return {"case": "h100", "products": products, "gathers": gathers}


def test_kernels_are_gathered_as_one_byte_and_multiplied_so():
    row = compiled_apart(__file__, timeout=1800)["h100"]
    eight_bits = [
        n for kind, n in row["products"].items() if {"f8e4m3fn"} == set(kind.split("+"))
    ]
    # Of a layer's query, out, gate, up and down: three products, and the forward one
    # again but of down.
    tokens, kernels = B * S // 2, D * (2 * HEADS * 128 + 3 * F) // 2
    assert sum(eight_bits) == 2 * tokens * (4 * kernels - D * F // 2)
    whole = {
        (dtype, tuple(shape))
        for dtype, shape in row["gathers"]
        if len(shape) > 1 and D in shape
    }
    # A tensor shard's half of them; key and value are too small, and the output layer
    # is left out.
    half = {(D, HEADS // 2, 128), (D, 128, HEADS // 2), (D, F // 2), (F // 2, D)}
    assert {shape for dtype, shape in whole if dtype == "u8"} == half
    assert {shape for dtype, shape in whole if dtype != "u8"} == {
        (D, KV_HEADS // 2, 128),
        (D, 256),
    }


if __name__ == "__main__":
    print(json.dumps(_compile()))
