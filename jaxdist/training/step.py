"""The train step: one jitted, donated, pure function, built once for all that measure or run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import precision, sharding
from jaxdist.config import ConfigError
from jaxdist.models.staged import Batch
from jaxdist.optimizers import OptimizerConfig, Schedule, build_optimizer
from jaxdist.sharding import Rules
from jaxdist.training import examination
from jaxdist.training.moments import state_specs
from jaxdist.training.objective import Sums, build_objective, build_pipelined, sum_gradients
from jaxdist.training.staging import Staging
from jaxdist.training.state import ModelSpec, State, Tree, stored_dtype

Metrics = dict[str, jax.Array]
INIT, STEPS = 0, 1  # what the seed's first fold is for


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know beside the model, the optimizer and the mesh."""

    seed: int = 0
    accumulation: int = 1
    compute: str = "float32"
    params: str = "float32"
    reduce: str = "float32"
    remat: str = "dots"
    ema_decay: float = 0.0
    staging: Staging | None = None  # how a pipeline cuts up the layers; None: no pipeline


class OptState(NamedTuple):
    """The optimizer's state, and where the run stands in its schedule."""

    optimizer: Tree
    skipped: jax.Array  # int32, steps in a row left out for non-finite gradients
    clock: jax.Array  # float32, position in the schedule; equals the step at pace 1
    pace: jax.Array  # float32, clock per step; above 1 when the run must end by a time


class TrainStep(NamedTuple):
    """A built step. All functions are jitted; arrays have the given shardings."""

    step: Any  # (State, Batch) -> (State, Metrics); the state is donated
    init: Any  # ({path: value} of parameters that begin with values = {}, layers flat) -> State
    inspect: Any  # (State, Batch) -> (State, Metrics, mean gradients), not donated; to verify
    evaluate: Any  # (State, Batch) -> (loss sum, count), deterministic
    abstract_state: State  # ShapeDtypeStructs with their shardings
    shardings: State
    views: Views
    batch_shardings: Callable[[Mapping[str, Any]], dict[str, NamedSharding]]


class Views(NamedTuple):
    """The state as checkpoints have it, layers flat; without a pipeline the state itself."""

    flat: Any  # State -> State
    staged: Any  # flat State -> State
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
      optimizer: a transformation of optax is used as it is: the learning rate is its own, `schedule` is
        not read and nothing is clipped; it must not look at whole stacks where a pipeline cuts them up.

    Raises:
      ConfigError: a parameter's dim that its mesh axis does not divide; or, when the step is traced, a
        model that cannot be trained so.
    """
    cut, flat = config.staging, spec
    stages = cut.stages if cut else 1
    if found := list(examination.faults(spec, stages=stages)):
        raise ConfigError(found)
    rule = _rule(optimizer, schedule, spec)
    spec = cut.staged_spec(spec) if cut else spec
    sharding.place(spec.named_parameters(), rules)
    abstract = jax.eval_shape(lambda: _fresh_state(spec, cut, rule.transform, config))
    specs = _state_specs(spec, abstract, rules)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=_is_spec)
    objective = build_objective(spec, compute=config.compute, remat=config.remat)
    pipelined = _pipelined(spec, config, backward=True)
    scored = _pipelined(spec, config, backward=False) or objective

    def inspect(state: State, batch: Batch) -> tuple[State, Metrics, Tree]:
        if found := examination.examine(flat, batch, accumulation=config.accumulation, stages=stages):
            raise ConfigError(found)
        with sharding.activate(mesh, rules), precision.reducing_in(config.reduce):
            key = jax.random.fold_in(_key(config.seed, STEPS), state.step)
            sums = sum_gradients(
                objective, state.trainable, state.model_state, state.frozen, batch, key,
                accumulation=config.accumulation, names=spec.placed_names, pipelined=pipelined,
            )  # fmt: skip
            gradients = jax.tree.map(lambda g: g / sums.loss.count, sums.gradients)
            sums = sums._replace(model_state=_told(flat, cut, state, sums))
            after = _update(state, sums, batch, rule, config, spec)
            return *after, gradients

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        after, metrics, _ = inspect(state, batch)
        return after, metrics

    def evaluate(state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with sharding.activate(mesh, rules):
            weights = state.trainable if state.ema is None else state.ema
            loss = scored(weights, state.model_state, state.frozen, batch, None)[1].loss
        return loss.sum, loss.count

    whole = NamedSharding(mesh, P())
    return TrainStep(
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole)),
        init=jax.jit(
            lambda given=None: _fresh_state(spec, cut, rule.transform, config, given),
            donate_argnums=() if cut else 0,  # stages take other buffers
            out_shardings=shardings,
            compiler_options=_for_one_run(mesh),
        ),
        inspect=jax.jit(inspect, out_shardings=(shardings, whole, None)),
        evaluate=jax.jit(evaluate),
        abstract_state=jax.tree.map(_with_sharding, abstract, shardings),
        shardings=shardings,
        views=_views(cut, abstract, shardings),
        batch_shardings=lambda batch: _batch_shardings(batch, mesh, rules),
    )


def _pipelined(spec: ModelSpec, config: StepConfig, *, backward: bool):
    """Returns the pipeline's gradient (or loss) function, or None without a pipeline."""
    cut = config.staging
    if cut is None:
        return None
    return build_pipelined(
        spec, cut.program(), cut.num_layers, compute=config.compute, remat=cut.remat,
        gather_once=cut.config.gather_once, edges_last=cut.config.edges == "last", backward=backward,
    )  # fmt: skip


