"""Smaller meshes with the same program: their choice, their proof, and real compiles."""

import dataclasses
from importlib.util import find_spec

import pytest

from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner import compiled_step, replicas, show, targets, worker
from jaxdist.planner import plan as plan_module
from jaxdist.planner.communication import Collective
from jaxdist.planner.compiler import CompileOptions, DoesNotFit
from jaxdist.planner.plan import make_plan, plan_by_arithmetic
from jaxdist.trainer import cli

needs_libtpu = pytest.mark.skipif(
    not find_spec("libtpu"), reason='pip install -e ".[aot]"'
)
TINY = {
    "model.num_layers": "1",
    "model.d_model": "1024",
    "model.d_ff": "1024",
    "model.num_heads": "1",
    "model.num_kv_heads": "1",
    "model.head_dim": "128",
    "model.vocab_size": "1024",
    "optimizer.name": "adamw",
    "batch.sequence_length": "128",
    "precision.compute": "bfloat16",
}


def run_of(**overrides):
    values = TINY | {key.replace("__", "."): str(v) for key, v in overrides.items()}
    words = [f"--config.{name}={value}" for name, value in values.items()]
    parser = cli.ConfigParser("test", None)
    return cli.parse(parser, ["--config", "quickstart", *words])[1]


def on(target, *, data, fsdp, **more):
    run = run_of(
        mesh__data=data, mesh__fsdp=fsdp, batch__global_size=data * fsdp, **more
    )
    return plan_by_arithmetic(run, targets.parse(target))


def smaller(target, most=64, **sizes):
    plan = on(target, **sizes)
    found = replicas.smaller(plan.composition, plan.target, most)
    return found and (found.target.text, str(found.shape))


@pytest.mark.parametrize(
    ("target", "data", "fsdp", "found"),
    [
        # the ring of 16 that data has alone becomes one of 4
        ("v5p:16x16x16", 16, 256, ("v5p:4x16x16", "data 4 x fsdp 256")),
        # fsdp has a part of each ring, and would get another one
        ("v5p:16x16x16", 64, 64, None),
        ("v5p:16x16x16", 4, 1024, None),
        # between slices data shrinks to two, and within them it stays
        ("v5p:4x4x4x4", 4, 64, ("v5p:4x4x4x2", "data 2 x fsdp 64")),
        ("v5p:4x4x4x4", 16, 16, ("v5p:4x4x4x2", "data 8 x fsdp 16")),
        ("v5p:4x4x4x2", 2, 64, None),
        # a ring of 16 on v6e has no smaller ring
        ("v6e:16x16", 16, 16, None),
        ("v6e:16x16x4", 4, 256, ("v6e:16x16x2", "data 2 x fsdp 256")),
        # GPUs compile as fast for all
        ("h100:64x8", 64, 8, None),
    ],
)
def test_the_choice_of_a_smaller_mesh(target, data, fsdp, found):
    assert smaller(target, data=data, fsdp=fsdp) == found


def test_slices_joined_along_another_axis_keep_their_mesh():
    """The compiler splits sums between slices over `data` within them."""
    more = {"data": 16, "fsdp": 256, "mesh__dcn__data": 1, "mesh__dcn__fsdp": 4}
    assert smaller("v5p:4x16x16", data=16, fsdp=64) is not None
    assert smaller("v5p:4x16x16x4", **more) is None


def test_small_targets_keep_their_mesh():
    assert smaller("v5p:4x4x4x4", most=256, data=4, fsdp=64) is None


def test_the_largest_mesh_below_the_limit_is_taken():
    sizes = {"data": 16, "fsdp": 64}
    assert smaller("v5p:4x4x4x16", most=512, **sizes)[0] == "v5p:4x4x4x8"
    assert smaller("v5p:4x4x4x16", most=64, **sizes)[0] == "v5p:4x4x4x2"


def test_each_device_keeps_its_samples():
    plan = on("v5p:4x4x4x4", data=4, fsdp=64)
    found = replicas.smaller(plan.composition, plan.target, 64)
    assert found.run.batch.global_size == 128
    assert plan.run.batch.global_size == 256


def test_lowered_steps_that_differ():
    full = "module {\n  %1 = add %0 : tensor<64x128xf32>\n  %2 = cst 1.25e-4\n}"
    small = full.replace("64x", "16x").replace("1.25e-4", "5.0e-4")
    assert replicas.difference(full, small, 4) == ""
    assert "tensor<64x128" in replicas.difference(full, small, 2)
    assert "tensor<64x128" in replicas.difference(full, small.replace("128", "64"), 4)
    assert "add" in replicas.difference(full, small.replace("add", "multiply"), 4)
    assert "lines" in replicas.difference(full, small + "\n}", 4)
    groups = "  %3 = reduce {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}"
    others = "  %3 = reduce {replica_groups = dense<[[0, 7]]> : tensor<1x2xi64>}"
    assert replicas.difference(groups, others, 4) == ""


