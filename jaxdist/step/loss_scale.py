"""A dynamic loss scale: float16's narrow range, moved to where the gradients are.

Below 6e-8 float16 has nothing but zero, above 65,504 nothing but infinity, and
gradients of a mean loss are often smaller. So the backward pass begins with a power of
two instead of 1, and gradients are divided by it in float32 before anything looks at
them. Powers of two move exponents: where nothing overflows or vanishes, no bit of a
gradient changes. The sequence is that of `torch.amp.GradScaler`: an update whose
gradients are not finite is left out and halves the scale, some good ones in a row
double it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel.precision import GROWTH_INTERVAL, LOSS_SCALE
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import Tree

# the scale stays above; torch's goes on to zero, and then everything is NaN
FLOOR = 2.0**-24


class LossScale(NamedTuple):
    """The scale and what moves it, a part of the train state."""

    scale: jax.Array  # float32, a power of two: of the mean loss
    good_steps: jax.Array  # int32, since the scale changed
    skips: jax.Array  # int32, updates left out because of the scale


@dataclass(frozen=True)
class DynamicLossScale:
    """How a loss scale begins and grows."""

    initial: float = LOSS_SCALE  # a power of two
    growth_interval: int = GROWTH_INTERVAL  # good steps in a row after which it doubles

    def init(self) -> LossScale:
        """Returns the state of a new run."""
        return LossScale(jnp.float32(self.initial), jnp.int32(0), jnp.int32(0))

    def after(
        self, state: LossScale, finite: jax.Array, by_scale: jax.Array
    ) -> LossScale:
        """Returns the state after a step.

        Args:
          finite: whether all gradients were.
          by_scale: whether the update was left out because of the scale.
        """
        steps = state.good_steps + 1
        grows = finite & (steps == self.growth_interval)
        doubled = jnp.where(
            grows & jnp.isfinite(2 * state.scale), 2 * state.scale, state.scale
        )
        scale = jnp.where(finite, doubled, jnp.maximum(state.scale / 2, FLOOR))
        return LossScale(
            scale, jnp.where(finite & ~grows, steps, 0), state.skips + by_scale
        )


def factor(state: LossScale, batch: Batch) -> jax.Array:
    """Computes what multiplies a step's sum of losses, a power of two.

    The scale is of the mean, as torch's is, up to the next power of two of the step's
    targets.

    Args:
      batch: the step's whole batch.
    """
    targets = (
        batch["weights"].size
        if "weights" in batch
        else next(iter(batch.values())).shape[0]
    )
    return state.scale * 2.0 ** -math.ceil(math.log2(targets))


def unscaled(gradients: Tree, factor: jax.Array | None) -> Tree:
    """Returns float32 gradients as they are without a factor; None: they have none."""
    if factor is None:
        return gradients
    # exact. Of one division by another XLA makes a product with a rounded inverse
    inverse = 1 / factor
    return jax.tree.map(lambda g: g * inverse, gradients)


def is_cause(state: LossScale, finite: jax.Array, loss: jax.Array) -> jax.Array:
    """Tests whether the scale can be why gradients are not finite: above its floor,
    with a finite loss.
    """
    return ~finite & jnp.isfinite(loss) & (state.scale > FLOOR)


def scaled_metrics(before: LossScale, after: LossScale) -> dict[str, jax.Array]:
    """Returns a step's figures: the scale that it had, and the updates left out for
    scales so far.
    """
    return {"loss_scale": before.scale, "loss_scale_skips": after.skips}
