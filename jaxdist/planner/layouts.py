"""The layouts that a run could have on a target, each with its time and state by
arithmetic.

Mesh sizes, ZeRO stage, parts of the batch, schedule and rematerialisation vary; the
global batch and the numerics never do. The times are made of datasheet rates: good for
an order, not for a promise.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.hardware.chips import FP8_REACHED
from jaxdist.ops.experts.grouped_matmul import SHARE_SLACK
from jaxdist.parallel import remat
from jaxdist.parallel.axes import (
    CROSSING_AXES,
    EXPERT_AXES,
    PARAMETER_SHARDS,
    REST_AXIS,
    SEARCHED,
    SEQUENCE_AXES,
    STATE_AXES,
    STEP_AXES,
    divisors,
)
from jaxdist.parallel.mesh import DcnConfig, MeshConfig, MeshShape
from jaxdist.parallel.pipeline.schedules.balance import bubble_fraction
from jaxdist.parallel.sharding import Rules, build_rules
from jaxdist.planner import context, experts, formulas, memory
from jaxdist.planner.estimate import Estimate, mixed
from jaxdist.planner.targets import Target, validate_for
from jaxdist.planner.timing import attention_share, products_peak
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step import reduction
from jaxdist.trainer import batching, build, product_formats, step_lines
from jaxdist.trainer.model_flops import model_flops
from jaxdist.trainer.run_config import RunConfig

REMAT = (
    "none",
    "dots",
    "save:query,key,value,attention_residuals,attention_projection",
    "full",
    f"offload:{remat.INPUT}",
    f"save:attention_residuals+offload:{remat.INPUT},query,key,value,attention_projection",
)
KEYS = (
    *(f"mesh.{axis}" for axis in (*SEARCHED, *EXPERT_AXES, *SEQUENCE_AXES)),
    *(f"mesh.dcn.{axis}" for axis in SEARCHED if axis in CROSSING_AXES),
    "mesh.zero",
    "mesh.sequence_parallel",
    "batch.accumulation",
    "pipeline.schedule",
    "pipeline.microbatches",
    "pipeline.chunks",
    "remat.policy",
    "remat.layers",
    "remat.every",
    "context.attention",
)
_EXPERTS = "hidden rows of experts"
_MADE_BY = {
    "out": "attention_projection",
    "gate": "mlp_gate",
    "up": "mlp_up",
    "down": "mlp_out",
}
# activations not of the model's width
_WIDE = ("query", "key", "value", "mlp_gate", "mlp_up")


@dataclass(frozen=True)
class Candidate:
    """A legal layout."""

    run: RunConfig
    shape: MeshShape
    estimate: Estimate
    # weights, gradients and optimizer state, were everything split evenly: the least
    state_bytes: int
    accounted_bytes: int = 0  # at the peak, by `memory`; 0: not looked at

    @property
    def text(self) -> str:
        run, flow = self.run, self.run.pipeline
        words = [str(self.shape)]
        words += [f"zero {run.mesh.zero}"] * (run.mesh.zero < 3)
        words += ["sequence parallel"] * run.mesh.sequence_parallel
        words += [f"accumulation {run.batch.accumulation}"] * (
            run.batch.accumulation > 1
        )
        form = run.context.attention if self.shape.sizes[context.AXIS] > 1 else "auto"
        words += [f"attention by {form}"] * (form != "auto")
        if self.shape.sizes["pipeline"] == 1:
            return ", ".join([*words, f"remat {run.remat}"])
        chunks = f" x {flow.chunks} chunks" if flow.chunks > 1 else ""
        return ", ".join(
            [*words, f"{flow.schedule}{chunks}, {flow.microbatches} microbatches"]
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes in use."""
        return tuple(axis for axis, size in self.shape.sizes.items() if size > 1)

    @property
    def complexity(self) -> int:
        """How much there is to set and to understand."""
        run = self.run
        split = run.mesh.sequence_parallel, run.mesh.zero < 3
        parts = (
            run.batch.accumulation > 1,
            run.pipeline.chunks > 1,
            run.context.attention != "auto",
        )
        return 2 * len(self.axes) + sum(split) + sum(parts) + (":" in run.remat.policy)

    def overrides(self, run: RunConfig) -> list[str]:
        """Returns what it changes of a run, as on the command line."""
        values = (
            (key, attrgetter(key)(self.run), attrgetter(key)(run)) for key in KEYS
        )
        return [
            f"{key}={str(mine).lower()}"
            for key, mine, theirs in values
            if mine != theirs
        ]


