"""The experts' products and their exchange, compiled ahead of time for chips that are
not here.

One child process a platform compiles all its cases and prints a JSON line per case.
"""

import importlib.util
import json
import math
import re
import sys

import pytest

from support.compilers import compiled_apart

pytestmark = pytest.mark.slow

LAYERS, B, S, D, F, E, K = 2, 8, 1024, 512, 256, 16, 4
CASES = {  # target, exchange, sizes of the mesh
    "one": ("tpu", "v5e:2x2", "auto", {}),
    "rounds": ("tpu", "v5e:2x2", "rounds", {"expert": 2, "fsdp": 2}),
    "gather": ("tpu", "v5e:2x2", "gather", {"expert": 2, "fsdp": 2}),
    "trillium": ("tpu", "v6e:2x2", "rounds", {"expert": 4}),
    "h100": ("gpu", "h100:1x4", "rounds", {"expert": 2, "fsdp": 2}),
}


def _step(rules, mesh, exchange: str):
    """Returns the gradient of two layers, rematerialised, and its abstract
    arguments.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxdist.ops.experts import experts, route
    from jaxdist.ops.experts.mixture import DOWN_NAMES, INPUT_NAMES
    from jaxdist.parallel import execution, remat

    names = {
        "router": ("d_model", None),
        "gate": INPUT_NAMES,
        "up": INPUT_NAMES,
        "down": DOWN_NAMES,
    }
    dims = {"router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}

    def layer(x, values):
        p = {
            name: nnx.Param(value, logical=names[name])
            for name, value in values.items()
        }
        router = p["router"][...].astype(x.dtype)
        routing = route(
            jnp.tensordot(x, router, 1, preferred_element_type=jnp.float32), K
        )
        kernels = p["gate"], p["up"], p["down"]
        out = experts(
            x, routing.ids, routing.weights, *kernels, jax.nn.silu, exchange=exchange
        )
        return execution.shard(x + out.x, "batch", "residual", None), out.stats

    def loss(values, x):
        x, stats = jax.lax.scan(remat.rematerialised(layer_of_x, "full"), x, values)
        return jnp.sum(x.astype(jnp.float32) ** 2), stats

    def layer_of_x(x, values):
        return layer(x, values)

    def step(values, x):
        with execution.activate(mesh, rules, compute="bfloat16"):
            return jax.value_and_grad(loss, has_aux=True)(values, x)

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    values = {
        name: abstract(
            (LAYERS, *size), jnp.float32, P(None, *rules.stored(names[name], size))
        )
        for name, size in dims.items()
    }
    x = (B, S, D)
    x = abstract(x, jnp.bfloat16, rules.activation(("batch", "sequence", None), x))
    where = jax.tree.map(lambda value: value.sharding, values)
    return jax.jit(step, out_shardings=(None, where)), (values, x)


def _compile(name: str) -> dict:
    """Returns what the compiler made of a case; runs in the child."""
    from jaxdist.planner import targets
    from jaxdist.telemetry import flops, hlo
    from support.experts import rules_and_mesh
    from support.programs import collectives

    platform, target, exchange, sizes = CASES[name]
    devices = targets.devices(targets.parse(target))
    rules, mesh = rules_and_mesh(devices, **sizes)
    step, arguments = _step(rules, mesh, exchange)
    lowered = step.trace(*arguments).lower(
        lowering_platforms=("cuda" if platform == "gpu" else "tpu",)
    )
    compiled = lowered.compile()
    text = compiled.as_text()
    module = hlo.parse(text)
    kinds = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
    products = [
        flops.instruction_flops(instructions, step)
        for instructions in module.computations.values()
        for step in instructions.values()
        if step.opcode in ("dot", "convolution", "ragged-dot")
        or step.value("custom_call_target").startswith("__cublas$")
    ]
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "ragged": len(re.findall(r"= \S+ ragged-dot\(", text)),
        "sorts": len(re.findall(r" sort\(", text)),
        "moved": [
            (kind, dtype, shape) for _, kind, dtype, shape in collectives(module, kinds)
        ],
        "products": sorted(map(float, products)),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def results(platform: str) -> dict[str, dict]:
    return compiled_apart(__file__, platform, timeout=1800)


def _devices(name: str) -> int:
    return math.prod(CASES[name][3].values())


def _rows(row: dict, kind: str) -> list:
    """Returns what a collective moves of tokens."""
    return [
        shape
        for own, _, shape in row["moved"]
        if own == kind and shape[-1] == D and shape[-2] > D
    ]


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
def test_tpus_have_kernels_and_no_product_with_all_experts(name):
    row = results("tpu")[name]
    # 3 products forward; gate and up again, and six gradients; one kernel for the
    # hidden rows' gradients
    assert row["kernels"] == 12
    # one a layer: rematerialisation keeps the order
    assert row["ragged"] == 0
    assert row["sorts"] == 1
    one_product = 2 * B * S * K * D * F / _devices(name)
    assert max(row["products"]) < 0.1 * one_product  # the router's and none else


@TPU
def test_what_crosses_devices_on_tpus():
    rounds, gather = results("tpu")["rounds"], results("tpu")["gather"]
    # 2 forward, 3 backward
    assert len(_rows(rounds, "all-to-all")) == 5
    assert not _rows(rounds, "all-gather")
    assert len(_rows(gather, "all-gather")) == 3
    assert not _rows(gather, "all-to-all")
    for row in (rounds, gather):
        kernels = [
            shape
            for kind, _, shape in row["moved"]
            if kind == "reduce-scatter" and len(shape) == 3
        ]
        assert sorted(kernels) == [[E // 2, D // 2, F]] * 2 + [[E // 2, F, D // 2]]
        assert not [
            shape
            for kind, _, shape in row["moved"]
            if kind == "all-reduce" and len(shape) == 3
        ]


@GPU
def test_gpus_multiply_the_rows_of_each_expert_and_no_others():
    row = results("gpu")["h100"]
    active = 2 * B * S * K * D * F / _devices("h100")
    # A first share of all experts is 1.25 of the rows of an even load (the exchange has
    # room for so many); a loop over what is left has a quarter as much in its body. XLA
    # computes gate and up in one.
    assert row["ragged"] == 0
    assert max(row["products"]) <= 2 * 1.25 * 1.05 * active
    # 3 products forward and 8 backward; XLA writes a loop over two layers out, but for
    # one of the passes.
    assert (
        11 * 1.5 * active
        < sum(row["products"])
        < 19 * (1.25 + 1.25 / 4) * 1.05 * active
    )
    assert _rows(row, "all-to-all")
    assert not _rows(row, "all-gather")


if __name__ == "__main__":
    for case, (own, *_) in CASES.items():
        if own == sys.argv[1]:
            print(json.dumps({"case": case} | _compile(case)), flush=True)
