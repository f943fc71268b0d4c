"""Long prompts compiled for TPUs ahead of time: memory, kernels, communication."""

import importlib.util
import json
import math
import re
import sys

import pytest

from support.compilers import compiled_apart

LAYERS, P, ROOM, D, H, K, N = 2, 32768, 128, 2048, 16, 8, 128
CACHE = 2 * LAYERS * (P + ROOM) * K * N * 2  # bytes in bfloat16
KINDS = (
    "all-reduce",
    "all-to-all",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
)
CASES = {"whole": 1, "split": 4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="ahead-of-time TPU compiles need libtpu: jaxdist[aot]",
    ),
]


def _compile(size: int) -> dict:
    """Compiles prefill and decoding for a number of devices, in a child process."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from jaxdist.inference.decoding import SamplingConfig, TokenGenerator
    from jaxdist.models.transformer import Transformer, TransformerConfig
    from jaxdist.parallel.sharding import is_vector
    from jaxdist.planner import targets
    from jaxdist.protocols.model_spec import describe
    from jaxdist.telemetry import hlo
    from support.experts import rules_and_mesh
    from support.programs import collectives, loop_bodies, reachable

    rules, mesh = rules_and_mesh(
        targets.devices(targets.parse("v5e:2x2")), context=size
    )
    config = TransformerConfig(
        vocab_size=4096,
        num_layers=LAYERS,
        d_model=D,
        d_ff=3 * D,
        num_heads=H,
        num_kv_heads=K,
        head_dim=N,
    )
    spec = describe(lambda rngs: Transformer(config, rngs=rngs))

    def abstract(leaf, names=(), dtype=None):
        place = NamedSharding(
            mesh, rules.stored(names, leaf.shape) if names else jax.P()
        )
        return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place)

    kernels = jax.tree.map(
        lambda x, names: abstract(x, names, "bfloat16"), spec.trainable, spec.names
    )
    weights = kernels, spec.model_state, spec.frozen
    rows = [abstract(np.zeros(dims, np.int32)) for dims in ((1, P), 1, 1)]
    scalars = np.int32(1), np.int32(ROOM), np.uint32(0)
    sizes = {
        "room": ROOM,
        "capacity": P + ROOM,
        "sampling": SamplingConfig(temperature=0.0),
    }
    generate = TokenGenerator(spec, mesh, rules, compute="bfloat16")
    traced = generate._run.trace(weights, *rows, *scalars, **sizes)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    module = hlo.parse(text)
    (tokens,) = (body for body, times in loop_bodies(module).items() if times is None)
    of_a_token = reachable(module, tokens)
    moved = [
        (name in of_a_token, kind, shape)
        for name, kind, _, shape in collectives(module, KINDS)
    ]
    return {
        "temp": memory.temp_size_in_bytes,
        "weights": 2 * spec.parameter_count,  # of bfloat16
        "sizes": [
            x.shape
            for x, names in spec.named_trainable().values()
            if not is_vector(names, x.shape)
        ],
        "kernels": sorted(
            set(re.findall(r"%(splash_mha_\w+?)[.\d]* = .*tpu_custom_call", text))
        ),
        "tokens": [(kind, shape) for by_token, kind, shape in moved if by_token],
        "prompt": [(kind, shape) for by_token, kind, shape in moved if not by_token],
    }


def test_a_device_holds_a_part_of_the_prompt_and_of_the_cache():
    rows = compiled_apart(__file__, timeout=1500)
    whole, split = rows["whole"], rows["split"]
    assert not whole["prompt"]
    assert not whole["tokens"]
    assert whole["temp"] > CACHE
    # Beside its part a device has the weights, gathered once before the prompt is read.
    assert split["temp"] < whole["temp"] / 4 * 1.05 + split["weights"]
    # no logits of all tokens to all others
    assert whole["kernels"] == split["kernels"] != []
    assert {kind for kind, _ in split["tokens"]} == {"all-reduce"}
    # of a token's sums: no keys
    assert max(math.prod(shape) for _, shape in split["tokens"]) == H * N
    large = {kind for kind, shape in split["prompt"] if P // 4 in shape or P in shape}
    assert large == {"all-to-all"}  # heads for places
    gathered = {tuple(shape) for kind, shape in split["prompt"] if kind == "all-gather"}
    assert gathered == set(map(tuple, split["sizes"]))


if __name__ == "__main__":
    for case, size in CASES.items():
        if not sys.argv[1:] or case in sys.argv[1:]:
            print(json.dumps({"case": case} | _compile(size)), flush=True)
