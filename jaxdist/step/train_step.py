"""The train step: one jitted, donated, pure function, built once for all that measure
or run it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import Schedule
from jaxdist.parallel import execution, placement
from jaxdist.parallel.offload import HOST, to_device
from jaxdist.parallel.optimizer_sharding import state_specs
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.parallel.precision import Matmul
from jaxdist.parallel.remat import RematConfig
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch, as_metrics, has_metrics
from jaxdist.protocols.model_spec import ModelSpec, Tree, stored_dtype
from jaxdist.step import model_checks, reduction
from jaxdist.step.evaluation import LossSums
from jaxdist.step.gradients import (
    Objective,
    assembled,
    build_objective,
    build_pipelined,
    names_of,
    sum_gradients,
)
from jaxdist.step.layerwise import Trained
from jaxdist.step.loss_scale import DynamicLossScale, factor
from jaxdist.step.reduction import Reduce
from jaxdist.step.state import Metrics, OptState, State
from jaxdist.step.update import UpdateRule, apply_stats, build_update_rule

INIT, STEPS = 0, 1  # what the seed's first fold is for


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know beside the model, the optimizer and the mesh."""

    seed: int = 0
    accumulation: int = 1
    compute: str = "float32"
    params: str = "float32"
    reduce: str = "float32"
    matmul: Matmul = "compute"
    fp8_small_kernels: bool = False
    reduce_over_replicas: Reduce = "auto"  # mesh.reduce
    remat: RematConfig | str = "dots"  # or its policy
    loss_scale: DynamicLossScale | None = None  # None: the backward pass begins with 1
    ema_decay: float = 0.0
    # memory kind where optimizer state waits; None: it stays on the device
    moments_in: str | None = None
    # how a pipeline cuts up the layers; None: no pipeline
    staging: Staging | None = None
    # times that `step` may be traced, where one shape is expected; None: any
    max_traces: int | None = None

    @property
    def parts(self) -> int:
        """Returns the sequential parts that a step's batch is cut into."""
        return self.accumulation * (self.staging.microbatches if self.staging else 1)

    @property
    def products(self) -> dict[str, Any]:
        """Returns what `execution.activate` is told of products, in training and
        evaluation alike.
        """
        names = ("compute", "matmul", "fp8_small_kernels")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TrainStep:
    """A built step. All functions are jitted; arrays have the given shardings."""

    step: Any  # (State, Batch) -> (State, Metrics); the state is donated
    # ({path: value} of parameters that begin with values = {}, layers flat) -> State
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
        """Returns each batch entry's sharding: samples over the batch axes, [B, S] over
        context.
        """

        def of(x) -> NamedSharding:
            names = (
                ("batch", "sequence")[: x.ndim]
                if x.ndim <= 2
                else ("batch",) + (None,) * (x.ndim - 1)
            )
            return NamedSharding(self.mesh, self.rules.activation(names, x.shape))

        return {name: of(x) for name, x in batch.items()}

    def abstract_batch(
        self, batch: Mapping[str, Any]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a global batch, from arrays or their
        shapes.
        """
        where = self.batch_shardings(batch)
        return {name: _with_sharding(x, where[name]) for name, x in batch.items()}


class CheckpointViews(NamedTuple):
    """The state as checkpoints have it, layers flat; without a pipeline the state
    itself.
    """

    flat: Any  # State -> State
    staged: Any  # flat State -> State; its buffers are taken
    # flat State without optimizer state and average -> State, to evaluate
    staged_weights: Any
    abstract: State  # flat, ShapeDtypeStructs with their shardings


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
    cut = config.staging
    if faults := list(model_checks.faults(spec, stages=cut.stages if cut else 1)):
        raise ConfigError(faults)
    staged = cut.staged_spec(spec) if cut else spec
    rule = build_update_rule(
        optimizer, schedule, spec, config.ema_decay, staged.names, config.moments_in
    )
    rule = replace(rule, scaler=config.loss_scale)
    placement.place(staged.named_parameters(), rules)
    fresh = partial(_fresh_state, staged, cut, rule.transform, config)
    abstract = jax.eval_shape(fresh)
    shardings = _on_host(
        rule, abstract, _state_shardings(staged, abstract, mesh, rules)
    )
    gradient_of, loss_of = _build_gradients(staged, config)
    inspect = _build_inspect(
        spec, gradient_of, rule, mesh, rules, config, names_of(staged)
    )

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        return inspect(state, batch)[:2]

    if config.max_traces is not None:
        step = _limit_traces(step, config.max_traces)
    whole, on_cpu = NamedSharding(mesh, P()), mesh.devices.flat[0].platform == "cpu"
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
        evaluate=jax.jit(_build_evaluate(spec, loss_of, mesh, rules, config)),
        abstract_state=jax.tree.map(_with_sharding, abstract, shardings),
        shardings=shardings,
        views=_views(cut, abstract, shardings),
        mesh=mesh,
        rules=rules,
    )


def _build_inspect(
    spec: ModelSpec,
    gradient_of: Objective,
    rule: UpdateRule,
    mesh: Mesh,
    rules: Rules,
    config: StepConfig,
    names: StageParams,
) -> Callable[[State, Batch], tuple[State, Metrics, Tree]]:
    """Returns the step that hands out its gradients, too; `spec` is that without
    stages, `names` are with.
    """
    cut, accumulation = config.staging, config.accumulation
    stages = cut.stages if cut else 1
    setting = config.reduce_over_replicas
    chosen = reduction.choose(spec, rules, setting, parts=config.parts)

    def inspect(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        if faults := model_checks.check_model(
            spec, batch, accumulation=accumulation, stages=stages
        ):
            raise ConfigError(faults)
        with execution.activate(mesh, rules, reduce=config.reduce, **config.products):
            key = jax.random.fold_in(_key(config.seed, STEPS), state.step)
            once = reduction.axes_for(chosen, batch, rules, setting, config.parts)
            scaled = state.opt_state.loss_scale
            scale = None if scaled is None else factor(scaled, batch)
            sums = sum_gradients(
                gradient_of,
                state,
                batch,
                key,
                accumulation=accumulation,
                names=names,
                once=once,
                scale=scale,
            )
            gradients = jax.tree.map(lambda g: g / sums.loss.count, sums.gradients)
            sums = sums._replace(model_state=apply_stats(spec, cut, state, sums))
            return *rule.apply(state, sums, batch), gradients

    return inspect


def _build_evaluate(
    spec: ModelSpec, loss_of: Objective, mesh: Mesh, rules: Rules, config: StepConfig
) -> Callable[[State, Batch], LossSums]:
    """Returns the function `TrainStep.evaluate`; `spec` is that without stages."""
    cut, measures = config.staging, has_metrics(spec.model_class)

    def evaluate(state: State, batch: Batch) -> LossSums:
        arrays = state.model_arrays
        with execution.activate(mesh, rules, **config.products):
            _, (loss, _) = loss_of(*arrays, batch, None)
            others = {
                f"aux/{name}": (value, loss.count) for name, value in loss.aux.items()
            }
            if measures:
                parts = [*map(cut.flat, arrays)] if cut else [*arrays]
                model = assembled(
                    spec, config.compute, parts[0], parts[1], parts[2], None
                )
                others |= as_metrics(model.metrics(batch), loss.count)
        return loss.sum, loss.count, others

    return evaluate


def _build_gradients(
    spec: ModelSpec, config: StepConfig
) -> tuple[Objective, Objective]:
    """Returns what gives the gradients of a part of a batch, and what gives its loss
    alone.
    """
    if config.staging is None:
        objective = build_objective(spec, compute=config.compute, remat=config.remat)
        return jax.grad(objective, has_aux=True), objective
    build = partial(build_pipelined, spec, config.staging, compute=config.compute)
    return build(backward=True), build(backward=False)


def _fresh_state(
    spec: ModelSpec,
    cut: Staging | None,
    transform,
    config: StepConfig,
    given: Mapping[str, jax.Array] | None = None,
) -> State:
    parts = spec.init_params(_key(config.seed, INIT), given)
    trainable, model_state, frozen = map(cut.staged, parts) if cut else parts
    trainable, frozen = (
        jax.tree.map(lambda x: x.astype(stored_dtype(x, config.params)), tree)
        for tree in (trainable, frozen)
    )
    ema = (
        jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
        if config.ema_decay
        else None
    )
    scale = config.loss_scale.init() if config.loss_scale else None
    opt_state = OptState(transform.init(trainable), jnp.int32(0), scale)
    return State(jnp.int32(0), trainable, frozen, model_state, opt_state, ema)


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


def _key(seed: int, purpose: int) -> jax.Array:
    high, low = divmod(seed, 2**32)
    # without 64-bit types, jax would leave the upper half out
    key = jax.random.key(low)
    return jax.random.fold_in(jax.random.fold_in(key, high) if high else key, purpose)


# --- shardings ------------------------------------------------------------------------


def _state_shardings(
    spec: ModelSpec, abstract: State, mesh: Mesh, rules: Rules
) -> State:

    def specs(tree: Tree, names: Tree, rule: Callable[..., P]) -> Tree:
        return jax.tree.map(lambda x, own: rule(own, x.shape), tree, names)

    whole = jax.tree.map(lambda _: P(), abstract)
    moments = specs(spec.trainable, spec.names, rules.state)
    optimizer = state_specs(abstract.opt_state.optimizer, spec.trainable, moments)
    state = whole._replace(
        trainable=specs(spec.trainable, spec.names, rules.stored),
        frozen=specs(spec.frozen, spec.frozen_names, rules.stored),
        model_state=specs(spec.model_state, spec.state_names, rules.computed),
        opt_state=whole.opt_state._replace(optimizer=optimizer),
        ema=None if abstract.ema is None else moments,
    )
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s), state, is_leaf=lambda x: isinstance(x, P)
    )


def _on_host(rule: UpdateRule, abstract: State, shardings: State) -> State:
    """Returns the shardings, those of what waits in the host's memory with its memory
    kind.
    """
    if rule.layerwise is None:
        return shardings
    trees = (abstract.trainable, abstract.opt_state.optimizer, abstract.ema)
    _, moments, ema = rule.layerwise.waiting(Trained(*trees))

    def move(waits: bool, where: NamedSharding) -> NamedSharding:
        return where.with_memory_kind(HOST) if waits else where

    optimizer = jax.tree.map(move, moments, shardings.opt_state.optimizer)
    average = None if ema is None else jax.tree.map(move, ema, shardings.ema)
    return shardings._replace(
        opt_state=shardings.opt_state._replace(optimizer=optimizer), ema=average
    )


def _views(cut: Staging | None, abstract: State, shardings: Any) -> CheckpointViews:
    if cut is None:
        same = jax.tree.map(_with_sharding, abstract, shardings)
        return CheckpointViews(*(3 * (lambda state: state,)), abstract=same)
    shapes = jax.eval_shape(cut.flat, abstract)
    whole_stages = cut.num_layers % cut.stages == 0

    def flat_sharding(
        flat: jax.ShapeDtypeStruct, leaf: jax.ShapeDtypeStruct, where: NamedSharding
    ):
        if flat.shape == leaf.shape:
            return where
        spec = P("pipeline" if whole_stages else None, *where.spec[3:])
        return NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)

    flat = jax.tree.map(flat_sharding, shapes, abstract, shardings)
    return CheckpointViews(
        _view(cut.flat, flat, donate=False),
        _view(cut.staged, shardings, donate=True),
        jax.jit(cut.staged, out_shardings=shardings._replace(opt_state=None, ema=None)),
        jax.tree.map(_with_sharding, shapes, flat),
    )


def _view(
    view: Callable[[Tree], Tree], shardings: State, *, donate: bool
) -> Callable[[State], State]:
    """Returns the compiled view; what waits in the host's memory passes the device one
    array at a time.
    """
    places: list[NamedSharding] = jax.tree.leaves(shardings)
    structure: Any = jax.tree.structure(shardings)
    waiting = [i for i, where in enumerate(places) if where.memory_kind == HOST]
    others = [i for i in range(len(places)) if i not in waiting]

    def some(leaves: Sequence[Any], chosen: Sequence[int]) -> State:
        return structure.unflatten(
            [x if i in chosen else None for i, x in enumerate(leaves)]
        )

    def compiled(chosen: Sequence[int]) -> Callable[[State], State]:
        return jax.jit(
            lambda part: view(jax.tree.map(to_device, part)),
            out_shardings=some(places, chosen),
            donate_argnums=0 if donate else (),
        )

    if not waiting:
        return compiled(others)
    programs = [
        (chosen, compiled(chosen)) for chosen in (others, *([i] for i in waiting))
    ]

    def viewed(state: State) -> State:
        leaves: list[Any] = jax.tree.leaves(state)
        for chosen, program in programs:
            done = jax.tree.leaves(program(some(leaves, chosen)))
            for i, x in zip(chosen, done, strict=True):
                leaves[i] = x
        return structure.unflatten(leaves)

    return viewed


def _with_sharding(
    x: jax.ShapeDtypeStruct, where: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
