"""Whole train steps of a small model with experts, compiled ahead of time for chips
that are not here.

One child process a platform compiles its cases and prints a JSON line per case.
"""

import importlib.util
import json
import sys

import pytest

from support.compilers import compiled_apart

pytestmark = pytest.mark.slow

LAYERS, B, S, D, F, E, K = 2, 8, 512, 256, 256, 16, 2
CASES = {  # target, and values that change
    "v5e": ("tpu", "v5e:2x2", {"mesh.fsdp": 4, "remat.policy": "full"}),
    "v5e, experts shared out": (
        "tpu",
        "v5e:2x2",
        {"mesh.expert": 4, "remat.policy": "full"},
    ),
    "h100": ("gpu", "h100:1x4", {"mesh.fsdp": 4, "remat.policy": "full"}),
    "h100, experts shared out": (
        "gpu",
        "h100:1x4",
        {"mesh.expert": 4, "remat.policy": "full"},
    ),
}
MODEL = {
    "num_layers": LAYERS,
    "d_model": D,
    "d_ff": F,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "num_experts": E,
    "experts_per_token": K,
}


def _compile(name: str) -> dict:
    """Returns the products of a case's program; runs in the child."""
    from jaxdist.planner import targets
    from jaxdist.telemetry import flops, hlo
    from jaxdist.trainer import compose, run_config, validation

    platform, target, changes = CASES[name]
    devices = targets.devices(targets.parse(target))
    config = run_config.default_config()
    values = {f"model.{key}": value for key, value in MODEL.items()} | changes
    values |= {"mesh.data": 1, "batch.global_size": B, "batch.sequence_length": S}
    config.update_from_flattened_dict(values | {"precision.compute": "bfloat16"})
    run = run_config.from_config(config)
    composition = validation.validate(run, devices, with_data=False)
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(run, B))
    lowered = built.step.trace(built.abstract_state, batch).lower(
        lowering_platforms=("cuda" if platform == "gpu" else "tpu",)
    )
    text = lowered.compile().as_text()
    module = hlo.parse(text)
    products = [
        flops.instruction_flops(instructions, step)
        for instructions in module.computations.values()
        for step in instructions.values()
        if step.opcode in ("dot", "convolution", "ragged-dot")
        or step.value("custom_call_target").startswith("__cublas$")
    ]
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "ragged": text.count("ragged-dot("),
        "products": sorted(map(float, products)),
    }


def _row(name: str) -> dict:
    return compiled_apart(__file__, CASES[name][0], timeout=1800)[name]


# Of a device, by one kernel of all its experts' rows; a dense product has E / K times
# as many.
ACTIVE = 2 * (B * S * K // 4) * D * F
TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="ahead-of-time TPU compiles need libtpu: jaxdist[aot]",
)
GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="ahead-of-time GPU compiles need its plugin: jaxdist[aot-gpu]",
)


@TPU
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case[0] == "tpu"]
)
def test_a_step_on_tpus_multiplies_rows_with_their_experts_by_kernels_alone(name):
    row = _row(name)
    assert row["kernels"] >= 11
    assert not row["ragged"]
    # What is no kernel is attention's projections and the head's: a token's, of all of
    # which K rows are made.
    assert 0 < max(row["products"]) <= ACTIVE


@GPU
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case[0] == "gpu"]
)
def test_no_product_of_a_step_on_gpus_is_of_all_experts_and_all_rows(name):
    row = _row(name)
    # A first share of all experts is 1.25 of the rows of an even load; XLA computes
    # gate and up in one.
    assert not row["ragged"]
    assert 1.25 * ACTIVE <= max(row["products"]) <= 2 * 1.25 * 1.05 * ACTIVE
    assert 0.5 * E / K > 2 * 1.25 * 1.05  # far from a dense product


if __name__ == "__main__":
    for case, (own, *_) in CASES.items():
        if own == sys.argv[1]:
            print(json.dumps({"case": case} | _compile(case)), flush=True)
