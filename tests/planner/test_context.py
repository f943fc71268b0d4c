"""Sequences over several devices in a plan: bytes of each form, what it holds, layouts
that have the axis.
"""

import dataclasses
import math

import pytest

from jaxdist.config import ConfigError, files, schema
from jaxdist.ops import costs
from jaxdist.ops.attention_costs import (
    AttentionCost,
    Traffic,
    attention_cost,
    busiest,
)
from jaxdist.parallel.sharding import Rules
from jaxdist.planner import (
    communication,
    layouts,
    memory,
    on_target,
    plan,
    show,
    targets,
)
from jaxdist.planner.compiler import CompileOptions
from jaxdist.telemetry import hlo
from jaxdist.trainer import run_config
from jaxdist.trainer.costs import costs_of
from support.stored_programs import mesh_shape

LLAMA = attention_cost(width=4096, heads=32, kv_heads=8, head_size=128, length=32_768)
TINY = (
    "model.num_layers=2 model.d_model=64 model.d_ff=64 model.num_heads=8 model.num_kv_heads=2 "
    "model.head_dim=16 model.vocab_size=128 batch.global_size=4 batch.sequence_length=256 mesh.data=1"
)


def run_of(name: str, words: str = "") -> run_config.RunConfig:
    config = schema.to_config_dict(
        run_config.from_config(files.load(name, folders=files.packaged_folders()))
    )
    pairs = dict(word.split("=", 1) for word in words.split())
    files.apply_overrides(config, pairs, run_config.full_schema(config.model.target))
    return run_config.from_config(config)


def cost(form: str, one: AttentionCost = LLAMA, **axes: int) -> Traffic:
    rules = Rules(mesh_shape(**axes), attention=form)
    return one.traffic(one.form(rules), itemsize=2)


# --- bytes ----------------------------------------------------------------------------

ROW = 32_768 // 8 * 128 * 2  # bytes of one head of a device's part


@pytest.mark.parametrize(
    ("form", "forward", "backward"),
    [
        ("heads", 80 * 7 / 8, 80 * 7 / 8),
        ("gather", 16 * 7, 16 * 7),
        # Chunks change places on the way in and out; gradients of keys travel in
        # float32, and home. Results stay: of their product with gradients a float32 of
        # each head moves.
        ("ring", 80 + 16 * 7, 32 + 32 * 4 / 256 + (32 + 16) + 16 * 7 + 2 * 16 * 8),
    ],
)
def test_a_device_sends_what_the_form_needs(form, forward, backward):
    one = cost(form, context=8)
    assert (one.forward, one.backward) == (forward * ROW, backward * ROW)


def test_tensor_splits_heads_and_few_kv_heads_are_copied():
    assert (
        cost("heads", context=4, tensor=2).forward
        == cost("heads", context=4).forward / 2
    )
    copied = cost("heads", context=16)  # 8 kv heads, of which each is held twice
    assert copied.forward == 2 * (32 + 16) * ROW / 2 * 15 / 16
    assert copied.keys == 16 * ROW / 2  # as much again as its own part
    assert cost("heads", context=8).keys == 0


def test_what_is_held_of_others_grows_with_the_sequence_only_when_it_is_gathered():
    double = dataclasses.replace(LLAMA, length=65_536)
    held = {
        form: [cost(form, own, context=8).keys for own in (LLAMA, double)]
        for form in ("gather", "ring")
    }
    assert held["gather"] == [7 * 16 * ROW, 14 * 16 * ROW]
    assert held["ring"] == [
        16 * ROW,
        32 * ROW,
    ]
    window = dataclasses.replace(LLAMA, window=5000)  # reaches two devices of 4,096
    assert cost("gather", window, context=8).forward == 2 * 16 * ROW
    assert cost("ring", window, context=8) == cost("gather", window, context=8)


def test_the_last_part_of_the_queries_has_most_to_do():
    def most(form: str, words: str = "") -> float:
        run = run_of("llama3_8b", f"batch.sequence_length=32768 {words}")
        rules = Rules(mesh_shape(context=8), attention=form)
        return busiest(costs_of(run), rules, 2)

    assert [most(form) for form in ("heads", "ring", "gather")] == [
        1,
        1,
        pytest.approx(2 - 1 / 8),
    ]
    # Of the layers with a window every part has equal work.
    some = most("gather", "model.window=4096 model.layer_pattern=local,global")
    assert 1 < some < 2 - 1 / 8


# --- programs -------------------------------------------------------------------------


