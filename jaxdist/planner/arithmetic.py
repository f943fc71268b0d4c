"""The step time and the state of any layout of a run, by arithmetic.

The times follow from datasheet rates and the work of a step (`work`). They can rank
layouts, but do not predict step times.
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
    CONTEXT,
    EXPERT,
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


@dataclass(frozen=True)
class Estimate:
    """Seconds of the parts of a step on each device."""

    compute: float  # matmuls, including recomputed ones, and attention
    bubble: float  # idle time of a pipeline
    update: float  # reads and writes of the state and the summed gradients
    gathers: float  # gathers of weights
    gradients: float  # sums of gradients over devices
    tensor: float  # sums of activations over the axis `tensor`
    stages: float  # activations between stages, and sums over the split vocabulary
    exchange: float  # rows sent to experts and back
    context: float  # communication of attention over split sequences
    host: float  # transfers of offloaded activations
    hides: bool  # whether gathers and sums of gradients overlap with compute

    @property
    def busy_s(self) -> float:
        """Seconds without communication."""
        return self.compute + self.bubble + self.update

    @property
    def network_s(self) -> float:
        """Seconds of communication between devices."""
        parameters = self.gathers + self.gradients
        activations = self.tensor + self.stages + self.exchange + self.context
        return parameters + activations

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time: everything overlaps."""
        return max(self.busy_s, self.network_s, self.host)

    @property
    def step_s(self) -> float:
        """The step time, in which compute covers some communication."""
        overlapping = self.gathers + self.gradients if self.hides else 0.0
        covered = min(overlapping, self.busy_s) + min(self.host, self.busy_s)
        return self.busy_s + self.network_s + self.host - covered


def mixed(parts: Sequence[Estimate], shares: Sequence[float]) -> Estimate:
    """Averages estimates, weighted by the share of a step that each applies to."""
    names = [field.name for field in fields(Estimate) if field.name != "hides"]
    means: dict[str, Any] = {
        name: math.fsum(
            share * getattr(part, name)
            for part, share in zip(parts, shares, strict=True)
        )
        for name in names
    }
    return replace(parts[0], **means)


