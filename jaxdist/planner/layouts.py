"""The possible layouts of a run on a target, with time and memory by arithmetic.

Mesh sizes, ZeRO stage, parts of the batch, schedule and rematerialization vary. The
global batch and the numerics never do. The times are computed from datasheet rates:
they can rank layouts, but do not predict step times.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from jaxdist.config.schema import schema_of
from jaxdist.parallel import remat
from jaxdist.parallel.axes import (
    CONTEXT,
    PARAMETER_SHARDS,
    divisors,
)
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner import memory
from jaxdist.planner.arithmetic import Estimate, Model
from jaxdist.planner.document import Plan
from jaxdist.planner.targets import Target
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


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout of a run on a target, with its time and memory by arithmetic."""

    composition: Composition
    model: Model  # the arithmetic

    @property
    def target(self) -> Target:
        """The hardware."""
        return self.model.target

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state on a device.

        It is a lower bound: all are split evenly.
        """
        return self.model.state_bytes(self.composition)

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The step time by arithmetic.

        It is computed on demand, because a search asks for few of the layouts whose
        state alone is too large.
        """
        return self.model.estimate(self.composition)

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


@dataclass(frozen=True)
class CompiledLayout:
    """A layout and its plan after compilation."""

    candidate: Candidate
    plan: Plan

    @property
    def fits(self) -> bool | None:
        """True if the layout fits; None if the compiler gave no answer."""
        return self.plan.fits

    @property
    def seconds(self) -> float:
        """The estimated step time, or the time of the busiest link if that is longer.

        Layouts are ranked by it. The estimate alone treats most asynchronous
        communication of a TPU step as hidden, which favors layouts with busy links.
        """
        if self.plan.time.step_s is None:
            return self.candidate.estimate.step_s
        busy = dict[str, float]()
        for collective in self.plan.collectives:
            link = collective.link.name if collective.link else ""
            busy[link] = busy.get(link, 0.0) + collective.step_s
        return max(self.plan.time.step_s, *busy.values(), 0.0)


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
            for zero, split, part in product(zeros, splits, parts):
                sharding = {"mesh.zero": zero, "mesh.sequence_parallel": split}
                config = compose.with_overrides(part, sharding)
                composition = compose.compose(config, shape, spec)
                for policy in policies:
                    if policy == run_policy:
                        yield Candidate(composition, model)
                        continue
                    other = replace(config, remat=remat.RematConfig(policy))
                    yield Candidate(replace(composition, config=other), model)


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
