"""The pipeline equals one device: loss, gradients, update and evaluation of every schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.extend import core as jax_core
from models_for_tests import (
    FAST_COMPILE,
    TINY,
    batch_of,
    collectives,
    loop_bodies,
    reachable,
    spec_of,
    worst,
)

from jaxdist import mesh as meshes
from jaxdist import sharding
from jaxdist.models.transformer import TransformerConfig
from jaxdist.optimizers import OptimizerConfig, build_schedule
from jaxdist.pipeline import schedule as schedules
from jaxdist.telemetry import hlo
from jaxdist.telemetry.flops import hlo_flops
from jaxdist.training.staging import PipelineConfig, Staging
from jaxdist.training.step import StepConfig, TrainStep, build_train_step

# Eight layers, and no loss of interest is left out: z-loss, grouped heads, unequal weights.
MODEL = replace(TINY, num_layers=8, num_kv_heads=2, z_loss=1e-4)
SEVEN = replace(MODEL, num_layers=7)
# With weights that large (0.2), bfloat16 noise grows tenfold on its way through eight layers.
CALM = replace(MODEL, init_std=0.05)
TIED = {"tie_embeddings": True}
OPTIMIZER = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=1)
BATCH, LENGTH = 16, 16


class Case(NamedTuple):
    """A pipeline on a mesh, and what flows through it."""

    stages: int = 2
    microbatches: int = 4
    chunks: int = 1
    schedule: str = "1f1b"
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: int = 3
    accumulation: int = 1
    edges: Any = "sharded"
    gather_once: bool = False
    remat: str = "none"
    compute: str = "float32"
    model: TransformerConfig = MODEL
    packed: bool = False

    @property
    def devices(self) -> int:
        return self.stages * self.data * self.fsdp * self.tensor

    @property
    def config(self) -> PipelineConfig:
        return PipelineConfig(
            self.schedule, self.microbatches, self.chunks, self.edges, self.gather_once, self.remat
        )

    @property
    def staging(self) -> Staging | None:
        return Staging(self.config, self.model.num_layers, self.stages) if self.stages > 1 else None


class Result(NamedTuple):
    """What one step gave, as numpy arrays with flat layers."""

    loss: float
    z_loss: float
    gradients: Any
    trainable: Any
    evaluated: tuple[float, float]


def build(case: Case, remat: str = "dots", optimizer: OptimizerConfig = OPTIMIZER) -> TrainStep:
    config = meshes.MeshConfig(
        pipeline=case.stages, data=case.data, fsdp=case.fsdp, tensor=case.tensor, zero=case.zero
    )
    mesh = meshes.build_mesh(config, jax.devices()[: case.devices])
    rules = sharding.build_rules(
        config, meshes.resolve_mesh(config, case.devices), vocab_over_stages=case.edges == "sharded"
    )
    step = StepConfig(accumulation=case.accumulation, compute=case.compute, remat=remat, staging=case.staging)
    rate = build_schedule(optimizer, 1000, BATCH)
    return build_train_step(spec_of(case.model), optimizer, rate, mesh, rules, step)


def batch_for(case: Case) -> dict[str, Any]:
    batch = batch_of(case.model, BATCH, LENGTH)
    if case.packed:  # two documents a row, cut at another place in each, and padding in one
        cut = np.arange(BATCH)[:, None] % (LENGTH - 4) + 2
        row = np.arange(LENGTH)[None, :]
        second = row >= cut
        batch["segment_ids"] = (1 + second).astype(np.int32)
        batch["positions"] = np.where(second, row - cut, row).astype(np.int32)
        batch["segment_ids"][3, 12:], batch["weights"][3, 12:] = 0, 0
    return batch


def one_device(case: Case) -> Case:
    return Case(stages=1, model=case.model, packed=case.packed, compute=case.compute)


@lru_cache
def fresh_state(model: TransformerConfig):
    """Returns the state on one device before the first step, as numpy arrays."""
    built = build(Case(stages=1, model=model))
    return jax.device_get(built.init.lower().compile(FAST_COMPILE)())


def run(case: Case) -> Result:
    """Returns what a step from the same fresh state does; checks the gradients' shardings."""
    built, cut = build(case), case.staging
    state = fresh_state(case.model)
    state = jax.device_put(cut.staged(state) if cut else state, built.shardings)
    batch = batch_for(case)
    batch = jax.device_put(batch, built.batch_shardings(batch))
    evaluated = built.evaluate.lower(state, batch).compile(FAST_COMPILE)(state, batch)
    inspect = built.inspect.lower(state, batch).compile(FAST_COMPILE)
    after, metrics, gradients = inspect(state, batch)
    if case.zero == 3:
        where = [(g.sharding, p.sharding, g.ndim) for g, p in _pairs(gradients, after.trainable)]
        assert all(one.is_equivalent_to(other, ndim) for one, other, ndim in where)
    gradients, trainable = (cut.flat(t) if cut else t for t in (gradients, after.trainable))
    return Result(
        *(float(metrics[name]) for name in ("loss", "aux/z_loss")),
        jax.device_get(gradients), jax.device_get(trainable), tuple(map(float, evaluated)),
    )  # fmt: skip


