"""One optimizer update: clipping, rate, skipped steps and the moving average."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import ConfigError
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.optimizers import ELEMENTWISE, build_optimizer, optimizer_of
from jaxdist.optim.roles import roles
from jaxdist.optim.schedules import Schedule
from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.param_names import Names
from jaxdist.step import loss_scale
from jaxdist.step.gradients import Sums
from jaxdist.step.layerwise import LayerwiseUpdate, Scalars, Trained, build_parts
from jaxdist.step.state import Metrics, OptState, State

_LANES = 128  # of a TPU's vector
# of stats that metrics have whole, too: 256 layers with 256 experts
_MOST_NUMBERS = 1 << 16

StatsMetrics = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]


@dataclass(frozen=True)
class UpdateRule:
    """How summed gradients become the next state."""

    transform: optax.GradientTransformation
    schedule: Schedule | None  # None: the rate is the transformation's own
    clip: float  # largest global norm of gradients; 0 = no limit
    ema_decay: float  # of the moving average of weights; 0 = none
    names: Tree  # logical names of the trained parameters, as the step holds them
    stats_metrics: StatsMetrics | None = None  # the model's own figures of its stats
    layerwise: LayerwiseUpdate | None = None  # for moments in the host's memory
    # whether the transformation looks at each number by itself
    elementwise: bool = False
    # how the state's loss scale moves
    scaler: loss_scale.DynamicLossScale | None = None

    def apply(self, state: State, sums: Sums, batch: Batch) -> tuple[State, Metrics]:
        """Returns the state after one update by summed gradients, unchanged if they are
        not finite.
        """
        flags = narrow_kernels(state.trainable, self.names) if self.elementwise else {}
        paths = {
            path for path, flag in jax.tree_util.tree_leaves_with_path(flags) if flag
        }
        if not paths:
            return self._apply(state, sums, batch)
        names = jax.tree.map(
            lambda f, own: (*own[:-2], *own[:-3:-1]) if f else own, flags, self.names
        )
        # A barrier, or else XLA moves the swap behind the update.
        state, gradients = _swapped(
            (state, sums.gradients), paths, jax.lax.optimization_barrier
        )
        after, metrics = replace(self, names=names)._apply(
            state, sums._replace(gradients=gradients), batch
        )
        return _swapped(after, paths), metrics

    def _apply(self, state: State, sums: Sums, batch: Batch) -> tuple[State, Metrics]:
        count = sums.loss.count
        loss = sums.loss
        total = optax.tree.norm(sums.gradients)
        norm = total / count
        good = jnp.isfinite(norm) & jnp.isfinite(loss.sum)
        skipped = jnp.where(good, 0, state.opt_state.skipped + 1)
        skipped, scale, figures = self._rescale(
            state.opt_state, total, loss.sum, skipped
        )
        update = self._update_whole if self.layerwise is None else self._update_by_layer
        (trainable, moments, ema), rate, good = update(state, sums, norm, good)
        metrics = {
            "loss": loss.sum / count,
            "grad_norm": norm,
            **({} if rate is None else {"learning_rate": rate}),
            "tokens": _count_tokens(batch, norm),
            "skipped": skipped,
            **figures,
            **{f"aux/{name}": value / count for name, value in loss.aux.items()},
            **_stats_metrics(
                self.stats_metrics(loss.stats) if self.stats_metrics else loss.stats
            ),
        }
        after = State(
            state.step + 1,
            trainable,
            state.frozen,
            where_finite(good, sums.model_state, state.model_state),
            OptState(moments, skipped, scale),
            ema,
            state.modules,
        )
        return after, metrics

    def _rescale(
        self, before: OptState, total: jax.Array, loss: jax.Array, skipped: jax.Array
    ) -> tuple[jax.Array, loss_scale.LossScale | None, Metrics]:
        """Returns `skipped` without steps that the scale is to blame for, the next
        scale, and its figures.

        Args:
          total: norm of the summed gradients. Of their mean nothing is known where no
            target has a weight.
        """
        if self.scaler is None or before.loss_scale is None:
            return skipped, None, {}
        finite = jnp.isfinite(total)
        now = before.loss_scale
        by_scale = loss_scale.is_cause(now, finite, loss)
        after = self.scaler.after(now, finite, by_scale)
        return (
            jnp.where(by_scale, 0, skipped),
            after,
            loss_scale.scaled_metrics(now, after),
        )

    def _update_whole(
        self, state: State, sums: Sums, norm: jax.Array, good: jax.Array
    ) -> tuple[Trained, jax.Array | None, jax.Array]:
        """Computes what one update leaves, the learning rate, and `good` in the order of
        memory.
        """
        scale = self._scale(sums, norm)
        gradients = _as_state(
            jax.tree.map(lambda g: g * scale, sums.gradients), self.names
        )
        updates, moments = self.transform.update(
            gradients, state.opt_state.optimizer, state.trainable
        )
        updates = _as_state(updates, self.names)
        if self.schedule is None:
            rate = _stored_rate(moments)
        else:
            # The rate is applied here, by the step: the schedule goes on where a step
            # is skipped, too.
            rate = self.schedule(state.step)
            updates = jax.tree.map(lambda u: u * rate, updates)
        trainable = optax.apply_updates(state.trainable, updates)
        ema = None
        decay = self.ema_decay
        if decay:
            ema = jax.tree.map(
                lambda e, p: e + (1 - decay) * (p - e), state.ema, trainable
            )
        trainable = where_finite(good, trainable, state.trainable)
        if execution.current().mesh:
            good = after_params_updated(good, trainable)
        moments = where_finite(good, moments, state.opt_state.optimizer)
        ema = where_finite(good, ema, state.ema)
        return Trained(trainable, moments, ema), rate, good

    def _update_by_layer(
        self, state: State, sums: Sums, norm: jax.Array, good: jax.Array
    ) -> tuple[Trained, jax.Array | None, jax.Array]:
        """Returns the same, of a state whose moments wait in the host's memory."""
        assert self.layerwise is not None and self.schedule is not None
        rate = self.schedule(state.step)
        before = Trained(state.trainable, state.opt_state.optimizer, state.ema)
        gradients = _as_state(sums.gradients, self.names)
        scalars = Scalars(self._scale(sums, norm), rate, good)
        return self.layerwise.apply(before, gradients, scalars), rate, good

    def _scale(self, sums: Sums, norm: jax.Array) -> jax.Array:
        """Computes what makes summed gradients the clipped mean."""
        count = sums.loss.count
        if not self.clip:
            return 1 / count
        return jnp.minimum(1, self.clip / jnp.maximum(norm, 1e-30)) / count


