"""Arithmetic for choosing a schedule: the bubble, and the balance of stages."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdist.parallel.axes import divisors

WARN_ABOVE = 0.10  # imbalance, and bubble, that is worth a warning


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Computes the idle share of a step, (p - 1) / (v m + p - 1).

    It holds for equal stages, with gpipe, 1f1b and interleaved.

    Args:
      stages: p.
      microbatches: m.
      chunks: v.
    """
    return (stages - 1) / (chunks * microbatches + stages - 1)


class Option(NamedTuple):
    """A change of the configuration, and its bubble."""

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
    """Lists changes that lower the bubble to WARN_ABOVE, or as far as possible.

    There are at most two alternatives: more microbatches, which makes each of them
    smaller; and more chunks, which means more hops and more live inputs.

    Args:
      stages: number of stages of the pipeline.
      microbatches: number of microbatches in use.
      chunks: number of chunks of a stage in use.
      choices: numbers of microbatches that the batch allows.
      layers: number of layers, which places must divide evenly.

    Returns:
      The alternatives; [] if the bubble is small enough already.
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
    best = []
    for options in (more, finer):
        small = [option for option in options if option.bubble <= WARN_ABOVE]
        # the smallest change that suffices, or the largest one
        best += small[:1] or options[-1:]
    return best


class Balance(NamedTuple):
    """The balance of the stages, which all run at the pace of the heaviest place."""

    cut: tuple[int, ...]  # layers of each place, in order of the chain
    shares: tuple[float, ...]  # each stage's share of the cost; their sum is 1
    imbalance: float  # heaviest place over the mean, minus 1
    heaviest: int  # the stage of the heaviest place

    def warning(self) -> str | None:
        """Describes an imbalance above WARN_ABOVE, with its fix; otherwise None."""
        if self.imbalance <= WARN_ABOVE:
            return None
        layers = sum(self.cut)
        cut = ", ".join(map(str, self.cut))
        sizes = ", ".join(map(str, divisors(layers)))
        return (
            f"stage {self.heaviest} sets the pace, {self.imbalance:.0%} above the mean of the cut {cut}: "
            f"{layers} layers divide by {sizes}"
        )


def balance(
    cut: Sequence[int], stages: int, *, layer_cost: float = 1.0, edge_cost: float = 0.0
) -> Balance:
    """Computes the load of each stage.

    Args:
      cut: layers of each place, without padding, which costs nothing here.
      stages: number of stages of the pipeline.
      layer_cost: cost of a layer.
      edge_cost: cost of a stage's share of embedding and head, for all of its places.
    """
    chunks = len(cut) // stages
    loads = (layer_cost * np.asarray(cut) + edge_cost / chunks).reshape(chunks, stages)
    return Balance(
        cut=tuple(cut),
        shares=tuple((loads.sum(axis=0) / loads.sum()).tolist()),
        imbalance=float(loads.max() / loads.mean() - 1),
        heaviest=int(loads.max(axis=0).argmax()),
    )
