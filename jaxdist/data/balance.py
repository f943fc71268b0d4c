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
        """Returns the rows of each part and batch shard, [parts, shards, G / (parts x
        shards)].
        """
        # Row = shard, then place in the shard, microbatch, accumulation: parts take
        # every so-manieth row.
        shape = (self.batch_shards, -1, self.microbatches, self.accumulation)
        rows = np.arange(global_size).reshape(shape)
        return rows.transpose(3, 2, 0, 1).reshape(self.parts, self.batch_shards, -1)

    def on_devices(self, work: np.ndarray) -> np.ndarray:
        """Returns the work of rows' chunks [G, chunks] as that of a context axis of n
        devices, [G, n].
        """
        return (
            work[:, : self.context] + work[:, self.context :][:, ::-1]
            if self.zigzag
            else work
        )


def balanced_order(work: np.ndarray, grid: StepGrid) -> np.ndarray:
    """Returns which row of the batch goes to each place, [G], so that cells have even
    work [G].

    The longest rows first, each to the cell that has the least work and still room (LPT
    with equal counts; Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    Shards wait for each other in each part, so cells of like work then make up a part;
    of these the shard with least work so far takes the one with most.
    """
    cells = grid.cells(len(work))
    count, room = cells.shape[0] * cells.shape[1], cells.shape[2]
    if work.min() == work.max():
        return np.arange(len(work))
    least = [(0, cell) for cell in range(count)]  # a heap
    rows: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-work, kind="stable").tolist():
        load, cell = heapq.heappop(least)
        rows[cell].append(row)
        if len(rows[cell]) < room:
            heapq.heappush(least, (load + int(work[row]), cell))
    loads = work[np.array(rows)].sum(1)
    most_first = np.argsort(-loads, kind="stable").reshape(cells.shape[:2])
    order, so_far = np.empty(len(work), np.int64), np.zeros(grid.batch_shards, np.int64)
    for part, members in enumerate(most_first):
        shards = np.argsort(so_far, kind="stable")
        so_far[shards] += loads[members]
        order[cells[part, shards]] = np.sort(np.array(rows)[members], axis=1)
    return order


def imbalance(work: np.ndarray, grid: StepGrid) -> dict[str, float]:
    """Returns how uneven the attention work of a step is, by name of the metric; 1 =
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
        metrics["attention_imbalance_context"] = (
            devices.max(2).sum() / devices.mean(2).sum()
        )
    return {name: float(value) for name, value in metrics.items()}


class Balancer:
    """The places of the rows of a run's batches, a function of the step alone, and how
    even their work is.
    """

    def __init__(
        self, dataset: Dataset, global_size: int, grid: StepGrid, *, balanced: bool
    ):
        """Args:
        balanced: whether rows change places; else the metrics are of the batches as
        they are.
        """
        self._dataset, self._size, self._grid, self._balanced = (
            dataset,
            global_size,
            grid,
            balanced,
        )

    def order(self, step: int) -> np.ndarray:
        """Returns which row of the global batch of `step` goes to each place, [G]."""
        work = (
            self._dataset.attention_work(step, self._size) if self._balanced else None
        )
        return (
            np.arange(self._size)
            if work is None
            else balanced_order(work[:, 0], self._grid)
        )

    def metrics(self, step: int) -> dict[str, float]:
        """Returns `imbalance` of the batch of `step`; nothing where all rows need the
        same work.
        """
        work = self._dataset.attention_work(step, self._size, self._grid.chunks)
        return (
            {}
            if work is None or not work.any()
            else imbalance(work[self.order(step)], self._grid)
        )

    def lines(self) -> list[str]:
        """Returns a line for people: the means of the first steps, as they are and as
        they could be.
        """
        steps = range(_SAMPLE_STEPS)
        work = [
            self._dataset.attention_work(step, self._size, self._grid.chunks)
            for step in steps
        ]
        known = [x for x in work if x is not None and x.any()]
        if not known:
            return []
        orders = [balanced_order(x.sum(1), self._grid) for x in known]
        before = _means([imbalance(x, self._grid) for x in known])
        after = _means(
            [
                imbalance(x[order], self._grid)
                for x, order in zip(known, orders, strict=True)
            ]
        )
        now, then = (after, before) if self._balanced else (before, after)
        other = "none" if self._balanced else "attention"
        parts, shards = self._grid.parts, self._grid.batch_shards
        return [
            f"attention work, largest over mean (first {len(known)} steps): "
            f"{now['attention_imbalance']:.2f} of {parts * shards} microbatches ({parts} x {shards} batch "
            f"shards), {now['attention_slowdown']:.2f} where shards wait for each other{_of_context(now)} "
            f"(data.balance={other}: {then['attention_imbalance']:.2f}, {then['attention_slowdown']:.2f})"
        ]


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def _of_context(means: dict[str, float]) -> str:
    value = means.get("attention_imbalance_context")
    return "" if value is None else f", {value:.2f} of context shards"
