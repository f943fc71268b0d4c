"""Sequence parallelism in a plan: all-gathers and reduce-scatters where all-reduces
were.
"""

from collections import Counter
from importlib.util import find_spec

import pytest

from jaxdist.config import files, schema
from jaxdist.planner import layouts, on_target, plan, targets
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
    run = run_config.from_config(
        files.load("quickstart", folders=files.packaged_folders())
    )
    config = schema.to_config_dict(run)
    pairs = dict(word.split("=", 1) for word in words.split())
    files.apply_overrides(config, pairs, run_config.full_schema(run.model["target"]))
    return run_config.from_config(config)


# In each layer two forward sums, two backward, and the first again: the second's result
# nobody reads.
PASSES = {"forward": 2 * LAYERS, "backward": 2 * LAYERS, "recomputation": LAYERS}
# Both inputs are gathered again, as gradients of the kernels that read them need them
# whole.
SPLIT = {("reduce-scatter", phase): count for phase, count in PASSES.items()} | {
    ("all-gather", phase): 2 * LAYERS for phase in PASSES
}


def sums(words: str, on: str, size: int, folder) -> Counter:
    """Returns how often a compiled step's layers move the residual stream, of so many
    bytes, over tensor.
    """
    options = CompileOptions(cache=folder)
    made = plan.make_plan(
        run_of(f"{SMALL} {words}"), targets.parse(on), options=options
    )
    alike = Counter[tuple[str, str]]()
    for one in made.collectives:
        if one.in_loop and one.bytes == size and one.axis == "tensor":
            assert one.what == "activations"
            alike[one.kind, one.phase] += one.count
    return alike


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("libtpu"), reason='pip install -e ".[aot]"')
def test_with_context_the_same_is_moved_of_a_devices_part(tmp_path):
    words = "mesh.sequence_parallel=true mesh.context=2"
    assert sums(words, "v5e:2x4", STREAM // 2, tmp_path) == SPLIT


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("libtpu"), reason='pip install -e ".[aot]"')
def test_a_tpu_program_gathers_and_scatters_what_it_summed(tmp_path):
    whole = sums("", "v5e:2x2", STREAM, tmp_path)
    split = sums("mesh.sequence_parallel=true", "v5e:2x2", STREAM, tmp_path)
    assert whole == {("all-reduce", phase): count for phase, count in PASSES.items()}
    assert split == SPLIT
    sent = [_sent(alike) for alike in (whole, split)]
    assert sent[1] == pytest.approx(1.1 * sent[0])


def _sent(alike: Counter) -> float:
    return sum(
        count * wire_bytes(kind, STREAM, 4) for (kind, _), count in alike.items()
    )


def test_a_search_prices_both():
    run, target = run_of(SMALL), targets.parse("v5e:2x2")
    meshes, _ = on_target.legal_meshes(run, target)
    (mesh,) = (one for one in meshes if one.shape.sizes["tensor"] == 4)
    times = {
        one.run.mesh.sequence_parallel: one.estimate.tensor
        for one in layouts.candidates([mesh], target)
        if one.run.remat.policy == "full"
        and one.run.batch.accumulation == 1
        and one.run.mesh.zero == 3
    }
    outside = 3  # sums of the embedding and the loss
    assert times[True] / times[False] == pytest.approx(
        (6 * LAYERS + outside) / (5 * LAYERS + outside)
    )
    assert "sequence parallel" in next(
        one.text
        for one in layouts.candidates([mesh], target)
        if one.run.mesh.sequence_parallel
    )
    assert not run.mesh.sequence_parallel  # the default