def _pairs(one, other):
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


reference = lru_cache(run)


def moved(one, other) -> float:
    """Returns max over leaves of |difference| / |reference|, Euclidean."""
    return max(
        float(np.linalg.norm((a - np.float64(b)).ravel()) / np.linalg.norm(np.float64(b).ravel()))
        for a, b in _pairs(one, other)
    )


class Errors(NamedTuple):
    """How far a pipeline is from one device, relative."""

    loss: float
    evaluation: float
    gradient: float
    parameter: float


def errors(case: Case) -> Errors:
    found, wanted = run(case), reference(one_device(case))
    assert wanted.z_loss > 0 and all(np.abs(g).max() > 0 for g in jax.tree.leaves(wanted.gradients))
    assert moved(wanted.trainable, fresh_state(case.model).trainable) > 1e-3  # the step does something
    assert found.evaluated[1] == wanted.evaluated[1] > 0
    return Errors(
        max(abs(found.loss / wanted.loss - 1), abs(found.z_loss / wanted.z_loss - 1)),
        abs(found.evaluated[0] / wanted.evaluated[0] - 1),
        worst(found.gradients, wanted.gradients),
        moved(found.trainable, wanted.trainable),
    )


FLOAT32, BFLOAT16 = Errors(1e-6, 1e-6, 1e-5, 1e-6), Errors(1e-3, 1e-3, 2e-2, 2e-2)


def check(case: Case) -> None:
    assert case.devices <= len(jax.devices())
    bands = BFLOAT16 if case.compute == "bfloat16" else FLOAT32
    found = errors(case)
    print(f"\n{found}")
    assert all(error <= band for error, band in zip(found, bands, strict=True)), found


# The default suite: every mechanism at least once.
FEW = {
    "two stages": Case(),
    "interleaved": Case(4, 4, 2, "interleaved"),
    "with fsdp and tensor": Case(2, 4, fsdp=2, tensor=2),
    "uneven, tied, dropout": Case(4, 4, model=replace(SEVEN, dropout=0.1, **TIED)),
    "packed, zero 2": Case(2, 4, fsdp=2, zero=2, packed=True),
    "accumulation": Case(2, 2, accumulation=2),
}

MANY = {
    f"{p} stages, {m} microbatches, {v} chunks": Case(p, m, v, "interleaved" if v > 1 else "1f1b")
    for p in (2, 4)
    for m in (4, 8, 16)
    for v in (1, 2)
} | {
    "interleaved, fsdp and tensor": Case(2, 4, 2, "interleaved", fsdp=2, tensor=2),
    "tied, fsdp and tensor": Case(2, 4, fsdp=2, tensor=2, model=replace(MODEL, **TIED)),
    "data": Case(4, 8, data=2),
    "zero 1": Case(2, 4, fsdp=2, zero=1),
    "zero 2": Case(2, 4, fsdp=2, zero=2),
    "zero 3": Case(4, 4, fsdp=2, zero=3),
    "seven layers": Case(4, 8, model=SEVEN),
    "seven layers, interleaved": Case(2, 4, 2, "interleaved", model=SEVEN),
    "tied": Case(4, 4, model=replace(MODEL, **TIED)),
    # Without biases: that of keys has no gradient but noise, where positions are learned.
    "learned positions": Case(4, 4, model=replace(MODEL, positions="learned", max_positions=LENGTH)),
    "dropout": Case(4, 8, model=replace(MODEL, dropout=0.1)),
    "dropout, data, accumulation": Case(
        2, 2, 2, "interleaved", data=2, accumulation=2, model=replace(MODEL, dropout=0.1)
    ),
    "packed": Case(4, 8, packed=True),
    "packed, interleaved": Case(2, 4, 2, "interleaved", packed=True),
    "replicated edges": Case(4, 4, edges="replicated"),
    "replicated edges, fsdp and tensor": Case(2, 4, fsdp=2, tensor=2, edges="replicated"),
    "gathered once": Case(2, 4, fsdp=2, tensor=2, gather_once=True),
    "kept layers": Case(2, 4, remat="layers", model=replace(SEVEN, dropout=0.1)),
    "gpipe": Case(4, 8, schedule="gpipe"),
    "rematerialised layers": Case(2, 4, remat="full"),
    "bfloat16": Case(4, 8, compute="bfloat16", model=CALM),
    "bfloat16, fsdp and tensor": Case(2, 4, fsdp=2, tensor=2, compute="bfloat16", model=CALM),
}