class Model:
    """The arithmetic of all layouts of one run.

    Args:
      legal: any legal layout of the run.
      target: the hardware.
      expert_load: see `plan.make_plan`.
    """

    def __init__(
        self, legal: Composition, target: Target, expert_load: float = 1.0
    ) -> None:
        self.target = target
        self.work = Work(legal, target)
        chip = target.chip
        self.hbm_bytes_per_s = chip.hbm_bytes_per_s if chip else math.inf
        self.pcie_bytes_per_s = (chip and chip.pcie_bytes_per_s) or math.inf
        self.rounds = rounds(expert_load)
        # Cached, because many layouts share them. Their keys hold what differs between
        # the layouts of a run; the model and `mesh.reduce` do not.
        self._once: dict[tuple[int, ...], Collection[str]] = {}
        self._shares: dict[tuple[Any, ...], list[Share]] = {}
        self._of_parameters: dict[tuple[Any, ...], tuple[float, float, float]] = {}

    def state_bytes(self, layout: Composition) -> int:
        """Counts a device's bytes of weights, gradients and optimizer state."""
        sizes = layout.shape.sizes
        # Sums of several parts are float32.
        in_parts = layout.config.batch.accumulation > 1 or sizes["pipeline"] > 1
        trained = formulas.Policy(
            self.work.stored,
            gradients=4 if in_parts else self.work.stored,
            optimizer=self.work.moments,
        )
        dense, in_experts = self._local(layout.shape)
        zero = layout.config.mesh.zero
        shards = math.prod(sizes[axis] for axis in PARAMETER_SHARDS)
        size = formulas.state_bytes(dense, trained, shards=shards, zero=zero)
        size += formulas.state_bytes(
            in_experts, trained, shards=sizes["fsdp"], zero=zero
        )
        frozen = formulas.Policy(self.work.stored, gradients=0, optimizer=0)
        in_modules = self.work.in_modules / sizes["tensor"] / sizes["pipeline"]
        size += formulas.state_bytes(in_modules, frozen, shards=shards, zero=zero)
        return int(size)

    def _local(self, shape: MeshShape) -> tuple[float, float]:
        """Counts a device's gathered parameters outside and inside of experts."""
        split = shape.sizes["tensor"] * shape.sizes["pipeline"]
        in_experts = self.work.in_experts / split / shape.sizes["expert"]
        return self.work.dense / split, in_experts

    def estimate(self, layout: Composition) -> Estimate:
        """Estimates the step time of a layout.

        With `remat.layers`, it averages over layers of both policies.
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
        """Estimates the step time of a layout with one remat policy in all layers."""
        run = layout.config
        shape = layout.shape
        work = self.work
        stages = shape.sizes["pipeline"]
        microbatches = 1
        chunks = 1
        policy = run.remat.policy
        if stages > 1:
            microbatches = run.pipeline.microbatches
            chunks = run.pipeline.chunks
            policy = "full"
        # ticks of the schedule per microbatch: 1, and a share of the idle ones
        ticks = (microbatches + (stages - 1) / chunks) / microbatches
        # passes over a stage's weights
        passes = run.batch.accumulation * microbatches * ticks
        stream_bytes = work.input_bytes * work.tokens / self._shards(shape)
        shares = self._shares_of(layout)
        layer_sums = 4
        if work.again(policy) > work.part(remat.PROJECTED):
            layer_sums += 1
        # A split residual stream is gathered again for the gradients of the first
        # matmul in both parts of a layer.
        if run.mesh.sequence_parallel and policy != "none":
            layer_sums += 1
        sums = layer_sums * work.depth / stages * ticks + 3
        gathers, gradients, update = self._parameters(layout, passes)
        weight_reads = 3
        again = 0.0
        if run.remat.every > 1:
            # The forward pass runs once more, without the last matmul of a group.
            again = 1 - work.part(remat.BLOCK_OUTPUT) / run.remat.every
            weight_reads += 1
            sums += 2 * work.depth / stages
            if run.mesh.zero >= 3:
                gathers *= 3 / 2
        weights = sum(self._local(shape)) * work.computed
        flops_s = work.matmuls_s(policy, stages * chunks, again)
        flops_s += work.kernels_s(policy, shares, more=again > 0)
        compute = max(flops_s, weight_reads * passes * weights / self.hbm_bytes_per_s)
        offloaded = work.offloaded(policy) * work.tokens / self._shards(shape)
        between_stages = self._time(
            "collective-permute", 2 * chunks * ticks * stream_bytes, shape, "pipeline"
        )
        over_stages = self._time(
            "all-reduce", 3 * ticks * stream_bytes, shape, "pipeline"
        )
        crossing = self._crossing(shares, shape, policy)
        idle = bubble_fraction(stages, microbatches, chunks)
        return Estimate(
            compute=compute,
            bubble=compute * (1 / (1 - idle) - 1),
            update=update,
            gathers=gathers,
            gradients=gradients,
            tensor=self._time("all-reduce", sums * stream_bytes, shape, "tensor"),
            stages=between_stages + over_stages,
            exchange=crossing[EXPERT] * ticks / stages,
            context=crossing[CONTEXT] * ticks / stages,
            host=2 * offloaded / self.pcie_bytes_per_s,
            hides=self.target.platform == "gpu",
        )

    def _parameters(
        self, layout: Composition, passes: float
    ) -> tuple[float, float, float]:
        """Estimates the seconds of gathers, of sums of gradients, and of the update.

        They are the same for all remat policies, so they are cached.

        Args:
          layout: the layout.
          passes: passes over a stage's weights in a step.
        """
        key = *_key(layout.shape), layout.config.mesh.zero, passes
        if key not in self._of_parameters:
            self._of_parameters[key] = self._time_of_parameters(layout, passes)
        return self._of_parameters[key]

    def _time_of_parameters(
        self, layout: Composition, passes: float
    ) -> tuple[float, float, float]:
        """Estimates what `_parameters` returns; see there."""
        shape = layout.shape
        work = self.work
        zero = layout.config.mesh.zero
        once = self._summed_once(layout)
        # axes that sum gradients but do not split the stored parameters
        adding = [
            axis
            for axis in (*STEP_AXES, *SEQUENCE_AXES)
            if axis not in PARAMETER_SHARDS
        ]
        # bytes of a parameter's gradient that each axis sums in a step
        sent = {axis: 4 * (1 if axis in once else passes) for axis in (*adding, "fsdp")}
        reduction_kind = "reduce-scatter" if zero >= 2 else "all-reduce"
        gathers = 0.0
        gradients = 0.0
        update = 0.0
        dense, in_experts = self._local(shape)
        # Experts' kernels are already split over the expert axis. Other parameters are
        # stored in shards over all of these axes.
        for local, axes in ((dense, "+".join(PARAMETER_SHARDS)), (in_experts, "fsdp")):
            shards = math.prod(shape.sizes[axis] for axis in axes.split("+"))
            state = local / shards if zero else local
            partial = state if zero >= 2 else local  # gradients while they are summed
            gathered = work.stored * local
            if zero >= 3:
                gathered = 2 * passes * work.gathered * local
            gathers += self._time("all-gather", gathered, shape, axes)
            gradients += self._time(reduction_kind, sent["fsdp"] * local, shape, axes)
            gradients += sum(
                self._time("all-reduce", sent[axis] * partial, shape, axis)
                for axis in adding
            )
            updated = 2 * (work.stored + work.moments) * state
            update += (updated + 8 * passes * partial) / self.hbm_bytes_per_s
        return gathers, gradients, update

    def _summed_once(self, layout: Composition) -> Collection[str]:
        """Finds the axes over which gradients of all parts are summed once per step."""
        mesh = layout.config.mesh
        key = *_key(layout.shape), mesh.zero
        if key not in self._once:
            chosen = reduction.choose(
                layout.spec, layout.rules, mesh.reduce, microbatches=2
            )
            self._once[key] = chosen.axes_summed_once
        return self._once[key]

    def _shares_of(self, layout: Composition) -> list[Share]:
        """Computes a device's share of each op."""
        key = layout.config.context.attention, *_key(layout.shape)
        if key not in self._shares:
            self._shares[key] = [
                cost.share(layout.rules, self.work.computed) for cost in self.work.costs
            ]
        return self._shares[key]

    def forms(self, layout: Composition) -> list[RunConfig]:
        """Lists the run with each form of attention over split sequences worth trying.

        A form is skipped if an earlier one is at least as fast and needs no more
        memory.
        """
        configs = list[RunConfig]()
        best = list[tuple[float, int]]()
        for candidate in self._forms_to_try(layout):
            shares = self._shares_of(candidate)
            moving = self._crossing(shares, candidate.shape, "full")[CONTEXT]
            seconds = self.work.kernels_s("full", shares) + moving
            held = max((share.held for share in shares), default=0)
            if all(
                seconds < best_seconds or held < best_held
                for best_seconds, best_held in best
            ):
                configs.append(candidate.config)
                best.append((seconds, held))
        return configs

    def _forms_to_try(self, layout: Composition) -> list[Composition]:
        """Composes the run with each form of attention on a mesh; "auto" comes first.

        Other forms are tried only if the config's is "auto". A form must be legal, and
        must differ from earlier ones on this mesh.
        """
        run = layout.config
        if run.context.attention != "auto" or layout.shape.sizes[CONTEXT] == 1:
            return [layout]
        costs = self.work.costs
        by_names = dict[tuple[str, ...], Composition]()
        for form in get_args(AttentionForm):
            config = compose.with_overrides(run, {"context.attention": form})
            candidate = compose.compose(config, layout.shape, layout.spec)
            rules = candidate.rules
            if not any(fault for cost in costs for fault in cost.faults(rules)):
                names = tuple(cost.form_name(rules) for cost in costs)
                by_names.setdefault(names, candidate)
        return list(by_names.values())

    def _crossing(
        self, shares: Sequence[Share], shape: MeshShape, policy: str
    ) -> Counter[str]:
        """Estimates the seconds in which ops of all layers communicate, by mesh axis.

        Args:
          shares: a device's share of each op.
          shape: the mesh.
          policy: the remat policy; recomputation repeats some communication.
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
                duration = link.seconds(crossing.kind, cost.layers * sent * tokens)
                # typeshed's Counter counts integers only
                seconds[crossing.axis] += duration  # type: ignore[assignment]
        return seconds

    @staticmethod
    def _shards(shape: MeshShape) -> int:
        """Counts the devices that split the tokens."""
        return shape.batch_shards * shape.sizes[CONTEXT]

    def _time(self, kind: str, payload: float, shape: MeshShape, axes: str) -> float:
        """Estimates the seconds of a collective over mesh axes, as in "data+fsdp"."""
        axes = "+".join(axis for axis in axes.split("+") if shape.sizes[axis] > 1)
        if not axes:
            return 0.0
        members = math.prod(shape.sizes[axis] for axis in axes.split("+"))
        return self.target.axis_link(shape, axes).seconds(
            kind, formulas.wire_bytes(kind, payload, members)
        )


def _key(shape: MeshShape) -> tuple[int, ...]:
    """Makes a cache key of a mesh."""
    return *shape.sizes.values(), *shape.dcn.values()
