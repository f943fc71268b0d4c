"""A dynamic loss scale, which keeps gradients in the narrow range of float16.

float16 rounds numbers below 6e-8 to zero and numbers above 65,504 to infinity.
Gradients of a mean loss are often smaller. So the backward pass starts with a power of
two instead of 1, and the gradients are divided by it in float32. A power of two changes
exponents only, so no bit of a gradient changes unless it overflows or vanishes.

The scale follows the rule of `torch.amp.GradScaler`. An update with non-finite
gradients is skipped and halves the scale. A number of good updates in a row doubles it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel.precision import GROWTH_INTERVAL, LOSS_SCALE
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import Tree

# Smallest scale. The scale of torch falls to zero, and then all gradients are NaN.
FLOOR = 2.0**-24


class LossScale(NamedTuple):
    """The loss scale in the train state."""

    scale: jax.Array  # float32, factor of the mean loss; a power of two
    good_steps: jax.Array  # int32, updates since the scale changed
    # int32, all updates of the run that were skipped because of the scale; these do not
    # count in `OptState.skipped`
    skips: jax.Array


@dataclass(frozen=True)
class DynamicLossScale:
    """The rule by which a loss scale starts and changes."""

    initial: float = LOSS_SCALE  # a power of two
    # good updates in a row after which the scale doubles
    growth_interval: int = GROWTH_INTERVAL

    def init(self) -> LossScale:
        """Makes the scale of a new run."""
        return LossScale(
            scale=jnp.float32(self.initial),
            good_steps=jnp.int32(0),
            skips=jnp.int32(0),
        )

    def after(
        self, state: LossScale, finite: jax.Array, by_scale: jax.Array
    ) -> LossScale:
        """Computes the scale after a step.

        Args:
          state: the scale before the step.
          finite: whether all gradients were finite.
          by_scale: whether the update was skipped because of the scale.
        """
        good_steps = state.good_steps + 1
        grows = finite & (good_steps == self.growth_interval)
        doubled = jnp.where(
            grows & jnp.isfinite(2 * state.scale), 2 * state.scale, state.scale
        )
        return LossScale(
            scale=jnp.where(finite, doubled, jnp.maximum(state.scale / 2, FLOOR)),
            good_steps=jnp.where(finite & ~grows, good_steps, 0),
            skips=state.skips + by_scale,
        )


def factor(state: LossScale, batch: Batch) -> jax.Array:
    """Computes the factor of a step's sum of losses, a power of two.

    `state.scale` is the factor of the mean loss, as in torch. The sum needs this factor
    divided by the number of targets, rounded up to a power of two.

    Args:
      state: the loss scale.
      batch: the step's whole batch.
    """
    if "weights" in batch:
        targets = batch["weights"].size
    else:
        targets = next(iter(batch.values())).shape[0]
    return state.scale * 2.0 ** -math.ceil(math.log2(targets))


def unscaled(gradients: Tree, factor: jax.Array | None) -> Tree:
    """Divides float32 gradients by the factor of the loss; None: they have none."""
    if factor is None:
        return gradients
    # The inverse of a power of two is exact. XLA would turn a division of each gradient
    # into a product with a rounded inverse.
    inverse = 1 / factor
    return jax.tree.map(lambda g: g * inverse, gradients)


def is_cause(state: LossScale, finite: jax.Array, loss: jax.Array) -> jax.Array:
    """Tests whether the scale may have made gradients non-finite.

    It cannot be the cause if the loss is not finite, or if the scale is at its floor.
    """
    return ~finite & jnp.isfinite(loss) & (state.scale > FLOOR)


def scaled_metrics(before: LossScale, after: LossScale) -> dict[str, jax.Array]:
    """Reports the scale of a step, and the updates skipped for the scale so far."""
    return {"loss_scale": before.scale, "loss_scale_skips": after.skips}
