"""One update of the state: clipping, learning rate, skipped steps, moving average."""

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
from jaxdist.optim.roles import Role, roles, with_names
from jaxdist.optim.schedules import Schedule, rate_of_one
from jaxdist.parallel import execution
from jaxdist.parallel.offload import HOST, OffloadConfig
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import Names
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step import loss_scale
from jaxdist.step.layerwise import (
    DEVICE,
    LayerwiseUpdate,
    Scalars,
    Trained,
    build_groups,
)
from jaxdist.step.state import Metrics, OptState, State, Sums

_LANES = 128  # lanes of a TPU's vector registers
# largest stats that metrics include in full: those of 256 layers with 256 experts
_MOST_NUMBERS = 1 << 16

StatsMetrics = Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]]


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which summed gradients change the state."""

    transform: optax.GradientTransformation
    # learning rate by step; None = `transform` has its own
    schedule: Schedule | None
    clip: float  # largest global norm of the gradients; 0 = no limit
    ema_decay: float  # decay of the moving average of the weights; 0 = no average
    names: Tree  # logical names of the trained parameters, as the step holds them
    # the model's metrics of its stats; None = the stats themselves
    stats_metrics: StatsMetrics | None = None
    # update layer by layer, for moments in the host's memory; None = all at once
    layerwise: LayerwiseUpdate | None = None
    # whether `transform` treats each number independently
    elementwise: bool = False
    # rule of the state's loss scale; None = gradients are not scaled
    scaler: loss_scale.DynamicLossScale | None = None

    def apply(self, state: State, sums: Sums, batch: Batch) -> tuple[State, Metrics]:
        """Updates the state by summed gradients.

        If the gradients are not finite, only the counters change.
        """
        narrow: Tree = {}
        if self.elementwise:
            narrow = narrow_kernels(state.trainable, self.names)
        leaves = jax.tree_util.tree_leaves_with_path(narrow)
        paths = {path for path, is_narrow in leaves if is_narrow}
        if not paths:
            return self._apply(state, sums, batch)

        def swap_names(is_narrow: bool, dims: Names) -> Names:
            return (*dims[:-2], dims[-1], dims[-2]) if is_narrow else dims

        names = jax.tree.map(swap_names, narrow, self.names)
        # Without the barrier, XLA would move the swap behind the update.
        state, gradients = _swap_last_dims(
            (state, sums.gradients), paths, jax.lax.optimization_barrier
        )
        after, metrics = replace(self, names=names)._apply(
            state, sums._replace(gradients=gradients), batch
        )
        return _swap_last_dims(after, paths), metrics

    def on_device(self, trainable: Tree, compute: str) -> Tree:
        """Copies stored parameters that wait in the host's memory to the device.

        Args:
          trainable: the stored parameters.
          compute: dtype of copied kernels of layers.
        """
        if self.layerwise is None:
            return trainable
        return self.layerwise.fetch(trainable, compute)

    def _apply(self, state: State, sums: Sums, batch: Batch) -> tuple[State, Metrics]:
        loss = sums.loss
        count = loss.count  # sum of the targets' weights
        norm_of_sum = optax.tree.norm(sums.gradients)
        norm = norm_of_sum / count  # norm of the mean gradients
        good = jnp.isfinite(norm) & jnp.isfinite(loss.sum)
        skipped = jnp.where(good, 0, state.opt_state.skipped + 1)
        skipped, next_loss_scale, scale_metrics = self._update_loss_scale(
            state.opt_state, norm_of_sum=norm_of_sum, loss=loss.sum, skipped=skipped
        )
        update = self._update_whole if self.layerwise is None else self._update_by_layer
        trained, rate, good = update(state, sums, norm, good)
        metrics = {"loss": loss.sum / count, "grad_norm": norm}
        if rate is not None:
            metrics["learning_rate"] = rate
        metrics["tokens"] = _count_tokens(batch, norm)
        metrics["skipped"] = skipped
        metrics |= scale_metrics
        metrics |= {f"aux/{name}": value / count for name, value in loss.aux.items()}
        metrics |= {name: value / count for name, value in loss.metrics.items()}
        stats = self.stats_metrics(loss.stats) if self.stats_metrics else loss.stats
        metrics |= _stats_metrics(stats)
        after = State(
            step=state.step + 1,
            trainable=trained.params,
            frozen=state.frozen,
            model_state=where_finite(good, sums.model_state, state.model_state),
            opt_state=OptState(
                trained.moments, skipped=skipped, loss_scale=next_loss_scale
            ),
            ema=trained.ema,
            modules=state.modules,
        )
        return after, metrics

    def _update_loss_scale(
        self,
        before: OptState,
        *,
        norm_of_sum: jax.Array,
        loss: jax.Array,
        skipped: jax.Array,
    ) -> tuple[jax.Array, loss_scale.LossScale | None, Metrics]:
        """Changes the loss scale after a step.

        Args:
          before: the optimizer's state before the step.
          norm_of_sum: norm of the summed gradients. The norm of their mean may be NaN
            because no target has a weight.
          loss: the summed loss.
          skipped: number of consecutive updates that were skipped, including this step.

        Returns:
          `skipped`, or 0 if the scale was the cause; the next scale; and its metrics.
        """
        if self.scaler is None or before.loss_scale is None:
            return skipped, None, {}
        finite = jnp.isfinite(norm_of_sum)
        by_scale = loss_scale.is_cause(before.loss_scale, finite, loss)
        after = self.scaler.after(before.loss_scale, finite, by_scale)
        skipped = jnp.where(by_scale, 0, skipped)
        return skipped, after, loss_scale.scaled_metrics(before.loss_scale, after)

    def _update_whole(
        self, state: State, sums: Sums, norm: jax.Array, good: jax.Array
    ) -> tuple[Trained, jax.Array | None, jax.Array]:
        """Updates all parameters at once.

        Returns:
          The updated trees; the learning rate if it is known; and `good`, available
          only after the parameters are updated.
        """
        factor = self._clip_factor(sums, norm)
        gradients = _as_state(
            jax.tree.map(lambda g: g * factor, sums.gradients), self.names
        )
        updates, moments = self.transform.update(
            gradients, state.opt_state.optimizer, state.trainable
        )
        updates = _as_state(updates, self.names)
        if self.schedule is None:
            rate = _stored_rate(moments)
        else:
            # The step applies the rate, so the schedule continues if an update is
            # skipped.
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
        """Updates the parameters layer by layer, with moments in the host's memory.

        It returns the same as `_update_whole`.
        """
        assert self.layerwise is not None
        assert self.schedule is not None
        rate = self.schedule(state.step)
        before = Trained(state.trainable, state.opt_state.optimizer, state.ema)
        gradients = _as_state(sums.gradients, self.names)
        scalars = Scalars(self._clip_factor(sums, norm), rate, good)
        return self.layerwise.apply(before, gradients, scalars), rate, good

    def _clip_factor(self, sums: Sums, norm: jax.Array) -> jax.Array:
        """Computes the factor that turns summed gradients into the clipped mean.

        It is 1 / count, times a factor below 1 if the mean's `norm` exceeds the limit.
        """
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
    params_in: str | None = None,
    scaler: loss_scale.DynamicLossScale | None = None,
) -> UpdateRule:
    """Builds the update of a configured optimizer, or of a transformation of optax.

    Args:
      optimizer: a config, or a transformation, which is used unchanged.
      schedule: the learning rate by step, for the optimizer of a config.
      spec: the model with flat blocks.
      ema_decay: decay of the moving average of the weights; 0 = no average.
      names: logical names of the trained parameters, as the step holds them.
      moments_in: memory kind where the moments wait. The update then goes layer by
        layer. Default: the moments are on the devices, and all are updated at once.
      params_in: memory kind where the stored parameters wait, beside the moments.
        Default: they are on the devices.
      scaler: rule of the loss scale; default: gradients are not scaled.

    Raises:
      ConfigError: moments cannot wait on the host with this optimizer.
    """
    if moments_in:
        obstacle = offload_obstacle(optimizer)
        if obstacle:
            raise ConfigError(obstacle)
    stats_metrics = getattr(spec.model_class, "stats_metrics", None)
    if not callable(stats_metrics):
        stats_metrics = None
    if not isinstance(optimizer, OptimizerConfig):
        return UpdateRule(
            optimizer,
            schedule=None,
            clip=0.0,
            ema_decay=ema_decay,
            names=names,
            stats_metrics=stats_metrics,
            scaler=scaler,
        )

    # `UpdateRule._update_whole` applies the learning rate.
    transform = build_optimizer(
        optimizer,
        rate_of_one,
        spec.trainable,
        spec.names,
        step_names=names,
        map_matrices=_map_matrices,
    )
    layerwise = None
    if moments_in:
        param_roles = with_names(roles(spec.trainable, spec.names), names)
        transform_of = partial(
            optimizer_of, optimizer, rate_of_one, map_matrices=_map_matrices
        )
        groups = build_groups(param_roles, names, transform_of)
        layerwise = LayerwiseUpdate(
            groups,
            ema_decay,
            memory_kind=moments_in,
            params_kind=params_in or DEVICE,
        )
    return UpdateRule(
        transform,
        schedule=schedule,
        clip=optimizer.clip_norm,
        ema_decay=ema_decay,
        names=names,
        stats_metrics=stats_metrics,
        layerwise=layerwise,
        elementwise=optimizer.name in ELEMENTWISE and layerwise is None,
        scaler=scaler,
    )


def _map_matrices(
    function: Callable[[jax.Array], jax.Array], stack: jax.Array, role: Role
) -> jax.Array:
    """Applies a function to each matrix of a stack, see `Execution.map_matrices`."""
    return execution.current().map_matrices(
        function, stack, role.names, matrix_dims=role.dims
    )


def memory_of_moments(
    optimizer: OptimizerConfig | optax.GradientTransformation,
    offload: OffloadConfig,
    *,
    zero: int,
) -> str | None:
    """Chooses the memory where moments wait; see `StepConfig.moments_in`.

    At ZeRO 2 a device updates its shards and gathers the new parameters. XLA gathers them
    beside the old ones, which the update of a whole stack reads. A loop over the layers
    reads only shards of the old ones, so gathers take their memory.

    Args:
      optimizer: a config, or a transformation of the caller.
      offload: what waits on the host.
      zero: the ZeRO stage.
    """
    if offload.optimizer:
        return HOST
    if zero == 2 and offload_obstacle(optimizer) is None:
        return DEVICE
    return None


def offload_obstacle(
    optimizer: OptimizerConfig | optax.GradientTransformation,
) -> str | None:
    """Explains why moments of an optimizer cannot wait on the host; None: they can."""
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
    """Marks the parameters that are updated with their last two dims swapped.

    These are kernels of experts on TPUs. If fsdp leaves fewer columns than a vector has
    lanes, XLA stores the rows along the lanes. But its update would store the columns
    along the lanes and pad them, in copies of the parameter and its state.

    Returns:
      A bool for each parameter.
    """
    now = execution.current()

    def is_narrow(x: jax.Array, dims: Names) -> bool:
        if now.platform != "tpu" or now.mesh is None or "experts" not in dims:
            return False
        *_, rows, columns = now.rules.shard_dims(
            now.rules.state(dims, x.shape), x.shape
        )
        return columns < _LANES and rows % _LANES == 0

    return jax.tree.map(is_narrow, parameters, names)


def _swap_last_dims(
    tree: Tree,
    paths: Collection[tuple[Any, ...]],
    barrier: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Tree:
    """Swaps the last two dims of some parameters and of their optimizer state.

    Args:
      tree: parameters and state.
      paths: paths of the parameters. The path of a parameter's state ends with them.
      barrier: applied to each swapped array.
    """

    def swap(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        ends = (path[start:] for start in range(len(path)))
        if not any(end in paths for end in ends):
            return x
        return barrier(jnp.swapaxes(x, -1, -2))

    return jax.tree_util.tree_map_with_path(swap, tree)


def _stored_rate(moments: Tree) -> jax.Array | None:
    """Finds the learning rate in the state of a transformation of optax.

    Transformations of `optax.inject_hyperparams` store it. The result is None if there
    is none, or more than one.
    """
    named = (x for _, x in optax.tree.get_all_with_path(moments, "learning_rate"))
    rates = [x for x in named if isinstance(x, jax.Array) and x.ndim == 0]
    return rates[0] if len(rates) == 1 else None


def _stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Makes metrics of a step's stats.

    An array, such as one value for each layer, also gives its mean, min and max.
    """
    metrics: dict[str, jax.Array] = {}
    for name, x in stats.items():
        key = f"stats/{name}"
        if x.ndim > 0:
            metrics[f"{key}/mean"] = x.mean()
            metrics[f"{key}/min"] = x.min()
            metrics[f"{key}/max"] = x.max()
        if x.size <= _MOST_NUMBERS:
            metrics[key] = x
    return metrics