class _Rule(NamedTuple):
    """How gradients become updates."""

    transform: optax.GradientTransformation
    schedule: Schedule | None  # None: the rate is the transformation's own
    clip: float  # largest global norm of gradients; 0 = no limit


def _rule(
    optimizer: OptimizerConfig | optax.GradientTransformation, schedule: Schedule | None, spec: ModelSpec
) -> _Rule:
    if not isinstance(optimizer, OptimizerConfig):
        return _Rule(optimizer, None, 0.0)
    transform = build_optimizer(optimizer, _unit_rate, spec.trainable, spec.names)
    return _Rule(transform, schedule, optimizer.clip_norm)


def _update(state, found, batch, rule: _Rule, config, spec) -> tuple[State, Metrics]:
    """Returns the state after one update by summed gradients, unchanged if they are not finite."""
    transform, schedule, clip = rule
    count, loss = found.loss.count, found.loss
    norm = optax.tree.norm(found.gradients) / count
    scale = jnp.minimum(1, clip / jnp.maximum(norm, 1e-30)) / count if clip else 1 / count
    gradients = _as_state(jax.tree.map(lambda g: g * scale, found.gradients), spec.placed_names)
    updates, new = transform.update(gradients, state.opt_state.optimizer, state.trainable)
    # The rate is applied here, by the schedule's clock: a skipped or hurried step stays in time.
    rate = schedule(state.opt_state.clock) if schedule else None
    updates = _as_state(updates, spec.placed_names)
    updates = jax.tree.map(lambda u: u * rate, updates) if schedule else updates
    trainable = optax.apply_updates(state.trainable, updates)
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda e, p: e + (1 - config.ema_decay) * (p - e), ema, trainable)
    good = jnp.isfinite(norm) & jnp.isfinite(loss.sum)
    skipped = jnp.where(good, 0, state.opt_state.skipped + 1)
    trainable = _chosen(good, trainable, state.trainable)
    good = _once_there(good, trainable) if sharding.active() else good

    metrics = {
        "loss": loss.sum / count,
        "grad_norm": norm,
        **({"learning_rate": rate} if schedule else {}),
        # Known only after the norm: a sum over devices that depends on nothing may run before or beside
        # those in the layers' loop (XLA on CPU), and processes that differ in that mix up their messages.
        "tokens": jnp.sum((batch["weights"] > 0) & ~(norm < -1)) if "weights" in batch else _samples(batch),
        "skipped": skipped,
        **{f"aux/{name}": value / count for name, value in loss.aux.items()},
    }
    after = State(
        state.step + 1,
        trainable,
        state.frozen,
        _chosen(good, found.model_state, state.model_state),
        state.opt_state._replace(
            optimizer=_chosen(good, new, state.opt_state.optimizer),
            skipped=skipped,
            clock=state.opt_state.clock + state.opt_state.pace,
        ),
        _chosen(good, ema, state.ema),
    )
    return after, metrics


def _samples(batch: Batch) -> jax.Array:
    return jnp.int32(next(iter(batch.values())).shape[0])


def _told(spec: ModelSpec, cut: Staging | None, state: State, sums: Sums) -> Tree:
    """Returns the model state after the model was told the step's stats."""
    if not sums.loss.stats:
        return sums.model_state
    parts = [state.trainable, sums.model_state, state.frozen]
    parts = [*map(cut.flat, parts)] if cut else parts
    model = spec.assemble(*parts)
    if not callable(getattr(model, "update", None)):
        raise ConfigError(f"{type(model).__name__}.loss returns stats, but it has no update(self, stats)")
    model.update(sums.loss.stats)
    trainable, after, _ = spec.arrays_of(model)
    if any(new is not old for new, old in zip(*map(jax.tree.leaves, (trainable, parts[0])), strict=True)):
        name = type(model).__name__
        raise ConfigError(f"{name}.update changes parameters; keep such values in an nnx.Variable")
    return cut.staged(after) if cut else after


