"""Experts in a plan: bytes of their exchange, its rounds, layouts that share them out,
and bad input.
"""

from importlib.util import find_spec

import pytest

import jaxdist.plan
from jaxdist.config import ConfigError, files, schema
from jaxdist.ops.experts import ExpertsCost, experts_cost
from jaxdist.ops.experts.costs import rounds
from jaxdist.ops.experts.mixture import SLACK
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.sharding import Rules
from jaxdist.planner import (
    communication,
    layouts,
    memory,
    on_target,
    plan,
    search,
    targets,
    timing,
)
from jaxdist.planner.arithmetic import EXPERT
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.layouts import CompiledLayout
from jaxdist.telemetry import hlo
from jaxdist.trainer import compose, exit_code, run_config
from support.stored_programs import mesh_shape

QWEN = experts_cost(
    experts=128, chosen=8, width=2048, hidden=768, gated=True, layers=48
)
TINY = (
    "model.num_layers=2 model.d_model=64 model.d_ff=64 model.num_heads=4 model.num_kv_heads=2 "
    "model.head_dim=16 model.vocab_size=128 model.num_experts=8 batch.global_size=8 batch.sequence_length=64 "
    "mesh.data=1"
)


def run_of(name: str, words: str = "") -> run_config.RunConfig:
    run = run_config.from_config(files.load(name, folders=files.packaged_folders()))
    config = schema.to_config_dict(run)
    pairs = dict(word.split("=", 1) for word in words.split())
    files.apply_overrides(config, pairs, run_config.full_schema(run.model["target"]))
    return run_config.from_config(config)


# --- bytes and rounds -----------------------------------------------------------------


def sent(cost: ExpertsCost, parts: int, itemsize: int = 2) -> tuple[str, str, float]:
    """Returns the form, the collective, and what a device sends a token and layer."""
    rules = Rules(mesh_shape(expert=parts))
    crossings = cost.share(rules, itemsize).crossings
    assert all(one.axis == "expert" and one.follows_load for one in crossings)
    (kind,) = {one.kind for one in crossings} or {""}
    total = sum(one.forward + one.backward for one in crossings)
    return cost.form_name(rules), kind, total


@pytest.mark.parametrize("parts", [8, 16, 64])
def test_rounds_send_each_row_five_times(parts):
    form, kind, moved = sent(QWEN, parts)
    assert kind == "all-to-all"
    assert form == "rounds"
    # docs/how-to/experts.md, a token
    assert moved == pytest.approx(5 * 8 * 1.25 * (parts - 1) / parts * 2048 * 2)


def test_few_devices_gather_tokens():
    form, kind, moved = sent(QWEN, 4)
    assert kind == "all-gather"
    assert form == "gather"
    assert moved == pytest.approx(5 * 3 * 2048 * 2)
    assert sent(QWEN, 1) == ("", "", 0)


