"""The search: which layouts there are, their order by arithmetic, and what is compiled
of them.
"""

import dataclasses
import io
import itertools
import json
import math
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxdist.config import ConfigError, files, schema
from jaxdist.parallel.mesh import resolve_mesh
from jaxdist.planner import (
    document,
    layouts,
    memory,
    on_target,
    search,
    targets,
    timing,
)
from jaxdist.planner.arithmetic import Model
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.layouts import CompiledLayout
from jaxdist.planner.plan import plan_by_arithmetic
from jaxdist.trainer import run_config, validation

needs_libtpu = pytest.mark.skipif(
    not find_spec("libtpu"), reason='pip install -e ".[aot]"'
)
TINY = (
    "model.num_layers=2 model.d_model=256 model.d_ff=256 model.num_heads=2 model.num_kv_heads=1 "
    "model.head_dim=128 model.vocab_size=512 optimizer.name=adamw batch.global_size=8 "
    "batch.sequence_length=128 precision.compute=bfloat16"
)


def overridden(run: run_config.RunConfig, words: str) -> run_config.RunConfig:
    """Returns the run with `a.b=value c.d=value`, as on the command line."""
    values = schema.to_config_dict(run)
    pairs = dict(word.split("=", 1) for word in words.split())
    files.apply_overrides(values, pairs, run_config.full_schema(run.model["target"]))
    return run_config.from_config(values)


def run_of(name: str, words: str = "") -> run_config.RunConfig:
    return overridden(
        run_config.from_config(files.load(name, folders=files.packaged_folders())),
        words,
    )


@pytest.fixture(scope="module")
def llama():
    """Every layout of the 8 B model on 64 chips."""
    run, target = run_of("llama3_8b"), targets.parse("v5p:4x4x4")
    meshes, illegal = on_target.legal_meshes(run, target)
    return run, target, meshes, illegal, list(layouts.candidates(meshes, target))


def estimate_of(
    candidates,
    *,
    remat="full",
    accumulation=1,
    zero=3,
    microbatches=0,
    chunks=1,
    **axis_sizes,
):
    """Returns the estimate of the one candidate with these options; other axes are 1.

    Args:
      microbatches: 0 stands for any number.
      chunks: parts of a stage's layers; read in layouts with a pipeline only.
    """
    axes = ("pipeline", "data", "fsdp", "tensor")
    sizes = {axis: axis_sizes.get(axis, 1) for axis in axes}

    def is_wanted(candidate):
        run, shape = candidate.run, candidate.shape
        return (
            all(shape.sizes[axis] == size for axis, size in sizes.items())
            and run.remat.policy == remat
            and run.mesh.zero == zero
            and run.batch.accumulation == accumulation
            and not run.mesh.sequence_parallel
            and microbatches in (0, run.pipeline.microbatches)
            and (sizes["pipeline"] == 1 or run.pipeline.chunks == chunks)
        )

    (candidate,) = filter(is_wanted, candidates)
    return candidate.estimate