def _chosen(good: jax.Array, new: Tree, old: Tree) -> Tree:
    """Returns the new tree, or the old one if the step was not good."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def _once_there(good: jax.Array, parameters: Tree) -> jax.Array:
    """Returns `good`, but known only after the new parameters are.

    Their update reads the old moments. XLA updates in place what it can prove to be read no more;
    left unordered, it copies all moments first (8 bytes a parameter and device). The order costs a
    little time, so it is kept to meshes, whose layouts are chosen for memory.
    """
    firsts = sum(leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(parameters))
    return good & ~jnp.isnan(firsts)


def _fresh_state(
    spec: ModelSpec,
    cut: Staging | None,
    transform,
    config: StepConfig,
    given: Mapping[str, jax.Array] | None = None,
) -> State:
    parts = spec.fresh(_key(config.seed, INIT), given)
    trainable, model_state, frozen = map(cut.staged, parts) if cut else parts
    trainable, frozen = (
        jax.tree.map(lambda x: x.astype(stored_dtype(x, config.params)), tree) for tree in (trainable, frozen)
    )
    ema = jax.tree.map(lambda x: x.astype(jnp.float32), trainable) if config.ema_decay else None
    start = (jnp.int32(0), jnp.float32(0), jnp.float32(1))
    opt_state = OptState(transform.init(trainable), *start)
    return State(jnp.int32(0), trainable, frozen, model_state, opt_state, ema)


def _unit_rate(_: Any) -> jax.Array:
    """Leaves updates as they are: the rate is applied by the step."""
    return jnp.float32(1)


def _for_one_run(mesh: Mesh) -> dict[str, int] | None:
    """Returns compiler options for a program that runs once.

    On CPU, LLVM's full optimisation of the random generators takes most of a short start; a quarter
    of the time gives the same bits.
    """
    return {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None


def _key(seed: int, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), purpose)


# --- shardings ------------------------------------------------------------------------------------


def _state_specs(spec: ModelSpec, abstract: State, rules: Rules) -> Any:
    trainable = spec.named_trainable()
    stored, state = (_specs(spec.trainable, trainable, rule) for rule in (rules.stored, rules.state))
    whole = jax.tree.map(lambda _: P(), abstract)
    moments = state_specs(abstract.opt_state.optimizer, spec.trainable, state)
    return whole._replace(
        trainable=stored,
        frozen=_specs(spec.frozen, spec.named_frozen(), rules.stored),
        model_state=jax.tree.map(
            lambda x, names: rules.computed(names, x.shape), spec.model_state, spec.state_names
        ),
        opt_state=whole.opt_state._replace(optimizer=moments),
        ema=None if abstract.ema is None else state,
    )


def _specs(tree: Tree, named: Mapping[str, tuple[Any, sharding.Names]], rule: Callable[..., P]) -> Tree:
    specs = [rule(names, leaf.shape) for leaf, names in named.values()]
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


def _as_state(tree: Tree, names: Tree) -> Tree:
    """Returns the tree laid out as optimizer state: each shard updates its own part."""
    now = sharding.active()
    if now is None:
        return tree
    known = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    leaves, structure = jax.tree.flatten(tree)
    out = [now.constrain(x, now.rules.state(n, x.shape)) for x, n in zip(leaves, known, strict=True)]
    return jax.tree.unflatten(structure, out)


def _views(cut: Staging | None, abstract: State, shardings: Any) -> Views:
    if cut is None:
        same = jax.tree.map(_with_sharding, abstract, shardings)
        return Views(lambda state: state, lambda state: state, same)
    shapes = jax.eval_shape(cut.flat, abstract)
    whole_stages = cut.num_layers % cut.stages == 0

    def flat_sharding(flat: jax.ShapeDtypeStruct, leaf: jax.ShapeDtypeStruct, where: NamedSharding):
        if flat.shape == leaf.shape:
            return where
        return NamedSharding(where.mesh, P("pipeline" if whole_stages else None, *where.spec[3:]))

    flat = jax.tree.map(flat_sharding, shapes, abstract, shardings)
    return Views(
        jax.jit(cut.flat, out_shardings=flat),
        jax.jit(cut.staged, out_shardings=shardings, donate_argnums=0),
        jax.tree.map(_with_sharding, shapes, flat),
    )


def _batch_shardings(batch: Mapping[str, Any], mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """Returns each batch entry's sharding: samples over the batch axes, [B, S] over context."""

    def of(x) -> NamedSharding:
        names = ("batch", "sequence")[: x.ndim] if x.ndim <= 2 else ("batch",) + (None,) * (x.ndim - 1)
        return NamedSharding(mesh, rules.activation(names, x.shape))

    return {name: of(x) for name, x in batch.items()}


def _with_sharding(x: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _is_spec(x) -> bool:
    return isinstance(x, P)
