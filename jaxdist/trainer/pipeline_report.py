"""A pipeline before it runs: ticks, bubble, shares of the work, and settings that would
be faster.

All by arithmetic from the schedule's own table and the model's FLOPs: nothing is run or
compiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxdist.parallel.axes import divisors
from jaxdist.parallel.pipeline.schedules.balance import (
    Balance,
    balance,
    microbatch_options,
)
from jaxdist.parallel.pipeline.schedules.simulator import (
    Costs,
    Simulation,
    draw_svg,
    simulate,
)
from jaxdist.parallel.pipeline.schedules.table import Schedule, build_schedule
from jaxdist.parallel.sharding import Rules, axes_in
from jaxdist.protocols.model import embedded
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.trainer.compose import Composition, batch_shapes, targets_per_sample
from jaxdist.trainer.model_flops import policy_flops


@dataclass(frozen=True)
class PipelineEstimate:
    """A run's pipeline; costs are FLOPs per token of a microbatch."""

    schedule: Schedule
    costs: Costs
    simulation: Simulation
    balance: Balance
    # inputs that a stage keeps of a live microbatch: of its chunk, or of its layers
    kept: int


def estimate_pipeline(composition: Composition) -> PipelineEstimate | None:
    """Estimates the schedule of a validated run; None without a pipeline.

    A backward is two forwards and those that it recomputes: from kept inputs one, and
    with pipeline.remat=full over several layers, or remat.policy=full in groups, each
    of them once more. The head's is not recomputed.
    Norms, softmax, lookups and the optimizer are left out, attention counts causally.
    """
    cut = composition.staging
    if cut is None:
        return None
    rules = composition.rules
    # Of a token: a block, embedding and head, and the layers that are done where the
    # embedding is.
    layer, head, first = (
        cost / 3 for cost in _forward_and_backward(composition, cut.num_layers)
    )
    parameters = composition.spec.named_parameters().values()
    specs = (rules.stored(names, x.shape) for x, names in parameters)
    split = any("pipeline" in axes_in(entry) for stored in specs for entry in stored)
    # without a split vocabulary each stage does all of it
    edge = head / cut.stages if split else head
    config = cut.config
    places = cut.stages * cut.config.chunks
    depth = cut.dims[2]
    layers = [
        max(min(depth, cut.num_layers - first), 0)
        for first in range(0, depth * places, depth)
    ]
    loads = balance(layers, cut.stages, layer_cost=layer, edge_cost=edge + first)
    twice = (
        cut.recompute.policy == "full"
        if cut.grouped
        else cut.remat == "full" and depth > 1
    )
    again = 2 if twice else 1
    chunks = [[n * layer for n in layers[s :: cut.stages]] for s in range(cut.stages)]
    back = [[(2 + again) * cost for cost in row] for row in chunks]
    costs = Costs(
        chunks, back, head=3 * head, first=first, edges="sharded" if split else "last"
    )
    schedule = build_schedule(
        config.schedule, cut.stages, cut.microbatches, config.chunks
    )
    kept = cut.kept_inputs if cut.remat == "layers" else 1
    return PipelineEstimate(schedule, costs, simulate(schedule, costs), loads, kept)


def _forward_and_backward(
    composition: Composition, num_layers: int
) -> tuple[float, float, float]:
    """Counts FLOPs per token of a block, of embedding and head together, and of
    `first_blocks`.
    """
    run = composition.config
    spec = composition.spec
    whole = policy_flops(run, spec)["causal"]
    batch = batch_shapes(run, 1)

    def outside(embed) -> float:
        def edges(trainable, model_state, frozen, batch):
            model = spec.assemble(trainable, model_state, frozen)
            return model.head(embed(model, batch), batch)

        counted = jaxpr_flops(
            jax.make_jaxpr(edges)(spec.trainable, spec.model_state, spec.frozen, batch)
        )
        return 3 * counted / targets_per_sample(run)

    edges = outside(lambda model, batch: model.embed(batch))
    first = 0.0
    if "first_blocks" in spec.trainable | spec.frozen:
        first = outside(lambda model, batch: embedded(model, batch, None)) - edges
    return (whole - edges - first) / num_layers, edges, first


def lines(composition: Composition) -> Iterator[str]:
    """Yields what a person should know about the pipeline; nothing without one."""
    estimate = estimate_pipeline(composition)
    if estimate is None:
        return
    run = composition.config
    spec = composition.spec
    rules = composition.rules
    result = estimate.simulation
    plan = estimate.schedule
    chunks = f" x {plan.chunks} chunks" if plan.chunks > 1 else ""
    each = run.batch.global_size // (run.batch.accumulation * rules.shape.batch_shards)
    yield (
        f"pipeline: {run.pipeline.schedule}, {plan.stages} stages{chunks}, {plan.microbatches} microbatches: "
        f"{result.ticks} ticks, bubble {result.bubble:.1%}, a stage keeps at most "
        f"{max(result.live_inputs)} inputs{f' x {estimate.kept} layers' if estimate.kept > 1 else ''} of "
        f"{each // plan.microbatches} sequences a device"
    )
    shares = ", ".join(f"{share:.1%}" for share in estimate.balance.shares)
    blocks = (
        f"groups of {spec.block_layers} layers" if spec.block_layers > 1 else "layers"
    )
    yield f"  FLOPs by stage: {shares}; {blocks} by place: {', '.join(map(str, estimate.balance.cut))}"
    if estimate.costs.first:
        without = simulate(estimate.schedule, replace(estimate.costs, first=0.0)).time
        yield (
            f"  the layers before them (first_blocks) run on every stage, which lengthens the step by "
            f"{result.time / without - 1:.1%}"
        )
    warning = estimate.balance.warning()
    if warning:
        yield f"  warning: {warning}"
    yield from _edge_lines(estimate, rules)
    for option in microbatch_options(
        plan.stages,
        plan.microbatches,
        plan.chunks,
        choices=divisors(each),
        layers=sum(estimate.balance.cut),
    ):
        yield f"  {option.overrides} would have a bubble of {option.bubble:.1%}"


def _edge_lines(estimate: PipelineEstimate, rules: Rules) -> Iterator[str]:
    """Yields what embedding and head cost where they are not shared out, or where that
    is slow.
    """
    costs = [replace(estimate.costs, edges=kind) for kind in ("sharded", "last")]
    shared, whole = (simulate(estimate.schedule, each).time for each in costs)
    longer = f"{whole / shared - 1:.1%}"
    if estimate.costs.edges == "last":
        yield f"  every stage does the whole embedding and head, which lengthens the step by {longer}"
    elif rules.shape.dcn["pipeline"] > 1:
        yield (
            "  mesh.dcn.pipeline: stages share out the vocabulary, so each tick sums over slices; with "
            f"pipeline.edges=last none does, for {longer} more work"
        )


def describe(composition: Composition) -> dict[str, Any]:
    """Describes the pipeline for run.json, its timeline included; {} without
    one.
    """
    estimate = estimate_pipeline(composition)
    if estimate is None:
        return {}
    result = estimate.simulation
    plan = estimate.schedule
    sizes = {
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "chunks": plan.chunks,
    }
    counts = {
        "ticks": result.ticks,
        "bubble": result.bubble,
        "live_inputs": max(result.live_inputs),
    }
    description: dict[str, Any] = {
        "pipeline": {"schedule": composition.config.pipeline.schedule} | sizes | counts
    }
    if (plan.table >= 0).sum() <= 4096:  # ops; a longer timeline shows nothing
        description["timeline_svg"] = draw_svg(plan, estimate.costs, width=1160)
    return description