def build_update_rule(
    optimizer: OptimizerConfig | optax.GradientTransformation,
    schedule: Schedule | None,
    spec: ModelSpec,
    ema_decay: float,
    names: Tree,
    moments_in: str | None = None,
    scaler: loss_scale.DynamicLossScale | None = None,
) -> UpdateRule:
    """Returns the rule of a configured optimizer, or of one of optax, which is used as
    it is.

    Args:
      spec: with flat blocks.
      names: logical names of the trained parameters, as the step holds them.
      moments_in: the memory kind where moments wait to be updated layer by layer; None:
        the device's, and all are updated at once.
      scaler: how the loss scale moves; None: there is none.

    Raises:
      ConfigError: moments cannot wait on the host with this optimizer.
    """
    obstacle = offload_obstacle(optimizer) if moments_in else None
    if obstacle:
        raise ConfigError(obstacle)
    figures = getattr(spec.model_class, "stats_metrics", None)
    if not callable(figures):
        figures = None
    if not isinstance(optimizer, OptimizerConfig):
        return UpdateRule(
            optimizer,
            schedule=None,
            clip=0.0,
            ema_decay=ema_decay,
            names=names,
            stats_metrics=figures,
            scaler=scaler,
        )
    # The rate is applied by the step: see `UpdateRule._updates`.
    unit = lambda _: jnp.float32(1)  # noqa: E731
    transform = build_optimizer(optimizer, unit, spec.trainable, spec.names)
    layerwise = None
    if moments_in:
        of_part = partial(optimizer_of, optimizer, unit)
        parts = build_parts(roles(spec.trainable, spec.names), names, of_part)
        layerwise = LayerwiseUpdate(parts, ema_decay, moments_in)
    return UpdateRule(
        transform,
        schedule=schedule,
        clip=optimizer.clip_norm,
        ema_decay=ema_decay,
        names=names,
        stats_metrics=figures,
        layerwise=layerwise,
        elementwise=optimizer.name in ELEMENTWISE and layerwise is None,
        scaler=scaler,
    )


def offload_obstacle(
    optimizer: OptimizerConfig | optax.GradientTransformation,
) -> str | None:
    """Explains why moments cannot wait in the host's memory with this optimizer; None:
    they can.
    """
    if not isinstance(optimizer, OptimizerConfig) or optimizer.name == "given":
        return (
            "offload.optimizer: the optimizer is given to jaxdist.fit, which does not know whether it treats "
            "each parameter by itself; name one of jaxdist's (optimizer.name), or leave it off"
        )
    if optimizer.name == "adafactor":
        return (
            "offload.optimizer: adafactor keeps a row and a column of each matrix, too little to gain by "
            "moving; leave it off, or set optimizer.name=adamw"
        )
    return None


