"""Attention over a split sequence, compiled ahead of time by libtpu for chips that are not here."""

import json
import re
import sys

import pytest

from support.compilers import compiled_apart

pytest.importorskip("libtpu", reason="ahead-of-time TPU compiles need libtpu: pip install jax[tpu]")
pytestmark = pytest.mark.slow

LAYERS, B, S, H, K, N = 2, 2, 8192, 16, 2, 128
CASES = ("heads", "gather")
SHARDS = 4


def _compile(form: str) -> dict:
    """Returns what the compiler made of a form; runs in the child."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxdist.ops.attention import attention
    from jaxdist.parallel import execution, remat, sharding
    from jaxdist.parallel import mesh as meshes

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    config = meshes.MeshConfig(data=1, context=SHARDS)
    mesh = meshes.build_mesh(config, devices)
    rules = sharding.build_rules(config, meshes.resolve_mesh(config, mesh.size), attention=form)

    def loss(w, x, k, ids):
        def layer(x, w):
            y = attention(x * w, k * w, k + w, segment_ids_BS=ids, window=3000)
            return execution.shard(jnp.sin(x + y), "batch", "sequence", "heads", None), None

        with execution.activate(mesh, rules):
            y, _ = jax.lax.scan(remat.rematerialised(layer, "none"), x, w)
        return jnp.sum(y.astype(jnp.float32))

    def abstract(shape, dtype, *names):
        spec = rules.activation(names, shape) if names else P()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    w = abstract((LAYERS, 1, 1, 1, N), jnp.bfloat16)
    x = abstract((B, S, H, N), jnp.bfloat16, "batch", "sequence", "heads", None)
    k = abstract((B, S, K, N), jnp.bfloat16, "batch", "sequence", "kv_heads", None)
    ids = abstract((B, S), jnp.int32, "batch", "sequence")
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(w, x, k, ids)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    results = re.findall(r" = \(?([^=]*?)\)? (all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text)
    moved: dict[str, list[list[int]]] = {"all-gather": [], "all-to-all": [], "reduce-scatter": []}
    for shapes, kind in results:
        for dims in re.findall(r"(?:bf16|f32)\[([\d,]+)\]", shapes):
            moved[kind].append([int(dim) for dim in dims.split(",") if int(dim) > 1])
    return {
        "kernels": sorted(re.findall(r"%splash_mha_(fwd|dq|dkv)\S* = .*tpu_custom_call", text)),
        "moved": moved,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def _results() -> dict[str, dict]:
    return compiled_apart(__file__, timeout=600)


@pytest.mark.parametrize("form", CASES)
def test_one_kernel_a_direction(form):
    assert _results()[form]["kernels"] == ["dkv", "dq", "fwd"]


def test_heads_change_places_and_nothing_is_gathered():
    moved = _results()["heads"]["moved"]
    assert len(moved["all-to-all"]) == 8  # q, k, v and the output; and their gradients
    assert not moved["all-gather"] and not moved["reduce-scatter"]


def test_keys_and_values_are_gathered_as_they_are():
    moved = _results()["gather"]["moved"]
    assert moved["all-gather"] == [[B, S, K, N]] * 2
    assert moved["reduce-scatter"] == [[B, S // SHARDS, K, N]] * 2
    assert not moved["all-to-all"]


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(json.dumps({"case": case} | _compile(case)), flush=True)
