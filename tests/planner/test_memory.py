"""Memory by arithmetic: against built steps, against jax's residuals, against
compilers' peaks.
"""

import functools
import math
from dataclasses import dataclass

import jax
import pytest

from jaxdist.parallel import remat
from jaxdist.planner import arithmetic, dry_run, memory, targets
from jaxdist.planner.state import (
    HOST_PARAMETERS,
    HOST_STATE,
    checkpoint_bytes,
    held_bytes,
)
from jaxdist.trainer import compose, validation
from jaxdist.trainer.run_config import RunConfig
from support.objectives import Preference, SumObjective, composition_for
from support.runs import run_of

SMALL = {
    "batch.global_size": 32,
    "precision.compute": "bfloat16",
    "remat.policy": "full",
}


def account(run: RunConfig, on: str) -> memory.Components:
    target = targets.parse(on)
    composition = validation.validate_on(run, target.num_devices, with_data=False)
    return memory.components(composition, target)


@functools.cache
def small(on: str = "cpu:8", **changes) -> memory.Components:
    return account(run_of("llama3_8b:tiny", **SMALL | changes), on)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 2, "mesh.fsdp": 4, "mesh.zero": zero, "train.ema_decay": 0.9}
        for zero in (0, 1, 2, 3)
    ]
    + [
        {
            "mesh.data": 1,
            "mesh.fsdp": 4,
            "mesh.tensor": 2,
            "optimizer.name": "adafactor",
        },
        {"mesh.data": 1, "mesh.fsdp": 4, "mesh.pipeline": 2, "optimizer.name": "muon"},
        {
            "mesh.fsdp": 8,
            "precision.params": "bfloat16",
            "optimizer.momentum_dtype": "bfloat16",
        },
    ],
)
def test_the_state_is_that_of_the_built_step(changes):
    run = run_of("llama3_8b:tiny", **SMALL | changes)
    composition = validation.validate(run, jax.devices(), with_data=False)
    state = composition.build_step().abstract_state
    found = memory.components(composition, jax.devices()[0])

    def held(tree) -> int:
        leaves = [
            (x.sharding.shard_shape(x.shape), x.dtype.itemsize)
            for x in jax.tree.leaves(tree)
        ]
        return sum(math.prod(dims) * itemsize for dims, itemsize in leaves)

    assert found["parameters"] == held(state.trainable)
    assert (run.mesh.zero < 3) == (
        found["parameters"] == 4 * composition.spec.parameter_count
    )
    assert found["optimizer state"] == held(state.opt_state.optimizer)
    assert found.get("moving average", 0) == held(state.ema)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= whole - checkpoint_bytes(composition) < 100  # counters


def test_a_device_holds_its_own_rows_of_the_batch():
    run = run_of("llama3_8b:tiny", **SMALL | {"mesh.data": 2, "mesh.fsdp": 4})
    composition = validation.validate(run, jax.devices(), with_data=False)
    shapes = compose.batch_shapes(run)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes.values())
    batch = composition.build_step().abstract_batch(shapes)
    held = 0
    for x in batch.values():
        held += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    assert held == whole // 8
    assert memory.components(composition, jax.devices()[0])["batch"] == held


