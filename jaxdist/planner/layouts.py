"""The layouts that a run could have on a target, each with its time and state by
arithmetic.

Mesh sizes, ZeRO stage, parts of the batch, schedule and rematerialisation vary; the
global batch and the numerics never do. The times are made of datasheet rates: good for
an order, not for a promise.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.config.schema import schema_of
from jaxdist.parallel import remat
from jaxdist.parallel.axes import (
    CROSSING_AXES,
    PARAMETER_SHARDS,
    REST_AXIS,
    SEARCHED,
    divisors,
)
from jaxdist.parallel.mesh import DcnConfig, MeshConfig, MeshShape
from jaxdist.planner import memory
from jaxdist.planner.arithmetic import CONTEXT, EXPERT, Estimate, Model
from jaxdist.planner.targets import Target, validate_for
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.param_names import EXPERTS, has_experts
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

REMAT = (
    "none",
    "dots",
    "save:query,key,value,attention_residuals,attention_projection",
    "full",
    f"offload:{remat.INPUT}",
    f"save:attention_residuals+offload:{remat.INPUT},query,key,value,attention_projection",
)
# Stages have stacks of their own, and are cut up by the schedules tried.
_STAGED = {
    "pipeline.schedule": "1f1b",
    "pipeline.microbatches": 1,
    "pipeline.chunks": 1,
    "remat.layers": 0,
    "remat.every": 1,
}
# devices of a sequence at most, and the least tokens of it on a device
MOST_CONTEXT = 64
LEAST_TOKENS = 1024
# An exchange in every layer waits for these, as for a chip's network.
SLOW_LINKS = ("DCN", "PCIe", "network")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout of a run on a target, with its time and state by arithmetic."""

    composition: Composition
    target: Target
    estimate: Estimate
    # weights, gradients and optimizer state, were everything split evenly: the least
    state_bytes: int = 0

    @property
    def run(self) -> RunConfig:
        """The config with the layout."""
        return self.composition.config

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return self.composition.shape

    @functools.cached_property
    def components(self) -> memory.Components:
        """Bytes of a device at the peak, by `memory`: milliseconds, once a block's
        shapes are traced.
        """
        return memory.components(self.composition, self.target)

    @property
    def accounted_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return memory.accounted_peak(self.components)

    @property
    def text(self) -> str:
        run = self.run
        words = [str(self.shape)]
        if run.mesh.zero < 3:
            words.append(f"zero {run.mesh.zero}")
        if run.mesh.sequence_parallel:
            words.append("sequence parallel")
        if run.batch.accumulation > 1:
            words.append(f"accumulation {run.batch.accumulation}")
        if self.shape.sizes[CONTEXT] > 1 and run.context.attention != "auto":
            words.append(f"attention by {run.context.attention}")
        if self.shape.sizes["pipeline"] == 1:
            words.append(f"remat {run.remat}")
            return ", ".join(words)
        schedule = run.pipeline.schedule
        if run.pipeline.chunks > 1:
            schedule += f" x {run.pipeline.chunks} chunks"
        words += [schedule, f"{run.pipeline.microbatches} microbatches"]
        return ", ".join(words)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes in use."""
        return tuple(axis for axis, size in self.shape.sizes.items() if size > 1)

    @property
    def complexity(self) -> int:
        """How much there is to set and to understand."""
        run = self.run
        settings = (
            run.mesh.sequence_parallel,
            run.mesh.zero < 3,
            run.batch.accumulation > 1,
            run.pipeline.chunks > 1,
            run.context.attention != "auto",
            ":" in run.remat.policy,
        )
        return 2 * len(self.axes) + sum(settings)

    def overrides(self, run: RunConfig) -> list[str]:
        """Lists what it changes of a run, as on the command line."""
        words = []
        for key, entry in schema_of(RunConfig).items():
            value = attrgetter(key)(self.run)
            if entry.searched and value != attrgetter(key)(run):
                words.append(f"{key}={str(value).lower()}")
        return words


def legal_meshes(
    run: RunConfig, target: Target
) -> tuple[list[Composition], dict[str, int]]:
    """Finds the run on each legal mesh, and counts the reasons against the others.

    Experts are shared out by each divisor of their number, sequences by those of their
    length up to `MOST_CONTEXT`, both over fast links only.

    Raises:
      ConfigError: no mesh is legal.
    """
    legal = list[Composition]()
    faults = Counter[str]()
    error = ConfigError("no mesh is legal")
    spec = compose.model_spec(run)
    sizes = {
        EXPERT: divisors(math.gcd(target.num_devices, _expert_count(spec))),
        CONTEXT: context_sizes(run, target.num_devices),
    }
    for mesh in _meshes(run.mesh, target, sizes):
        overrides: dict[str, Any] = {"mesh": mesh, "batch.accumulation": 1}
        if mesh.pipeline > 1:
            overrides |= _STAGED
        tried = compose.with_overrides(run, overrides)
        try:
            composition = validate_for(tried, target, spec)
        except ConfigError as refusal:
            error = refusal
            faults[re.sub(r"\d+", "N", refusal.faults[0].partition("; ")[0])] += 1
            continue
        slow = next(slow_axes(target, composition.shape), None)
        if slow:
            faults[slow] += 1
        else:
            legal.append(composition)
    if not legal:
        raise error
    return legal, dict(faults.most_common())


def _expert_count(spec: ModelSpec) -> int:
    """Returns the number of a layer's experts, the common divisor of several; 1 without
    any.
    """
    counts = [
        x.shape[names.index(EXPERTS) - len(names)]
        for x, names in spec.named_parameters().values()
        if has_experts(names)
    ]
    return math.gcd(*counts) or 1


def context_sizes(run: RunConfig, devices: int) -> list[int]:
    """Returns the sizes of the axis `context` that a search looks at: its present one
    for what has no sequences.
    """
    own = max(run.mesh.context, 1)
    if not run.data.is_text:
        return [own]
    length = run.batch.sequence_length
    return [
        n
        for n in divisors(math.gcd(devices, length))
        if n in (1, own) or (n <= MOST_CONTEXT and length // n >= LEAST_TOKENS)
    ]


def slow_axes(target: Target, shape: MeshShape) -> Iterator[str]:
    """Yields why axes that experts or sequences are shared out over must not cross what
    they cross.
    """
    for axis in (EXPERT, CONTEXT):
        link = target.axis_link(shape, axis)
        if link.name in SLOW_LINKS or (
            target.chip and link.name == target.chip.network
        ):
            yield f"mesh.{axis}=N talks in every layer, over {link.name}"


def _meshes(
    base: MeshConfig, target: Target, sizes_of: Mapping[str, Sequence[int]]
) -> Iterator[MeshConfig]:
    """Yields every mesh; `sizes_of`: of axes that do not take all divisors of the
    devices' number.
    """
    total = target.num_devices
    slices = target.num_slices
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
    legal: Sequence[Composition], target: Target, expert_load: float = 1.0
) -> Iterator[Candidate]:
    """Yields every layout on the legal meshes; `expert_load`: see `plan.make_plan`."""
    model = Model(legal[0], target, expert_load)
    for placed in legal:
        shape = placed.shape
        spec = placed.spec
        own_policy = placed.config.remat.policy
        policies = [own_policy]
        if shape.sizes["pipeline"] == 1:  # stages recompute as pipeline.remat says
            policies = list(dict.fromkeys((own_policy, *REMAT)))
        zeros = [3]
        if math.prod(shape.sizes[axis] for axis in PARAMETER_SHARDS) > 1:
            zeros = [3, 2, 1]
        splits = (False, True) if shape.sizes["tensor"] > 1 else (False,)
        for form in model.forms(placed):
            parts = _parts(form, shape, max(spec.depth, 1))
            for zero, split, part, policy in product(zeros, splits, parts, policies):
                overrides: dict[str, Any] = {
                    "mesh.zero": zero,
                    "mesh.sequence_parallel": split,
                }
                if policy != own_policy:
                    overrides["remat"] = remat.RematConfig(policy)
                config = compose.with_overrides(part, overrides)
                layout = compose.compose(config, shape, spec)
                seconds = model.estimate(layout)
                yield Candidate(layout, target, seconds, model.state_bytes(layout))


def _parts(run: RunConfig, shape: MeshShape, depth: int) -> Iterator[RunConfig]:
    """Yields the ways to cut up the batch: in accumulation steps, or microbatches and
    chunks.
    """
    stages = shape.sizes["pipeline"]
    for n in divisors(run.batch.global_size // shape.batch_shards):
        if stages == 1:
            yield compose.with_overrides(run, {"batch.accumulation": n})
            continue
        overrides: dict[str, Any] = {"pipeline.microbatches": n}
        yield compose.with_overrides(run, overrides)
        if n % stages:
            continue
        overrides["pipeline.schedule"] = "interleaved"
        for chunks in range(2, depth // stages + 1):
            if depth % (stages * chunks) == 0:
                overrides["pipeline.chunks"] = chunks
                yield compose.with_overrides(run, overrides)
