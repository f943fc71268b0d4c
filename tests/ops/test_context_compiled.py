"""Attention over a split sequence, compiled ahead of time for chips that are not here.

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

LAYERS, B, S, H, K, N, SHARDS = 2, 2, 8192, 16, 2, 128, 4
# Of all-to-alls of `heads`: queries, results, keys and values copied so that devices
# have one; and the gradients of all. (SHARDS - 1) / SHARDS of them are sent.
ELEMENTS = 2 * B * S // SHARDS * (2 * H + 2 * max(K, SHARDS)) * N
KINDS = ("all-to-all", "all-gather", "reduce-scatter", "collective-permute")
CASES = {  # platform, target, form, window
    "heads": ("tpu", "v5e:2x2", "heads", 3000),
    "gather": ("tpu", "v5e:2x2", "gather", 0),
    "neighbours": ("tpu", "v5e:2x2", "gather", 2000),
    "ring": ("tpu", "v5e:2x2", "ring", 0),
    "h100": ("gpu", "h100:1x4", "heads", 3000),
}


def _compile(case: str) -> dict:
    """Returns what the compiler made of a case; runs in the child."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxdist.ops.attention import attention
    from jaxdist.parallel import execution, remat
    from jaxdist.planner import targets
    from jaxdist.telemetry import hlo
    from support.experts import rules_and_mesh
    from support.programs import collectives

    platform, target, form, window = CASES[case]
    rules, mesh = rules_and_mesh(
        targets.devices(targets.parse(target)), attention=form, context=SHARDS
    )

    def loss(w, x, k, ids):
        def layer(x, w):
            y = attention(
                x * w, k * w, k + w, segment_ids_BS=ids, window=window or None
            )
            return execution.shard(
                jnp.sin(x + y), "batch", "sequence", "heads", None
            ), None

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
    text = (
        traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",))
        .compile()
        .as_text()
    )
    moved = collectives(hlo.parse(text), KINDS)
    return {
        "kernels": sorted(
            re.findall(r"%splash_mha_(fwd|dq|dkv)\S* = .*tpu_custom_call", text)
        ),
        "cudnn": sorted(
            set(re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text))
        ),
        "moved": [
            (kind, tuple(dim for dim in shape if dim > 1))
            for _, kind, _, shape in moved
        ],
    }


def results(platform: str) -> dict[str, dict]:
    return compiled_apart(__file__, platform, timeout=900)


def _moved(row: dict, kind: str) -> list[list[int]]:
    return [shape for own, shape in row["moved"] if own == kind]


TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="ahead-of-time TPU compiles need libtpu: jaxdist[aot]",
)
GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="ahead-of-time GPU compiles need its plugin: jaxdist[aot-gpu]",
)


@TPU
@pytest.mark.parametrize("form", ["heads", "gather", "neighbours"])
def test_one_kernel_a_direction(form):
    assert results("tpu")[form]["kernels"] == ["dkv", "dq", "fwd"]


@TPU
def test_heads_change_places_and_nothing_is_gathered():
    row = results("tpu")["heads"]
    # q, k, v and the output; and their gradients
    assert len(_moved(row, "all-to-all")) == 8
    assert not _moved(row, "all-gather")
    assert not _moved(row, "reduce-scatter")


@TPU
def test_keys_and_values_are_gathered_as_they_are():
    row = results("tpu")["gather"]
    assert _moved(row, "all-gather") == [[B, S, K, N]] * 2
    assert _moved(row, "reduce-scatter") == [[B, S // SHARDS, K, N]] * 2
    assert not _moved(row, "all-to-all")


@TPU
def test_a_window_asks_the_neighbour_alone():
    row = results("tpu")["neighbours"]
    assert {kind for kind, _ in row["moved"]} == {"collective-permute"}
    assert all(shape == [B, S // SHARDS, K, N] for _, shape in row["moved"])


@TPU
def test_a_ring_holds_two_chunks_of_keys_and_gathers_nothing():
    row = results("tpu")["ring"]
    # Three products of a device's own chunks, two of a step; the last step stands
    # outside of the loop.
    assert [row["kernels"].count(name) for name in ("fwd", "dq", "dkv")] == [7, 0, 7]
    assert {kind for kind, _ in row["moved"]} == {"collective-permute"}


@GPU
def test_cudnn_sees_whole_sequences_of_its_own_heads():
    row = results("gpu")["h100"]
    assert len(row["cudnn"]) == 2, "a kernel a direction"
    assert not _moved(row, "all-gather")
    # An asynchronous one is listed with what it takes and what it gives.
    assert sum(map(math.prod, _moved(row, "all-to-all"))) == 2 * ELEMENTS


if __name__ == "__main__":
    for case, (platform, *_) in CASES.items():
        if {platform, case} & {*sys.argv[1:]}:
            print(json.dumps({"case": case} | _compile(case)), flush=True)