def test_the_state_is_what_the_compiler_calls_arguments():
    run = run_of("llama3_8b:tiny", **{"mesh.fsdp": 8})
    composition = validation.validate(run, jax.devices(), with_data=False)
    found = memory.components(composition, jax.devices()[0])
    state = found["parameters"] + found["optimizer state"]
    arguments = (
        dry_run.compile_step(composition, jax.devices())
        .memory_analysis()
        .argument_size_in_bytes
    )
    # Besides them four counters of the step; the batch's own indices may be dropped, as
    # nobody reads them.
    assert state < arguments <= state + found["batch"] + 16


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"pipeline": 2, "fsdp": 2, "tensor": 2}])
def test_frozen_modules_are_a_part_of_the_state(axes):
    axes = {f"mesh.{axis}": size for axis, size in ({"data": 1} | axes).items()}
    run = run_of("llama3_8b:tiny", **{"data.packing": "documents"} | axes)
    composition = composition_for(run, Preference())
    state = composition.build_step().abstract_state
    found = memory.components(composition, jax.devices()[0])
    held = 0
    for x in jax.tree.leaves(state.modules):
        held += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    # sharded as the policy of the same size
    assert found["frozen modules"] == held == found["parameters"] > 0
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= whole - checkpoint_bytes(composition) < 100  # counters
    placed = {p.path: p.shard_bytes for p in composition.placements()}
    assert sum(placed.values()) == 2 * held
    # the reference has three numbers for each target
    targets = run.batch.global_size * run.batch.sequence_length
    shards = composition.shape.batch_shards
    assert found["prepared fields"] == 3 * 4 * targets // shards
    path = "modules/reference/blocks/mlp/up"
    assert placed[path] == placed["blocks/mlp/up"]


def test_every_frozen_module_is_a_part_of_the_state():
    run = run_of("llama3_8b:tiny", **{"mesh.fsdp": 8, "data.packing": "documents"})
    one = composition_for(run, Preference())
    two = composition_for(run, TwoReferences())
    found = [memory.components(x, jax.devices()[0]) for x in (one, two)]
    assert found[1]["frozen modules"] == 2 * found[0]["frozen modules"] > 0
    sizes = [checkpoint_bytes(x) for x in (one, two)]
    assert sizes[1] - sizes[0] == 4 * one.spec.parameter_count


@dataclass(frozen=True)
class TwoReferences(Preference):
    """Compares the policy with one reference, and holds another."""

    modules = ("reference", "other")


@pytest.mark.parametrize(("zero", "shards"), [(3, 4), (2, 1)])
def test_a_search_counts_frozen_modules_in_the_state(zero, shards):
    run = run_of(
        "llama3_8b:tiny",
        **{
            "data.packing": "documents",
            "mesh.data": 1,
            "mesh.fsdp": 4,
            "mesh.tensor": 2,
            "mesh.zero": zero,
        },
    )
    sizes = []
    for objective in (SumObjective(), Preference()):
        composition = composition_for(run, objective)
        model = arithmetic.Model(composition, targets.parse("cpu:8"))
        sizes.append(model.state_bytes(composition))
    count = composition.spec.parameter_count
    assert sizes[1] - sizes[0] == pytest.approx(4 * count / 2 / shards, abs=1)


def test_frozen_modules_are_among_the_compilers_arguments():
    run = run_of("llama3_8b:tiny", **{"mesh.fsdp": 8, "data.packing": "documents"})
    composition = composition_for(run, Preference())
    found = memory.components(composition, jax.devices()[0])
    step = dry_run.compile_step(composition, jax.devices())
    arguments = step.memory_analysis().argument_size_in_bytes
    state = held_bytes(found)
    assert found["frozen modules"] > state / 5
    assert state + found["batch"] == pytest.approx(arguments, rel=0.01)


TOKENS = 4 * 128  # of a device: 32 sequences over 8
X, Q, KV, FF = (
    2 * TOKENS * 128,
    2 * TOKENS * 4 * 32,
    2 * TOKENS * 2 * 32,
    2 * TOKENS * 384,
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("full", {"block_input": X}),
        ("save:mlp_up,value", {"block_input": X, "mlp_up": FF, "value": KV}),
        (
            "dots",
            {
                "block_input": X,
                "query": Q,
                "key": KV,
                "value": KV,
                "mlp_gate": FF,
                "mlp_up": FF,
                "attention_projection": X,
                "attention_residuals": Q + 4 * TOKENS * 4,
            },
        ),
    ],
)
def test_layers_keep_what_the_policy_says(policy, kept):
    found = small(**{"mesh.fsdp": 8, "remat.policy": policy})
    saved = {
        name.removeprefix("saved: "): size
        for name, size in found.items()
        if "saved" in name
    }
    assert saved == {name: 4 * size for name, size in kept.items()}  # of four layers


