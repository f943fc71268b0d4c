"""Arithmetic for choosing: the bubble's closed form, microbatches and chunks, and the
balance of stages.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdist.parallel.axes import divisors

WARN_ABOVE = 0.10  # of imbalance, and of bubble


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Returns the idle share of a step: (p-1)/(vm+p-1), equal stages, gpipe as well as
    1f1b.
    """
    return (stages - 1) / (chunks * microbatches + stages - 1)


class Option(NamedTuple):
    """One change of the configuration and the bubble that it leads to."""

    overrides: str  # as on a command line, without `--config.`
    bubble: float


def microbatch_options(
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    choices: Iterable[int],
    layers: int,
) -> list[Option]:
    """Returns changes that bring the bubble down to WARN_ABOVE, or as far as they go;
    [] if it is.

    At most two, each by itself: more microbatches, out of those that the batch allows
    (`choices`), and more chunks, out of those that divide the layers evenly. More
    microbatches make each one smaller; more chunks mean more hops and more live inputs.
    """
    if bubble_fraction(stages, microbatches, chunks) <= WARN_ABOVE:
        return []
    more = [
        Option(f"pipeline.microbatches={n}", bubble_fraction(stages, n, chunks))
        for n in sorted(set(choices))
        if n > microbatches and (chunks == 1 or n % stages == 0)
    ]
    finer = [
        Option(
            f"pipeline.schedule=interleaved pipeline.chunks={v}",
            bubble_fraction(stages, microbatches, v),
        )
        for v in divisors(layers)
        if v > chunks and layers % (stages * v) == 0 and microbatches % stages == 0
    ]
    return [
        next((option for option in options if option.bubble <= WARN_ABOVE), options[-1])
        for options in (more, finer)
        if options
    ]


class Balance(NamedTuple):
    """How evenly the stages are loaded; all go at the pace of the heaviest place."""

    cut: tuple[int, ...]  # layers by place, in order of the chain
    shares: tuple[float, ...]  # of the whole cost, by stage; they add up to 1
    imbalance: float  # heaviest place over the mean, minus 1
    heaviest: int  # the stage that has that place

    def warning(self) -> str | None:
        """Returns a line if the imbalance is above WARN_ABOVE: which stage, and what to
        change.
        """
        if self.imbalance <= WARN_ABOVE:
            return None
        layers = sum(self.cut)
        cut, sizes = (
            ", ".join(map(str, numbers)) for numbers in (self.cut, divisors(layers))
        )
        return (
            f"stage {self.heaviest} sets the pace, {self.imbalance:.0%} above the mean of the cut {cut}: "
            f"{layers} layers divide by {sizes}"
        )


def balance(
    cut: Sequence[int], stages: int, *, layer_cost: float = 1.0, edge_cost: float = 0.0
) -> Balance:
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
