"""A step's seconds and state by arithmetic, for any layout of a run.

Datasheet rates and what there is to do (`work`): good for an order of layouts, not for a
promise.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from jaxdist.ops.costs import Share
from jaxdist.ops.experts.costs import rounds
from jaxdist.parallel import remat
from jaxdist.parallel.axes import (
    EXPERT_AXES,
    PARAMETER_SHARDS,
    SEQUENCE_AXES,
    STEP_AXES,
)
from jaxdist.parallel.context import AttentionForm
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.pipeline.schedules.balance import bubble_fraction
from jaxdist.planner import formulas
from jaxdist.planner.targets import Target
from jaxdist.planner.work import Work
from jaxdist.step import reduction
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

(EXPERT,) = EXPERT_AXES
(CONTEXT,) = SEQUENCE_AXES


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step on each device."""

    compute: float  # products, recomputed ones included, and attention
    bubble: float  # of a pipeline
    update: float  # state and summed gradients, read and written
    gathers: float  # of weights
    gradients: float
    tensor: float  # sums of activations
    stages: float  # what stages hand on, and their sums over the vocabulary
    exchange: float  # rows that go to experts and back
    context: float  # what attention over a split sequence moves
    host: float  # offloaded activations
    hides: bool  # whether the compiler runs gathers and gradients beside compute

    @property
    def busy_s(self) -> float:
        return self.compute + self.bubble + self.update

    @property
    def network_s(self) -> float:
        parameters = self.gathers + self.gradients
        activations = self.tensor + self.stages + self.exchange + self.context
        return parameters + activations

    @property
    def bound_s(self) -> float:
        """The least: all at once."""
        return max(self.busy_s, self.network_s, self.host)

    @property
    def step_s(self) -> float:
        beside = self.gathers + self.gradients if self.hides else 0.0
        covered = min(beside, self.busy_s) + min(self.host, self.busy_s)
        return self.busy_s + self.network_s + self.host - covered


def mixed(parts: Sequence[Estimate], shares: Sequence[float]) -> Estimate:
    """Returns the estimate of a step of which each part is a share."""
    names = [field.name for field in fields(Estimate) if field.name != "hides"]
    sums: dict[str, Any] = {
        name: math.fsum(
            share * getattr(one, name) for one, share in zip(parts, shares, strict=True)
        )
        for name in names
    }
    return replace(parts[0], **sums)


