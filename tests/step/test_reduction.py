"""How often gradients cross the axes that copy parameters: once a step where the
model's loss is a sum.
"""

import re
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import ConfigError, files
from jaxdist.models.transformer import Transformer
from jaxdist.models.vision import VisionConfig, VisionTransformer
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.sharding import Rules
from jaxdist.planner import communication, targets
from jaxdist.planner.communication import Collective
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.plan import make_plan
from jaxdist.protocols.model import stack
from jaxdist.protocols.model_spec import describe
from jaxdist.protocols.sample_sums import who_sums_over_samples
from jaxdist.step import reduction
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from jaxdist.telemetry import hlo
from jaxdist.trainer import run_config, step_lines, validation
from support.models import (
    FAST_COMPILE,
    ONE,
    OPTIMIZER,
    TINY,
    Layout,
    batch_of,
    program_of,
    rules_and_mesh,
    run,
    spec_of,
    step_of,
    worst,
)
from support.pipelines import MODEL, Case, batch_for, build
from support.plain_flax_models import Contrastive, OwnDropout, WeightedMean

SMALL = replace(TINY, num_layers=1)
MICROBATCHES = 4


# --- which models ---------------------------------------------------------------------


def rules_of(zero: int = 3, **sizes: int) -> Rules:
    ones = dict.fromkeys(("pipeline", "data", "fsdp", "expert", "context", "tensor"), 1)
    return Rules(MeshShape(ones | sizes, ones), zero)


@pytest.mark.parametrize(
    ("sizes", "zero", "axes"),
    [
        ({"data": 8}, 3, ("data",)),
        ({"fsdp": 8}, 3, ()),
        ({"fsdp": 8}, 1, ("fsdp",)),
        ({"data": 2, "fsdp": 4}, 2, ("data",)),
        ({"data": 2, "fsdp": 4, "tensor": 2}, 0, ("data", "fsdp")),
    ],
)
def test_the_axes_are_those_that_copy_parameters_and_gradients(sizes, zero, axes):
    chosen = reduction.choose(
        spec_of(), rules_of(zero, **sizes), "auto", microbatches=MICROBATCHES
    )
    assert chosen.axes_summed_once == axes
    assert bool(chosen.over) == bool(axes)


@pytest.mark.parametrize(
    ("names", "dims", "dtype"),
    [
        (("d_model", "d_ff"), (32, 48), "bfloat16"),
        (("vocab", "d_model"), (64, 32), "float32"),
        (("d_model", "vocab"), (32, 64), "float32"),
        (("d_model",), (32,), "float32"),
    ],
)
def test_kernels_alone_cross_in_the_dtype_of_reduce(names, dims, dtype):
    assert reduction.sent_dtype(names, dims, "bfloat16") == dtype
    assert reduction.sent_dtype(names, dims, "float32") == "float32"


def test_a_step_in_one_part_sums_in_its_backward_pass_and_a_pipeline_never_does():
    assert reduction.choose(spec_of(), rules_of(data=8), "auto", microbatches=1) == (
        (),
        "",
        "",
    )
    assert reduction.choose(
        spec_of(), rules_of(pipeline=2, data=4), "auto", microbatches=1
    ).axes_summed_once == ("data",)


def test_a_run_says_what_it_does_and_what_both_ways_cost():
    config = run_config.default_config()
    config.batch.accumulation = MICROBATCHES

    def line(reduce: str) -> str:
        config.mesh.reduce = reduce
        run = run_config.from_config(config)
        composition = validation.validate_on(run, 4, with_data=False)
        megabytes = 4 * composition.spec.parameter_count / 1e6
        (found,) = step_lines.reduction_lines(composition)
        return found.replace(f"{megabytes:.1f}", "ONCE").replace(
            f"{4 * megabytes:.1f}", "EACH"
        )

    assert line("auto") == line("once")
    each = "with each of 4 microbatches, EACH MB"
    over = "gradients: summed over data 4"
    assert (
        line("auto")
        == f"{over} once a step, ONCE MB a device (mesh.reduce=each: {each})"
    )
    assert (
        line("each")
        == f"{over} {each} a device (once a step: ONCE MB): mesh.reduce=each"
    )


class Table(nnx.Module):
    """Sums over samples; without names fsdp splits its table."""

    sums_over_samples = True

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (64, 64)))


