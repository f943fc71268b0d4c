"""A step's seconds by arithmetic, and what of them runs at the same time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step on each device."""

    compute: float  # products, recomputed ones included, and attention
    bubble: float  # of a pipeline
    update: float  # state and summed gradients, read and written
    gathers: float  # of weights
    gradients: float
    tensor: float  # sums of activations
    stages: float  # what stages hand on, and their sums over the vocabulary
    exchange: float  # rows that go to experts and back
    context: float  # what attention over a split sequence moves
    host: float  # offloaded activations
    hides: bool  # whether the compiler runs gathers and gradients beside compute

    @property
    def busy_s(self) -> float:
        return self.compute + self.bubble + self.update

    @property
    def network_s(self) -> float:
        return math.fsum(
            (
                self.gathers,
                self.gradients,
                self.tensor,
                self.stages,
                self.exchange,
                self.context,
            )
        )

    @property
    def bound_s(self) -> float:
        """The least: all at once."""
        return max(self.busy_s, self.network_s, self.host)

    @property
    def step_s(self) -> float:
        beside = self.gathers + self.gradients if self.hides else 0.0
        covered = min(beside, self.busy_s) + min(self.host, self.busy_s)
        return self.busy_s + self.network_s + self.host - covered


def mixed(parts: Sequence[Estimate], shares: Sequence[float]) -> Estimate:
    """Returns the estimate of a step of which each part is a share."""
    names = [field.name for field in fields(Estimate) if field.name != "hides"]
    sums: dict[str, Any] = {
        name: math.fsum(
            share * getattr(one, name) for one, share in zip(parts, shares, strict=True)
        )
        for name in names
    }
    return replace(parts[0], **sums)