def test_a_tpu_pads_narrow_heads_to_its_lanes():
    layout = {"mesh.fsdp": 8, "remat.policy": "save:query,mlp_up"}
    whole, padded = small(**layout), small("v5e:2x4", **layout)
    # heads of 32 in 128
    assert padded["saved: query"] == 4 * whole["saved: query"] == 4 * 4 * Q
    assert padded["saved: mlp_up"] == whole["saved: mlp_up"]


def test_cudnns_residuals_are_saved_but_not_offloaded():
    name, dots = "saved: attention_residuals", {"mesh.fsdp": 8, "remat.policy": "dots"}
    assert (
        small("h100:1x8", **dots)[name]
        == small(**dots)[name]
        == 4 * (Q + 4 * TOKENS * 4)
    )
    offload = {"mesh.fsdp": 8, "remat.policy": "offload:attention_residuals,mlp_up"}
    moved = small("h100:1x8", **offload)[memory.HOST]
    assert small(**offload)[memory.HOST] - moved == 4 * (Q + 4 * TOKENS * 4)


def test_no_remat_keeps_more_than_any_policy():
    kept = [
        sum(
            size
            for name, size in small(**{"mesh.fsdp": 8, "remat.policy": policy}).items()
            if "saved" in name
        )
        for policy in ("full", "dots", "none")
    ]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_the_last_layers_keep_more():
    layout = {"mesh.fsdp": 8, "remat.policy": "save:mlp_up", "remat.layers": 1}
    found = small(**layout)
    assert (found["saved: block_input"], found["saved: mlp_up"]) == (4 * X, FF)
    moved = small(**layout | {"remat.policy": f"save:mlp_up+offload:{remat.INPUT}"})
    assert (moved[memory.HOST], moved["saved: mlp_up"]) == (4 * X, FF)


def test_of_a_group_one_input_is_kept():
    found = small(**{"mesh.fsdp": 8, "remat.every": 2})
    assert (found["saved: block_input"], found["saved in a group"]) == (2 * X, 2 * X)
    within = small(**{"mesh.fsdp": 8, "remat.every": 4, "remat.policy": "save:mlp_up"})
    assert (within["saved: block_input"], within["saved in a group"]) == (
        X,
        4 * (X + FF),
    )


def test_a_pipeline_keeps_inputs_of_groups():
    """1F1B over two stages of two layers: two slots, one for trash, and a gradient's
    two.
    """
    layers, groups = (
        small(
            **{
                "mesh.fsdp": 4,
                "mesh.pipeline": 2,
                "pipeline.microbatches": 4,
                "remat.every": every,
            }
        )
        for every in (1, 2)
    )
    assert groups["pipeline slots"] < layers["pipeline slots"]


def test_offloaded_activations_are_the_hosts():
    base = small(**{"mesh.fsdp": 8})
    found = small(**{"mesh.fsdp": 8, "remat.policy": f"offload:{remat.INPUT}"})
    assert found[memory.HOST] == base["saved: block_input"] == 4 * X
    assert memory.accounted_peak(base) - memory.accounted_peak(found) == 4 * X


