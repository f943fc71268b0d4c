"""Arithmetic for choosing: the bubble's closed form, microbatches and chunks, and the balance of stages."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

WARN_ABOVE = 0.10  # of imbalance, and of bubble


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Returns the idle share of a step: (p-1)/(vm+p-1), equal stages, gpipe as well as 1f1b."""
    return (stages - 1) / (chunks * microbatches + stages - 1)


class Option(NamedTuple):
    """One change of the configuration and the bubble that it leads to."""

    microbatches: int
    chunks: int
    bubble: float
    overrides: str  # as on a command line, without `--config.`


def microbatch_options(
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    choices: Iterable[int],
    layers: int,
    target: float = WARN_ABOVE,
) -> tuple[Option, ...]:
    """Returns changes that bring the bubble down to `target`, or as far as they go; () if it is.

    At most two, each by itself: more microbatches, out of those that the batch allows (`choices`),
    and more chunks, out of those that divide the layers evenly. More microbatches make each one
    smaller; more chunks mean more hops and more live inputs.
    """
    if bubble_fraction(stages, microbatches, chunks) <= target:
        return ()
    counts = [n for n in sorted(set(choices)) if n > microbatches and (chunks == 1 or not n % stages)]
    most = layers // stages if microbatches % stages == 0 else 0
    pieces = [v for v in range(chunks + 1, most + 1) if layers % (stages * v) == 0]
    options = [
        [_option(stages, n, chunks, f"pipeline.microbatches={n}") for n in counts],
        [
            _option(stages, microbatches, v, f"pipeline.schedule=interleaved pipeline.chunks={v}")
            for v in pieces
        ],
    ]
    return tuple(
        next((option for option in row if option.bubble <= target), row[-1]) for row in options if row
    )


def _option(stages: int, microbatches: int, chunks: int, overrides: str) -> Option:
    return Option(microbatches, chunks, bubble_fraction(stages, microbatches, chunks), overrides)


class Balance(NamedTuple):
    """How evenly the stages are loaded; all go at the pace of the heaviest place."""

    cut: tuple[int, ...]  # layers by place, in order of the chain
    shares: tuple[float, ...]  # of the whole cost, by stage; they add up to 1
    imbalance: float  # heaviest place over the mean, minus 1
    heaviest: int  # the stage that has that place

    def warning(self, limit: float = WARN_ABOVE) -> str | None:
        """Returns a line if the imbalance is above `limit`: which stage, and what to change."""
        if self.imbalance <= limit:
            return None
        layers = sum(self.cut)
        divisors = [str(n) for n in range(1, layers + 1) if layers % n == 0]
        return (
            f"stage {self.heaviest} sets the pace, {self.imbalance:.0%} above the mean of the cut "
            f"{', '.join(map(str, self.cut))}: {layers} layers divide by {', '.join(divisors)}"
        )


def balance(cut: Sequence[int], stages: int, *, layer_cost: float = 1.0, edge_cost: float = 0.0) -> Balance:
    """Returns the load of each stage.

    Args:
      cut: layers by place; the padding of places to equal length is not a load.
      edge_cost: of what each stage does of embedding and head, over all of its places.
    """
    chunks = len(cut) // stages
    loads = (layer_cost * np.asarray(cut) + edge_cost / chunks).reshape(chunks, stages)
    return Balance(
        cut=tuple(cut),
        shares=tuple((loads.sum(axis=0) / loads.sum()).tolist()),
        imbalance=float(loads.max() / loads.mean() - 1),
        heaviest=int(loads.max(axis=0).argmax()),
    )
