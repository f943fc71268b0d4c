"""What is built of a RunConfig: the model's spec, placements, batches and the train
step.
"""

import optax
from jax.sharding import Mesh

from jaxdist.models import lora as adapters
from jaxdist.models import registry
from jaxdist.optim import schedules
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.offload import HOST
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.sharding import Rules, build_rules
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.step.loss_scale import DynamicLossScale
from jaxdist.step.train_step import StepConfig, TrainStep, build_train_step
from jaxdist.trainer.run_config import Build, RunConfig


def shares_vocabulary(run: RunConfig, spec: ModelSpec) -> bool:
    """Returns whether a pipeline's stages split the vocabulary: only `jaxdist.ops` know
    their part.
    """
    return run.pipeline.edges == "sharded" and spec.casts_itself


def rules_for(run: RunConfig, spec: ModelSpec, shape: MeshShape) -> Rules:
    """Returns the rule table of a run on a mesh."""
    shared = shares_vocabulary(run, spec)
    return build_rules(
        run.mesh, shape, vocab_over_stages=shared, attention=run.context.attention
    )


def model_spec(run: RunConfig, build: Build | None = None) -> ModelSpec:
    """Returns the spec of a run's model, with its adapters.

    Raises:
      ConfigError: it cannot be built so.
    """
    build = adapters.adapted(
        build or registry.build_function(run.model_class, run.model_options), run.lora
    )
    return describe(build, frozen=run.optimizer.frozen, rules=run.sharding.rules)


def build_step(
    run: RunConfig,
    spec: ModelSpec,
    mesh: Mesh,
    rules: Rules,
    *,
    optimizer: optax.GradientTransformation | None = None,
    schedule_steps: schedules.ScheduleSteps | None = None,
    max_traces: int | None = None,
) -> TrainStep:
    """Returns the train step of a validated run on a mesh: the one that everything
    uses.

    Args:
      optimizer: instead of the config's.
      schedule_steps: of a run that goes on; default: the config's.
      max_traces: times that `step` may be traced; a further one raises a RuntimeError.
    """
    size = run.batch.global_size
    schedule = schedules.build_schedule(
        run.optimizer, run.train.steps, size, schedule_steps
    )
    step = StepConfig(
        seed=run.seed,
        accumulation=run.batch.accumulation,
        compute=run.precision.compute,
        params=run.precision.params,
        reduce=run.precision.reduce,
        matmul=run.precision.matmul,
        fp8_small_kernels=run.precision.fp8_small_kernels,
        loss_scale=loss_scale(run),
        reduce_over_replicas=run.mesh.reduce,
        remat=run.remat,
        ema_decay=run.train.ema_decay,
        moments_in=HOST if run.offload.optimizer else None,
        staging=staging(run, spec, rules.shape),
        max_traces=max_traces,
    )
    return build_train_step(
        spec, optimizer or run.optimizer, schedule, mesh, rules, step
    )


def loss_scale(run: RunConfig) -> DynamicLossScale | None:
    """Returns how a run's loss scale moves; None: its gradients need none."""
    given = run.precision
    if given.compute != "float16":
        return None
    return DynamicLossScale(given.loss_scale, given.loss_scale_growth_interval)


def staging(run: RunConfig, spec: ModelSpec, shape: MeshShape) -> Staging | None:
    """Returns how a pipeline cuts up the model's layers; None without one."""
    if shape.sizes["pipeline"] == 1:
        return None
    stages = shape.sizes["pipeline"]
    return Staging(
        run.pipeline, spec.depth, stages, spec.period, spec.block_layers, run.remat
    )