@pytest.mark.parametrize(
    "changes", [{"mesh.fsdp": 8}, {"mesh.fsdp": 4, "mesh.pipeline": 2}]
)
def test_moments_on_the_host_are_those_of_the_built_step(changes):
    changes = (
        SMALL
        | changes
        | {"mesh.data": 1, "train.ema_decay": 0.9, "offload.optimizer": True}
    )
    run = run_of("llama3_8b:tiny", **changes)
    composition = validation.validate(run, jax.devices(), with_data=False)
    state = composition.build_step().abstract_state
    found = account(run, "v5e:2x4")
    waiting = [
        x for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"
    ]
    sizes = [
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in waiting
    ]
    assert (
        found[HOST_STATE]
        == sum(sizes)
        > 0.95 * 12 * composition.spec.parameter_count / 8
    )
    whole = account(
        run_of("llama3_8b:tiny", **changes | {"offload.optimizer": False}), "v5e:2x4"
    )
    assert memory.accounted_peak(whole) - memory.accounted_peak(found) == sum(sizes)
    target = targets.parse("v5e:2x4")
    (line,) = memory.offload_lines(found, target)
    assert f"{2 * sum(sizes) / 15e9:.2f} s at 15 GB/s" in line
    assert not memory.offload_lines(whole, target)


def test_parameters_on_the_host_come_once_more_and_over_the_chips_own_link():
    changes = {"offload.optimizer": True, "offload.parameters": True}
    found = account(run_of("llama3_8b", **changes), "h100:1x8")
    state = found[HOST_STATE]
    parameters = found[HOST_PARAMETERS]
    assert state == 2 * parameters  # two moments in float32
    assert memory.moved_bytes(found) == 2 * state + 3 * parameters
    assert found["copies of parameters"] == parameters // 2  # in bfloat16
    rates = [
        memory.host_rate(targets.parse(name).chip) / 1e9
        for name in ("v5e:2x4", "a100:1x8", "h100:1x8", "gb200:1x8")
    ]
    assert rates == [15, 32, 64, 225]


def test_tensor_and_sequence_parallelism_split_activations():
    layout = {"mesh.fsdp": 4, "mesh.tensor": 2, "remat.policy": "save:mlp_up"}
    found = small(**layout)
    assert found["saved: mlp_up"] == 4 * FF  # twice the sequences on half the features
    assert found["saved: block_input"] == 2 * 4 * X
    assert (
        small(**layout, **{"mesh.sequence_parallel": True})["saved: block_input"]
        == 4 * X
    )


def test_adapters_keep_their_own_activations_and_no_gradient_of_the_base():
    layout = {"mesh.fsdp": 8, "remat.policy": "dots"}
    base, found = small(**layout), small(**layout, **{"lora.rank": 8})
    hidden = found["saved: unnamed"]  # x A of every kernel
    assert "saved: unnamed" not in base
    assert hidden > 0
    assert base["working set"] < found["working set"]
    assert found["working set"] < base["working set"] + hidden
    assert "unreduced gradients" in base
    assert "unreduced gradients" not in found


def test_accumulation_holds_one_tree_of_gradients():
    whole, parts = (
        small(**{"mesh.fsdp": 8}),
        small(**{"mesh.fsdp": 8, "batch.accumulation": 4}),
    )
    assert parts["saved: block_input"] == whole["saved: block_input"] / 4
    # float32, the same layout
    assert parts["gradients"] == parts["parameters"]


@pytest.mark.parametrize(
    "changes",
    [{"remat.every": 2}, {"remat.layers": 2}, {"precision.params": "bfloat16"}],
)
def test_sums_that_are_not_added_in_place_need_a_second_tree(changes):
    layout = {"mesh.fsdp": 8, "batch.accumulation": 4}
    one = small(**layout)["gradients"]
    assert small(**layout, **changes)["gradients"] > 1.2 * one


def test_a_pipelines_slots_do_not_grow_with_microbatches():
    def slots(schedule: str, microbatches: int) -> int:
        layout = {
            "mesh.fsdp": 2,
            "mesh.pipeline": 4,
            "batch.global_size": 2 * microbatches,
        }
        return small(
            **layout,
            **{"pipeline.schedule": schedule, "pipeline.microbatches": microbatches},
        )["pipeline slots"]

    assert slots("1f1b", 8) == slots("1f1b", 32) > 0
    assert slots("gpipe", 32) > 2 * slots("gpipe", 8)


