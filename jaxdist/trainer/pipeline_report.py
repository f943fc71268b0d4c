"""The estimate of a pipeline: ticks, bubble, balance, and settings that are faster.

It is arithmetic on the schedule's table and the model's FLOPs. Nothing is compiled or
run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from jaxdist.protocols.model import (
    Batch,
    Block,
    BlockOutput,
    Transform,
    embedded,
    head_loss,
    unchanged,
)
from jaxdist.protocols.model_spec import Tree
from jaxdist.protocols.objective import TokenObjective
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.trainer.compose import Composition, batch_shapes, targets_per_sample
from jaxdist.trainer.model_flops import policy_flops

# largest number of ops in a timeline; in a longer one they are too small to see
_MOST_OPS = 4096


@dataclass(frozen=True)
class PipelineEstimate:
    """The estimate of a run's pipeline. Costs are FLOPs per token of a microbatch."""

    schedule: Schedule
    costs: Costs
    simulation: Simulation
    balance: Balance
    # inputs that a stage keeps for each live microbatch: one, or one for each layer
    kept: int


def estimate_pipeline(composition: Composition) -> PipelineEstimate | None:
    """Estimates the schedule of a validated run; None without a pipeline.

    A backward pass costs two forward passes and the recomputation of the forward pass.
    The recomputation runs twice with pipeline.remat=full over several layers, and with
    remat.policy=full in groups. The head is not recomputed. Attention counts causally.
    Norms, softmax, lookups and the optimizer are not counted.
    """
    cut = composition.staging
    if cut is None:
        return None
    # A third of these costs is that of the forward pass.
    per_layer, head, first = (
        cost / 3 for cost in _forward_and_backward(composition, cut.num_layers)
    )
    is_sharded = _vocab_is_sharded(composition)
    # If the vocabulary is not sharded, each stage computes the whole head.
    edge = head / cut.stages if is_sharded else head
    places = cut.stages * cut.config.chunks
    depth = cut.dims[2]
    layers = [
        max(min(depth, cut.num_layers - begin), 0)
        for begin in range(0, depth * places, depth)
    ]
    if cut.grouped:
        recomputes_twice = cut.recompute.policy == "full"
    else:
        recomputes_twice = cut.remat == "full" and depth > 1
    backward = 2 + (2 if recomputes_twice else 1)
    forward_by_stage = [
        [count * per_layer for count in layers[stage :: cut.stages]]
        for stage in range(cut.stages)
    ]
    backward_by_stage = [[backward * cost for cost in row] for row in forward_by_stage]
    costs = Costs(
        forward_by_stage,
        backward_by_stage,
        head=3 * head,
        first=first,
        edges="sharded" if is_sharded else "last",
    )
    schedule = build_schedule(
        cut.config.schedule, cut.stages, cut.microbatches, cut.config.chunks
    )
    return PipelineEstimate(
        schedule=schedule,
        costs=costs,
        simulation=simulate(schedule, costs),
        balance=balance(
            layers, cut.stages, layer_cost=per_layer, edge_cost=edge + first
        ),
        kept=cut.kept_inputs if cut.remat == "layers" else 1,
    )


def _vocab_is_sharded(composition: Composition) -> bool:
    """Tests whether the stages of a pipeline shard parameters of embedding and head."""
    parameters = composition.spec.named_parameters().values()
    specs = (composition.rules.stored(names, x.shape) for x, names in parameters)
    return any("pipeline" in axes_in(entry) for stored in specs for entry in stored)


def _forward_and_backward(
    composition: Composition, num_layers: int
) -> tuple[float, float, float]:
    """Counts the FLOPs per token of parts of the model, forward and backward.

    Returns:
      The FLOPs of a block; of embedding and head together; and of the layers beside the
      stack, which are `first_blocks` and those of the head.
    """
    config = composition.config
    spec = composition.spec
    total = policy_flops(config, spec)["causal"]
    batch = batch_shapes(config, 1)

    def count_edges(
        embed: Callable[[Any, Batch], jax.Array], transform: Transform = unchanged
    ) -> float:
        def edges(
            trainable: Tree, model_state: Tree, frozen: Tree, batch: Batch
        ) -> Any:
            model = spec.assemble(trainable, model_state, frozen)
            x = embed(model, batch)
            if isinstance(spec.objective, TokenObjective):
                return spec.objective.terms_of_policy(model, x, batch)
            return head_loss(model, x, batch, None, transform)

        counted = jaxpr_flops(
            jax.make_jaxpr(edges)(spec.trainable, spec.model_state, spec.frozen, batch)
        )
        return 3 * counted / targets_per_sample(config)

    with_layers = count_edges(lambda model, batch: model.embed(batch))
    edges = with_layers
    if getattr(spec.abstract_model, "head_has_layers", False):
        edges = count_edges(lambda model, batch: model.embed(batch), _skipped)
    first = with_layers - edges
    if "first_blocks" in spec.trainable | spec.frozen:
        first += (
            count_edges(lambda model, batch: embedded(model, batch, None)) - with_layers
        )
    return (total - edges - first) / num_layers, edges, first