def test_a_table_that_may_be_looked_up_by_index_is_not_split_in_a_region():
    spec = describe(lambda rngs: Table(rngs=rngs))
    assert (
        "by index"
        in reduction.choose(
            spec, rules_of(data=2, fsdp=4), "auto", microbatches=MICROBATCHES
        ).why_each
    )
    assert reduction.choose(
        spec, rules_of(2, data=2, fsdp=4), "auto", microbatches=MICROBATCHES
    ).axes_summed_once == ("data",)
    assert reduction.choose(
        spec, rules_of(data=8), "auto", microbatches=MICROBATCHES
    ).axes_summed_once == ("data",)


class Renamed(Transformer):
    """Adds nothing to the loss."""

    def describe(self) -> str:
        return "renamed"


class OtherHead(Transformer):
    """Its loss may be anything."""

    def head(self, x_BSD, batch):
        return super().head(x_BSD, batch)


class OtherHeadThatSums(OtherHead):
    """Says it again."""

    sums_over_samples = True


class Measured(VisionTransformer):
    """Adds figures beside the loss, with other options."""

    class Config(VisionConfig):
        """The same."""

    def metrics(self, batch):
        return {}


class OtherLogits(VisionTransformer):
    """Its head calls this."""

    def logits(self, x_BPD):
        return super().logits(x_BPD)


class Called(Table):
    """Its loss may call this."""

    def __call__(self, x):
        return x


def test_a_subclass_that_may_make_the_loss_otherwise_does_not_inherit_the_word():
    say_so = (
        Transformer,
        Renamed,
        OtherHeadThatSums,
        VisionTransformer,
        Measured,
        Table,
    )
    assert all(map(who_sums_over_samples, say_so))
    assert who_sums_over_samples(Renamed) is Transformer
    assert not any(
        map(
            who_sums_over_samples,
            (OtherHead, OtherLogits, Called, Contrastive, nnx.Module),
        )
    )


class Mixer(nnx.Module):
    """A layer that mixes samples."""

    def __call__(self, x_BSD, info):
        return x_BSD - x_BSD.mean(0), {}


class OursOfMixers(Transformer):
    """Takes all upon itself."""

    sums_over_samples = True


@pytest.mark.parametrize(
    ("model_class", "sums"), [(Transformer, False), (OursOfMixers, True)]
)
def test_our_word_is_not_for_layers_of_others(model_class, sums):
    def build(rngs):
        model = model_class(TINY, rngs=rngs)
        assert describe(lambda rngs: model_class(TINY, rngs=rngs)).sums_over_samples
        model.blocks = stack(lambda rngs: Mixer(), TINY.num_layers, rngs)
        return model

    assert describe(build).sums_over_samples is sums


def test_who_may_look_up_by_index_is_in_no_region_with_two_more_axes_unless_asked():
    def chosen(
        model: type[Transformer], setting: reduction.Reduce = "auto", **sizes: int
    ):
        spec = describe(lambda rngs: model(TINY, rngs=rngs))
        return reduction.choose(
            spec, rules_of(data=2, **sizes), setting, microbatches=MICROBATCHES
        )

    on_both = {"fsdp": 2, "tensor": 2}
    assert "what fsdp and tensor split" in chosen(OtherHeadThatSums, **on_both).why_each
    assert chosen(OtherHeadThatSums, "once", **on_both).axes_summed_once == ("data",)
    assert chosen(OtherHeadThatSums, fsdp=4).axes_summed_once == ("data",)
    assert chosen(OtherHeadThatSums, pipeline=2, **on_both).axes_summed_once == (
        "data",
    )
    assert chosen(Renamed, **on_both).axes_summed_once == ("data",)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Contrastive, "sums_over_samples"), (OwnDropout, "its own nnx.Rngs (drop/rngs/")],
)
def test_once_is_refused_for_a_model_that_it_would_change(model, why):
    config = run_config.default_config(f"{model.__module__}:{model.__name__}")
    config.mesh.reduce = "once"
    with pytest.raises(ConfigError) as refusal:
        validation.validate_on(run_config.from_config(config), 1)
    (fault,) = refusal.value.faults
    assert fault.startswith(f"mesh.reduce=once: {model.__name__} ")
    assert why in fault
    assert fault.endswith("; set mesh.reduce=auto or each")


