"""Layers of latent attention, compiled ahead of time for chips that are not here.

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

B, S, SHARDS = 1, 4096, 4
# heads, width, query rank, kv rank, sizes without positions, rotated, of values
SIZES = {
    "tiny": (4, 128, 48, 40, 24, 8, 16),
    # DeepSeek-V3 with an eighth of its heads, as tensor 8 has them
    "real": (16, 7168, 1536, 512, 128, 64, 128),
}
CASES = {  # target, form, sizes, packed
    "tiny": ("v5e:2x2", "heads", "tiny", True),
    "heads": ("v5e:2x2", "heads", "real", False),
    "gather": ("v5e:2x2", "gather", "real", True),
    "ring": ("v5e:2x2", "ring", "real", True),
    "tensor": ("v5e:2x2", "", "real", True),
    "h100 tiny": ("h100:1x4", "heads", "tiny", True),
    "h100": ("h100:1x4", "", "real", True),
    "h100 gather": ("h100:1x4", "gather", "real", True),
}


def _compile(case: str) -> dict:
    """Returns what the compiler made of a layer and its gradients; runs in the child."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding

    from jaxdist.models.latent_attention import LatentAttention, LatentOptions
    from jaxdist.models.transformer import TransformerConfig
    from jaxdist.parallel import execution, remat
    from jaxdist.planner import targets
    from jaxdist.protocols.model import BlockInfo
    from support.experts import rules_and_mesh

    target, form, sizes, packed = CASES[case]
    heads, width, query_rank, kv_rank, nope, rope, value = SIZES[sizes]
    devices = targets.devices(targets.parse(target))
    layout = {"context": SHARDS, "attention": form} if form else {"tensor": SHARDS}
    rules, mesh = rules_and_mesh(devices, **layout)
    config = TransformerConfig(
        d_model=width,
        num_heads=heads,
        layer_pattern=("latent",),
        latent=LatentOptions(query_rank, kv_rank, nope, rope, value),
    )
    graph, parameters = nnx.split(
        nnx.eval_shape(lambda: LatentAttention(config, nnx.Rngs(0)))
    )

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    leaves, tree = jax.tree.flatten(
        parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    stored = []
    for leaf in leaves:
        shape = leaf.get_value().shape
        spec = rules.stored(leaf.get_metadata()["logical"], shape)
        stored.append(leaf.replace(abstract(shape, jnp.float32, spec)))
    parameters = jax.tree.unflatten(tree, stored)
    rows = rules.activation(("batch", "sequence"), (B, S))
    x = abstract(
        (B, S, width),
        jnp.bfloat16,
        rules.activation(("batch", "sequence", None), (B, S, width)),
    )
    positions = abstract((B, S), jnp.int32, rows)

    def loss(parameters, x, positions):
        fields = LatentAttention.prepare(config, {"positions": positions}, S)
        if packed:
            fields["segment_ids"] = 1 + positions // 1500
        info = BlockInfo(None, jnp.int32(0), fields, "latent")

        def layer(parameters, x):
            x = execution.shard(x, "batch", "sequence", None)
            return nnx.merge(graph, parameters)(x, info).x

        y = remat.rematerialised(layer, "dots")(parameters, x)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    def run(parameters, x, positions):
        with execution.activate(mesh, rules, compute="bfloat16"):
            return jax.grad(loss, (0, 1))(parameters, x, positions)

    platform = "cuda" if target.startswith("h100") else "tpu"
    compiled = (
        jax.jit(run)
        .trace(parameters, x, positions)
        .lower(lowering_platforms=(platform,))
        .compile()
    )
    text = compiled.as_text()
    moved = re.findall(
        r"= \(?\w+\[([\d,]+)\]\S* (all-gather|reduce-scatter|all-to-all|"
        r"collective-permute|all-gather-start|collective-permute-start)\(",
        text,
    )
    shapes = re.findall(r"\b(?:bf16|f32|pred|s32|f16)\[([\d,]+)\]", text)
    squares = {s for s in shapes if s.split(",").count(str(S)) >= 2}
    return {
        "kernels": sorted(
            re.findall(r"%splash_mha_(fwd|dq|dkv)\S* = .*tpu_custom_call", text)
        ),
        "cudnn": sorted(
            set(re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text))
        ),
        "moved": [[kind, [int(d) for d in dims.split(",")]] for dims, kind in moved],
        "squares": sorted(squares),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def results(platform: str) -> dict[str, dict]:
    return compiled_apart(__file__, platform, timeout=1500)


TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="ahead-of-time TPU compiles need libtpu: jaxdist[aot]",
)
GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="ahead-of-time GPU compiles need its plugin: jaxdist[aot-gpu]",
)


def _moved(row: dict, kind: str) -> list[list[int]]:
    return [shape for own, shape in row["moved"] if own == kind]


def _no_scores_of_heads(row: dict) -> bool:
    """Whether arrays of S x S elements are of one head: documents, not scores."""
    shapes = [[int(dim) for dim in shape.split(",")] for shape in row["squares"]]
    return all(math.prod(shape) == S * S for shape in shapes)


@TPU
@pytest.mark.parametrize("case", ["tiny", "heads", "gather", "ring", "tensor"])
def test_a_tpu_has_kernels_of_both_head_sizes(case):
    row = results("tpu")[case]
    assert {*row["kernels"]} == ({"fwd", "dkv"} | ({"dq"} if case != "ring" else set()))
    assert not row["squares"]


@TPU
def test_a_tpu_gathers_latents():
    row = results("tpu")["gather"]
    _, _, _, C, _, R, _ = SIZES["real"]
    activations = [shape for shape in _moved(row, "all-gather") if shape[:2] == [B, S]]
    assert sorted(shape for shape in activations if len(shape) == 3) == [
        [B, S, R],
        [B, S, C],
    ]
    assert not [shape for shape in activations if len(shape) > 3]
    part = [B, S // SHARDS]
    sums = [shape for shape in _moved(row, "reduce-scatter") if shape[:2] == part]
    assert sorted(sums) == [[*part, R], [*part, C]]


@TPU
def test_a_tpu_exchanges_heads():
    row = results("tpu")["heads"]
    # queries, keys, values and results, and their gradients
    assert len(_moved(row, "all-to-all")) == 8


@GPU
@pytest.mark.parametrize("case", ["h100 tiny", "h100", "h100 gather"])
def test_a_gpu_has_no_scores_of_all_heads(case):
    row = results("gpu")[case]
    # cuDNN takes heads of up to 128 elements
    assert len(row["cudnn"]) == (2 if case == "h100 tiny" else 0)
    assert _no_scores_of_heads(row)
    assert row["temporaries"] < 1e9


if __name__ == "__main__":
    for case, (target, *_) in CASES.items():
        platform = "gpu" if target.startswith("h100") else "tpu"
        if {platform, case} & {*sys.argv[1:]}:
            print(json.dumps({"case": case} | _compile(case)), flush=True)
