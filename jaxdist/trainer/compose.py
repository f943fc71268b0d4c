"""The composition of a run from its config: model, mesh rules and train step.

Training, planning, verification, evaluation and benchmarks use the same `Composition`.
This module writes no files and makes no arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist.data.config import sample_shapes
from jaxdist.data.dataset import Dataset
from jaxdist.models import lora, registry
from jaxdist.optim import schedules
from jaxdist.parallel.mesh import MeshShape, build_mesh
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.placement import Placement, place
from jaxdist.parallel.sharding import Rules, build_rules
from jaxdist.protocols.model_spec import ModelSpec, as_stored, describe
from jaxdist.protocols.objective import Objective
from jaxdist.step.loss_scale import DynamicLossScale
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import TrainStep, build_train_step
from jaxdist.step.update import memory_of_moments
from jaxdist.trainer.module_models import describe_modules
from jaxdist.trainer.run_config import Build, RunConfig, TrainedFor

# --- a run's config alone -------------------------------------------------------------


def with_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Replaces some values of a config.

    Args:
      config: the config, which is not changed.
      overrides: new values by key, such as {"mesh.fsdp": 8}, or whole groups, such as
        {"remat": RematConfig("full")}. Values must have the types of their fields: they
        are neither converted nor checked.

    Raises:
      AttributeError: a group or model option does not exist.
      TypeError: a key of a group does not exist.
    """
    for key, value in overrides.items():
        config = _with_value(config, key.split("."), value)
    return config


def _with_value(group: Any, path: Sequence[str], value: Any) -> Any:
    """Replaces one value of a group: a dataclass, or a mapping of model options."""
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


def model_spec(config: RunConfig, build: Build | None = None) -> ModelSpec:
    """Describes a run's model, with its adapters.

    Args:
      config: the run's config.
      build: makes the caller's model; default: the config names the model.

    Raises:
      ConfigError: the model cannot be built.
    """
    build = build or registry.build_function(config.model_class, config.model_options)
    spec = describe(
        lora.adapted(build, config.lora),
        frozen=config.optimizer.frozen,
        rules=config.sharding.rules,
    )
    if isinstance(build, TrainedFor):
        modules = {name: describe(module) for name, module in build.modules.items()}
        return spec.trained_for(build.objective, modules)
    objective = objective_of(config)
    if objective is not None:
        modules = describe_modules(config, objective.modules, spec)
        spec = spec.trained_for(objective, modules)
    return spec


def objective_of(config: RunConfig) -> Objective | None:
    """Makes the objective that a config names; None for the loss of its model."""
    has_adapters = config.lora.rank > 0
    # those of another run, or of a PEFT folder, have been trained
    has_source = bool(config.lora.from_peft or config.init.from_run)
    return config.objective.build(new_adapters=has_adapters and not has_source)


