"""Learning-rate schedules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults
from jaxdist.optim.config import OptimizerConfig, warmup_faults

Schedule = Callable[[ArrayLike], jax.Array]  # updates done so far -> learning rate


def depends_on_train_steps(config: OptimizerConfig) -> bool:
    """Returns whether a change of `train.steps` would change the learning rate of any step."""
    return config.schedule in ("cosine", "linear", "wsd") and config.decay_steps is None


def peak_learning_rate(config: OptimizerConfig, global_size: int) -> float:
    """Returns the peak learning rate at `global_size` sequences per step.

    `sqrt` suits Adam-like optimizers (https://arxiv.org/abs/2205.10287), `linear` suits SGD
    (https://arxiv.org/abs/1706.02677).
    """
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.learning_rate_scaling]
    return config.learning_rate * (global_size / config.reference_batch) ** power


def build_schedule(config: OptimizerConfig, train_steps: int, global_size: int) -> Schedule:
    """Returns a function from the number of updates done to the next update's learning rate.

    It takes a traced or a Python number and returns a float32 scalar. With w warm-up steps and
    the decay ending at T (`decay_steps`, else `train_steps`), update s = 0, 1, ... gets
    peak * min(1, (s + 1) / w) * shape(s), shape being 1 until the decay starts. So neither the
    first update is lost nor the last, s = T - 1: the final value is reached at s = T and kept.
    `cosine` and `linear` decay from w to T; `wsd` is linear over the last `decay_fraction * T`
    steps, but not before w; `inverse_sqrt` is sqrt(w / (s + 1)) and has no end, like `constant`.

    Raises:
      ConfigError: a value is out of range, or the warm-up is longer than the schedule.
    """
    if wrong := [*faults(config, "optimizer."), *warmup_faults(config, train_steps)]:
        raise ConfigError(wrong)
    peak = peak_learning_rate(config, global_size)
    warmup = max(config.warmup_steps, 1)
    shape = _decay_shape(config, train_steps)

    def schedule(step: ArrayLike) -> jax.Array:
        done = jnp.asarray(step, jnp.float32)
        return peak * jnp.minimum(1.0, (done + 1) / warmup) * shape(done)

    return schedule


def _decay_shape(config: OptimizerConfig, train_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the factor in [0, 1] that follows the warm-up, as a function of updates done."""
    if config.schedule == "constant":
        return jnp.ones_like
    if config.schedule == "inverse_sqrt":
        warmup = max(config.warmup_steps, 1)
        return lambda done: jnp.sqrt(warmup / jnp.maximum(done + 1, warmup))
    end = train_steps if config.decay_steps is None else config.decay_steps
    start = float(config.warmup_steps)
    if config.schedule == "wsd":
        start = max(start, end - config.decay_fraction * end)
    length = max(end - start, 1e-6)  # a warm-up that fills the schedule leaves no decay
    final = config.final_learning_rate

    def shape(done: jax.Array) -> jax.Array:
        progress = jnp.clip((done - start) / length, 0.0, 1.0)
        if config.schedule == "cosine":
            progress = 0.5 * (1 - jnp.cos(jnp.pi * progress))
        return 1 - (1 - final) * progress

    return shape