def narrow_kernels(parameters: Tree, names: Tree) -> Tree:
    """Finds the parameters that are updated with their last two dims swapped: experts'
    kernels, on TPUs.

    Where fsdp leaves less than a vector's lanes of the last dim, the one before is
    stored in them. XLA updates in the order of the dims, though, and fills up the
    lanes: copies of the parameter and its state.
    """
    now = execution.current()

    def narrow(x: jax.Array, own: Names) -> bool:
        if now.platform != "tpu" or now.mesh is None or "experts" not in own:
            return False
        *_, rows, lanes = now.rules.shard_dims(now.rules.state(own, x.shape), x.shape)
        return lanes < _LANES and rows % _LANES == 0

    return jax.tree.map(narrow, parameters, names)


def _swapped(
    tree: Tree, paths: Collection[tuple[Any, ...]], placed: Callable = lambda x: x
) -> Tree:
    """Returns the tree with the last two dims swapped of parameters with such paths,
    and of their state.
    """

    def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        own = any(path[start:] in paths for start in range(len(path)))
        return placed(jnp.swapaxes(x, -1, -2)) if own else x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _stored_rate(moments: Tree) -> jax.Array | None:
    """Returns the learning rate that a transformation of optax keeps in its state
    (inject_hyperparams).

    None where it keeps none, as most do, or several.
    """
    named = (x for _, x in optax.tree.get_all_with_path(moments, "learning_rate"))
    kept = [x for x in named if isinstance(x, jax.Array) and x.ndim == 0]
    return kept[0] if len(kept) == 1 else None


def _stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the step's stats: a sum as it is, of several (of each layer, say) also
    three figures.
    """
    metrics: dict[str, jax.Array] = {}
    for name, x in stats.items():
        figures = (
            {"": x}
            if x.ndim == 0
            else {"/mean": x.mean(), "/min": x.min(), "/max": x.max()}
        )
        figures |= {"": x} if x.size <= _MOST_NUMBERS else {}
        metrics |= {f"stats/{name}{end}": value for end, value in figures.items()}
    return metrics


def _count_tokens(batch: Batch, norm: jax.Array) -> jax.Array:
    """Counts the targets that have a weight, or samples where none has; known only
    after the norm.

    A sum over devices that depends on nothing may run before or beside those in the
    layers' loop (XLA on CPU), and processes that differ in that mix up their messages.
    """
    if "weights" in batch:
        return jnp.sum((batch["weights"] > 0) & ~(norm < -1))
    return jnp.int32(next(iter(batch.values())).shape[0])


def apply_stats(spec: ModelSpec, cut: Staging | None, state: State, sums: Sums) -> Tree:
    """Returns the model state after the model was told the step's stats."""
    if not sums.loss.stats:
        return sums.model_state
    parts = [state.trainable, sums.model_state, state.frozen]
    parts = [*map(cut.flat, parts)] if cut else parts
    model = spec.assemble(*parts)
    model.update(sums.loss.stats)
    trainable, after, _ = spec.arrays_of(model)
    if any(
        new is not old
        for new, old in zip(*map(jax.tree.leaves, (trainable, parts[0])), strict=True)
    ):
        name = type(model).__name__
        raise ConfigError(
            f"{name}.update changes parameters; keep such values in an nnx.Variable"
        )
    return cut.staged(after) if cut else after


def where_finite(good: jax.Array, new: Tree, old: Tree) -> Tree:
    """Returns the new tree, or the old one if the step was not good."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def after_params_updated(good: jax.Array, parameters: Tree) -> jax.Array:
    """Returns `good`, but known only after the new parameters are.

    Their update reads the old moments. XLA updates in place what it can prove to be
    read no more; left unordered, it copies all moments first (8 bytes a parameter and
    device). The order costs a little time, so it is kept to meshes, whose layouts are
    chosen for memory.
    """
    firsts = sum(
        leaf[(0,) * leaf.ndim].astype(jnp.float32)
        for leaf in jax.tree.leaves(parameters)
    )
    return good & ~jnp.isnan(firsts)


def _as_state(tree: Tree, names: Tree) -> Tree:
    """Returns the tree laid out as optimizer state: each shard updates its own part."""
    now = execution.current()
    return jax.tree.map(lambda x, own: now.lay_out(x, Rules.state, own), tree, names)