# Compilers' own peaks in bytes (peak_memory_in_bytes): jax 0.10.2 with libtpu 0.0.42.1,
# or with its CUDA plugin, no device at hand, 2026-11-20 to 28. To measure: python -m
# jaxdist.plan --config NAME --on TARGET.
WIDE_64B = {
    "num_layers": 64,
    "d_model": 8192,
    "d_ff": 28_672,
    "num_heads": 64,
    "num_kv_heads": 64,
}
SEQUENCE_PARALLEL = {
    "batch.global_size": 192,
    "mesh.fsdp": 16,
    "mesh.tensor": 4,
    "mesh.sequence_parallel": True,
    "remat.policy": "save:query,key,value,attention_projection,mlp_gate,mlp_up",
    **{f"model.{name}": size for name, size in WIDE_64B.items()},
}
MIXTRAL = {  # 8x7B, in the batch of llama3_8b
    f"model.{name}": size
    for name, size in {
        "vocab_size": 32_000,
        "num_experts": 8,
        "experts_per_token": 2,
    }.items()
}
LONG = {
    "batch.sequence_length": 32_768,
    "batch.global_size": 16,
    "mesh.context": 4,
    "mesh.fsdp": 16,
}
LONGER = LONG | {
    "batch.sequence_length": 131_072,
    "batch.global_size": 4,
    "mesh.context": 16,
    "mesh.fsdp": 4,
}
ON_HOST = {
    "mesh.fsdp": 16,
    "mesh.data": 1,
    "batch.global_size": 16,
    "batch.sequence_length": 2048,
}
ON_HOST |= {"offload.optimizer": True}
SHALLOW = {"model.num_layers": 4, "batch.sequence_length": 4096, "batch.global_size": 8}
TENSOR = {"mesh.fsdp": 1, "mesh.tensor": 4, "model.num_layers": 4}
FP8 = {"precision.matmul": "fp8_rowwise"}
PEAKS = [
    ("llama3_8b", "v5p:4x4x4", {}, 8_345_512_640),
    ("llama3_8b", "v5p:2x2x4", {}, 25_189_575_360),
    ("llama3_8b", "v5p:4x4x4", {"remat.policy": "dots"}, 30_420_609_728),
    ("llama3_70b", "v5p:4x4x4", {"batch.accumulation": 8}, 42_937_910_464),
    (
        "llama3_70b",
        "v5p:4x4x4",
        {"batch.accumulation": 8, "mesh.fsdp": 16, "mesh.tensor": 4},
        73_269_810_880,
    ),
    ("dense_16b", "v5e:16x16", {}, 9_297_470_976),
    ("dense_16b", "v5p:4x4x4", SEQUENCE_PARALLEL, 97_267_675_328),
    ("llama3_8b", "h100:1x8", {}, 48_477_307_308),
    # with cuDNN 9.28
    ("llama3_8b", "h100:1x8", {"remat.policy": "dots"}, 224_746_602_900),
    ("llama3_8b", "h100:1x8", {"batch.accumulation": 8}, 23_575_081_412),
    ("llama3_8b", "h100:1x8", FP8, 49_752_387_988),
    ("llama3_8b", "h100:1x8", FP8 | {"batch.accumulation": 8}, 23_575_081_412),
    ("llama3_8b", "h100:1x8", {"remat.policy": "offload:block_input"}, 31_650_300_316),
    (
        "llama3_8b",
        "h100:1x8",
        {"remat.policy": "offload:attention_projection,mlp_gate"},
        46_819_529_592,
    ),
    (
        "llama3_8b",
        "h100:1x8",
        {"mesh.fsdp": 1, "mesh.tensor": 8, "batch.accumulation": 16},
        27_027_702_184,
    ),
    (
        "llama3_8b",
        "h100:4x8",
        {"remat.policy": "none", "batch.accumulation": 2},
        80_657_842_620,
    ),
    (
        "llama2_7b",
        "h100:4x8",
        {"mesh.data": 4, "mesh.fsdp": 8, "batch.accumulation": 4},
        29_367_305_248,
    ),
    ("gpt2_124m", "h100:1x8", {"batch.accumulation": 1}, 16_234_161_748),
    (
        "gpt2_124m",
        "v5e:2x4",
        {
            "mesh.data": 1,
            "mesh.fsdp": 8,
            "mesh.zero": 1,
            "batch.global_size": 128,
            "batch.accumulation": 1,
        },
        5_939_387_904,
    ),
    (
        "gpt2_124m",
        "v5e:2x4",
        {"lora.rank": 16, "batch.accumulation": 1},
        19_423_989_596,
    ),
    ("llama3_70b", "h100:8x8", {"batch.accumulation": 8}, 38_646_546_852),
    (
        "llama3_70b",
        "h100:8x8",
        {"mesh.fsdp": 8, "mesh.tensor": 8, "batch.accumulation": 8},
        116_784_826_808,
    ),
    # With experts, 2026-11-23.
    ("llama3_8b", "v5p:4x4x4", MIXTRAL | {"mesh.fsdp": 64}, 20_933_962_048),
    (
        "llama3_8b",
        "v5p:4x4x4",
        MIXTRAL | {"mesh.fsdp": 8, "mesh.expert": 8},
        20_013_830_464,
    ),
    ("qwen3_30b_a3b", "v5p:4x4x4", {"mesh.fsdp": 8, "mesh.expert": 8}, 17_979_464_032),
    ("qwen3_30b_a3b", "v5p:4x4x4", {"mesh.fsdp": 16, "mesh.expert": 4}, 19_918_202_720),
    ("mixtral_8x7b", "h100:1x8", SHALLOW | {"mesh.fsdp": 8}, 27_609_673_080),
    (
        "mixtral_8x7b",
        "h100:1x8",
        SHALLOW | {"mesh.expert": 8, "mesh.fsdp": 1},
        17_104_598_328,
    ),
    (
        "mixtral_8x7b",
        "h100:1x8",
        SHALLOW | {"mesh.expert": 4, "mesh.fsdp": 2},
        21_863_650_736,
    ),
    ("qwen3_30b_a3b", "h100:1x8", SHALLOW | {"mesh.fsdp": 8}, 13_169_427_848),
    (
        "qwen3_30b_a3b",
        "h100:1x8",
        SHALLOW | {"mesh.expert": 8, "mesh.fsdp": 1},
        9_685_017_256,
    ),
    (
        "mixtral_8x7b",
        "v5p:2x2x1",
        TENSOR
        | {
            "mesh.expert": 2,
            "mesh.tensor": 2,
            "model.num_layers": 2,
            "batch.global_size": 4,
        },
        18_411_439_424,
    ),
    (
        "mixtral_8x7b",
        "v5p:2x2x1",
        TENSOR
        | {
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "model.num_layers": 2,
            "batch.global_size": 4,
        },
        17_621_652_800,
    ),
    # With sequence parallelism, and without.
    ("llama3_8b", "v5p:4x4x4", TENSOR | {"mesh.fsdp": 16}, 4_040_859_840),
    (
        "llama3_8b",
        "v5p:4x4x4",
        TENSOR | {"mesh.fsdp": 16, "mesh.sequence_parallel": True},
        3_758_268_096,
    ),
    # With context, 2026-11-23.
    ("llama3_8b", "v5p:4x4x4", LONG, 6_523_410_624),
    ("llama3_8b", "v5e:4x4", ON_HOST, 7_660_000_000),
    ("llama3_8b", "v5e:4x4", ON_HOST | {"model.num_layers": 64}, 11_250_000_000),
    ("llama3_8b", "v5p:4x4x4", LONGER, 6_548_801_216),
    ("llama3_8b", "v5p:4x4x4", LONG | {"remat.policy": "dots"}, 28_544_342_208),
    (
        "llama3_8b",
        "v5p:4x4x4",
        LONG
        | TENSOR
        | {"mesh.fsdp": 4, "batch.global_size": 4, "mesh.sequence_parallel": True},
        1_332_555_456,
    ),
    ("llama3_8b", "v5p:4x4x4", LONGER | {"context.attention": "ring"}, 6_564_775_104),
]


