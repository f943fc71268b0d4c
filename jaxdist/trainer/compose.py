"""A RunConfig taken apart: what a run is made of, and the train step built of it.

Training, planning, verification, evaluation and benchmarks ask the same `Composition`.
Nothing here has effects: no file is written, no array is made.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxdist.data import sample_shapes
from jaxdist.models import lora, registry
from jaxdist.optim import schedules
from jaxdist.parallel.mesh import MeshShape, build_mesh
from jaxdist.parallel.offload import HOST
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.placement import Placement, place
from jaxdist.parallel.sharding import Rules, build_rules
from jaxdist.protocols.model_spec import ModelSpec, describe, stored_dtype
from jaxdist.step.loss_scale import DynamicLossScale
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import TrainStep, build_train_step
from jaxdist.trainer.run_config import Build, RunConfig

# --- a run's config alone -------------------------------------------------------------


def with_overrides(run: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Replaces values of a config.

    Args:
      run: the config; it stays as it is.
      overrides: new values by key, as in {"mesh.fsdp": 8}; or whole groups, as in
        {"remat": RematConfig("full")}. The values have the types of their fields: they
        are neither converted nor checked.

    Raises:
      AttributeError, TypeError: there is no such key.
    """
    for key, value in overrides.items():
        run = _with_value(run, key.split("."), value)
    return run


def _with_value(group: Any, path: Sequence[str], value: Any) -> Any:
    """Replaces one value of a group, which is a dataclass or the options of a model."""
    name, *rest = path
    if isinstance(group, Mapping):
        if name not in group:
            raise AttributeError(f"the model has no option {name!r}")
        if rest:
            value = _with_value(group[name], rest, value)
        return {**group, name: value}
    if rest:
        value = _with_value(getattr(group, name), rest, value)
    return dataclasses.replace(group, **{name: value})


def model_spec(run: RunConfig, build: Build | None = None) -> ModelSpec:
    """Describes a run's model, with its adapters.

    Args:
      build: makes the model from its rngs; default: what `model.*` says.

    Raises:
      ConfigError: it cannot be built so.
    """
    build = build or registry.build_function(run.model_class, run.model_options)
    return describe(
        lora.adapted(build, run.lora),
        frozen=run.optimizer.frozen,
        rules=run.sharding.rules,
    )


def batch_shapes(
    run: RunConfig, size: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes a batch by entry, as the run's dataset makes it; may read its files.

    Args:
      size: samples; default: the global batch.

    Raises:
      ConfigError: `data.source=arrays` has no such file.
    """
    if size is None:
        size = run.batch.global_size
    samples = sample_shapes(run.data, run.batch.sequence_length)
    return {
        name: jax.ShapeDtypeStruct((size, *dims), dtype)
        for name, (dims, dtype) in samples.items()
    }


def targets_per_sample(run: RunConfig) -> int:
    """Counts the targets of a sample, the unit of speeds and FLOPs; an image has 1."""
    return math.prod(_dims_of_weights(run))


def unit(run: RunConfig) -> str:
    """Names what a run counts: "tokens", or "samples" if each has a single target."""
    return "tokens" if _dims_of_weights(run) else "samples"


def _dims_of_weights(run: RunConfig) -> tuple[int, ...]:
    samples = sample_shapes(run.data, run.batch.sequence_length)
    dims, _ = samples.get("weights", ((), ""))
    return dims


# --- a run on a mesh ------------------------------------------------------------------


@dataclass(frozen=True)
class Composition:
    """A run on a mesh of some shape: its config, model and sharding rules.

    `validation` makes and checks it; `compose` makes it unchecked.
    """

    config: RunConfig
    rules: Rules
    spec: ModelSpec  # of the model with flat layers

    @property
    def shape(self) -> MeshShape:
        """The resolved mesh."""
        return self.rules.shape

    @functools.cached_property
    def staging(self) -> Staging | None:
        """The model's layers on the stages of a pipeline; None without one."""
        stages = self.shape.sizes["pipeline"]
        if stages == 1:
            return None
        return Staging(
            config=self.config.pipeline,
            num_layers=self.spec.depth,
            stages=stages,
            period=self.spec.period,
            block_layers=self.spec.block_layers,
            recompute=self.config.remat,
        )

    @functools.cached_property
    def staged_spec(self) -> ModelSpec:
        """The model as the step holds it: with a pipeline, layers are split in
        stages.
        """
        if self.staging is None:
            return self.spec
        return self.staging.staged_spec(self.spec)

    @property
    def microbatches(self) -> int:
        """The microbatches of an accumulation step; 1 without a pipeline."""
        return self.config.pipeline.microbatches_for(self.shape.sizes["pipeline"])

    @property
    def parts(self) -> int:
        """The sequential parts of a step's batch."""
        return self.config.batch.accumulation * self.microbatches

    @property
    def loss_scale(self) -> DynamicLossScale | None:
        """The rule of the loss scale; None where gradients need none."""
        precision = self.config.precision
        if not precision.format.scales_loss:
            return None
        return DynamicLossScale(
            precision.loss_scale, precision.loss_scale_growth_interval
        )

    def placements(self) -> list[Placement]:
        """Places every parameter on the mesh, those of frozen modules too.

        Raises:
          ConfigError: dims that an axis does not divide.
        """
        params = self.config.precision.params
        parameters = {}
        for path, (x, names) in self.staged_spec.all_parameters().items():
            stored = jax.ShapeDtypeStruct(x.shape, stored_dtype(x, params))
            parameters[path] = (stored, names)
        return place(parameters, self.rules)

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Arranges devices as the mesh of the run; default: all devices."""
        return build_mesh(self.config.mesh, devices)

    def build_step(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        optimizer: optax.GradientTransformation | None = None,
        schedule_steps: schedules.ScheduleSteps | None = None,
        max_traces: int | None = None,
    ) -> TrainStep:
        """Builds the train step of the run; nothing is traced or compiled.

        Args:
          devices: of the mesh; default: all.
          optimizer: instead of the config's.
          schedule_steps: of a run that was extended; default: the config's.
          max_traces: times that `step` may be traced; a further one raises a
            RuntimeError.
        """
        run = self.config
        schedule = schedules.build_schedule(
            run.optimizer, run.train.steps, run.batch.global_size, schedule_steps
        )
        step = StepConfig(
            seed=run.seed,
            accumulation=run.batch.accumulation,
            compute=run.precision.compute,
            params=run.precision.params,
            reduce=run.precision.reduce,
            recipe=run.precision.recipe,
            loss_scale=self.loss_scale,
            reduce_over_replicas=run.mesh.reduce,
            remat=run.remat,
            ema_decay=run.train.ema_decay,
            moments_in=HOST if run.offload.optimizer else None,
            staging=self.staging,
            max_traces=max_traces,
        )
        return build_train_step(
            self.spec,
            optimizer or run.optimizer,
            schedule,
            self.mesh(devices),
            self.rules,
            step,
        )


def compose(run: RunConfig, shape: MeshShape, spec: ModelSpec) -> Composition:
    """Composes a run on a mesh without checking it.

    Args:
      spec: of the run's model, see `model_spec`.
    """
    # Only models of `jaxdist.ops` know their stage's part of the vocabulary.
    vocab_over_stages = run.pipeline.edges == "sharded" and spec.casts_itself
    rules = build_rules(
        run.mesh,
        shape,
        vocab_over_stages=vocab_over_stages,
        attention=run.context.attention,
    )
    return Composition(run, rules, spec)