@pytest.mark.parametrize("name", FEW)
def test_a_pipeline_equals_one_device(name):
    check(FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_every_pipeline_equals_one_device(name):
    check(MANY[name])


@pytest.mark.slow
def test_a_schedule_from_a_file_equals_one_device(tmp_path: Path):
    path = tmp_path / "mine.json"
    table = schedules.build_schedule("1f1b", 2, 4, 1)
    schedules.write_schedule(table, path)
    check(Case(2, 4, schedule=str(path)))


# --- what the program is --------------------------------------------------------------------------


def abstract_inputs(built: TrainStep, case: Case):
    """Returns the state and the batch, abstract."""
    example = batch_for(case)
    where = built.batch_shardings(example)
    batch = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[n]) for n, x in example.items()}
    return built.abstract_state, batch


def traced(case: Case, remat: str = "none"):
    """Returns the traced step; remat is that of layers without a pipeline."""
    built = build(case, remat)
    return built.step.trace(*abstract_inputs(built, case))


def _inner(equation) -> list[Any]:
    """Returns the jaxprs in an equation's parameters."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, jax_core.ClosedJaxpr):
                one = one.jaxpr
            if isinstance(one, jax_core.Jaxpr):
                found.append(one)
    return found


def scan_sizes(params) -> tuple[int, int]:
    """Returns the numbers of a scan's constants and carried values, in jax before 0.12 and from it on."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = (
        params["ft_in"].unpack() if hasattr(params["ft_in"], "unpack") else params["ft_in"]
    )
    return tuple(len(jax.tree.leaves(part, is_leaf=lambda x: x is None)) for part in (constants, carried))


def stage_dependent_predicates(jaxpr, varying=frozenset()) -> tuple[int, int, list[bool]]:
    """Returns (stage numbers read, conditionals, which outputs depend on the stage) of a jaxpr.

    Args:
      varying: numbers of the inputs that depend on the stage.

    Raises:
      AssertionError: a predicate of a conditional or a loop depends on the stage.
    """
    depends = {jaxpr.invars[i] for i in varying}
    reads = conditionals = 0

    def found(atom) -> bool:
        return isinstance(atom, jax_core.Var) and atom in depends

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [found(atom) for atom in equation.invars]
        tainted = any(inputs) or name == "axis_index"
        reads += name == "axis_index"
        if name == "cond":
            conditionals += 1
            assert not inputs[0], "a conditional's predicate depends on the stage"
        assert name != "while" or not any(inputs[: equation.params["cond_nconsts"]])
        for inner in _inner(equation):
            assert len(inner.invars) <= len(inputs) + 1
            lead = len(inputs) - len(inner.invars)
            marks = {i for i in range(len(inner.invars)) if lead + i >= 0 and inputs[lead + i]}
            if name == "shard_map":  # its inputs that are split over stages are a stage's own
                marks |= {i for i, spec in enumerate(equation.params["in_specs"]) if "pipeline" in str(spec)}
            outs: list[bool] = []
            while True:  # what a loop carries round may bring the stage back in
                r, c, outs = stage_dependent_predicates(inner, frozenset(marks))
                first, carried = scan_sizes(equation.params) if name == "scan" else (0, 0)
                more = {first + i for i in range(carried) if outs[i]} - marks
                if not more:
                    break
                marks |= more
            reads, conditionals = reads + r, conditionals + c
            tainted = tainted or any(outs)
        if tainted and name not in ("psum", "pmax"):  # the same on all stages after these
            depends.update(equation.outvars)
    return reads, conditionals, [found(atom) for atom in jaxpr.outvars]


