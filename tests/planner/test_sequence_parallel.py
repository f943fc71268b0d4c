"""Sequence parallelism in a plan: all-gathers and reduce-scatters where all-reduces were."""

from collections import Counter
from importlib.util import find_spec

import pytest

from jaxdist.config import files, schema
from jaxdist.planner import layouts, plan, targets
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.formulas import wire_bytes
from jaxdist.trainer import run_config

LAYERS, TOKENS, WIDTH = 2, 8 * 512, 512
SMALL = (
    f"model.num_layers={LAYERS} model.d_model={WIDTH} model.d_ff=1024 model.num_heads=8 "
    "model.num_kv_heads=4 model.head_dim=128 model.vocab_size=512 optimizer.name=adamw batch.global_size=8 "
    "batch.sequence_length=512 precision.compute=bfloat16 remat.policy=full mesh.data=1 mesh.tensor=4"
)
STREAM = TOKENS * WIDTH * 2  # bytes of the residual stream


def run_of(words: str) -> run_config.RunConfig:
    run = run_config.from_config(files.load("quickstart", folders=files.packaged_folders()))
    config = schema.to_config_dict(run)
    pairs = dict(word.split("=", 1) for word in words.split())
    files.apply_overrides(config, pairs, run_config.full_schema(run.model["target"]))
    return run_config.from_config(config)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("libtpu"), reason='pip install "jaxdist[aot]"')
def test_a_tpu_program_gathers_and_scatters_what_it_summed(tmp_path):
    def sums(words: str) -> Counter:
        options = CompileOptions(cache=tmp_path)
        made = plan.make_plan(run_of(f"{SMALL} {words}"), targets.parse("v5e:2x2"), options=options)
        alike = Counter[tuple[str, str]]()
        for one in made.collectives:
            if one.in_loop and one.bytes == STREAM:
                assert (one.axis, one.what) == ("tensor", "activations")
                alike[one.kind, one.phase] += one.count
        return alike

    whole, split = sums(""), sums("mesh.sequence_parallel=true")
    # In each layer two forward sums, two backward, and the first again: the second's result nobody reads.
    passes = {"forward": 2 * LAYERS, "backward": 2 * LAYERS, "recomputation": LAYERS}
    assert whole == {("all-reduce", phase): count for phase, count in passes.items()}
    scattered = {("reduce-scatter", phase): count for phase, count in passes.items()}
    # Both inputs are gathered again, as gradients of the kernels that read them need them whole.
    gathered = {("all-gather", phase): 2 * LAYERS for phase in passes}
    assert split == scattered | gathered
    sent = [_sent(alike) for alike in (whole, split)]
    assert sent[1] == pytest.approx(1.1 * sent[0])


def _sent(alike: Counter) -> float:
    return sum(count * wire_bytes(kind, STREAM, 4) for (kind, _), count in alike.items())


def test_a_search_prices_both():
    run, target = run_of(SMALL), targets.parse("v5e:2x2")
    meshes, _, spec = layouts.legal_meshes(run, target)
    (mesh,) = (both for both in meshes if both[1].sizes["tensor"] == 4)
    times = {
        one.run.mesh.sequence_parallel: one.estimate.tensor
        for one in layouts.candidates(run, target, [mesh], spec)
        if one.run.remat.policy == "full" and one.run.batch.accumulation == 1 and one.run.mesh.zero == 3
    }
    outside = 3  # sums of the embedding and the loss
    assert times[True] / times[False] == pytest.approx((6 * LAYERS + outside) / (5 * LAYERS + outside))
    assert "sequence parallel" in next(
        one.text for one in layouts.candidates(run, target, [mesh], spec) if one.run.mesh.sequence_parallel
    )
    assert not run.mesh.sequence_parallel  # the default
