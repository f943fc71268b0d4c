"""Arithmetic for choosing: the bubble's closed form, microbatches and chunks, cuts of layers."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

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


def even_cut(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns how many layers each place holds, in order of the chain; the first take the rest."""
    least, rest = divmod(layers, stages * chunks)
    return tuple(least + (place < rest) for place in range(stages * chunks))


@dataclasses.dataclass(frozen=True)
class Balance:
    """How evenly a cut loads the stages; all stages go at the pace of the heaviest chunk."""

    cut: tuple[int, ...]  # layers by place
    loads: tuple[tuple[float, ...], ...]  # cost of one microbatch, [stages][chunks]
    shares: tuple[float, ...]  # of the whole cost, by stage; they add up to 1
    imbalance: float  # heaviest place over the mean, minus 1
    better_cut: tuple[int, ...] | None  # None: no other cut is better by a thousandth
    better_imbalance: float

    def warning(self, limit: float = WARN_ABOVE) -> str | None:
        """Returns a line if the imbalance is above `limit`: which stage, and what to change."""
        if self.imbalance <= limit:
            return None
        heaviest = max(range(len(self.shares)), key=lambda stage: max(self.loads[stage]))
        places, layers = len(self.cut), sum(self.cut)
        if self.better_cut:
            cut = ", ".join(map(str, self.better_cut))
            better = f"the cut {cut} would leave {self.better_imbalance:.0%}"
        else:
            fits = [str(n) for n in range(1, layers + 1) if layers % n == 0]
            better = f"no cut into {places} is better; {layers} layers divide by {', '.join(fits)}"
        return (
            f"stage {heaviest} sets the pace, {self.imbalance:.0%} above the mean of the cut "
            f"{', '.join(map(str, self.cut))}: {better}"
        )


def balance(
    layer_costs: Sequence[float],
    *,
    stages: int,
    chunks: int = 1,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
    edges: Literal["sharded", "replicated", "last"] = "sharded",
    cut: Sequence[int] | None = None,
) -> Balance:
    """Returns the load of each stage under `cut` (default: `even_cut`), and the best cut there is.

    Edges cost: sharded, a share on every stage; replicated, all of it on every stage; last, the
    embedding on the first place and the head on the last one. Padding is not a load here: an
    executor that pads places to equal length does it at the pace of the longest. A given cut may
    leave places empty.

    Raises:
      ValueError: fewer layers than places, or a cut that is not of these layers and places.
    """
    places, costs = stages * chunks, np.asarray(layer_costs, float)
    cut = tuple(cut or even_cut(len(costs), stages, chunks))
    if len(costs) < places or len(cut) != places or sum(cut) != len(costs) or min(cut) < 0:
        raise ValueError(
            f"{len(costs)} layers were cut {cut} into {stages} stages x {chunks} chunks; "
            "at least one layer a place is required, and every layer in one place"
        )
    extra = np.zeros(places)
    if edges == "last":
        extra[0], extra[-1] = embed_cost, extra[-1] + head_cost + (places == 1) * embed_cost
    else:
        extra += (embed_cost + head_cost) / (places if edges == "sharded" else chunks)
    loads = _loads(costs, cut, extra)
    better = _best_cut(costs, extra)
    imbalances = [float(load.max() / load.mean() - 1) for load in (loads, _loads(costs, better, extra))]
    by_stage = loads.reshape(chunks, stages).T
    return Balance(
        cut=cut,
        loads=tuple(map(tuple, by_stage.tolist())),
        shares=tuple((by_stage.sum(axis=1) / loads.sum()).tolist()),
        imbalance=imbalances[0],
        better_cut=better if imbalances[1] < imbalances[0] - 1e-3 else None,
        better_imbalance=min(imbalances),
    )


def _loads(costs: np.ndarray, cut: Sequence[int], extra: np.ndarray) -> np.ndarray:
    prefix, ends = np.concatenate([[0.0], np.cumsum(costs)]), np.cumsum(cut)
    return prefix[ends] - prefix[ends - np.asarray(cut)] + extra


def _best_cut(costs: np.ndarray, extra: np.ndarray) -> tuple[int, ...]:
    """Returns the cut into len(extra) parts whose heaviest is lightest: O(parts layers^2)."""
    count, prefix = len(costs), np.concatenate([[0.0], np.cumsum(costs)])
    best = np.full(count + 1, np.inf)  # the heaviest part of the best cut of the first n layers
    best[0] = 0.0
    choices = []
    for place in range(len(extra)):
        # heaviest[n, start]: parts before end at `start`, this part is start..n, not empty
        part = prefix[:, None] - prefix[None, :] + extra[place]
        part[np.triu_indices(count + 1)] = np.inf
        heaviest = np.maximum(best[None, :], part)
        choices.append(heaviest.argmin(axis=1))
        best = heaviest.min(axis=1)
    ends = [count]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return tuple(np.diff(ends[::-1]).tolist())
