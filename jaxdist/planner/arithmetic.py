"""A step's seconds and state by arithmetic, for any layout of a run.

Datasheet rates and what the model's ops declare (`ops.costs`): good for an order of
layouts, not for a promise.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import jax.numpy as jnp

from jaxdist.ops.costs import Cost, Product, Share
from jaxdist.ops.experts.costs import rounds
from jaxdist.parallel import remat
from jaxdist.parallel.axes import (
    EXPERT_AXES,
    PARAMETER_SHARDS,
    SEQUENCE_AXES,
    STATE_AXES,
    STEP_AXES,
)
from jaxdist.parallel.context import AttentionForm
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.pipeline.schedules.balance import bubble_fraction
from jaxdist.parallel.sharding import build_rules
from jaxdist.planner import formulas, memory
from jaxdist.planner.blocks import trace
from jaxdist.planner.targets import Target
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.param_names import has_experts
from jaxdist.step import reduction
from jaxdist.trainer import compose, product_formats
from jaxdist.trainer.costs import costs_of, itemsize_of
from jaxdist.trainer.model_flops import model_flops
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
      legal, shape: any layout, from whose optimizer state the bytes per parameter are
        taken.
      expert_load: see `plan.make_plan`.
    """

    def __init__(
        self,
        run: RunConfig,
        target: Target,
        spec: ModelSpec,
        legal: RunConfig,
        shape: MeshShape,
        expert_load: float = 1.0,
    ):
        self.target, self.spec = target, spec
        chip = target.chip
        self.peak = target.products_peak(run.precision.compute) or 1e12
        self.hbm = chip.hbm_bytes_per_s if chip else math.inf
        self.pcie = (chip and chip.pcie_bytes_per_s) or math.inf
        self.stored = jnp.dtype(run.precision.params).itemsize
        self.computed = itemsize_of(run)
        self.rounds = rounds(expert_load)
        self.sequences = run.batch.global_size
        self.tokens = self.sequences * compose.targets_per_sample(run)
        self.depth = max(spec.depth, 1)
        rules = compose.compose(legal, shape, spec).rules
        # Bytes of a parameter.
        state = memory.components(legal, spec, rules, target)
        shards = math.prod(shape.sizes[axis] for axis in STATE_AXES)
        moments = state.get("optimizer state", 0) * shards
        self.moments = moments / spec.parameter_count
        # What flows from block to block, in bytes a token; 0 without blocks.
        block = trace(legal, spec, rules, legal.remat.policy, target.platform)
        self.x = block.x / block.tokens
        self.in_experts = sum(
            x.size
            for x, names in spec.named_parameters().values()
            if has_experts(names)
        )
        self.dense = spec.parameter_count - self.in_experts
        self._sum_costs(run)
        self._count_recipe(run)
        # Kept by mesh, of which there are many layouts.
        self._once: dict[tuple[int, ...], Collection[str]] = {}
        self._shares: dict[tuple[Any, ...], list[Share]] = {}

    def _sum_costs(self, run: RunConfig) -> None:
        """Sums what the ops declare; of a model that declares nothing, its FLOPs."""
        flops = model_flops(run, self.spec)["causal"]
        self.costs = costs_of(run) or _undeclared(self.spec, flops)
        fused = [cost.fused_flops("causal") / 3 for cost in self.costs]
        # FLOPs of one forward pass of a step's fused kernels, and of those at the peak
        # that would take as long
        self.fused = math.fsum(fused) * self.tokens
        self.fused_at_peak = self.tokens * math.fsum(
            count / self.target.observed.attention_share(cost.fused_width)
            for count, cost in zip(fused, self.costs, strict=True)
        )
        self.products = flops * self.tokens - 3 * self.fused
        # by name of a result: parameters that make it, and its elements a token
        self.made = Counter[str]()
        self.sizes = Counter[str]()
        self.always_again = 0.0
        for cost in self.costs:
            if not cost.in_blocks:
                continue
            for product in cost.products:
                used = cost.layers * product.contracted * product.size
                self.made[product.makes] += used
                self.sizes[product.makes] += cost.layers * product.size
                self.always_again += used if product.always_again else 0
        self.in_blocks = max(self.made.total(), 1)
        # rows that are computed for nothing, hidden ones a second time
        self.spare = 0.0
        for cost in self.costs:
            again = sum(p.flops for p in cost.products if p.always_again)
            flops = cost.product_flops() + cost.layers * again
            self.spare += cost.spare_rows(self.target.platform) * flops * self.tokens

    def _count_recipe(self, run: RunConfig) -> None:
        """Counts what matmuls of a recipe gather less, and take less time."""
        # Bytes of a parameter that are gathered, and the time of matmuls over that of
        # as many FLOPs in the compute dtype.
        self.gathered: float = self.computed
        self.paced = 1.0
        recipe = run.precision.recipe
        coded = product_formats.parameters(run, self.spec)
        if recipe is None or not coded:
            return
        share = coded / self.spec.parameter_count
        self.gathered -= (self.computed - recipe.gathered_bytes) * share
        peak = self.target.products_peak(recipe.peak)
        if peak is not None:
            saved = 1 - self.peak / (recipe.units.reached * peak)
            in_recipe = 2 * recipe.matmuls * coded * self.tokens
            self.paced -= saved * in_recipe / self.products

    def state_bytes(self, run: RunConfig, shape: MeshShape) -> int:
        """Returns a device's weights, gradients and optimizer state, split evenly."""
        kept = formulas.Policy(self.stored, 4, self.moments)
        dense, of_experts = self._local(shape)
        zero, fsdp = run.mesh.zero, shape.sizes["fsdp"]
        shards = math.prod(shape.sizes[axis] for axis in PARAMETER_SHARDS)
        size = formulas.state_bytes(dense, kept, shards=shards, zero=zero)
        size += formulas.state_bytes(of_experts, kept, shards=fsdp, zero=zero)
        return int(size)

    def _local(self, shape: MeshShape) -> tuple[float, float]:
        """Returns the parameters that a device computes with, but those of experts, and
        those.
        """
        split = shape.sizes["tensor"] * shape.sizes["pipeline"]
        return self.dense / split, self.in_experts / split / shape.sizes["expert"]

    def estimate(self, run: RunConfig, shape: MeshShape) -> Estimate:
        """Returns the seconds of a layout; of one with `remat.layers` as many of each
        kind as there are.
        """
        layers = run.remat.layers if shape.sizes["pipeline"] == 1 else 0
        if not 0 < layers < (depth := self.depth * self.spec.block_layers):
            return self._estimate(run, shape)
        shares = (layers / depth, 1 - layers / depth)
        policies = (run.remat.policy, run.remat.others)
        runs = (
            compose.with_overrides(run, {"remat": remat.RematConfig(policy)})
            for policy in policies
        )
        return mixed([self._estimate(own, shape) for own in runs], shares)

    def _estimate(self, run: RunConfig, shape: MeshShape) -> Estimate:
        stages = shape.sizes["pipeline"]
        flow, chunks = 1, 1
        policy = run.remat.policy
        if stages > 1:
            flow, chunks = run.pipeline.microbatches, run.pipeline.chunks
            policy = "full"
        # 1, and what is computed for nothing
        ticks = (flow + (stages - 1) / chunks) / flow
        passes = run.batch.accumulation * flow * ticks  # over a stage's weights
        x = self.x * self.tokens / self._shards(shape)
        shares = self._laid_out(run, shape)
        sums_of_layer = 4
        if self._again(policy) > self._part(remat.PROJECTED):
            sums_of_layer += 1
        # A split residual stream is gathered again for the gradients of both parts'
        # first kernels.
        if run.mesh.sequence_parallel and policy != "none":
            sums_of_layer += 1
        sums = sums_of_layer * self.depth / stages * ticks + 3
        gathers, gradients, update = self._parameters(run, shape, passes)
        readings, again = 3, 0.0
        if run.remat.every > 1:
            # the forward pass runs once more, but for a group's last product
            again = 1 - self._part(remat.BLOCK_OUTPUT) / run.remat.every
            readings += 1
            sums += 2 * self.depth / stages
            if run.mesh.zero >= 3:
                gathers *= 3 / 2
        weights = sum(self._local(shape)) * self.computed
        compute = max(
            self._compute(policy, stages * chunks, shares, again),
            readings * passes * weights / self.hbm,
        )
        offloaded = self._offloaded(policy) * self.tokens / self._shards(shape)
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
        self, run: RunConfig, shape: MeshShape, passes: float
    ) -> tuple[float, float, float]:
        """Returns the seconds of gathers, of sums of gradients, and of the update."""
        zero = run.mesh.zero
        once = self._summed_once(run, shape)
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
            gathered = self.stored * local
            if zero >= 3:
                gathered = 2 * passes * self.gathered * local
            gathers += self._time("all-gather", gathered, shape, axes)
            gradients += self._time(reduced, sent["fsdp"] * local, shape, axes)
            gradients += sum(
                self._time("all-reduce", sent[axis] * partial, shape, axis)
                for axis in adding
            )
            updated = 2 * (self.stored + self.moments) * state
            update += (updated + 8 * passes * partial) / self.hbm
        return gathers, gradients, update

    def _summed_once(self, run: RunConfig, shape: MeshShape) -> Collection[str]:
        """Returns the axes over which parts' gradients are summed once a step."""
        key = *_key(shape), run.mesh.zero
        if key not in self._once:
            rules = build_rules(run.mesh, shape)
            self._once[key] = reduction.choose(
                self.spec, rules, run.mesh.reduce, parts=2
            ).once
        return self._once[key]

    def _laid_out(self, run: RunConfig, shape: MeshShape) -> list[Share]:
        """Returns a device's share of each op; kept by mesh."""
        key = run.context.attention, *_key(shape)
        if key not in self._shares:
            rules = compose.compose(run, shape, self.spec).rules
            self._shares[key] = [
                cost.share(rules, self.computed) for cost in self.costs
            ]
        return self._shares[key]

    def forms(self, run: RunConfig, shape: MeshShape) -> list[RunConfig]:
        """Returns the run with each form of attention over a split sequence that may be
        the best: no form before it is as fast and holds as little.
        """
        found, best = list[RunConfig](), list[tuple[float, int]]()
        for one in self._runs_to_try(run, shape):
            shares = self._laid_out(one, shape)
            moving = self._crossing(shares, shape, "full")[CONTEXT]
            seconds = self._kernels("full", shares) + moving
            held = max((share.held for share in shares), default=0)
            if all(seconds < other[0] or held < other[1] for other in best):
                found.append(one)
                best.append((seconds, held))
        return found

    def _runs_to_try(self, run: RunConfig, shape: MeshShape) -> list[RunConfig]:
        """Returns the run with each form of attention on a mesh: its own first.

        Others only where it is left to us, they are legal, and attention is another
        than with those before.
        """
        if run.context.attention != "auto" or shape.sizes[CONTEXT] == 1:
            return [run]
        found, seen = list[RunConfig](), list[list[str]]()
        for form in get_args(AttentionForm):
            one = compose.with_overrides(run, {"context.attention": form})
            rules = compose.compose(one, shape, self.spec).rules
            if any(fault for cost in self.costs for fault in cost.faults(rules)):
                continue
            names = [cost.form_name(rules) for cost in self.costs]
            if names not in seen:
                found.append(one)
                seen.append(names)
        return found

    def _crossing(
        self, shares: Sequence[Share], shape: MeshShape, policy: str
    ) -> Counter[str]:
        """Returns the seconds in which ops send, by mesh axis, were all layers on a
        device.
        """
        seconds = Counter[str]()
        tokens = self.tokens / self._shards(shape)
        passes = 1 if policy == "none" else 2
        for cost, share in zip(self.costs, shares, strict=True):
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

    def _compute(
        self, policy: str, places: int, shares: Sequence[Share], again: float = 0
    ) -> float:
        """Returns seconds at peak.

        Args:
          places: that layers are padded to.
          again: share of a forward pass that runs beside what the policy says.
        """
        blocks = min(6.0 * self.in_blocks * self.tokens, self.products)
        padded = -(-self.depth // places) * places / self.depth
        recomputed = (self._again(policy) + again) / 3
        products = self.products + blocks * (padded * (1 + recomputed) - 1)
        products += self.spare
        kernels = self._kernels(policy, shares, more=again > 0)
        return products * self.paced / self.target.num_devices / self.peak + kernels

    def _kernels(
        self, policy: str, shares: Sequence[Share], more: bool = False
    ) -> float:
        """Returns the seconds of fused kernels on the device that has most of them.

        Args:
          more: the forward pass runs once more.
        """
        if not self.fused:
            return 0.0
        kept, gpu = _kept_names(policy), self.target.platform == "gpu"
        # cuDNN's residuals have no name by which they could be moved to the host
        if gpu:
            kept = kept - {*remat.named_in(policy)["offload"]}
        once = policy in ("none", "dots") or remat.RESIDUALS in kept
        most = 1.0
        if not gpu:
            most = self._busiest(shares)
        elif any(share.by_parts for share in shares):
            # A GPU's kernel knows no parts of a sequence: XLA computes all of the
            # square.
            most = 2.0
        runs = 1 + (not once) + more + (2.5 if gpu else 3.5)
        flops = runs * self.fused_at_peak * most
        return flops / self.target.num_devices / self.peak

    def _busiest(self, shares: Sequence[Share]) -> float:
        """Returns the work of the device with most of fused kernels, over the mean."""
        work = [cost.fused_flops("causal") for cost in self.costs]
        pairs = zip(work, shares, strict=True)
        return math.fsum(flops * share.busiest for flops, share in pairs) / sum(work)

    def _again(self, policy: str) -> float:
        """Returns the share of blocks' products that are computed again."""
        if policy in ("none", "dots"):
            return self.always_again / self.in_blocks
        # No backward pass reads a block's output.
        kept = _kept_names(policy) | {remat.BLOCK_OUTPUT}
        return 1 - sum(map(self._part, sorted(kept)))

    def _part(self, name: str) -> float:
        return self.made[name] / self.in_blocks

    def _offloaded(self, policy: str) -> float:
        """Returns the bytes of a token that blocks send to the host."""
        sizes = {name: size * self.computed for name, size in self.sizes.items()}
        names = remat.named_in(policy)["offload"]
        return math.fsum(sizes.get(name, self.depth * self.x) for name in names)

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


def _kept_names(policy: str) -> set[str]:
    """Returns the activations that a policy keeps by name, on the device or
    the host.
    """
    named = remat.named_in(policy)
    return {*named["save"], *named["offload"]}


def _undeclared(spec: ModelSpec, flops: float) -> list[Cost]:
    """Returns costs of a model that declares none: its FLOPs, the blocks' apart.

    Args:
      flops: of a token, forward and backward, as counted in its program.
    """
    parameters = spec.named_parameters().items()
    blocks = sum(x.size for path, (x, _) in parameters if path.startswith("blocks/"))
    used = round(flops / 6)
    in_blocks = min(blocks, used)
    name = spec.model_class.__name__
    return [
        Cost(name=name, products=(Product(in_blocks, 1),)),
        Cost(name=name, products=(Product(used - in_blocks, 1),), in_blocks=False),
    ]
