"""The possible layouts of a run on a target, with time and memory by arithmetic.

Mesh sizes, ZeRO stage, parts of the batch, schedule and rematerialization vary. The
global batch and the numerics never do. The times are computed from datasheet rates:
they can rank layouts, but do not predict step times.
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
from jaxdist.planner.targets import Target
from jaxdist.protocols.dim_names import EXPERTS, has_experts
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import compose, product_formats, validation
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
# Settings of a pipeline before `_parts` varies its schedule. Each stage has a stack of
# its own, so settings for the whole stack do not apply.
_STAGED = {
    "pipeline.schedule": "1f1b",
    "pipeline.microbatches": 1,
    "pipeline.chunks": 1,
    "remat.layers": 0,
    "remat.every": 1,
}
MOST_CONTEXT = 64  # most devices that share a sequence
LEAST_TOKENS = 1024  # least tokens of a shared sequence on each device
# links that are too slow for an exchange in every layer, as a chip's network is
SLOW_LINKS = ("DCN", "PCIe", "network")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout of a run on a target, with its time and memory by arithmetic."""

    composition: Composition
    target: Target
    estimate: Estimate
    # bytes of weights, gradients and optimizer state on a device, if all were split
    # evenly; a lower bound
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
    def components(self) -> Mapping[str, int]:
        """Bytes of a device at the peak by component.

        Computing them takes milliseconds, once the shapes of a block are traced.
        """
        return memory.components(self.composition, self.target)

    @property
    def accounted_bytes(self) -> int:
        """Bytes on a device at the peak."""
        return memory.accounted_peak(self.components)

    @property
    def text(self) -> str:
        """The layout in words, such as "fsdp 64, remat dots"."""
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
        """A count of the settings to make and to understand; mesh axes count twice."""
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
        """Lists the layout's changes of a run as overrides, `a.b=value`."""
        overrides = []
        for key, entry in schema_of(RunConfig).items():
            value = attrgetter(key)(self.run)
            if entry.searched and value != attrgetter(key)(run):
                overrides.append(f"{key}={str(value).lower()}")
        return overrides


def validate_for(
    run: RunConfig, target: Target, spec: ModelSpec | None = None
) -> Composition:
    """Composes a run on a target's devices and checks it, without its data.

    Args:
      run: the config.
      target: the hardware.
      spec: the run's model, if it is known.

    Raises:
      ConfigError: the run cannot be laid out on the target, or its chips have no units
        for the run's matmuls.
    """
    faults = list(product_formats.unit_faults(run, target.platform, target.device_kind))
    if faults:  # they exist in every layout
        raise ConfigError(faults)
    slices = target.num_slices if target.platform == "tpu" else None
    return validation.validate_on(
        run, target.num_devices, slices, with_data=False, spec=spec
    )


def legal_meshes(
    run: RunConfig, target: Target
) -> tuple[list[Composition], dict[str, int]]:
    """Composes the run on each legal mesh.

    The sizes of the expert axis are the divisors of the number of experts. The sizes of
    the context axis are divisors of the sequence length up to `MOST_CONTEXT`. Both axes
    stay within fast links.

    Args:
      run: the config.
      target: the hardware.

    Returns:
      The compositions, and the number of illegal meshes for each reason.

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
    """Counts the experts of a layer; 1 for a model without experts.

    If layers have different numbers of experts, it is their greatest common divisor.
    """
    counts = [
        x.shape[names.index(EXPERTS) - len(names)]
        for x, names in spec.named_parameters().values()
        if has_experts(names)
    ]
    return math.gcd(*counts) or 1


def context_sizes(run: RunConfig, devices: int) -> list[int]:
    """Lists the sizes of the axis `context` to search.

    Data without sequences keeps the run's size.

    Args:
      run: the config.
      devices: number of devices.
    """
    configured = max(run.mesh.context, 1)
    if not run.data.is_text:
        return [configured]
    length = run.batch.sequence_length
    return [
        n
        for n in divisors(math.gcd(devices, length))
        if n in (1, configured) or (n <= MOST_CONTEXT and length // n >= LEAST_TOKENS)
    ]


def slow_axes(target: Target, shape: MeshShape) -> Iterator[str]:
    """Yields a reason for each axis that communicates in every layer over a slow link.

    These are the axes that split experts or sequences.
    """
    network = target.chip.network if target.chip else None
    for axis in (EXPERT, CONTEXT):
        link = target.axis_link(shape, axis)
        if link.name in SLOW_LINKS or link.name == network:
            yield f"mesh.{axis}=N communicates in every layer, over {link.name}"


def _meshes(
    base: MeshConfig, target: Target, sizes_of: Mapping[str, Sequence[int]]
) -> Iterator[MeshConfig]:
    """Yields every mesh.

    Args:
      base: the run's mesh.
      target: the hardware.
      sizes_of: the sizes of some axes; other axes take each divisor of the number of
        devices, and fsdp takes the remaining devices.
    """
    total = target.num_devices
    slices = target.num_slices
    varied = [*(axis for axis in SEARCHED if axis != "fsdp"), *sizes_of]
    for sizes in product(*(sizes_of.get(axis, divisors(total)) for axis in varied)):
        if total % math.prod(sizes):
            continue
        split: dict[str, Any] = dict(zip(varied, sizes, strict=True))
        split["fsdp"] = total // math.prod(sizes)
        for axis in CROSSING_AXES if slices > 1 else (REST_AXIS,):
            if split[axis] % slices:
                continue
            dcn: dict[str, Any] = {}
            if axis != REST_AXIS:
                dcn = {axis: slices, REST_AXIS: 1}
            yield replace(
                base, **split, dcn=DcnConfig(**dcn), zero=3, sequence_parallel=False
            )


def candidates(
    legal: Sequence[Composition], target: Target, expert_load: float = 1.0
) -> Iterator[Candidate]:
    """Yields every layout on the legal meshes.

    Args:
      legal: the run on each legal mesh.
      target: the hardware.
      expert_load: see `plan.make_plan`.
    """
    model = Model(legal[0], target, expert_load)
    for on_mesh in legal:
        shape = on_mesh.shape
        spec = on_mesh.spec
        run_policy = on_mesh.config.remat.policy
        policies = [run_policy]
        if shape.sizes["pipeline"] == 1:  # stages recompute as pipeline.remat says
            policies = list(dict.fromkeys((run_policy, *REMAT)))
        zeros = [3]
        if math.prod(shape.sizes[axis] for axis in PARAMETER_SHARDS) > 1:
            zeros = [3, 2, 1]
        splits = (False, True) if shape.sizes["tensor"] > 1 else (False,)
        for form in model.forms(on_mesh):
            parts = _parts(form, shape, max(spec.depth, 1))
            for zero, split, part, policy in product(zeros, splits, parts, policies):
                overrides: dict[str, Any] = {
                    "mesh.zero": zero,
                    "mesh.sequence_parallel": split,
                }
                if policy != run_policy:
                    overrides["remat"] = remat.RematConfig(policy)
                config = compose.with_overrides(part, overrides)
                composition = compose.compose(config, shape, spec)
                yield Candidate(
                    composition,
                    target,
                    estimate=model.estimate(composition),
                    state_bytes=model.state_bytes(composition),
                )


def _parts(run: RunConfig, shape: MeshShape, depth: int) -> Iterator[RunConfig]:
    """Yields the ways to split the batch and the stages.

    Without a pipeline, the batch is split into accumulation steps. With one, it is
    split into microbatches, and stages into chunks.

    Args:
      run: the config.
      shape: the mesh.
      depth: number of blocks of the model.
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