def batch_shapes(
    config: RunConfig, size: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes a batch of the run's dataset by entry. This may read files of the data.

    Args:
      config: the run's config.
      size: number of samples; default: that of the global batch.

    Raises:
      ConfigError: the file of `data.source=arrays` does not exist.
    """
    if size is None:
        size = config.batch.global_size
    length = config.batch.sequence_length
    shapes = {
        name: jax.ShapeDtypeStruct((size, *dims), dtype)
        for name, (dims, dtype) in sample_shapes(config.data, length).items()
    }
    objective = objective_of(config)
    for name in objective.data_fields if objective else ():
        shapes[name] = jax.ShapeDtypeStruct((size, length), "float32")
    return shapes


def targets_per_sample(config: RunConfig) -> int:
    """Counts the targets of a sample, the unit of speeds and FLOPs. An image has 1."""
    return math.prod(_dims_of_weights(config))


def unit(config: RunConfig) -> str:
    """Names the unit of speeds: tokens, or samples if each has a single target."""
    return "tokens" if _dims_of_weights(config) else "samples"


def _dims_of_weights(config: RunConfig) -> tuple[int, ...]:
    samples = sample_shapes(config.data, config.batch.sequence_length)
    dims, _ = samples.get("weights", ((), ""))
    return dims


# --- a run on a mesh ------------------------------------------------------------------


class UserInputs(NamedTuple):
    """The inputs of the caller that replace those of the config; None = the config's."""

    build: Build | None = None  # makes the model
    dataset: Dataset | None = None
    optimizer: optax.GradientTransformation | None = None
    # initial values of the model by path; None = the config's weights
    initial: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Composition:
    """The config, the model and the sharding rules of a run on a mesh.

    `validation.validate` makes and checks one. `compose` makes one without checks.
    """

    config: RunConfig
    rules: Rules
    spec: ModelSpec  # the model with flat layers

    @property
    def shape(self) -> MeshShape:
        """The sizes of the mesh axes."""
        return self.rules.shape

    @functools.cached_property
    def staging(self) -> Staging | None:
        """The partition of the layers into stages; None without a pipeline."""
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
    def spec_by_stage(self) -> ModelSpec:
        """The model as the step holds it: with a pipeline, layers by stage."""
        if self.staging is None:
            return self.spec
        return self.staging.spec_by_stage(self.spec)

    @property
    def microbatches(self) -> int:
        """The microbatches of an accumulation step; 1 without a pipeline."""
        return self.config.pipeline.microbatches_for(self.shape.sizes["pipeline"])

    @property
    def total_microbatches(self) -> int:
        """The product accumulation x microbatches of a step's batch."""
        return self.config.batch.accumulation * self.microbatches

    @property
    def loss_scale(self) -> DynamicLossScale | None:
        """The rule of the loss scale; None if gradients are not scaled."""
        precision = self.config.precision
        if not precision.format.scales_loss:
            return None
        return DynamicLossScale(
            initial=precision.loss_scale,
            growth_interval=precision.loss_scale_growth_interval,
        )

    def placements(self) -> list[Placement]:
        """Places every parameter on the mesh, including those of frozen modules.

        Raises:
          ConfigError: a mesh axis does not divide a dim of a parameter.
        """
        params = self.config.precision.params
        parameters = {}
        for path, (x, names) in self.spec_by_stage.all_parameters().items():
            parameters[path] = (as_stored(x, params), names)
        return place(parameters, self.rules)

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Arranges devices as the run's mesh; default: all devices."""
        return build_mesh(self.config.mesh, devices)

    def moments_in(
        self, optimizer: optax.GradientTransformation | None = None
    ) -> str | None:
        """Chooses the memory where moments wait; see `StepConfig.moments_in`.

        Args:
          optimizer: the caller's optimizer; default: that of the config.
        """
        config = self.config
        return memory_of_moments(
            optimizer or config.optimizer, config.offload, zero=config.mesh.zero
        )

    def build_step(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        optimizer: optax.GradientTransformation | None = None,
        schedule_steps: schedules.ScheduleSteps | None = None,
        max_traces: int | None = None,
    ) -> TrainStep:
        """Builds the train step of the run. Nothing is compiled yet.

        Args:
          devices: devices of the mesh; default: all.
          optimizer: the caller's optimizer; default: that of the config.
          schedule_steps: steps of the learning-rate schedule, for a run that was
            extended; default: those of the config.
          max_traces: traces of `step` after which another one raises a RuntimeError;
            default: no limit.
        """
        config = self.config
        train_steps = config.train.steps
        if config.train.epochs:
            # A plan knows no number of steps, so it must not be too small for a warm-up.
            train_steps = max(train_steps, config.optimizer.warmup_steps or 0)
        schedule = schedules.build_schedule(
            config.optimizer,
            train_steps,
            config.batch.global_size,
            schedule_steps,
        )
        step = StepConfig(
            seed=config.seed,
            accumulation=config.batch.accumulation,
            compute=config.precision.compute,
            params=config.precision.params,
            reduce=config.precision.reduce,
            recipe=config.precision.recipe,
            loss_scale=self.loss_scale,
            reduce_over_replicas=config.mesh.reduce,
            remat=config.remat,
            ema_decay=config.train.ema_decay,
            moments_in=self.moments_in(optimizer),
            params_in=config.offload.parameters_in,
            staging=self.staging,
            max_traces=max_traces,
        )
        return build_train_step(
            self.spec,
            optimizer or config.optimizer,
            schedule,
            self.mesh(devices),
            self.rules,
            step,
        )


def compose(config: RunConfig, shape: MeshShape, spec: ModelSpec) -> Composition:
    """Composes a run on a mesh without checks.

    Args:
      config: the run's config.
      shape: sizes of the mesh axes.
      spec: the run's model; see `model_spec`.
    """
    # Only the ops of jaxdist can work on a stage's shard of the vocabulary.
    vocab_over_stages = config.pipeline.edges == "sharded" and spec.casts_itself
    rules = build_rules(
        config.mesh,
        shape,
        vocab_over_stages=vocab_over_stages,
        attention=config.context.attention,
    )
    return Composition(config, rules, spec)
