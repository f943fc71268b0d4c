"""Even attention work: which row of a packed global batch goes to which microbatch and
batch shard.

A row of one document of S tokens needs S times the attention of a row of S documents. A
batch keeps its rows, only their places change, so a step's sums are the same but for
the order of adding. Work is counted in pairs of tokens of the same document (a query
and a key not after it), as full causal attention computes; what is linear in tokens is
even as it is.

Shapes: G rows of the global batch, n pieces of a row over the context axis.
"""

import heapq
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from jaxdist.data.dataset import Dataset

_SAMPLE_STEPS = 16  # whose mean a run's first line tells


@dataclass(frozen=True)
class StepGrid:
    """How a step cuts up its global batch; as `jaxdist.step.batch_parts.split` does."""

    accumulation: int
    microbatches: int  # of a pipeline, in each part of the accumulation; else 1
    batch_shards: int
    # devices that share out a row's queries; 1: each sees whole rows, with some heads
    context: int = 1
    # whether they have chunks i and 2 context - 1 - i of 2 context; else chunk i
    zigzag: bool = False

    @property
    def parts(self) -> int:
        """The parts of a step that follow each other."""
        return self.accumulation * self.microbatches

    @property
    def chunks(self) -> int:
        """The pieces of a row that attention tells apart."""
        return 2 * self.context if self.zigzag else self.context

    def cells(self, global_size: int) -> np.ndarray:
        """Lists the rows of each part and batch shard, [parts, shards, G / (parts x
        shards)].
        """
        # Row = shard, then place in the shard, microbatch, accumulation: parts take
        # every so-manieth row.
        shape = (self.batch_shards, -1, self.microbatches, self.accumulation)
        rows = np.arange(global_size).reshape(shape)
        return rows.transpose(3, 2, 0, 1).reshape(self.parts, self.batch_shards, -1)

    def on_devices(self, work: np.ndarray) -> np.ndarray:
        """Adds up the work of rows' chunks [G, chunks] by device of the context axis,
        [G, n].
        """
        if not self.zigzag:
            return work
        return work[:, : self.context] + work[:, self.context :][:, ::-1]


def balanced_order(work: np.ndarray, grid: StepGrid) -> np.ndarray:
    """Chooses the row of the batch for each place, [G], so that cells have even work
    [G].

    The longest rows first, each to the cell that has the least work and still room (LPT
    with equal counts; Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    Shards wait for each other in each part, so cells of like work then make up a part;
    of these the shard with least work so far takes the one with most.
    """
    if work.min() == work.max():
        return np.arange(len(work))
    cells = grid.cells(len(work))
    parts, shards, room = cells.shape
    rows = np.array(_even_groups(work, parts * shards, room))
    loads = work[rows].sum(1)
    most_first = np.argsort(-loads, kind="stable").reshape(parts, shards)
    order = np.empty(len(work), np.int64)
    so_far = np.zeros(shards, np.int64)  # work of each shard
    for part, groups in enumerate(most_first):
        least_first = np.argsort(so_far, kind="stable")
        so_far[least_first] += loads[groups]
        order[cells[part, least_first]] = np.sort(rows[groups], axis=1)
    return order


def _even_groups(work: np.ndarray, count: int, room: int) -> list[list[int]]:
    """Groups rows into `count` groups of `room` rows with like work."""
    least = [(0, group) for group in range(count)]  # a heap
    groups: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-work, kind="stable").tolist():
        load, group = heapq.heappop(least)
        groups[group].append(row)
        if len(groups[group]) < room:
            heapq.heappush(least, (load + int(work[row]), group))
    return groups


def imbalance(work: np.ndarray, grid: StepGrid) -> dict[str, float]:
    """Measures how uneven the attention work of a step is, by name of the metric; 1 =
    even.

    Args:
      work: of the rows' chunks, in their places, [G, chunks].
    """
    # [parts, shards, context]
    devices = grid.on_devices(work)[grid.cells(len(work))].sum(2)
    cells = devices.sum(2)
    metrics = {
        "attention_imbalance": cells.max() / cells.mean(),  # the fullest cell
        # parts wait for their fullest shard
        "attention_slowdown": cells.max(1).sum() / cells.mean(1).sum(),
    }
    if grid.context > 1:
        of_context = devices.max(2).sum() / devices.mean(2).sum()
        metrics["attention_imbalance_context"] = of_context
    return {name: float(value) for name, value in metrics.items()}


class Balancer:
    """The places of the rows of a run's batches, a function of the step alone, and how
    even their work is.
    """

    def __init__(
        self, dataset: Dataset, global_size: int, grid: StepGrid, *, balanced: bool
    ) -> None:
        """Makes a balancer of batches of G rows.

        Args:
          balanced: whether rows change places; else the metrics are of the batches as
            they are.
        """
        self._dataset = dataset
        self._size = global_size
        self._grid = grid
        self._balanced = balanced

    def order(self, step: int) -> np.ndarray:
        """Chooses the row of the global batch of `step` for each place, [G]."""
        work = None
        if self._balanced:
            work = self._dataset.attention_work(step, self._size)
        if work is None:
            return np.arange(self._size)
        return balanced_order(work[:, 0], self._grid)

    def metrics(self, step: int) -> dict[str, float]:
        """Measures the `imbalance` of the batch of `step`; nothing where all rows need
        the same work.
        """
        work = self._work(step)
        if work is None:
            return {}
        return imbalance(work[self.order(step)], self._grid)

    def _work(self, step: int) -> np.ndarray | None:
        """Counts the work of the rows' chunks, [G, chunks]; None: it is even."""
        work = self._dataset.attention_work(step, self._size, self._grid.chunks)
        return work if work is not None and work.any() else None

    def lines(self) -> list[str]:
        """Writes a line for people: the means of the first steps, as they are and as
        they could be.
        """
        steps: dict[str, list[dict[str, float]]] = {"none": [], "attention": []}
        for step in range(_SAMPLE_STEPS):
            work = self._work(step)
            if work is not None:
                order = balanced_order(work.sum(1), self._grid)
                steps["none"].append(imbalance(work, self._grid))
                steps["attention"].append(imbalance(work[order], self._grid))
        count = len(steps["none"])
        if not count:
            return []
        now, other = ("attention", "none") if self._balanced else ("none", "attention")
        means = _means(steps[now])
        others = _means(steps[other])
        parts = self._grid.parts
        shards = self._grid.batch_shards
        of_context = ""
        if self._grid.context > 1:
            value = means["attention_imbalance_context"]
            of_context = f", {value:.2f} of context shards"
        return [
            f"attention work, largest over mean (first {count} steps): "
            f"{means['attention_imbalance']:.2f} of {parts * shards} microbatches "
            f"({parts} x {shards} batch shards), {means['attention_slowdown']:.2f} "
            f"where shards wait for each other{of_context} "
            f"(data.balance={other}: {others['attention_imbalance']:.2f}, "
            f"{others['attention_slowdown']:.2f})"
        ]


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
