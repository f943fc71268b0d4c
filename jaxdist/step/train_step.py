"""The train step: a pure, jitted function that updates a state by a batch.

Training, evaluation, verification and benchmarks all use the step that is built here.
The body of the step is in `programs.build_step_with_gradients`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import Schedule
from jaxdist.parallel import placement
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step import model_checks, programs, scoring_programs
from jaxdist.step.batch_parts import dim_names
from jaxdist.step.checkpoint_views import (
    CheckpointViews,
    StateStaging,
    build_views,
    with_sharding,
)
from jaxdist.step.first_state import first_state, state_shardings
from jaxdist.step.state import Metrics, State
from jaxdist.step.step_config import StepConfig
from jaxdist.step.update import build_update_rule

_Step = Callable[[State, Batch], tuple[State, Metrics]]


@dataclass(frozen=True)
class TrainStep:
    """The jitted functions of a model on a mesh, and the shardings of its state."""

    # (State, Batch) -> (State, Metrics); the state is donated
    step: Wrapped
    # (initial values by path, with flat layers; default {}) -> State; see `first_state`
    init: Wrapped
    # (State, Batch) -> (State, Metrics, mean gradients); nothing is donated
    inspect: Wrapped
    # (State, Batch) -> evaluation.LossSums; deterministic
    evaluate: Wrapped
    # (State, Batch) -> the policy's token terms, for models that have them; see
    # `protocols.objective`; deterministic
    terms: Wrapped
    abstract_state: State  # ShapeDtypeStructs with shardings
    shardings: State
    views: CheckpointViews
    mesh: Mesh
    rules: Rules

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Chooses the sharding of each field of a batch.

        Samples are sharded over the batch axes, and sequences over `context`.

        Args:
          batch: arrays or their shapes, by name.
        """
        return {
            name: NamedSharding(
                self.mesh, self.rules.activation(names, batch[name].shape)
            )
            for name, names in dim_names(batch).items()
        }

    def abstract_batch(
        self, batch: Mapping[str, Any]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes a global batch as ShapeDtypeStructs with shardings.

        Args:
          batch: arrays or their shapes, by name.
        """
        shardings = self.batch_shardings(batch)
        return {name: with_sharding(x, shardings[name]) for name, x in batch.items()}


def build_train_step(
    spec: ModelSpec,
    optimizer: OptimizerConfig | optax.GradientTransformation,
    schedule: Schedule | None,
    mesh: Mesh,
    rules: Rules,
    config: StepConfig,
) -> TrainStep:
    """Builds the train step of a model on a mesh. Nothing is compiled yet.

    Args:
      spec: the model with flat blocks.
      optimizer: a config, or a transformation of optax. A transformation is used
        unchanged: it has its own learning rate, and no gradient is clipped. With a
        pipeline it sees blocks by stage, [chunks, stages, layers, ...].
      schedule: the learning rate by step, for the optimizer of a config.
      mesh: the devices.
      rules: the sharding rules.
      config: the step's settings.

    Raises:
      ConfigError: a mesh axis does not divide a parameter's dim. The step raises one
        when it is traced, if the model cannot be trained with this batch.
    """
    staging = config.staging
    stages = staging.stages if staging else 1
    model_checks.check_spec(spec, stages=stages)
    spec_by_stage = staging.spec_by_stage(spec) if staging else spec
    state_staging = StateStaging.of(staging, spec)
    rule = build_update_rule(
        optimizer,
        schedule,
        spec,
        ema_decay=config.ema_decay,
        names=spec_by_stage.names,
        moments_in=config.moments_in,
        params_in=config.params_in,
        scaler=config.loss_scale,
    )
    placement.place(spec_by_stage.all_parameters(), rules)
    init = partial(first_state, spec, state_staging, rule.transform, config)
    abstract = jax.eval_shape(init)
    shardings = state_shardings(spec_by_stage, abstract, mesh, rules, rule)
    gradient_of, loss_of = programs.build_gradients(spec_by_stage, config)
    step_with_gradients = programs.build_step_with_gradients(
        spec,
        gradient_of,
        rule,
        mesh=mesh,
        rules=rules,
        config=config,
        spec_by_stage=spec_by_stage,
    )
    evaluate = scoring_programs.build_evaluate(spec, loss_of, rule, mesh, rules, config)
    terms = scoring_programs.build_policy_terms(spec, rule, mesh, rules, config)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        after, metrics, _ = step_with_gradients(state, batch)
        return after, metrics

    limited_step: _Step = step
    if config.max_traces is not None:
        limited_step = _limit_traces(step, config.max_traces)
    replicated = NamedSharding(mesh, P())
    # `init` runs once. On CPUs, full optimization of the random generators takes most
    # of a short start. Level 1 takes a quarter of the time and gives the same bits.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    init_options = {"xla_backend_optimization_level": 1} if on_cpu else None
    return TrainStep(
        step=jax.jit(
            limited_step, donate_argnums=0, out_shardings=(shardings, replicated)
        ),
        init=jax.jit(
            lambda values=None: init(values),
            # Arrays by stage do not fit into the buffers of flat ones.
            donate_argnums=() if state_staging else 0,
            out_shardings=shardings,
            compiler_options=init_options,
        ),
        inspect=jax.jit(
            step_with_gradients, out_shardings=(shardings, replicated, None)
        ),
        evaluate=jax.jit(evaluate),
        terms=jax.jit(terms),
        abstract_state=jax.tree.map(with_sharding, abstract, shardings),
        shardings=shardings,
        views=build_views(state_staging, abstract, shardings),
        mesh=mesh,
        rules=rules,
    )


def _limit_traces(step: _Step, most: int) -> _Step:
    """Makes a step fail if it is traced more often than `most` times.

    chex.assert_max_traces would count the traces of all runs of a process together.
    """
    traces = itertools.count(1)

    @wraps(step)
    def counted(state: State, batch: Batch) -> tuple[State, Metrics]:
        if next(traces) > most:
            shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in batch.items()}
            raise RuntimeError(
                f"the train step is traced more than {most} times, the last for a batch of {shapes}; all "
                f"batches of a run must be alike in shape, dtype and sharding"
            )
        return step(state, batch)

    return counted