def legal_meshes(
    run: RunConfig, target: Target
) -> tuple[list[tuple[RunConfig, MeshShape]], dict, ModelSpec]:
    """Returns the run on each legal mesh, the counted reasons against the others, and
    the model's spec.

    Experts are shared out by each divisor of their number, sequences by those of their
    length up to `context.MOST`, both over fast links only.

    Raises:
      ConfigError: no mesh is legal.
    """
    legal, faults = [], Counter[str]()
    error = ConfigError("no mesh is legal")
    flow = replace(run.pipeline, schedule="1f1b", chunks=1, microbatches=1)
    spec = build.model_spec(run)
    mixture = experts.mixture_of(run, spec)
    sizes = {
        experts.AXIS: divisors(
            math.gcd(target.num_devices, mixture.experts if mixture else 1)
        )
    }
    sizes[context.AXIS] = context.sizes_to_try(run, target.num_devices)
    for mesh in _meshes(run.mesh, target, sizes):
        pipeline = flow if mesh.pipeline > 1 else run.pipeline
        # Stages have stacks of their own.
        again = (
            replace(run.remat, layers=0, every=1) if mesh.pipeline > 1 else run.remat
        )
        batch = replace(run.batch, accumulation=1)
        tried = replace(run, mesh=mesh, batch=batch, pipeline=pipeline, remat=again)
        try:
            shape, _, _ = validate_for(tried, target, spec)
            if slow := next(slow_axes(target, shape), None):
                faults[slow] += 1
                continue
            legal.append((tried, shape))
        except ConfigError as refusal:
            error = refusal
            faults[re.sub(r"\d+", "N", refusal.faults[0].partition("; ")[0])] += 1
    if not legal:
        raise error
    return legal, dict(faults.most_common()), spec


def slow_axes(target: Target, shape: MeshShape) -> Iterator[str]:
    """Yields why axes that experts or sequences are shared out over must not cross what
    they cross.
    """
    for axis in (experts.AXIS, context.AXIS):
        link = target.axis_link(shape, axis)
        if link.name in experts.SLOW_LINKS or (
            target.chip and link.name == target.chip.network
        ):
            yield f"mesh.{axis}=N talks in every layer, over {link.name}"


def _meshes(
    base: MeshConfig, target: Target, sizes_of: Mapping[str, Sequence[int]]
) -> Iterator[MeshConfig]:
    """Yields every mesh; `sizes_of`: of axes that do not take all divisors of the
    devices' number.
    """
    total, slices = target.num_devices, target.num_slices
    # fsdp takes the rest
    varied = [*(axis for axis in SEARCHED if axis != "fsdp"), *sizes_of]
    for sizes in product(*(sizes_of.get(axis, divisors(total)) for axis in varied)):
        if total % math.prod(sizes):
            continue
        split: dict[str, Any] = dict(zip(varied, sizes, strict=True)) | {
            "fsdp": total // math.prod(sizes)
        }
        for axis in CROSSING_AXES if slices > 1 else (REST_AXIS,):
            if split[axis] % slices == 0:
                dcn: dict[str, Any] = (
                    {} if axis == REST_AXIS else {axis: slices, REST_AXIS: 1}
                )
                yield replace(
                    base, **split, dcn=DcnConfig(**dcn), zero=3, sequence_parallel=False
                )


def candidates(
    run: RunConfig,
    target: Target,
    legal: Sequence[tuple[RunConfig, MeshShape]],
    spec: ModelSpec,
    expert_load: float = 1.0,
) -> Iterator[Candidate]:
    """Yields every layout on the legal meshes; `expert_load`: see `plan.make_plan`."""
    model = Model(run, target, spec, *legal[0])
    model.rounds = experts.rounds(expert_load)
    for placed, shape in [
        (one, where) for own, where in legal for one in model.forms(own, where)
    ]:
        staged = shape.sizes["pipeline"] > 1  # stages recompute as pipeline.remat says
        zeros = (
            (3, 2, 1)
            if math.prod(shape.sizes[axis] for axis in PARAMETER_SHARDS) > 1
            else (3,)
        )
        splits = (False, True) if shape.sizes["tensor"] > 1 else (False,)
        policies = (
            (run.remat.policy,)
            if staged
            else tuple(dict.fromkeys((run.remat.policy, *REMAT)))
        )
        parts = list(_parts(placed, shape, max(spec.depth, 1)))
        for zero, split, part, policy in product(zeros, splits, parts, policies):
            mesh = replace(placed.mesh, zero=zero, sequence_parallel=split)
            own = (
                placed.remat
                if policy == run.remat.policy
                else remat.RematConfig(policy)
            )
            one = replace(part, mesh=mesh, remat=own)
            yield Candidate(
                one, shape, model.estimate(one, shape), model.state_bytes(one, shape)
            )


