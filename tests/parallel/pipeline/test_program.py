"""What a pipelined step is made of: predicates, FLOPs, gathers, and sums over
stages.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import pytest

from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry import hlo
from jaxdist.telemetry.flops import hlo_flops
from support.models import FAST_COMPILE, batch_of
from support.pipelines import BATCH, LENGTH, MODEL, SEVEN, Case, batch_for, build
from support.programs import (
    collectives,
    loop_bodies,
    reachable,
    stage_dependent_predicates,
)


def abstract_inputs(built: TrainStep, case: Case):
    """Returns the state and the batch, abstract."""
    return built.abstract_state, built.abstract_batch(batch_for(case))


def traced(case: Case, remat: str = "none"):
    """Returns the traced step; remat is that of layers without a pipeline."""
    built = build(case, remat)
    return built.step.trace(*abstract_inputs(built, case))


@pytest.mark.parametrize("source", ["axis_index", "rows"])
def test_a_predicate_that_depends_on_the_stage_would_be_found(source):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("pipeline",))

    def program(rows):
        stage = jax.lax.axis_index("pipeline") if source == "axis_index" else rows[0]

        def tick(total, _):
            return jax.lax.cond(
                total > 0, lambda t: t + 1, lambda t: t + stage, total
            ), None

        return jax.lax.scan(tick, 0, length=3)[0][None]

    split = jax.sharding.PartitionSpec("pipeline")
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    with pytest.raises(AssertionError, match="depends on the stage"):
        stage_dependent_predicates(jax.make_jaxpr(mapped)(np.zeros(2, np.int32)).jaxpr)


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 8, 2, "interleaved"),
        Case(4, 8, schedule="gpipe"),
        Case(4, 4, model=SEVEN, packed=True),
        Case(4, 8, 2, "interleaved", edges="last"),
    ],
    ids=["interleaved", "gpipe", "seven", "last"],
)
def test_no_predicate_depends_on_the_stage(case):
    reads, conditionals, _ = stage_dependent_predicates(traced(case).jaxpr.jaxpr)
    assert reads > 0
    assert conditionals > 0 or case.schedule == "1f1b"


def counted(lowered) -> float:
    return hlo_flops(lowered.compile(FAST_COMPILE).as_text())


ALONE = Case(stages=1, fsdp=4)


@lru_cache
def flops_of_full_remat() -> float:
    return counted(traced(ALONE, "full").lower())


def flops_recomputed() -> float:
    """Returns the FLOPs of the step that keeps everything, and of one more pass through
    the layers.

    A stage that keeps one input recomputes its layers in whole, since each needs the
    last one's output; `remat=full` need not, since it keeps them: XLA leaves each
    layer's last product out.
    """
    tokens = BATCH * LENGTH / ALONE.devices
    head = 2 * tokens * ALONE.model.d_model * ALONE.model.vocab_size
    evaluation = build(ALONE).evaluate.lower(*abstract_inputs(build(ALONE), ALONE))
    return counted(traced(ALONE).lower()) + counted(evaluation) - head


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 8),
        Case(4, 8, 2, "interleaved"),
        # the same program from another table
        pytest.param(Case(4, 8, schedule="gpipe"), marks=pytest.mark.slow),
    ],
    ids=lambda c: c.schedule,
)
def test_a_pipeline_computes_no_more_than_its_bubble(case):
    """Beside every layer rematerialised, on the same devices: nothing is computed a
    third time.
    """
    work, bubble = case.microbatches * case.chunks, case.stages - 1
    assert case.staging is not None
    assert case.staging.dims[2] == 2 // case.chunks
    found = counted(traced(case).lower()) / flops_of_full_remat()
    assert 1 + 0.5 * bubble / work < found <= 1.02 * (work + bubble) / work


def temp_bytes(schedule: str, microbatches: int) -> int:
    """Returns a device's temporary memory of a step of equal microbatches."""
    case = Case(2, microbatches, schedule=schedule)
    built = build(case, "full")
    batch = batch_of(case.model, 2 * microbatches, LENGTH)
    lowered = built.step.lower(built.abstract_state, built.abstract_batch(batch))
    return lowered.compile(FAST_COMPILE).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_with_microbatches_in_gpipe_alone():
    few, many = temp_bytes("1f1b", 8), temp_bytes("1f1b", 32)
    assert many - few < 0.2 * (temp_bytes("gpipe", 32) - many)


@pytest.mark.slow
def test_a_stage_that_keeps_its_input_alone_computes_its_layers_once_more():
    found = counted(traced(Case(4, 8, remat="none")).lower())
    limit = 1.02 * 11 / 8
    assert found <= limit * flops_recomputed()
    assert found > limit * flops_of_full_remat()


@pytest.mark.parametrize("once", [False, True], ids=["each tick", "once"])
def test_a_stage_gathers_its_weights_where_it_says(once):
    """One chunk, one layer: nothing but our barrier keeps XLA from taking its gathers
    out.
    """
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
    assert len(gathered) >= 3
    assert set(gathered) == {not once}


def groups_of(instruction: hlo.Instruction) -> list[list[int]]:
    """Returns the devices of each group of a collective."""
    text = instruction.attributes
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return [
            [int(d) for d in group.split(",")]
            for group in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
    # jax 0.12
    if named := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", text):
        axes = {
            name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])
        }
        grid = np.arange(np.prod(list(axes.values()))).reshape(tuple(axes.values()))
        summed = [list(axes).index(name) for name in re.findall(r"'(\w+)'", named[2])]
        together = np.moveaxis(grid, summed, range(-len(summed), 0))
        return together.reshape(
            -1, np.prod([grid.shape[axis] for axis in summed])
        ).tolist()
    found = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
    )
    assert found, text
    dims, sizes, order = (
        [int(n) for n in part.split(",")] if part else None for part in found.groups()
    )
    return (
        np.arange(np.prod(sizes)).reshape(sizes).transpose(order).reshape(dims).tolist()
    )


@pytest.mark.parametrize(
    ("edges", "some"),
    [("last", False), pytest.param("sharded", True, marks=pytest.mark.slow)],
)
def test_with_last_edges_ticks_sum_nothing_over_stages(edges, some):
    case = Case(2, 4, fsdp=2, tensor=2, edges=edges)
    module = hlo.parse(traced(case).lower().compile(FAST_COMPILE).as_text())
    inside = set().union(*(reachable(module, body) for body in loop_bodies(module)))
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    each = case.devices // case.stages  # devices of a stage, numbered in a row
    found = [
        len({device // each for device in group}) > 1
        for name in inside
        for instruction in module.computations.get(name, {}).values()
        if instruction.opcode.removesuffix("-start") in kinds
        for group in groups_of(instruction)
    ]
    assert len(found) > 20
    assert any(found) == some
