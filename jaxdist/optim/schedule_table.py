"""Table of the learning-rate schedules: their shapes after the warm-up, and facts."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def _even(share: jax.Array) -> jax.Array:
    return share


def _half_cosine(share: jax.Array) -> jax.Array:
    return 0.5 * (1 - jnp.cos(jnp.pi * share))


def _inverse_sqrt(done: jax.Array, warmup: int) -> jax.Array:
    return jnp.sqrt(warmup / jnp.maximum(done + 1, warmup))


def _constant(done: jax.Array, warmup: int) -> jax.Array:
    return jnp.ones_like(done)


@dataclass(frozen=True)
class Shape:
    """Shape of a schedule, as a share of its peak."""

    # (updates done, warm-up steps >= 1) -> share, for a schedule without an end; None =
    # it decays to final_learning_rate, at decay_steps or train.steps
    endless: Callable[[jax.Array, int], jax.Array] | None = None
    # share of the decay's steps -> share of its way down; 0 -> 0, 1 -> 1
    descent: Callable[[jax.Array], jax.Array] = _even
    # whether it stays at the peak until the last decay_fraction of its steps. The
    # checkpoint where the decay starts is kept, and a longer run resumes there.
    cools_down: bool = False

    @property
    def ends(self) -> bool:
        """Whether it decays to an end, which a longer run moves."""
        return self.endless is None


SCHEDULES: dict[str, Shape] = {
    "cosine": Shape(descent=_half_cosine),
    "linear": Shape(),
    "wsd": Shape(cools_down=True),
    "constant": Shape(endless=_constant),
    "inverse_sqrt": Shape(endless=_inverse_sqrt),
}


def ending() -> tuple[str, ...]:
    """Lists the schedules that end."""
    return tuple(name for name, shape in SCHEDULES.items() if shape.ends)


def cooling_down() -> tuple[str, ...]:
    """Lists the schedules that stay at the peak until their last part."""
    return tuple(name for name, shape in SCHEDULES.items() if shape.cools_down)
