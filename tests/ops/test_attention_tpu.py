"""The TPU kernel, compiled ahead of time by libtpu for chips that are not here.

A child process compiles cases (libtpu writes to fd 2 and reads its environment at
import) and prints a JSON line per case. By default these are the quick ones.
"""

import json
import re
import sys

import pytest

from support.compilers import compiled_apart

pytest.importorskip(
    "libtpu", reason="ahead-of-time TPU compiles need libtpu: pip install jax[tpu]"
)

LAYERS, B, S, H, K, N = 2, 4, 1024, 8, 2, 64  # 2 x 2 blocks of the kernel
# name: fsdp, tensor, packed, remat policy, changes of (S, H, K, N) and options of
# attention
CASES = {
    "none": (4, 1, False, "none", {}),
    "packed_tensor": (1, 4, True, "save:attention_residuals", {}),
    "odd_sizes": (2, 2, True, "full", {"S": 1000, "N": 80}),
    "gemma": (
        4,
        1,
        False,
        "none",
        {"S": 2048, "N": 256, "scale": 0.1, "softcap": 50.0, "window": 512},
    ),
    # The most that the kernel of all gradients holds at once.
    "long": (
        4,
        1,
        True,
        "save:attention_residuals",
        {"S": 16_384, "H": 2, "N": 256, "softcap": 50.0},
    ),
}
QUICK = ("none", "packed_tensor", "odd_sizes")
COSTLY = tuple(name for name in CASES if name not in QUICK)


def _compile(name: str) -> dict:
    """Returns what the compiler made of a case; runs in the child."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxdist.ops.attention import attention
    from jaxdist.parallel import execution, remat, sharding
    from jaxdist.parallel import mesh as meshes

    fsdp, tensor, packed, policy, changes = CASES[name]
    size = {"S": S, "H": H, "K": K, "N": N}
    options = {name: value for name, value in changes.items() if name not in size}
    size |= {name: value for name, value in changes.items() if name in size}
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2"
    ).devices
    config = meshes.MeshConfig(data=1, fsdp=fsdp, tensor=tensor)
    mesh = meshes.build_mesh(config, devices)
    rules = sharding.build_rules(config, meshes.resolve_mesh(config, mesh.size))

    def loss(w, x, k, ids):
        def layer(x, w):
            y = attention(
                x * w, k * w, k + w, segment_ids_BS=ids if packed else None, **options
            )
            return execution.shard(
                jnp.sin(x + y), "batch", "sequence", "heads", None
            ), None

        with execution.activate(mesh, rules):
            y, _ = jax.lax.scan(remat.rematerialised(layer, policy), x, w)
        return jnp.sum(y.astype(jnp.float32))

    def abstract(shape, dtype, *names):
        spec = rules.activation(names, shape) if names else P()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    w = abstract((LAYERS, 1, 1, 1, size["N"]), jnp.bfloat16)
    x = abstract(
        (B, size["S"], size["H"], size["N"]), jnp.bfloat16, "batch", None, "heads", None
    )
    kv = (B, size["S"], size["K"], size["N"])
    k = abstract(kv, jnp.bfloat16, "batch", None, "kv_heads", None)
    ids = abstract((B, size["S"]), jnp.int32, "batch", None)
    traced = jax.jit(jax.value_and_grad(loss)).trace(w, x, k, ids)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    # Of loops, and of conditionals in them: chunks that share no document are left out.
    called = re.findall(
        r"(?:body|true_computation|false_computation)=%([\w.\-]+)", text
    )
    called += [
        name
        for names in re.findall(r"branch_computations={([^}]*)}", text)
        for name in names[1:].split(", %")
    ]
    bodies = tuple(f"%{name} (" for name in called)
    loops = "".join(part for part in text.split("\n\n") if part.startswith(bodies))
    kernels = re.findall(r"%splash_mha_(fwd|dq|dkv)\S* = .*tpu_custom_call", loops)
    assert len(kernels) == text.count('custom_call_target="tpu_custom_call"')
    return {
        "kernels": {k: kernels.count(k) for k in ("fwd", "dq", "dkv")},
        "segmented": "segmented" in text,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "gathers": len(re.findall(r" all-gather(?:-start)?\(", text)),
        # per device
        "logits_bytes": int(np.prod([B, size["H"], size["S"], size["S"]])) * 4 // 4,
    }


def _results(names: tuple[str, ...] = QUICK) -> dict[str, dict]:
    return compiled_apart(__file__, *names, timeout=600)


@pytest.mark.slow
def test_forward_kernel_runs_again_only_when_its_residuals_are_not_saved():
    results = _results()
    # A scan's body appears once in the program, so counts are per layer.
    assert results["none"]["kernels"] == {"fwd": 1, "dq": 1, "dkv": 1}
    assert CASES["odd_sizes"][3] == "full"
    assert results["odd_sizes"]["kernels"] == {"fwd": 2, "dq": 1, "dkv": 1}
    assert CASES["packed_tensor"][3] == "save:attention_residuals"
    assert results["packed_tensor"]["kernels"] == {"fwd": 1, "dq": 1, "dkv": 1}


@pytest.mark.parametrize("names", [QUICK, pytest.param(COSTLY, marks=pytest.mark.slow)])
def test_cases_compile_without_a_buffer_of_logits(names):
    results = _results(names)
    assert set(results) == set(names)
    for name, row in results.items():
        assert row["temp_bytes"] < 0.5 * row["logits_bytes"], name


def test_kernels_see_their_own_shards():
    results = _results()
    assert results["packed_tensor"]["segmented"]
    assert not results["none"]["segmented"]
    assert all(row["gathers"] == 0 for row in results.values())


@pytest.mark.slow
def test_kernels_of_long_and_wide_shapes_see_their_own_shards():
    results = _results(COSTLY)
    assert results["gemma"]["kernels"] == {"fwd": 1, "dq": 1, "dkv": 1}
    # A call for chunks that see themselves, and one for those that see chunks before.
    assert results["long"]["kernels"] == {"fwd": 1, "dq": 0, "dkv": 2}
    assert results["long"]["segmented"]
    assert all(row["gathers"] == 0 for row in results.values())


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(json.dumps({"case": case} | _compile(case)), flush=True)