def _skipped(layer: Block) -> Block:
    """Replaces a layer by the identity, to count the FLOPs of what is beside it."""
    return lambda parameters, x, info: BlockOutput(x)


def lines(composition: Composition) -> Iterator[str]:
    """Yields lines that describe the pipeline; none without a pipeline."""
    estimate = estimate_pipeline(composition)
    if estimate is None:
        return
    config = composition.config
    spec = composition.spec
    rules = composition.rules
    result = estimate.simulation
    schedule = estimate.schedule
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    kept = f" x {estimate.kept} layers" if estimate.kept > 1 else ""
    per_device = config.batch.global_size // (
        config.batch.accumulation * rules.shape.batch_shards
    )
    yield (
        f"pipeline: {config.pipeline.schedule}, {schedule.stages} stages{chunks}, {schedule.microbatches} microbatches: "
        f"{result.ticks} ticks, bubble {result.bubble:.1%}, a stage keeps at most "
        f"{max(result.live_inputs)} inputs{kept} of "
        f"{per_device // schedule.microbatches} sequences a device"
    )
    shares = ", ".join(f"{share:.1%}" for share in estimate.balance.shares)
    blocks = "layers"
    if spec.block_layers > 1:
        blocks = f"groups of {spec.block_layers} layers"
    yield f"  FLOPs by stage: {shares}; {blocks} by place: {', '.join(map(str, estimate.balance.cut))}"
    if estimate.costs.first:
        without = simulate(schedule, replace(estimate.costs, first=0.0)).time
        yield (
            f"  layers beside them (first_blocks, or those of the head) run on every stage, which lengthens the step by "
            f"{result.time / without - 1:.1%}"
        )
    warning = estimate.balance.warning()
    if warning:
        yield f"  warning: {warning}"
    yield from _edge_lines(estimate, rules)
    options = microbatch_options(
        schedule.stages,
        schedule.microbatches,
        schedule.chunks,
        choices=divisors(per_device),
        layers=sum(estimate.balance.cut),
    )
    for option in options:
        yield f"  {option.overrides} would have a bubble of {option.bubble:.1%}"


def _edge_lines(estimate: PipelineEstimate, rules: Rules) -> Iterator[str]:
    """Yields the cost of embedding and head that are not sharded, or sharded slowly."""

    def time_with(edges: Literal["sharded", "last"]) -> float:
        return simulate(estimate.schedule, replace(estimate.costs, edges=edges)).time

    longer = f"{time_with('last') / time_with('sharded') - 1:.1%}"
    if estimate.costs.edges == "last":
        yield f"  every stage does the whole embedding and head, which lengthens the step by {longer}"
    elif rules.shape.dcn["pipeline"] > 1:
        yield (
            "  mesh.dcn.pipeline: stages share out the vocabulary, so each tick sums over slices; with "
            f"pipeline.edges=last none does, for {longer} more work"
        )


def describe(composition: Composition) -> dict[str, Any]:
    """Describes the pipeline and its timeline for run.json; {} without a pipeline."""
    estimate = estimate_pipeline(composition)
    if estimate is None:
        return {}
    result = estimate.simulation
    schedule = estimate.schedule
    description: dict[str, Any] = {
        "pipeline": {
            "schedule": composition.config.pipeline.schedule,
            "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "chunks": schedule.chunks,
            "ticks": result.ticks,
            "bubble": result.bubble,
            "live_inputs": max(result.live_inputs),
        }
    }
    if (schedule.table >= 0).sum() <= _MOST_OPS:
        description["timeline_svg"] = draw_svg(schedule, estimate.costs, width=1160)
    return description
