"""The train step: one jitted, donated, pure function, built once for all that measure
or run it.
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

from jaxdist.config import ConfigError
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import Schedule
from jaxdist.parallel import placement
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step import model_checks, programs
from jaxdist.step.batch_parts import dim_names
from jaxdist.step.checkpoint_views import (
    CheckpointViews,
    StateCut,
    build_views,
    with_sharding,
)
from jaxdist.step.first_state import first_state, state_shardings
from jaxdist.step.state import Metrics, State
from jaxdist.step.step_config import StepConfig
from jaxdist.step.update import build_update_rule


@dataclass(frozen=True)
class TrainStep:
    """A built step. All functions are jitted; arrays have the given shardings."""

    step: Any  # (State, Batch) -> (State, Metrics); the state is donated
    # ({path: value} of parameters that begin with values = {}, layers flat) -> State;
    # see `first_state`
    init: Any
    # (State, Batch) -> (State, Metrics, mean gradients), not donated; to verify
    inspect: Any
    evaluate: Any  # (State, Batch) -> evaluation.LossSums, deterministic
    abstract_state: State  # ShapeDtypeStructs with their shardings
    shardings: State
    views: CheckpointViews
    mesh: Mesh
    rules: Rules

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Returns the sharding of each field: samples over the batch axes, sequences
        over context.
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
        """Returns shapes, dtypes and shardings of a global batch, from arrays or their
        shapes.
        """
        where = self.batch_shardings(batch)
        return {name: with_sharding(x, where[name]) for name, x in batch.items()}


def build_train_step(
    spec: ModelSpec,
    optimizer: OptimizerConfig | optax.GradientTransformation,
    schedule: Schedule | None,
    mesh: Mesh,
    rules: Rules,
    config: StepConfig,
) -> TrainStep:
    """Returns the train step of a model on a mesh.

    Args:
      optimizer: a transformation of optax is used as it is: the learning rate is its
        own, `schedule` is not read and nothing is clipped; it must not look at whole
        stacks where a pipeline cuts them up.

    Raises:
      ConfigError: a parameter's dim that its mesh axis does not divide; or, when the
        step is traced, a model that cannot be trained so.
    """
    staging = config.staging
    stages = staging.stages if staging else 1
    faults = list(model_checks.faults(spec, stages=stages))
    if faults:
        raise ConfigError(faults)
    staged = staging.staged_spec(spec) if staging else spec
    cut = StateCut.of(staging, spec)
    rule = build_update_rule(
        optimizer,
        schedule,
        spec,
        ema_decay=config.ema_decay,
        names=staged.names,
        moments_in=config.moments_in,
        scaler=config.loss_scale,
    )
    placement.place(staged.all_parameters(), rules)
    fresh = partial(first_state, spec, cut, rule.transform, config)
    abstract = jax.eval_shape(fresh)
    shardings = state_shardings(staged, abstract, mesh, rules, rule)
    gradient_of, loss_of = programs.build_gradients(staged, config)
    inspect = programs.build_inspect(
        spec, gradient_of, rule, mesh, rules, config, staged
    )
    evaluate = programs.build_evaluate(spec, loss_of, mesh, rules, config)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        return inspect(state, batch)[:2]

    if config.max_traces is not None:
        step = _limit_traces(step, config.max_traces)
    whole = NamedSharding(mesh, P())
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return TrainStep(
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole)),
        init=jax.jit(
            lambda given=None: fresh(given),
            donate_argnums=() if cut else 0,  # stages take other buffers
            out_shardings=shardings,
            # It runs once: on CPU, LLVM's full optimisation of the random generators
            # takes most of a short start, and a quarter of the time gives the same
            # bits.
            compiler_options={"xla_backend_optimization_level": 1} if on_cpu else None,
        ),
        inspect=jax.jit(inspect, out_shardings=(shardings, whole, None)),
        evaluate=jax.jit(evaluate),
        abstract_state=jax.tree.map(with_sharding, abstract, shardings),
        shardings=shardings,
        views=build_views(cut, abstract, shardings),
        mesh=mesh,
        rules=rules,
    )


def _limit_traces(function: Callable, most: int) -> Callable:
    """Returns the function, which may be traced so often.

    chex.assert_max_traces would count the traces of all runs of a process together.
    """
    traces = itertools.count(1)

    @wraps(function)
    def counted(state: State, batch: Batch) -> Any:
        if next(traces) > most:
            shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in batch.items()}
            raise RuntimeError(
                f"the train step is traced more than {most} times, the last for a batch of {shapes}; all "
                f"batches of a run must be alike in shape, dtype and sharding"
            )
        return function(state, batch)

    return counted