def mesh(dcn=1, **sizes):
    return MeshShape(
        {axis: sizes.get(axis, 1) for axis in AXES},
        {axis: dcn if axis == "data" else 1 for axis in AXES},
    )


def collective(**values):
    text = dict.fromkeys(("what", "module", "phase", "name", "computation"), "")
    fields = {
        "kind": "all-reduce",
        "axis": "data",
        "group_size": 4,
        "dtype": "f32",
        "bytes": 2**20,
        "count": 1,
        "asynchronous": False,
        "in_loop": False,
        "begins": 0,
        "ends": 0,
    }
    return Collective(**(text | fields | values))


def enlarged(one, full_target, full, small_target, small):
    target = targets.parse(small_target)
    ids = target.arrange(small)
    link = target.axis_link(small, one.axis.removeprefix("part of "))
    if one.axis.startswith("part of "):
        link = target.group_link(ids.ravel()[: one.group_size].tolist())
    mesh_of = replicas.SmallMesh(run_of(), target, small)
    one = dataclasses.replace(one, link=link)
    (found,) = replicas.enlarged([one], mesh_of, full, targets.parse(full_target))
    return found


def test_sums_over_data_get_their_real_size():
    one = collective(group_size=4)
    full = ("v5p:16x16x16", mesh(data=16, fsdp=256))
    small = ("v5p:4x16x16", mesh(data=4, fsdp=256))
    found = enlarged(one, *full, *small)
    assert found.group_size == 16
    assert found.wire_bytes == pytest.approx(2 * 2**20 * 15 / 16)
    assert found.link == targets.parse(full[0]).axis_link(full[1], "data")
    # groups of other axes stay
    other = collective(axis="fsdp", group_size=256)
    assert enlarged(other, *full, *small).group_size == 256


def test_sums_between_slices_and_within_them():
    full = ("v5p:4x4x4x8", mesh(dcn=8, data=32, fsdp=16))
    small = ("v5p:4x4x4x2", mesh(dcn=2, data=8, fsdp=16))
    between = enlarged(collective(group_size=2), *full, *small)
    assert (between.group_size, between.link.name) == (8, "DCN")
    everywhere = enlarged(collective(group_size=8), *full, *small)
    assert (everywhere.group_size, everywhere.link.name) == (32, "DCN")
    part = collective(axis="part of data", group_size=4, kind="reduce-scatter")
    within = enlarged(part, *full, *small)
    assert (within.group_size, within.link.name) == (4, "ICI")


def test_collectives_that_a_smaller_mesh_does_not_show():
    full = ("v5p:16x16x16", mesh(data=16, fsdp=256))
    small = ("v5p:4x16x16", mesh(data=4, fsdp=256))
    for one in (
        collective(kind="all-gather"),  # of shards, or of whole arrays?
        collective(axis="part of data", group_size=2),  # neighbours
    ):
        with pytest.raises(replicas.NotTheSame, match="data"):
            enlarged(one, *full, *small)
    assert enlarged(collective(kind="all-gather", bytes=64), *full, *small).group_size


@pytest.mark.parametrize(
    ("target", "axes"),
    [
        ("v5p:4x4x8", {"data": 8, "fsdp": 4, "context": 2, "tensor": 2}),
        ("v4:4x4x4", {"data": 2, "fsdp": 32}),
        ("v6e:4x8x2", {"data": 4, "fsdp": 16}),
        ("tpu7x:4x4x4", {"data": 8, "fsdp": 16}),
        ("h100:4x6", {"data": 6, "fsdp": 4}),
        ("cpu:8", {"data": 2, "fsdp": 4}),
    ],
)
def test_the_link_of_an_axis_is_that_of_its_slowest_group(target, axes):
    target = targets.parse(target)
    shape = mesh(dcn=target.num_slices, **axes)
    ids = target.arrange(shape)
    for number, (axis, size) in enumerate(shape.sizes.items()):
        groups = [
            group.tolist() for group in ids.swapaxes(number, -1).reshape(-1, size)
        ]
        slowest = min(map(target.group_link, groups), key=lambda x: x.bytes_per_s)
        assert target.axis_link(shape, axis) == slowest


# --- the plan -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


def test_a_refusal_names_the_smaller_mesh(monkeypatch):
    def refuse(*arguments, small=None, **more):
        raise DoesNotFit(2, 1, small.target.text if small else "")

    monkeypatch.setattr(plan_module, "compile_run", refuse)
    run = on("v5p:4x4x4x4", data=4, fsdp=64).run
    target = targets.parse("v5p:4x4x4x4")
    options = CompileOptions(most_devices=64)
    assert "v5p:4x4x4x2" in make_plan(run, target, options=options).exit_reason
    whole = dataclasses.replace(options, full=True)
    assert "v5p:4x4x4x2" not in make_plan(run, target, options=whole).exit_reason