def test_a_batch_that_cannot_be_divided_is_refused_with_once_and_told_with_auto():
    layout, batch = Layout(8, data=8), batch_of(batch=MICROBATCHES)

    def lower(setting: reduction.Reduce) -> None:
        built = step_of(
            layout,
            SMALL,
            StepConfig(accumulation=MICROBATCHES, reduce_over_replicas=setting),
        )
        built.inspect.lower(built.abstract_state, built.abstract_batch(batch))

    uneven = re.escape("positions [4, 16], sample [4], targets [4, 16]")
    with pytest.raises(
        ConfigError,
        match=f"mesh.reduce=once: {uneven}.* into 4 microbatches x data 8 = 32; set",
    ):
        lower("once")
    with pytest.warns(
        UserWarning, match=f"summed over data 8 with each microbatch: {uneven}"
    ):
        lower("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower("each")


def test_a_step_refuses_once_as_a_run_does():
    rules, mesh = rules_and_mesh(Layout(2, data=2))
    spec = describe(lambda rngs: Contrastive(rngs=rngs))
    step = StepConfig(accumulation=MICROBATCHES, reduce_over_replicas="once")
    with pytest.raises(ConfigError, match="mesh.reduce=once: Contrastive does not say"):
        build_train_step(spec, OPTIMIZER, lambda _: 0.1, mesh, rules, step)


def after_one_step(model: type[nnx.Module], data: int) -> tuple[float, dict, str]:
    """Returns loss and gradients of a step in parts on so many replicas, and why each
    part is summed.
    """
    rules, mesh = rules_and_mesh(Layout(data, data=data))
    spec = describe(lambda rngs: model(rngs=rngs))
    built = build_train_step(
        spec,
        OPTIMIZER,
        lambda _: 0.1,
        mesh,
        rules,
        StepConfig(accumulation=MICROBATCHES),
    )
    batch = batch_of(batch=8 * MICROBATCHES)
    state = built.init.lower().compile(FAST_COMPILE)()
    placed = jax.device_put(batch, built.batch_shardings(batch))
    _, metrics, gradients = built.inspect.lower(state, placed).compile(FAST_COMPILE)(
        state, placed
    )
    why = reduction.choose(spec, rules, "auto", microbatches=MICROBATCHES).why_each
    return float(metrics["loss"]), jax.device_get(gradients), why


@pytest.mark.parametrize("model", [Contrastive, WeightedMean, OwnDropout])
def test_a_loss_that_is_no_sum_of_samples_is_the_same_on_any_number_of_replicas(model):
    loss, gradients, _ = after_one_step(model, 1)
    on_eight, theirs, why = after_one_step(model, 8)
    assert on_eight == pytest.approx(loss, rel=1e-6)
    assert worst(theirs, gradients) < 1e-5
    assert why.startswith(model.__name__)


class Mislabelled(Contrastive):
    """Says what is not so."""

    sums_over_samples = True


def test_the_word_decides_and_a_wrong_one_changes_the_loss():
    assert (
        abs(after_one_step(Mislabelled, 8)[0] / after_one_step(Contrastive, 8)[0] - 1)
        > 0.05
    )


# --- what crosses devices -------------------------------------------------------------


def sums_over(
    collectives: list[Collective], axes: tuple[str, ...]
) -> tuple[int, int, int]:
    """Returns (arrays, their bytes, how many of them in a loop) summed over some of the
    axes.
    """
    crossing = [one for one in collectives if set(one.axis.split("+")) & set(axes)]
    summed = [one for one in crossing if one.kind in ("all-reduce", "reduce-scatter")]
    return (
        sum(one.count for one in summed),
        sum(one.count * one.bytes for one in summed),
        sum(one.count for one in summed if one.in_loop),
    )


def in_parts(
    layout: Layout, parts: int, setting: reduction.Reduce = "auto", **options
) -> list[Collective]:
    step = StepConfig(accumulation=parts, reduce_over_replicas=setting, **options)
    program = program_of(layout, SMALL, step, 8 * layout.data * layout.fsdp)
    return communication.collectives(program.module, program.step.rules.shape)


def test_accumulation_sums_over_data_once_a_step():
    layout = Layout(2, data=2)
    _count, size, in_loop = sums_over(in_parts(layout, MICROBATCHES), ("data",))
    gradients = 4 * spec_of(SMALL).parameter_count
    # loss and count, norm, tokens
    assert not in_loop
    assert gradients <= size < gradients + 64
    each = sums_over(in_parts(layout, MICROBATCHES, "each"), ("data",))
    # the test sees what it is about
    assert each[2]
    assert each[1] > 0.9 * MICROBATCHES * gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (Layout(8, data=8), ("data",)),
        (Layout(8, data=2, fsdp=4), ("data",)),
        (Layout(8, data=2, fsdp=4, zero=2), ("data",)),
        (Layout(8, data=2, fsdp=4, zero=1), ("data", "fsdp")),
        (Layout(8, data=2, fsdp=4, zero=0), ("data", "fsdp")),
        (Layout(8, fsdp=8, zero=1), ("fsdp",)),
        (Layout(8, data=4, tensor=2), ("data",)),
    ],
    ids=str,
)
def test_accumulation_changes_nothing_of_what_crosses_replicas(layout, axes):
    four, eight = (sums_over(in_parts(layout, parts), axes) for parts in (4, 8))
    assert four == eight
    assert not four[2]
    if layout.zero == 3 or layout.fsdp == 1:  # else one part's are summed in shards
        one = sums_over(in_parts(layout, 1), axes)[1]
        # With fsdp, the partitioner sums some of one part's gradients whole, before
        # they are cut.
        assert four[1] <= one + 64 if layout.fsdp > 1 else abs(four[1] - one) <= 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"data": 4}, {"data": 2, "fsdp": 2, "zero": 1}, {"data": 2, "fsdp": 2}]
)
def test_microbatches_change_nothing_of_what_crosses_replicas(sizes):
    axes = ("data", "fsdp") if sizes.get("zero") == 1 else ("data",)
    model = replace(MODEL, num_layers=2)
    counted = set()
    for microbatches in (1, 4):
        built = build(case := Case(microbatches=microbatches, model=model, **sizes))
        batch = built.abstract_batch(batch_for(case))
        compiled = built.step.lower(built.abstract_state, batch).compile(FAST_COMPILE)
        moved = communication.collectives(
            hlo.parse(compiled.as_text()), built.rules.shape
        )
        # in how many instructions they go, XLA's combiner decides
        counted.add(sums_over(moved, axes)[1:])
        in_ticks = [one for one in moved if one.in_loop and "data" in one.axis]
        assert not in_ticks  # no batch is gathered for the embedding
    ((size, in_loop),) = counted
    assert size
    assert not in_loop