@pytest.mark.parametrize("source", ["axis_index", "rows"])
def test_a_predicate_that_depends_on_the_stage_would_be_found(source):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("pipeline",))

    def program(rows):
        stage = jax.lax.axis_index("pipeline") if source == "axis_index" else rows[0]

        def tick(total, _):
            return jax.lax.cond(total > 0, lambda t: t + 1, lambda t: t + stage, total), None

        return jax.lax.scan(tick, 0, length=3)[0][None]

    split = jax.sharding.PartitionSpec("pipeline")
    mapped = jax.shard_map(program, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    with pytest.raises(AssertionError, match="depends on the stage"):
        stage_dependent_predicates(jax.make_jaxpr(mapped)(np.zeros(2, np.int32)).jaxpr)


@pytest.mark.parametrize(
    "case",
    [Case(4, 8, 2, "interleaved"), Case(4, 8, schedule="gpipe"), Case(4, 4, model=SEVEN, packed=True)],
    ids=["interleaved", "gpipe", "seven"],
)
def test_no_predicate_depends_on_the_stage(case):
    reads, conditionals, _ = stage_dependent_predicates(traced(case).jaxpr.jaxpr)
    assert reads > 0 and (conditionals > 0 or case.schedule == "1f1b")


def counted(lowered) -> float:
    found = hlo_flops(lowered.compile(FAST_COMPILE).as_text())
    assert not found.notes
    return found.total


@lru_cache
def flops_recomputed(case: Case) -> float:
    """Returns the FLOPs of the step that keeps everything, and of one more pass through the layers.

    A stage recomputes its layers in whole, since each needs the last one's output; `remat=full`
    need not, since it keeps them: XLA leaves the last product of each layer out.
    """
    built = build(case)
    tokens = BATCH * LENGTH / case.devices
    head = 2 * tokens * case.model.d_model * case.model.vocab_size
    evaluation = built.evaluate.lower(*abstract_inputs(built, case))
    return counted(traced(case).lower()) + counted(evaluation) - head


@pytest.mark.parametrize(
    "case", [Case(4, 8), Case(4, 8, 2, "interleaved"), Case(4, 8, schedule="gpipe")], ids=lambda c: c.schedule
)
def test_a_pipeline_computes_no_more_than_its_bubble(case):
    work, bubble = case.microbatches * case.chunks, case.stages - 1
    assert case.staging is not None and case.staging.dims[2] == 2 // case.chunks
    found = counted(traced(case).lower()) / flops_recomputed(Case(stages=1, fsdp=4))
    assert 1 + 0.5 * bubble / work < found <= 1.02 * (work + bubble) / work


def test_a_stage_that_keeps_its_layers_inputs_recomputes_no_more_than_without_a_pipeline():
    case, alone = Case(4, 8, remat="layers"), Case(stages=1, fsdp=4)
    assert case.staging is not None and case.staging.dims[2] == 2
    wanted = counted(traced(alone, "full").lower())
    found, otherwise = (counted(traced(c).lower()) / wanted for c in (case, Case(4, 8)))
    assert found <= 1.02 * 11 / 8 < otherwise


@pytest.mark.parametrize("once", [False, True], ids=["each tick", "once"])
def test_a_stage_gathers_its_weights_where_it_says(once):
    """One chunk, one layer: nothing but our barrier keeps XLA from taking its gathers out."""
    model = replace(MODEL, num_layers=4)
    lowered = traced(Case(4, 4, fsdp=2, model=model, gather_once=once)).lower()
    module = hlo.parse(lowered.compile(FAST_COMPILE).as_text())
    inside = set().union(*(reachable(module, body) for body in loop_bodies(module)))
    layer = {(model.d_model, model.d_ff), (model.d_ff, model.d_model)}
    gathered = [
        name in inside
        for name, _, _, shape in collectives(module, ("all-gather",))
        if tuple(dim for dim in shape if dim > 1) in layer
    ]
    assert len(gathered) >= 3 and set(gathered) == {not once}