class Model:
    """A step's time and state by arithmetic, for the layouts of one run.

    Args:
      legal: any layout of the run.
      expert_load: see `plan.make_plan`.
    """

    def __init__(
        self, legal: Composition, target: Target, expert_load: float = 1.0
    ) -> None:
        self.target = target
        self.work = Work(legal, target)
        chip = target.chip
        self.hbm = chip.hbm_bytes_per_s if chip else math.inf
        self.pcie = (chip and chip.pcie_bytes_per_s) or math.inf
        self.rounds = rounds(expert_load)
        # Kept by mesh, of which there are many layouts.
        self._once: dict[tuple[int, ...], Collection[str]] = {}
        self._shares: dict[tuple[Any, ...], list[Share]] = {}

    def state_bytes(self, layout: Composition) -> int:
        """Counts a device's weights, gradients and optimizer state, split evenly."""
        sizes = layout.shape.sizes
        kept = formulas.Policy(self.work.stored, 4, self.work.moments)
        dense, of_experts = self._local(layout.shape)
        zero = layout.config.mesh.zero
        shards = math.prod(sizes[axis] for axis in PARAMETER_SHARDS)
        size = formulas.state_bytes(dense, kept, shards=shards, zero=zero)
        size += formulas.state_bytes(of_experts, kept, shards=sizes["fsdp"], zero=zero)
        frozen = formulas.Policy(self.work.stored, gradients=0, optimizer=0)
        in_modules = self.work.in_modules / sizes["tensor"] / sizes["pipeline"]
        size += formulas.state_bytes(in_modules, frozen, shards=shards, zero=zero)
        return int(size)

    def _local(self, shape: MeshShape) -> tuple[float, float]:
        """Counts the parameters that a device computes with: all but those of experts,
        and those.
        """
        split = shape.sizes["tensor"] * shape.sizes["pipeline"]
        of_experts = self.work.in_experts / split / shape.sizes["expert"]
        return self.work.dense / split, of_experts

    def estimate(self, layout: Composition) -> Estimate:
        """Estimates the seconds of a layout; with `remat.layers` as many layers of each
        kind as there are.
        """
        run = layout.config
        layers = run.remat.layers
        if not layers or layout.shape.sizes["pipeline"] > 1:
            return self._estimate(layout)
        depth = self.work.depth * layout.spec.block_layers
        if layers >= depth:
            return self._estimate(layout)
        parts = []
        for policy in (run.remat.policy, run.remat.others):
            config = compose.with_overrides(run, {"remat": remat.RematConfig(policy)})
            parts.append(self._estimate(replace(layout, config=config)))
        return mixed(parts, (layers / depth, 1 - layers / depth))

    def _estimate(self, layout: Composition) -> Estimate:
        run = layout.config
        shape = layout.shape
        work = self.work
        stages = shape.sizes["pipeline"]
        flow = 1
        chunks = 1
        policy = run.remat.policy
        if stages > 1:
            flow = run.pipeline.microbatches
            chunks = run.pipeline.chunks
            policy = "full"
        # 1, and what is computed for nothing
        ticks = (flow + (stages - 1) / chunks) / flow
        passes = run.batch.accumulation * flow * ticks  # over a stage's weights
        x = work.x * work.tokens / self._shards(shape)
        shares = self._laid_out(layout)
        sums_of_layer = 4
        if work.again(policy) > work.part(remat.PROJECTED):
            sums_of_layer += 1
        # A split residual stream is gathered again for the gradients of both parts'
        # first kernels.
        if run.mesh.sequence_parallel and policy != "none":
            sums_of_layer += 1
        sums = sums_of_layer * work.depth / stages * ticks + 3
        gathers, gradients, update = self._parameters(layout, passes)
        readings = 3
        again = 0.0
        if run.remat.every > 1:
            # the forward pass runs once more, but for a group's last product
            again = 1 - work.part(remat.BLOCK_OUTPUT) / run.remat.every
            readings += 1
            sums += 2 * work.depth / stages
            if run.mesh.zero >= 3:
                gathers *= 3 / 2
        weights = sum(self._local(shape)) * work.computed
        computing = work.products_s(policy, stages * chunks, again)
        computing += work.kernels_s(policy, shares, more=again > 0)
        compute = max(computing, readings * passes * weights / self.hbm)
        offloaded = work.offloaded(policy) * work.tokens / self._shards(shape)
        handed_on = self._time(
            "collective-permute", 2 * chunks * ticks * x, shape, "pipeline"
        )
        over_stages = self._time("all-reduce", 3 * ticks * x, shape, "pipeline")
        crossing = self._crossing(shares, shape, policy)
        return Estimate(
            compute=compute,
            bubble=compute * (1 / (1 - bubble_fraction(stages, flow, chunks)) - 1),
            update=update,
            gathers=gathers,
            gradients=gradients,
            tensor=self._time("all-reduce", sums * x, shape, "tensor"),
            stages=handed_on + over_stages,
            exchange=crossing[EXPERT] * ticks / stages,
            context=crossing[CONTEXT] * ticks / stages,
            host=2 * offloaded / self.pcie,
            hides=self.target.platform == "gpu",
        )

    def _parameters(
        self, layout: Composition, passes: float
    ) -> tuple[float, float, float]:
        """Estimates the seconds of gathers, of sums of gradients, and of the update."""
        shape = layout.shape
        work = self.work
        zero = layout.config.mesh.zero
        once = self._summed_once(layout)
        # Those that add up gradients besides the axes that share out what is stored.
        adding = [
            axis
            for axis in (*STEP_AXES, *SEQUENCE_AXES)
            if axis not in PARAMETER_SHARDS
        ]
        sent = {axis: 4 * (1 if axis in once else passes) for axis in (*adding, "fsdp")}
        reduced = "reduce-scatter" if zero >= 2 else "all-reduce"
        gathers = gradients = update = 0.0
        dense, of_experts = self._local(shape)
        # Experts' kernels are split over their axis already; all else is stored in
        # shards over all of these.
        for local, axes in ((dense, "+".join(PARAMETER_SHARDS)), (of_experts, "fsdp")):
            shards = math.prod(shape.sizes[axis] for axis in axes.split("+"))
            state = local / shards if zero else local
            partial = state if zero >= 2 else local  # gradients, as they are added up
            gathered = work.stored * local
            if zero >= 3:
                gathered = 2 * passes * work.gathered * local
            gathers += self._time("all-gather", gathered, shape, axes)
            gradients += self._time(reduced, sent["fsdp"] * local, shape, axes)
            gradients += sum(
                self._time("all-reduce", sent[axis] * partial, shape, axis)
                for axis in adding
            )
            updated = 2 * (work.stored + work.moments) * state
            update += (updated + 8 * passes * partial) / self.hbm
        return gathers, gradients, update

    def _summed_once(self, layout: Composition) -> Collection[str]:
        """Returns the axes over which parts' gradients are summed once a step."""
        mesh = layout.config.mesh
        key = *_key(layout.shape), mesh.zero
        if key not in self._once:
            chosen = reduction.choose(layout.spec, layout.rules, mesh.reduce, parts=2)
            self._once[key] = chosen.once
        return self._once[key]

    def _laid_out(self, layout: Composition) -> list[Share]:
        """Returns a device's share of each op; kept by mesh."""
        key = layout.config.context.attention, *_key(layout.shape)
        if key not in self._shares:
            self._shares[key] = [
                cost.share(layout.rules, self.work.computed) for cost in self.work.costs
            ]
        return self._shares[key]

    def forms(self, layout: Composition) -> list[RunConfig]:
        """Returns the run with each form of attention over a split sequence that may be
        the best: no form before it is as fast and holds as little.
        """
        found = list[RunConfig]()
        best = list[tuple[float, int]]()
        for one in self._forms_to_try(layout):
            shares = self._laid_out(one)
            moving = self._crossing(shares, one.shape, "full")[CONTEXT]
            seconds = self.work.kernels_s("full", shares) + moving
            held = max((share.held for share in shares), default=0)
            if all(seconds < other[0] or held < other[1] for other in best):
                found.append(one.config)
                best.append((seconds, held))
        return found

    def _forms_to_try(self, layout: Composition) -> list[Composition]:
        """Returns the run with each form of attention on a mesh: its own first.

        Others only where it is left to us, they are legal, and attention is another
        than with those before.
        """
        run = layout.config
        if run.context.attention != "auto" or layout.shape.sizes[CONTEXT] == 1:
            return [layout]
        found = dict[tuple[str, ...], Composition]()
        for form in get_args(AttentionForm):
            config = compose.with_overrides(run, {"context.attention": form})
            one = compose.compose(config, layout.shape, layout.spec)
            costs = self.work.costs
            if not any(fault for cost in costs for fault in cost.faults(one.rules)):
                names = tuple(cost.form_name(one.rules) for cost in costs)
                found.setdefault(names, one)
        return list(found.values())

    def _crossing(
        self, shares: Sequence[Share], shape: MeshShape, policy: str
    ) -> Counter[str]:
        """Estimates the seconds in which ops send, by mesh axis, were all layers on a
        device.
        """
        seconds = Counter[str]()
        tokens = self.work.tokens / self._shards(shape)
        passes = 1 if policy == "none" else 2
        for cost, share in zip(self.work.costs, shares, strict=True):
            for crossing in share.crossings:
                link = self.target.axis_link(shape, crossing.axis)
                times = passes if crossing.again else 1
                sent = times * crossing.forward + crossing.backward
                if crossing.follows_load:
                    sent *= self.rounds
                took = link.seconds(crossing.kind, cost.layers * sent * tokens)
                seconds[crossing.axis] += took  # type: ignore[assignment]
        return seconds

    @staticmethod
    def _shards(shape: MeshShape) -> int:
        """Returns the devices that share out the tokens."""
        return shape.batch_shards * shape.sizes[CONTEXT]

    def _time(self, kind: str, payload: float, shape: MeshShape, axes: str) -> float:
        axes = "+".join(axis for axis in axes.split("+") if shape.sizes[axis] > 1)
        if not axes:
            return 0.0
        members = math.prod(shape.sizes[axis] for axis in axes.split("+"))
        return self.target.axis_link(shape, axes).seconds(
            kind, formulas.wire_bytes(kind, payload, members)
        )


def _key(shape: MeshShape) -> tuple[int, ...]:
    return *shape.sizes.values(), *shape.dcn.values()