@pytest.mark.slow
def test_bfloat16_sums_cross_replicas_as_such_and_are_float32_again():
    reduced = run(
        Layout(2, data=2), SMALL, StepConfig(accumulation=2, reduce="bfloat16")
    )
    exact = run(ONE, SMALL)
    assert 1e-5 < worst(reduced.gradients, exact.gradients) < 2e-2
    assert {x.dtype for x in jax.tree.leaves(reduced.gradients)} == {
        np.dtype(np.float32)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "needs"),
    [("v5e:2x4", "libtpu"), ("h100:1x8", "jax_cuda12_plugin")],
    ids=["tpu", "gpu"],
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 8},
        {"data": 2, "fsdp": 4},
        {"data": 2, "fsdp": 4, "zero": 1},
        {"data": 4, "pipeline": 2},
    ],
)
def test_accelerators_compilers_sum_over_replicas_once_a_step(
    on, needs, sizes, tmp_path
):
    pytest.importorskip(needs, reason="compiles ahead of time for what is not here")
    config = files.load("quickstart", folders=files.packaged_folders())
    config.mesh.update(sizes)
    config.batch.global_size, config.model.num_layers = 64, 2
    axes = ("data", "fsdp") if sizes.get("zero") == 1 else ("data",)
    key = "microbatches" if "pipeline" in sizes else "accumulation"

    def summed(parts: int) -> tuple[int, int, int]:
        (config.pipeline if "pipeline" in sizes else config.batch)[key] = parts
        options = CompileOptions(cache=tmp_path)
        plan = make_plan(
            run_config.from_config(config), targets.parse(on), options=options
        )
        return sums_over(plan.collectives, axes)

    (_, four, in_loop), (_, eight, also_in_loop) = summed(4), summed(8)
    assert four == eight
    assert not in_loop + also_in_loop