def compiled_for(smaller):
    sizes = (
        "argument",
        "output",
        "alias",
        "temp",
        "peak",
        "host_argument",
        "host_temp",
    )
    return compiled_step.Compiled(
        **{f"{name}_bytes": 1 for name in sizes}, hlo="", mesh_ids=(), smaller=smaller
    )


def test_a_plan_says_that_it_was_compiled_on_a_smaller_mesh():
    plan = on("v5p:4x4x4x4", data=4, fsdp=64)
    for smaller, said in (("v5p:4x4x4x2", True), ("", False)):
        report = compiled_step.with_compiled(plan, compiled_for(smaller)).to_json()
        assert report["compile"]["smaller"] == smaller
        assert ("compiled for v5p:4x4x4x2" in show.as_text(report)) is said


def test_a_program_that_does_not_show_the_real_one_is_compiled_in_full(monkeypatch):
    asked = []

    def compiled(*arguments, small=None, **more):
        asked.append(small)
        return compiled_for(small.target.text if small else "")

    def read(plan, found, small=None):
        if small:
            raise replicas.NotTheSame("all-gather over data")
        return dataclasses.replace(plan, compiled=found, fits=True)

    monkeypatch.setattr(plan_module, "compile_run", compiled)
    monkeypatch.setattr(plan_module, "with_compiled", read)
    run = on("v5p:4x4x4x4", data=4, fsdp=64).run
    options = CompileOptions(most_devices=64)
    said = []
    plan = make_plan(
        run, targets.parse("v5p:4x4x4x4"), options=options, say=said.append
    )
    assert plan.compiled.smaller == ""
    assert [small is None for small in asked] == [False, True]
    assert any("all-gather over data" in line for line in said)


FULL = "v5p:4x4x4x4"
SMALLER = "v5p:4x4x4x2"


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Runs the compiler's child without a compiler on two lowered steps.

    Returns:
      A function of the two texts; it returns the result, and the compiled targets.
    """
    monkeypatch.setenv("XLA_FLAGS", "")
    compiled = []

    def compile_(lowered, flags, target, state_on_host):
        compiled.append(target.text)
        return {"refused": []}

    def run(full, small, **more):
        texts = {FULL: full, SMALLER: small}

        def lower(folder, target):
            return worker._Step(targets.parse(target), None, texts[target], [0], 0)

        monkeypatch.setattr(worker, "_lower", lower)
        monkeypatch.setattr(worker, "_compile", compile_)
        request = {"target": FULL, "cache": str(tmp_path), "flags": {}}
        return worker._work(tmp_path, request | more), compiled

    return run


ON_SMALLER = {"smaller": SMALLER, "ratio": 2}


def test_the_child_compiles_an_equal_step_on_the_smaller_mesh(child):
    result, compiled = child("tensor<4xf32>", "tensor<2xf32>", **ON_SMALLER)
    assert compiled == [SMALLER]
    assert result["smaller"] == SMALLER
    assert not result["notes"]


def test_the_child_compiles_a_step_that_differs_in_full(child):
    result, compiled = child("tensor<4xf32>", "tensor<3xf32>", **ON_SMALLER)
    assert compiled == [FULL]
    assert result["smaller"] == ""
    (note,) = result["notes"]
    assert "tensor<4xf32>" in note


def test_the_child_prefers_a_result_of_the_whole_mesh(child):
    child("tensor<4xf32>", "tensor<2xf32>")  # --full
    result, compiled = child("tensor<4xf32>", "tensor<2xf32>", **ON_SMALLER)
    assert compiled == [FULL]
    assert result["cached"]
    assert result["smaller"] == ""


def both(cache, target, **sizes):
    """Plans a run on a smaller mesh and in full."""
    run = on(target, **sizes).run
    options = CompileOptions(cache=cache, most_devices=1)
    target = targets.parse(target)
    small = make_plan(run, target, options=options)
    full = make_plan(run, target, options=dataclasses.replace(options, full=True))
    assert small.fits, small.exit_reason
    assert full.compiled.smaller == ""
    return small, full


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sizes", "smaller"),
    [
        ("v5p:4x4x8", {"data": 8, "fsdp": 16}, "v5p:4x4x4"),
        ("v5e:4x4x4", {"data": 4, "fsdp": 16}, "v5e:4x4x2"),
    ],
)
def test_a_smaller_mesh_shows_what_the_full_one_has(cache, target, sizes, smaller):
    small, full = both(cache, target, **sizes)
    assert small.compiled.smaller == smaller
    assert small.peak_bytes == pytest.approx(full.peak_bytes, rel=0.03)
    assert small.time.step_s == pytest.approx(full.time.step_s, rel=0.03)
    assert small.time.high_s == pytest.approx(full.time.high_s, rel=0.03)
    sums = [
        [(c.axis, c.group_size) for c in plan.collectives if c.bytes > 4096]
        for plan in (small, full)
    ]
    assert sums[0] == sums[1] != []
    report = small.to_json()
    assert report["compile"]["smaller"] == smaller