def test_a_skewed_load_takes_more_rounds():
    assert [rounds(load) for load in (1, 1.25, 1.26, 2.5, 3)] == [1, 1, 2, 2, 3]
    assert [rounds(load, 2) for load in (1, 1.25, 1.26, 2.5, 3)] == [
        2,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.slow
def test_a_compiled_step_sends_what_the_formula_says(tmp_path):
    run = run_of("quickstart", f"{TINY} mesh.expert=4")
    options = CompileOptions(cache=tmp_path)
    even, skewed = (
        plan.make_plan(
            run, targets.parse("cpu:4"), options=options, expert_load=load
        ).to_json()
        for load in (1, 3)
    )
    tokens, layers = 8 * 64 / 4, 2
    cost = experts_cost(
        experts=8, chosen=2, width=64, hidden=64, gated=True, layers=layers
    )
    # payload: each device keeps a part of it
    rows = layers * tokens * sent(cost, 4, itemsize=4)[2] * 4 / 3
    # weights go along, and their gradient comes back
    routers = 3 * layers * tokens * 2 * SLACK * 4
    moved = even["experts"]["exchanged"]
    assert {(one["kind"], one["axis"]) for one in moved} == {("all-to-all", "expert")}
    assert [one["what"] for one in moved] == ["rows to experts", "rows from experts"]
    assert rows < sum(one["bytes"] for one in moved) <= rows + routers
    assert "even load" in even["experts"]["assumption"]
    assert even["experts"]["rounds"] == 1
    assert skewed["experts"]["rounds"] == 3
    more = [one["bytes"] for one in skewed["experts"]["exchanged"]]
    assert more == [3 * one["bytes"] for one in moved]
    assert even["active_parameters"] < even["parameters"] == skewed["parameters"]


def test_loops_of_rounds_go_round_as_often_as_the_load_needs():
    text = """HloModule m

%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %s = (s32[], f32[8,16]) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%s), index=1
  %y = f32[8,16]{1,0} all-to-all(%x), replica_groups=[1,4]<=[4], dimensions={0}, metadata={op_name="jit(step)/even_load_trips_1/while/body/rows_to_experts/all_to_all"}
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %t = (s32[], f32[8,16]) tuple(%i, %y)
}

%condition (s: (s32[], f32[8,16])) -> pred[] {
  %s = (s32[], f32[8,16]) parameter(0)
  ROOT %less = pred[] custom-call(%s)
}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,16]) tuple(%zero, %p)
  %loop = (s32[], f32[8,16]) while(%init), condition=%condition, body=%body, metadata={op_name="jit(step)/even_load_trips_1/while"}
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""
    module, shape = hlo.parse(text), mesh_shape(expert=4)
    for load, count in ((1, 1), (2, 2), (4, 4)):
        (one,) = communication.collectives(timing.with_load(module, load), shape)
        assert (one.what, one.axis, one.count, one.bytes) == (
            "rows to experts",
            "expert",
            count,
            8 * 16 * 4,
        )


# --- links ----------------------------------------------------------------------------


def test_an_all_to_all_passes_other_members_of_a_torus():
    def seconds(target, kind, **sizes):
        shape = MeshShape({a: sizes.get(a, 1) for a in AXES}, dict.fromkeys(AXES, 1))
        link, n = targets.parse(target).axis_link(shape, "expert"), sizes["expert"]
        return link.bytes_per_s * link.seconds(
            kind, communication.wire_bytes(kind, 1.0, n)
        )

    # n / 4 on a ring
    assert seconds("v5e:16x16", "all-to-all", expert=16, fsdp=16) == pytest.approx(
        16 / 4
    )
    assert seconds("v5e:16x16", "all-gather", expert=16, fsdp=16) == pytest.approx(
        15 / 16
    )
    # a switch
    assert seconds("h100:1x8", "all-to-all", expert=8) == pytest.approx(7 / 8)
    assert seconds("v5e:2x2", "all-to-all", expert=2, fsdp=2) == pytest.approx(1 / 2)


# --- layouts --------------------------------------------------------------------------


def test_layouts_share_out_experts_and_price_it():
    run, target = (
        run_of("mixtral_8x7b", "batch.global_size=16"),
        targets.parse("h100:2x8"),
    )
    meshes, illegal = on_target.legal_meshes(run, target)
    sizes = {one.shape.sizes["expert"] for one in meshes}
    assert sizes == {1, 2, 4, 8}
    # 8 on two nodes, beside tensor
    assert any("over InfiniBand" in reason for reason in illegal)
    kept = [
        one
        for one in meshes
        if one.shape.sizes["expert"] * one.shape.sizes["fsdp"] == 16
    ]
    found = {
        c.shape.sizes["expert"]: c
        for c in layouts.candidates(kept, target)
        if c.run.remat.policy == "full"
        and c.run.mesh.zero == 3
        and c.run.batch.accumulation == 1
    }
    without, most = found[1].estimate, found[8].estimate
    assert without.exchange == 0 < most.exchange
    assert most.gathers < 0.6 * without.gathers
    # all is held once
    assert found[1].state_bytes == pytest.approx(found[8].state_bytes)
    assert "mesh.expert=8" in found[8].overrides(run)
    assert "expert 8" in found[8].text
    skewed = {
        c.text: c.estimate.exchange
        for c in layouts.candidates(kept, target, expert_load=3)
    }
    assert skewed[found[8].text] == pytest.approx(3 * most.exchange)


def test_a_dense_model_has_no_layouts_with_expert():
    meshes, _ = on_target.legal_meshes(run_of("quickstart"), targets.parse("h100:1x2"))
    assert {one.shape.sizes["expert"] for one in meshes} == {1}


def test_layouts_with_and_without_the_axis_are_compared():
    run = run_of("quickstart")
    shapes = (mesh_shape(fsdp=8), mesh_shape(expert=8), mesh_shape(expert=4, fsdp=2))
    plain, shared, half = (
        layouts.Candidate(compose.compose(run, shape, compose.model_spec(run)), None)
        for shape in shapes
    )
    done = [CompiledLayout(one, None) for one in (shared, half)]
    assert search._other_kind([shared, half, plain], done) is plain
    assert (
        search._other_kind([shared, plain], [*done, CompiledLayout(plain, None)])
        is None
    )
    assert search._other_kind([plain, shared], [CompiledLayout(plain, None)]) is shared


# --- memory ---------------------------------------------------------------------------


def test_the_state_of_experts_is_the_compilers_arguments():
    run, target = (
        run_of("quickstart", f"{TINY} mesh.expert=4 mesh.fsdp=2"),
        targets.parse("cpu:8"),
    )
    composition = on_target.validate_for(run, target)
    spec = composition.spec
    found = memory.components(composition, target)
    kernels = sum(
        x.size for x, names in spec.named_parameters().values() if "experts" in names
    )
    vectors = sum(
        x.size
        for x, _ in spec.named_parameters().values()
        if len(x.shape) <= 2 and 128 not in x.shape
    )
    least = 4 * (spec.parameter_count - vectors) / 8
    assert kernels > spec.parameter_count / 2
    assert least <= found["parameters"] <= least + 4 * vectors


def test_tpu7x_holds_the_gradients_of_all_kernels_of_a_layer_s_experts():
    """Its compiled peaks say so: plan-arithmetic.json, @gathered."""
    words = "mesh.fsdp=8 mesh.expert=1 batch.global_size=8 batch.sequence_length=256"
    run = run_of("mixtral_8x7b", f"{words} model.num_layers=4 batch.accumulation=1")
    unreduced = {}
    for text in ("tpu7x:2x2x1", "v5p:2x2x2"):
        target = targets.parse(text)
        composition = on_target.validate_for(run, target)
        found = memory.components(composition, target)
        unreduced[target.family] = found["unreduced gradients"]
    kernel_bytes = 4 * 8 * 4096 * 14_336
    assert unreduced["v5p"] > 2 * kernel_bytes
    assert unreduced["tpu7x"] - unreduced["v5p"] == kernel_bytes


# --- bad input, through the command ---------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--config.mesh.expert=8 --config.model.num_experts=6", "experts"),
        (
            "--config.model.num_experts=4 --config.model.experts_per_token=8",
            "experts_per_token",
        ),
        ("--config.mesh.expert=2", "has no experts"),
        (
            "--config.mesh.expert=8 --config.model.num_experts=8 --config.mesh.dcn.expert=2",
            "mesh.dcn.expert",
        ),
        ("--expert-load=2", "the model has no experts"),
    ],
)
def test_bad_input_is_refused_as_train_does(words, says, monkeypatch, capsys):
    arguments = ["--config", "quickstart", "--on", "v5e:2x4", *words.split()]
    on = ["--on", "v5e:2x4x2"] if "dcn" in words else []
    monkeypatch.setattr(
        plan, "compile_run", lambda *_, **__: pytest.fail("nothing is to be compiled")
    )
    code = exit_code.exit_code(lambda: jaxdist.plan.main([*arguments, *on]))
    said = capsys.readouterr().err.strip().splitlines()
    assert code == 78
    assert any(says in line for line in said)


def test_a_load_below_the_mean_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        jaxdist.plan.main(["--config", "quickstart", "--expert-load=0.5"])


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("libtpu"), reason='pip install -e ".[aot]"')
def test_a_search_compiles_layouts_with_and_without_the_axis(tmp_path):
    words = (
        "model.num_layers=2 model.d_model=256 model.d_ff=256 model.num_heads=2 model.num_kv_heads=1 "
        "model.head_dim=128 model.vocab_size=512 model.num_experts=4 batch.global_size=8 "
        "batch.sequence_length=128 precision.compute=bfloat16 optimizer.name=adamw"
    )
    run, target = run_of("quickstart", words), targets.parse("v5e:2x2")
    found = search.search(
        run, target, finalists=2, options=CompileOptions(cache=tmp_path)
    )
    seconds = {True: [], False: []}
    for one in found.compiled:
        seconds[EXPERT in one.candidate.axes].append(one.seconds)
    assert found.winner
    assert seconds[True]
    assert seconds[False]
    assert found.compiled[0].seconds <= (1 + search.TIE) * min(seconds[False])
    assert found.winner.to_json()["experts"]["experts"] == 4