def _parts(run: RunConfig, shape: MeshShape, depth: int) -> Iterator[RunConfig]:
    """Yields the ways to cut up the batch: in accumulation steps, or microbatches and
    chunks.
    """
    each, stages = run.batch.global_size // shape.batch_shards, shape.sizes["pipeline"]
    for n in divisors(each):
        if stages == 1:
            yield replace(run, batch=replace(run.batch, accumulation=n))
            continue
        yield replace(run, pipeline=replace(run.pipeline, microbatches=n))
        for chunks in range(2, depth // stages + 1) if n % stages == 0 else ():
            if depth % (stages * chunks) == 0:
                flow = replace(
                    run.pipeline, schedule="interleaved", microbatches=n, chunks=chunks
                )
                yield replace(run, pipeline=flow)


def accounted(one: Candidate, target: Target, spec: ModelSpec) -> Candidate:
    """Returns the candidate with its peak by `memory`: milliseconds, once a block's
    shapes are traced.
    """
    components = memory.components(
        one.run, spec, _rules(one.run, one.shape, spec), target
    )
    return replace(one, accounted_bytes=memory.accounted_peak(components))


def _rules(run: RunConfig, shape: MeshShape, spec: ModelSpec) -> Rules:
    return build.rules_for(run, spec, shape)


class Model:
    """A step's time and state by arithmetic, for the layouts of one run.

    `legal`, `shape`: any layout, from whose optimizer state the bytes per parameter are
    taken.
    """

    def __init__(
        self,
        run: RunConfig,
        target: Target,
        spec: ModelSpec,
        legal: RunConfig,
        shape: MeshShape,
    ):
        self.target, self.spec, chip = target, spec, target.chip
        components = memory.components(legal, spec, _rules(legal, shape, spec), target)
        shards = math.prod(shape.sizes[axis] for axis in STATE_AXES)
        # Bytes of a parameter.
        self.moments = (
            components.get("optimizer state", 0) * shards / spec.parameter_count
        )
        self.peak = products_peak(target, run.precision.compute) or 1e12
        self.hbm = chip.hbm_bytes_per_s if chip else math.inf
        self.pcie = (chip and chip.pcie_bytes_per_s) or math.inf
        self.stored = jnp.dtype(run.precision.params).itemsize
        self.computed = jnp.dtype(run.precision.compute).itemsize
        self.depth, self.made = max(spec.depth, 1), Counter[str]()
        self.by_experts = 0  # active parameters of experts
        # made: parameters by what they compute
        for path, (x, names) in spec.named_parameters().items():
            name, used = (
                path.rpartition("/")[2],
                math.prod(x.shape) * step_lines.active_share(run, names),
            )
            name = (
                _EXPERTS
                if "experts" in names and name != "down"
                else _MADE_BY.get(name, name)
            )
            self.made[name if path.startswith("blocks/") else ""] += round(used)
            self.by_experts += round(used) * ("experts" in names)
        self.in_blocks = max(self.made.total() - self.made.pop("", 0), 1)
        # Kept by mesh, of which there are many layouts.
        self._once: dict[tuple[int, ...], Collection[str]] = {}
        self._attentions: dict[tuple[Any, ...], context.Attention] = {}
        self.mixture, self.rounds = experts.mixture_of(run, spec), 1
        self.in_experts = (
            self.mixture.kernels * self.mixture.layers if self.mixture else 0
        )
        self.dense = spec.parameter_count - self.in_experts
        self.sequences = run.batch.global_size
        self.tokens = self.sequences * batching.targets_per_sample(run)
        flops = model_flops(run, spec)
        # one forward pass, causal
        self.attention = (flops["full"] - flops["causal"]) / 3 * self.tokens
        self.products = flops["causal"] * self.tokens - 3 * self.attention
        coded, byte = (
            product_formats.parameters(run, spec),
            products_peak(target, run.precision.peak),
        )
        # Codes of 8-bit floats are gathered; their products take less time than so many
        # FLOPs in bfloat16.
        self.gathered = (
            self.computed - (self.computed - 1) * coded / spec.parameter_count
        )
        thirds = 2 / 3 if run.precision.matmul == "fp8_rowwise_wgrad_bf16" else 1
        saved = 1 - self.peak / (FP8_REACHED * byte) if coded and byte else 0.0
        self.paced = 1 - saved * thirds * 6 * coded * self.tokens / self.products
        # of peak, by its kernels
        self.reached = attention_share(target, run.model.get("head_dim", 128))
        # of foreign models, what activations send is left out
        self.width = run.model.get("d_model", 0)

    def state_bytes(self, run: RunConfig, shape: MeshShape) -> int:
        kept, sizes = formulas.Policy(self.stored, 4, self.moments), shape.sizes
        dense, own = self._local(shape)
        shards = math.prod(sizes[axis] for axis in PARAMETER_SHARDS)
        whole = formulas.state_bytes(dense, kept, shards=shards, zero=run.mesh.zero)
        return int(
            whole
            + formulas.state_bytes(own, kept, shards=sizes["fsdp"], zero=run.mesh.zero)
        )

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
        runs = (replace(run, remat=remat.RematConfig(policy)) for policy in policies)
        return mixed([self._estimate(own, shape) for own in runs], shares)

    def _estimate(self, run: RunConfig, shape: MeshShape) -> Estimate:
        stages, gpu = shape.sizes["pipeline"], self.target.platform == "gpu"
        flow, chunks = (
            (run.pipeline.microbatches, run.pipeline.chunks) if stages > 1 else (1, 1)
        )
        # 1, and what is computed for nothing
        ticks = (flow + (stages - 1) / chunks) / flow
        passes = run.batch.accumulation * flow * ticks  # over a stage's weights
        policy = "full" if stages > 1 else run.remat.policy
        x = self.tokens * self.width * self.computed / self._shards(shape)
        attention = self._attention(run, shape)
        sums_of_layer = 4 + (self._again(policy) > self._part("attention_projection"))
        # A split residual stream is gathered again for the gradients of both parts'
        # first kernels.
        sums_of_layer += run.mesh.sequence_parallel and policy != "none"
        sums = sums_of_layer * self.depth / stages * ticks + 3
        reading = 3 * passes * sum(self._local(shape)) * self.computed / self.hbm
        # the forward pass runs once more, but for a group's last product
        grouped = run.remat.every > 1
        again = grouped * (1 - self._part("mlp_out") / run.remat.every)
        compute = max(
            self._compute(policy, stages * chunks, attention, again),
            reading * (3 + grouped) / 3,
        )
        gathers, gradients, update = self._parameters(run, shape, passes)
        gathers *= (2 + grouped) / 2 if run.mesh.zero >= 3 else 1
        return Estimate(
            compute=compute,
            bubble=compute * (1 / (1 - bubble_fraction(stages, flow, chunks)) - 1),
            update=update,
            gathers=gathers,
            gradients=gradients,
            tensor=self._time(
                "all-reduce",
                (sums + 2 * grouped * self.depth / stages) * x,
                shape,
                "tensor",
            ),
            stages=self._time(
                "collective-permute", 2 * chunks * ticks * x, shape, "pipeline"
            )
            + self._time("all-reduce", 3 * ticks * x, shape, "pipeline"),
            exchange=self._exchange(shape, ticks),
            context=self._context(attention, shape, policy) * ticks / stages,
            host=2 * self._offloaded(policy) * x / self.pcie,
            hides=gpu,
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
        # Experts' kernels are split over their axis already; all else is stored in
        # shards over all of these.
        for local, axes in zip(
            self._local(shape), ("+".join(PARAMETER_SHARDS), "fsdp"), strict=True
        ):
            shards = math.prod(shape.sizes[axis] for axis in axes.split("+"))
            state = local / (shards if zero else 1)
            partial = state if zero >= 2 else local  # gradients, as they are added up
            gathered = (
                2 * passes * self.gathered * local if zero >= 3 else self.stored * local
            )
            gathers += self._time("all-gather", gathered, shape, axes)
            gradients += self._time(reduced, sent["fsdp"] * local, shape, axes)
            gradients += sum(
                self._time("all-reduce", sent[axis] * partial, shape, axis)
                for axis in adding
            )
            update += (
                2 * (self.stored + self.moments) * state + 8 * passes * partial
            ) / self.hbm
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

    def _attention(self, run: RunConfig, shape: MeshShape) -> context.Attention:
        if (key := (run.context.attention, *_key(shape))) not in self._attentions:
            rules = _rules(run, shape, self.spec)
            self._attentions[key] = context.Attention(run, rules, self.depth)
        return self._attentions[key]

    def forms(self, run: RunConfig, shape: MeshShape) -> list[RunConfig]:
        """Returns the run with each form of attention over a split sequence that may be
        the best.
        """

        def cost(one: RunConfig) -> tuple[float, int]:
            attention = self._attention(one, shape)
            return self._kernels("full", attention) + self._context(
                attention, shape, "full"
            ), attention.keys

        return context.unbeaten(context.runs_to_try(run, self.spec, shape), cost)

    def _exchange(self, shape: MeshShape, ticks: float) -> float:
        """Returns the seconds in which rows go to experts and back."""
        if not self.mixture:
            return 0.0
        kind, payload = self.mixture.exchanged_bytes(shape.sizes[experts.AXIS])
        layers = self.mixture.layers / shape.sizes["pipeline"] * ticks * self.rounds
        return self._time(
            kind,
            layers * payload * self.tokens / self._shards(shape),
            shape,
            experts.AXIS,
        )

    def _context(
        self, attention: context.Attention, shape: MeshShape, policy: str
    ) -> float:
        """Returns the seconds in which attention moves parts of sequences, were all
        layers on a device.
        """
        link = self.target.axis_link(shape, context.AXIS)
        sequences = self.sequences / shape.batch_shards
        return (
            sequences * attention.seconds(1 if policy == "none" else 2, link)
            if attention.layers
            else 0.0
        )

    @staticmethod
    def _shards(shape: MeshShape) -> int:
        """Returns the devices that share out the tokens."""
        return shape.batch_shards * shape.sizes[context.AXIS]

    def _compute(
        self, policy: str, places: int, attention: context.Attention, again: float = 0
    ) -> float:
        """Returns seconds at peak.

        Args:
          places: that layers are padded to.
          again: share of a forward pass that runs beside what the policy says.
        """
        gpu = self.target.platform == "gpu"
        blocks = min(6.0 * self.in_blocks * self.tokens, self.products)
        padded = -(-self.depth // places) * places / self.depth
        products = self.products + blocks * (
            padded * (1 + (self._again(policy) + again) / 3) - 1
        )
        # a share of each expert's rows is padded; hidden rows are computed again
        if gpu:
            rows = 6.0 * self.by_experts + 2.0 * self.made[_EXPERTS]
            products += (SHARE_SLACK - 1) * rows * self.tokens
        kernels = self._kernels(policy, attention, more=again > 0)
        return products * self.paced / self.target.num_devices / self.peak + kernels

    def _kernels(
        self, policy: str, attention: context.Attention, more: bool = False
    ) -> float:
        """Returns the seconds of attention on the device that has most of it; `more`:
        forward once more.
        """
        kept, gpu = _kept_names(policy), self.target.platform == "gpu"
        # cuDNN's residuals have no name by which they could be moved to the host
        if gpu:
            kept = kept - {*remat.named_in(policy)["offload"]}
        once = policy in ("none", "dots") or remat.RESIDUALS in kept
        # A GPU's kernel knows no parts of a sequence: elsewhere XLA computes all of the
        # square.
        most = attention.busiest if not gpu else 2.0 if attention.by_parts else 1.0
        flops = (1 + (not once) + more + (2.5 if gpu else 3.5)) * self.attention * most
        return flops / self.reached / self.target.num_devices / self.peak

    def _again(self, policy: str) -> float:
        """Returns the share of blocks' products that are computed again; experts'
        hidden rows always are.
        """
        if policy in ("none", "dots"):
            return self._part(_EXPERTS)
        # No backward pass reads a block's output.
        return 1 - sum(map(self._part, sorted(_kept_names(policy) | {"mlp_out"})))

    def _part(self, name: str) -> float:
        return self.made[name] / self.in_blocks

    def _offloaded(self, policy: str) -> float:
        """Returns the elements that blocks send to the host, per element of the
        residual stream.
        """
        wide = {name: self.made[name] / max(self.width, 1) ** 2 for name in _WIDE}
        return sum(
            wide.get(name, self.depth) for name in remat.named_in(policy)["offload"]
        )

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