def test_collectives_are_called_by_what_attention_moves():
    text = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8,4096]) -> f32[8,4096] {
  %p = f32[8,4096]{1,0} parameter(0)
  %h = f32[8,4096]{1,0} multiply(%p, %p)
  %q = f32[8,4096]{1,0} all-to-all(%h), replica_groups=[1,4]<=[4], dimensions={0}, metadata={op_name="jit(step)/jvp(sequences_to_heads)/all_to_all"}
  ROOT %g = f32[8,4096]{1,0} all-reduce(%q), replica_groups=[1,4]<=[4], to_apply=%add, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}
"""
    found = communication.collectives(hlo.parse(text), mesh_shape(context=4))
    assert [(one.what, one.axis) for one in found] == [
        ("sequences to heads", "context"),
        ("gradient", "context"),  # of weights, whose tokens other devices have, too
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["heads", "gather", "ring"])
def test_a_compiled_step_sends_what_the_formula_says(form, tmp_path):
    run = run_of(
        "quickstart",
        f"{TINY} mesh.context=4 context.attention={form} remat.policy=full",
    )
    made = plan.make_plan(
        run, targets.parse("cpu:4"), options=CompileOptions(cache=tmp_path)
    )
    found, (layer,) = made.to_json()["context"], made.to_json()["context"]["layers"]
    assert {one["axis"] for one in found["exchanged"]} == {"context"}
    sequences, layers = 4, 2
    wanted = sequences * layers * (2 * layer["forward"] + layer["backward"])
    assert sum(one["wire_bytes"] for one in found["exchanged"]) == pytest.approx(wanted)
    assert found["why"][0].startswith(
        f"context 4: attention by {form}: set by context.attention"
    )
    text = " ".join(show.as_text(made.to_json()).split())  # lines are wrapped
    assert "attention over a split sequence" in text
    assert found["why"][0] in text


# --- memory ---------------------------------------------------------------------------


def peak(words: str) -> dict[str, int]:
    run, target = run_of("llama3_8b", words), targets.parse("v5p:4x4x4")
    composition = on_target.validate_for(run, target)
    return memory.components(composition, target)


def test_activations_are_those_of_a_devices_tokens():
    one = peak(
        "batch.sequence_length=8192 mesh.fsdp=16 mesh.data=4 batch.global_size=64"
    )
    more = peak(
        "batch.sequence_length=32768 batch.global_size=16 mesh.fsdp=16 mesh.context=4"
    )
    same = ("saved: block_input", "working set", "gathered weights")
    assert {name: one[name] for name in same} == {name: more[name] for name in same}
    # Devices of context share out parameters and their state, those of data do not.
    assert one["optimizer state"] == pytest.approx(
        4 * more["optimizer state"], rel=0.01
    )


def test_gathered_keys_are_there_in_the_backward_pass():
    words = (
        "batch.sequence_length=131072 batch.global_size=4 mesh.fsdp=4 mesh.context=16"
    )
    assert "keys of other devices" not in peak(f"{words} model.num_kv_heads=16")
    gathered = peak(f"{words} context.attention=gather")["keys of other devices"]
    assert gathered == 15 / 16 * 131_072 * 2 * 8 * 128 * 2


# --- layouts --------------------------------------------------------------------------


def fastest(
    words: str, config: str = "llama3_8b", on: str = "v5p:4x4x4"
) -> layouts.Candidate:
    run, target = run_of(config, words), targets.parse(on)
    meshes, _ = on_target.legal_meshes(run, target)
    assert {one.shape.sizes["pipeline"] for one in meshes} > {1}
    kept = ("fsdp", "tensor", "context")
    meshes = [
        one for one in meshes if math.prod(one.shape.sizes[a] for a in kept) == 64
    ]
    found = list(layouts.candidates(meshes, target))
    assert {one.shape.sizes["context"] for one in found} > {1}
    return min(found, key=lambda one: one.estimate.step_s)


@pytest.mark.slow
def test_long_sequences_that_are_fewer_than_devices_are_shared_out():
    one = fastest("batch.sequence_length=131072 batch.global_size=4")
    assert one.shape.sizes["context"] >= 8
    assert f"mesh.context={one.shape.sizes['context']}" in one.overrides(
        run_of("llama3_8b", "batch.sequence_length=131072 batch.global_size=4")
    )
    assert one.estimate.context > 0
    assert "context" in one.text


@pytest.mark.slow
def test_short_sequences_of_a_large_batch_are_not():
    one = fastest("")
    assert one.shape.sizes["context"] == 1
    assert one.estimate.context == 0


@pytest.mark.slow
def test_a_search_keeps_the_rules_of_a_run():
    run = run_of(
        "llama3_8b",
        "batch.sequence_length=131072 batch.global_size=4 context.attention=heads",
    )
    meshes, illegal = on_target.legal_meshes(run, targets.parse("v5p:4x4x4"))
    shapes = [one.shape for one in meshes]
    assert all(
        32 % (shape.sizes["context"] * shape.sizes["tensor"]) == 0 for shape in shapes
    )
    assert any("context.attention=heads" in reason for reason in illegal)
    sizes = {shape.sizes["context"] for shape in shapes}
    assert sizes == {1, 2, 4, 8, 16, 32}
    assert on_target.context_sizes(
        run_of("llama3_8b", "batch.sequence_length=6144"), 64
    ) == [1, 2, 4]
    assert on_target.context_sizes(run_of("vit_digits"), 64) == [1]
    nodes = run_of("llama3_8b", "batch.sequence_length=131072 batch.global_size=16")
    meshes, illegal = on_target.legal_meshes(nodes, targets.parse("h100:2x8"))
    assert max(one.shape.sizes["context"] for one in meshes) == 8
    assert any(
        "mesh.context=N communicates in every layer, over InfiniBand" in reason
        for reason in illegal
    )


def forms_of(words: str, on: str = "v5p:4x4x4") -> dict[int, list[str]]:
    """Returns the values of context.attention that a search tries, by the size of the
    axis.
    """
    run, target = run_of("llama3_8b", words), targets.parse(on)
    meshes, _ = on_target.legal_meshes(run, target)
    alone = [
        one
        for one in meshes
        if math.prod(one.shape.sizes[a] for a in ("fsdp", "context")) == 64
    ]
    found: dict[int, list[str]] = {}
    for one in layouts.candidates(alone, target):
        tried = found.setdefault(one.shape.sizes["context"], [])
        form = one.run.context.attention
        if form not in tried:
            assert (f"context.attention={form}" in one.overrides(run)) == (
                form != run.context.attention
            )
            assert (f"attention by {form}" in one.text) == (
                form != "auto" and one.shape.sizes["context"] > 1
            )
            tried.append(form)
    return found


WINDOW = "model.window=1024 model.layer_pattern=local"


@pytest.mark.slow
def test_a_search_tries_the_forms_that_none_beats_in_time_and_memory():
    batch = "batch.global_size=64 batch.sequence_length"
    # By heads all have equal work, and copies of 8 kv heads are more than a ring's
    # chunk on 32 devices alone.
    found = forms_of(f"{batch}=131072")
    assert found[1] == found[8] == found[16] == ["auto"]
    assert found[32] == [
        "auto",
        "ring",
    ]
    # Heads that do not divide: `auto` gathers, whose last device sees the most keys.
    found = forms_of(f"{batch}=131072 model.num_heads=20 model.num_kv_heads=4")
    assert found[2] == found[4] == ["auto"]
    assert found[8] == ["auto", "ring"]
    # A gather asks only those that a window reaches.
    assert forms_of(f"{batch}=8192 {WINDOW}")[8] == ["auto", "gather"]


@pytest.mark.slow
def test_a_search_keeps_the_form_that_is_set():
    batch = "batch.global_size=64 batch.sequence_length=8192"
    assert forms_of(f"{batch} {WINDOW} context.attention=heads")[8] == ["heads"]


def test_what_cannot_be_split_is_refused_as_a_run_is():
    run = run_of("llama3_8b", "batch.sequence_length=1000 mesh.context=16 mesh.fsdp=4")
    with pytest.raises(ConfigError, match="not divisible by mesh.context=16"):
        plan.plan_by_arithmetic(run, targets.parse("v5p:4x4x4"))
    assert math.isfinite(
        peak("mesh.context=2 mesh.fsdp=32 batch.global_size=32")["parameters"]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCost(AttentionCost):
    """Attention of another mixer, which sends a value of its own."""

    moves = ("latents",)


def test_ops_of_two_classes_share_a_section():
    latent = LatentCost(**{**vars(LLAMA), "layers": 3})
    rules = Rules(mesh_shape(context=4))
    (section, moves) = costs.reports([LLAMA, latent], rules, 2, 1.0)["context"]
    assert [layer["count"] for layer in section["layers"]] == [LLAMA.layers, 3]
    assert moves == (*LLAMA.moves, "latents")