def _count_tokens(batch: Batch, norm: jax.Array) -> jax.Array:
    """Counts the targets of positive weight, or the rows if there are no weights.

    This is the metric `tokens`. It differs from `Loss.count`, the sum of the weights,
    if weights are fractions.

    The count depends on the norm, which orders it. On CPU, XLA may otherwise run this
    sum over devices before or during the sums of the layers. If processes differ in
    that order, they mix up their messages.
    """
    if "weights" in batch:
        return jnp.sum((batch["weights"] > 0) & ~(norm < -1))
    samples: jax.Array = jnp.int32(next(iter(batch.values())).shape[0])
    return samples


def apply_stats(
    spec: ModelSpec, staging: Staging | None, state: State, sums: Sums
) -> Tree:
    """Calls the model's `update(stats)` and returns the model state that it leaves.

    Args:
      spec: the model with flat blocks.
      staging: the pipeline's partition of the layers; None: no pipeline.
      state: the state before the update.
      sums: the step's sums, with the stats and the model state.

    Raises:
      ConfigError: `update` changes parameters.
    """
    if not sums.loss.stats:
        return sums.model_state
    trainable = state.trainable
    model_state = sums.model_state
    frozen = state.frozen
    if staging:
        trainable, model_state, frozen = map(
            staging.flat, (trainable, model_state, frozen)
        )
    model = spec.assemble(trainable, model_state, frozen)
    model.update(sums.loss.stats)
    trainable_after, after, _ = spec.arrays_of(model)
    leaves = zip(
        jax.tree.leaves(trainable_after), jax.tree.leaves(trainable), strict=True
    )
    if any(new is not old for new, old in leaves):
        name = type(model).__name__
        raise ConfigError(
            f"{name}.update changes parameters; keep such values in an nnx.Variable"
        )
    return staging.by_stage(after) if staging else after


def where_finite(good: jax.Array, new: Tree, old: Tree) -> Tree:
    """Selects the new tree if the step was good, otherwise the old one."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def after_params_updated(good: jax.Array, parameters: Tree) -> jax.Array:
    """Delays `good` until the new parameters are computed.

    The update of the parameters reads the old moments. XLA updates the moments in place
    only if this read comes first. Without this order it copies all moments (8 bytes a
    parameter and device). The order costs a little time, so only meshes use it: their
    layouts are chosen for memory.
    """
    first_elements = sum(
        leaf[(0,) * leaf.ndim].astype(jnp.float32)
        for leaf in jax.tree.leaves(parameters)
    )
    return good & ~jnp.isnan(first_elements)


def _as_state(tree: Tree, names: Tree) -> Tree:
    """Gives a tree the sharding of the optimizer's state.

    So each device updates only its shard.
    """
    now = execution.current()
    return jax.tree.map(lambda x, dims: now.lay_out(x, Rules.state, dims), tree, names)