@pytest.mark.parametrize(("name", "on", "changes", "peak"), PEAKS)
def test_components_sum_to_the_compilers_peak(name, on, changes, peak):
    found = account(run_of(name, **changes), on)
    assert memory.accounted_peak(found) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("changes", [{}, {"batch.accumulation": 8}])
def test_a_recipe_s_step_is_counted_as_the_compute_dtype_s(changes):
    """What kernels in one byte save of a gather, codes of activations take."""
    rows = [(one[2], one[3]) for one in PEAKS if one[:2] == ("llama3_8b", "h100:1x8")]
    (half,) = (peak for settings, peak in rows if settings == changes)
    (byte,) = (peak for settings, peak in rows if settings == FP8 | changes)
    assert byte == pytest.approx(half, rel=0.03)
    run = run_of("llama3_8b", **changes)
    coded = run_of("llama3_8b", **FP8 | changes)
    assert account(run, "h100:1x8") == account(coded, "h100:1x8")


# GiB that libtpu 0.0.42.1 (jax 0.10.2) said to need of what it refused, 2026-11-22;
# what it took is marked.
TOO_LARGE = [
    ("llama3_8b", "v5e:4x4", {}, 19.62),
    # taken: 17.1 by its usual order
    ("llama3_8b", "v5e:4x4", {"batch.global_size": 32}, 14.61),
    ("llama3_8b", "v5e:4x4", {"batch.global_size": 128}, 30.80),
    ("llama3_8b", "v5e:4x4", {"remat.policy": "dots"}, 103.36),
    ("llama3_8b", "v5e:4x4", {"remat.policy": "none"}, 287.25),
    ("llama3_8b", "v5e:4x4", {"mesh.fsdp": 4, "mesh.tensor": 4}, 46.84),
    ("llama3_8b", "v5e:2x4", {}, 38.98),
    ("llama3_8b", "v5e:2x4", {"batch.accumulation": 4}, 26.17),
    ("llama3_8b", "v6e:2x2", {}, 85.65),
    ("llama2_7b", "v5e:4x4", {}, 105.16),
    ("dense_16b", "v5e:8x8", {}, 31.23),
    ("llama3_70b", "v5e:16x16", {}, 31.97),
    ("llama3_70b", "v5p:4x4x4", {}, 120.18),
    # jax 0.12 keeps less for gradients: libtpu 0.0.50.1 needs 93.07, 2026-11-23.
    (
        "gpt2_124m",
        "v5e:2x2",
        {"remat.policy": "none", "batch.accumulation": 1},
        93.07 if jax.__version_info__ >= (0, 12) else 101.95,
    ),
]


@pytest.mark.parametrize(("name", "on", "changes", "needed"), TOO_LARGE)
def test_components_sum_to_what_a_refused_program_needs(name, on, changes, needed):
    found = account(run_of(name, **changes), on)
    assert memory.accounted_peak(found) / 2**30 == pytest.approx(needed, rel=0.08)


def test_a_program_is_ordered_for_size_only_where_it_must_be():
    fits, pressed = (
        account(run_of("llama3_8b", **SMALL), on) for on in ("v5p:2x2x2", "v5e:2x4")
    )
    assert fits["unreduced gradients"] >= 4 * 4096 * 128256  # of the whole head
    assert "unreduced gradients" not in pressed
    assert pressed["working set"] < fits["working set"]
    same = ("parameters", "optimizer state", "saved: block_input", "gathered weights")
    assert all(fits[name] == pressed[name] for name in same)