def test_layouts_share_no_estimate_that_differs(llama):
    """A fresh model has nothing cached from other layouts."""
    _, target, meshes, _, candidates = llama
    some = candidates[:: len(candidates) // 60]
    assert len({one.shape.sizes["pipeline"] for one in some}) > 1
    assert {one.run.mesh.zero for one in some} == {1, 2, 3}
    assert len({one.run.batch.accumulation for one in some}) > 1
    for one in some:
        fresh = Model(meshes[0], target)
        assert one.estimate == fresh.estimate(one.composition)


def test_pipelines_are_tried_where_the_last_layers_save_more():
    run, target = run_of("llama3_8b", "remat.layers=20"), targets.parse("v5p:2x2x1")
    meshes, _ = on_target.legal_meshes(run, target)
    found = [*layouts.candidates(meshes, target)]
    staged = [one for one in found if one.shape.sizes["pipeline"] > 1]
    assert {one.run.remat.layers for one in staged} == {0}
    assert {one.run.remat.layers for one in found} == {0, 20}
    validation.validate_on(staged[-1].run, target.num_devices, 1, with_data=False)


@pytest.mark.slow
def test_every_layout_is_legal_and_keeps_the_batch(llama):
    run, target, _, _, found = llama
    assert len(found) > 1000
    assert len({c.text for c in found}) == len(found)
    for axis in ("pipeline", "data", "fsdp", "tensor"):
        assert len({c.shape.sizes[axis] for c in found}) > 3, axis
    assert {c.run.mesh.zero for c in found} == {1, 2, 3}
    assert {c.run.pipeline.schedule for c in found} == {"1f1b", "interleaved"}
    assert {c.run.remat.policy for c in found} >= set(layouts.REMAT)
    for one in found[:: len(found) // 30]:
        validation.validate_on(one.run, target.num_devices, 1, with_data=False)
        assert math.prod(one.shape.sizes.values()) == 64
    same = ("global_size", "sequence_length")
    assert {tuple(getattr(c.run.batch, n) for n in same) for c in found} == {(64, 8192)}
    assert all(
        (c.run.model, c.run.optimizer, c.run.precision)
        == (run.model, run.optimizer, run.precision)
        for c in found
    )


@pytest.mark.slow
def test_overrides_make_the_layout(llama):
    run, _target, _, _, found = llama
    for one in found[:: len(found) // 12]:
        made = overridden(run, " ".join(one.overrides(run)))
        assert made == dataclasses.replace(one.run, pipeline=made.pipeline)
        assert resolve_mesh(made.mesh, 64) == one.shape
        staged = one.shape.sizes["pipeline"] > 1
        assert not staged or made.pipeline == one.run.pipeline


def test_illegal_meshes_are_counted_with_their_reason(llama):
    _, _, meshes, illegal, _ = llama
    # 2^6 as four factors; 2^5, 2^4 and 2^3, where context is 2, 4 and 8.
    assert len(meshes) + sum(illegal.values()) == 84 + 56 + 35 + 20
    assert any("mesh.tensor" in reason for reason in illegal)
    assert any("layers" in reason for reason in illegal)


def test_nothing_legal_is_an_error_with_the_reason():
    with pytest.raises(ConfigError, match="global_size"):
        on_target.legal_meshes(
            run_of("llama3_8b", "batch.global_size=0"), targets.parse("v5p:2x2x1")
        )


@pytest.fixture
def estimate(llama):
    """Returns a function: options of a layout -> what its step costs by arithmetic."""
    *_, candidates = llama
    return partial(estimate_of, candidates)


def test_recomputing_more_layers_costs_compute(estimate):
    full = estimate(fsdp=64, remat="full")
    some = estimate(fsdp=64, remat=layouts.REMAT[2])
    dots = estimate(fsdp=64, remat="dots")
    assert dots.compute < some.compute < full.compute
    assert full.compute > 1.2 * dots.compute, "a forward pass again"


def test_fsdp_alone_costs_neither_sums_nor_stages_nor_transfers_to_the_host(estimate):
    fsdp = estimate(fsdp=64)
    assert fsdp.tensor == 0
    assert fsdp.stages == 0
    assert fsdp.host == 0


def test_tensor_parallelism_costs_sums_and_time(estimate):
    wider = [estimate(fsdp=64 // tensor, tensor=tensor) for tensor in (1, 2, 4, 8)]
    for narrow, wide in itertools.pairwise(wider):
        assert narrow.tensor < wide.tensor
        assert narrow.step_s < wide.step_s


def test_each_part_of_an_accumulated_batch_gathers_the_parameters_again(estimate):
    whole = estimate(fsdp=16, tensor=4, accumulation=1)
    in_four = estimate(fsdp=16, tensor=4, accumulation=4)
    assert in_four.gathers == pytest.approx(4 * whole.gathers)


def test_microbatches_and_chunks_shorten_the_bubble_of_a_pipeline(estimate):
    few = estimate(fsdp=32, pipeline=2, microbatches=1)
    many = estimate(fsdp=32, pipeline=2, microbatches=2)
    chunked = estimate(fsdp=32, pipeline=2, microbatches=2, chunks=16)
    assert few.bubble > many.bubble > chunked.bubble
    assert many.bubble > 0


def test_offloading_costs_transfers_to_the_host(estimate):
    offloaded = estimate(fsdp=64, remat=f"offload:{layouts.remat.INPUT}")
    assert offloaded.host > 0


def test_zero_2_reduces_gradients_in_half_the_bytes_of_zero_1(estimate):
    zero_1, zero_2 = estimate(fsdp=64, zero=1), estimate(fsdp=64, zero=2)
    assert zero_1.gradients == pytest.approx(2 * zero_2.gradients)


def test_no_estimate_is_shorter_than_its_lower_bound(llama):
    *_, candidates = llama
    for candidate in candidates:
        bound_s, step_s = candidate.estimate.bound_s, candidate.estimate.step_s
        assert 0 < bound_s <= step_s < math.inf, candidate.text


def test_8_bit_floats_are_gathered_in_half_the_bytes_and_multiplied_in_less_time():
    target, found = targets.parse("h100:1x8"), {}
    for matmul in ("compute", "fp8_rowwise", "fp8_rowwise_wgrad_bf16"):
        run = run_of("llama3_8b", f"precision.matmul={matmul} batch.global_size=8")
        meshes, _ = on_target.legal_meshes(run, target)
        found[matmul] = estimate_of(list(layouts.candidates(meshes, target)), fsdp=8)
    half, byte, mixed = found.values()
    coded = 6.71 / 8.03  # parameters: all but embedding, head, key and value
    assert byte.gathers == pytest.approx(half.gathers * (1 - coded / 2), rel=2e-3)
    assert mixed.gathers == byte.gathers
    assert half.gradients == byte.gradients
    assert 0.5 * half.compute < byte.compute < mixed.compute < half.compute
    assert half.compute - mixed.compute == pytest.approx(
        2 / 3 * (half.compute - byte.compute)
    )


@pytest.mark.parametrize("text", ["a100:1x8", "v6e:2x4"])
def test_a_chip_without_8_bit_units_is_refused_before_anything_is_laid_out(
    text, monkeypatch
):
    run = run_of("llama3_8b", "precision.matmul=fp8_rowwise batch.global_size=8")
    target = targets.parse(text)
    # a layout or a compiler would be asked for after this
    monkeypatch.setattr(on_target.validation, "validate_on", None)
    for ask in (plan_by_arithmetic, search.search):
        with pytest.raises(ConfigError) as caught:
            ask(run, target)
        (fault,) = caught.value.faults
        assert fault.startswith("precision.matmul=fp8_rowwise: ")
        assert fault.endswith("set precision.matmul=compute")


def test_state_is_a_lower_bound_of_what_is_accounted(llama):
    *_, found = llama
    for one in found[:: len(found) // 40]:
        assert one.state_bytes <= 1.001 * one.accounted_bytes, one.text


def test_products_alone_take_what_flops_over_peak_say(llama):
    _run, target, _, _, found = llama
    bare = estimate_of(found, fsdp=64, remat="none").compute
    flops = 6 * 8.03e9 * 64 * 8192 / 64 / target.chip.peak("bfloat16")
    # attention comes on top, the embedding's lookup does not count
    assert flops < bare < 1.6 * flops


def test_slices_are_crossed_by_data_fsdp_or_stages():
    run, target = run_of("llama3_8b"), targets.parse("v5p:2x2x2x2")
    meshes, _illegal = on_target.legal_meshes(run, target)
    sliced = [one.shape.dcn.items() for one in meshes]
    crossing = {axis for dcn in sliced for axis, n in dcn if n > 1}
    assert crossing == {"data", "fsdp", "pipeline"}
    assert len(meshes) > 20


def done(one, step_s, peak, fits=True):
    """Returns a compiled candidate with a made-up result."""
    seconds = dataclasses.replace(
        timing.Time("made up"),
        step_s=step_s,
        waterfall={"compute": 1.0, "x": step_s - 1},
    )
    return CompiledLayout(
        one,
        document.Plan(
            one.composition,
            targets.parse("v5p:4x4x4"),
            {},
            95 * 2**30,
            {},
            0,
            fits=fits,
            time=seconds,
            exit_reason="",
            peak_bytes=peak * 2**30,
        ),
    )


def test_ties_go_to_the_simpler_and_losers_say_why(llama):
    found = llama[-1]
    pick = {c.text: c for c in found}
    simple, double, large = (
        pick[f"{mesh}, remat dots"]
        for mesh in ("fsdp 64", "data 2 x fsdp 32", "fsdp 16 x tensor 4")
    )
    none = pick["fsdp 64, remat none"]
    ranked = search._ranked(
        [
            done(double, 1.9, 30),
            done(large, 3.0, 20),
            done(simple, 2.0, 28),
            done(none, 1.97, 70),
        ]
    )
    # equal to none, and smaller
    assert next(r.candidate.text for r in ranked) == "fsdp 64, remat dots"
    whys = {r.candidate.text: search.why_not_best(r, ranked[0]) for r in ranked}
    assert "tie" in whys["data 2 x fsdp 32, remat dots"]
    assert "more to set" in whys["data 2 x fsdp 32, remat dots"]
    assert whys["fsdp 16 x tensor 4, remat dots"] == "x 1.50: +1 s x"
    refused = done(none, 1.0, 97, fits=False)
    assert search._ranked([refused, ranked[0]]) == [ranked[0], refused]
    assert search.why_not_best(refused, ranked[0]) == "does not fit: 2.00 GiB too much"


def text_of(found: search.Ranking, *base: str) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    search.show(found.to_json(), console, *base)
    return console.file.getvalue()


@pytest.mark.slow
def test_a_search_on_cpu_compiles_what_it_calls_best(tmp_path):
    run = run_of("quickstart", f"{TINY} precision.compute=float32")
    said: list[str] = []
    found = search.search(
        run,
        targets.parse("cpu:2"),
        finalists=2,
        options=CompileOptions(cache=tmp_path),
        say=said.append,
    )
    assert found.exit_code == 0
    assert found.winner.fits
    assert found.winner.compiled.peak_bytes > 0
    # arithmetic of two CPU devices counts products of matrices alone: all are as fast
    assert found.summary["stopped"] == "no other layout can be faster"
    bounds = [candidate.estimate.bound_s for candidate, _ in found.others]
    assert min(bounds) >= found.compiled[0].seconds
    assert sum(line.startswith("  ") for line in said) == len(found.compiled)
    assert "compiling for cpu:2" in said  # the compiler's signs of life
    told = json.loads(json.dumps(found.to_json()))
    assert told["counts"]["layouts"] > 20
    assert told["ranking"][0]["why"] == "the best"
    text = text_of(found, "--config quickstart")
    assert "python -m jaxdist.train --config quickstart --config." in text
    made = overridden(run, " ".join(told["overrides"]))
    assert (
        validation.validate_on(made, 2, with_data=False).shape
        == found.winner.composition.shape
    )


# By default a search compiles for CPUs (`test_none_fits_is_exit_3_with_the_nearest`), a
# plan for TPUs (tests/planner/test_plan.py), and results are ranked that were made up.
@pytest.mark.slow
@needs_libtpu
def test_a_search_on_tpu_ranks_by_the_compiler(tmp_path):
    found = search.search(
        run_of("quickstart", TINY),
        targets.parse("v5e:2x2"),
        finalists=2,
        options=CompileOptions(cache=tmp_path),
    )
    assert found.winner
    assert found.winner.time.step_s > 0
    assert found.compiled[0].plan is found.winner
    assert len(found.compiled) == 2
    for one in found.compiled:
        assert one.seconds >= one.candidate.estimate.bound_s > 0


def test_none_fits_is_exit_3_with_the_nearest(tmp_path, monkeypatch):
    run, target = (
        run_of("quickstart", f"{TINY} precision.compute=float32"),
        targets.parse("cpu:2"),
    )
    monkeypatch.setattr(targets.Target, "usable_bytes", 1000)
    found = search.search(
        run, target, finalists=1, options=CompileOptions(cache=tmp_path)
    )
    assert found.winner is None
    assert found.exit_code == 3
    assert "NO LAYOUT FITS" in text_of(found)
    assert found.compiled[0].plan.peak_bytes > 1000
    least = min(memory.accounted_peak(one.plan.components) for one in found.compiled)
    assert found.compiled[0].candidate.accounted_bytes == least


def test_time_up_compiles_nothing_more(tmp_path):
    run = run_of("quickstart", f"{TINY} precision.compute=float32")
    found = search.search(
        run, targets.parse("cpu:2"), minutes=0, options=CompileOptions(cache=tmp_path)
    )
    assert found.exit_code == 4
    assert found.summary["stopped"] == "the time was up"
    assert not found.compiled


def test_layouts_that_are_a_little_too_large_are_left_to_the_compiler():
    """The arithmetic may be too high by as much."""

    def candidate(bytes_: int, step_s: float) -> SimpleNamespace:
        return SimpleNamespace(
            accounted_bytes=bytes_,
            state_bytes=1,
            estimate=SimpleNamespace(step_s=step_s),
            axes=("fsdp",),
            complexity=1,
        )

    target = SimpleNamespace(usable_bytes=1000, freely_used=lambda most: most)
    of_sizes = [candidate(900, 1.3), candidate(1090, 1.1), candidate(1110, 1.0)]
    found, counts = search._select_fitting(of_sizes, target)
    assert [one.accounted_bytes for one in found] == [1090, 900]
    assert counts["fit"] == counts["at most 10% too large"] == 1
    assert counts["with too many activations"] == 1


def test_layouts_that_the_compiler_refuses_do_not_end_a_search():
    candidates = [
        SimpleNamespace(
            accounted_bytes=1000 - i,
            estimate=SimpleNamespace(step_s=1.0, bound_s=0.5),
            axes=("fsdp",),
            run=SimpleNamespace(remat=SimpleNamespace(policy="full")),
        )
        for i in range(9)
    ]
    finals = search._Finals(
        candidates,
        targets.parse("cpu:2"),
        CompileOptions(),
        finalists=1,
        ends=math.inf,
        expert_load=1.0,
        say=lambda line: None,
    )
    done = [
        SimpleNamespace(candidate=one, fits=False, seconds=math.inf)
        for one in candidates
    ]
    for count in range(1 + search.MAX_REFUSED):
        assert finals.choose(done[:count]) is candidates[count]
    assert finals.choose(done[: 1 + search.MAX_REFUSED]) is None
    assert finals.stopped == "1 were compiled"
