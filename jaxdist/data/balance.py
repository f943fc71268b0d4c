"""Balance of attention work over microbatches and batch shards of packed rows.

A row of one document of S tokens needs S times the attention of a row of S documents.
Balancing permutes the rows of a batch, so the sums of a step change only in their
order.

Work is counted in pairs of tokens of the same document, a query and a key that is not
after it. Full causal attention computes these pairs. All work that is linear in tokens
is even in any order.

Shapes: G rows of the global batch, n pieces of a row over the context axis.
"""

import heapq
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from jaxdist.data.dataset import Dataset

_SAMPLE_STEPS = 16  # number of first steps whose mean is logged


@dataclass(frozen=True)
class StepGrid:
    """Partition of a step's global batch, as in `jaxdist.step.batch_parts.split`."""

    accumulation: int
    # microbatches of a pipeline in each accumulation step; 1 without a pipeline
    microbatches: int
    batch_shards: int
    # devices over which the queries of a row are split; 1 = each device has whole rows
    context: int = 1
    # whether device i has the chunks i and 2 context - 1 - i of 2 context chunks;
    # otherwise it has chunk i of context chunks
    zigzag: bool = False

    @property
    def total_microbatches(self) -> int:
        """The product accumulation x microbatches of a step's batch."""
        return self.accumulation * self.microbatches

    @property
    def chunks(self) -> int:
        """The number of pieces of a row whose work is counted separately."""
        return 2 * self.context if self.zigzag else self.context

    def cells(self, global_size: int) -> np.ndarray:
        """Lists the rows of each cell, a batch shard of a microbatch.

        Returns:
          [M, shards, G / (M x shards)], for M microbatches in all.
        """
        # A row number has the digits shard, place in the cell, microbatch,
        # accumulation: adjacent rows of a shard are in different microbatches.
        shape = (self.batch_shards, -1, self.microbatches, self.accumulation)
        rows = np.arange(global_size).reshape(shape)
        return rows.transpose(3, 2, 0, 1).reshape(
            self.total_microbatches, self.batch_shards, -1
        )

    def on_devices(self, work: np.ndarray) -> np.ndarray:
        """Adds up the work of chunks by device of the context axis.

        Args:
          work: [G, chunks].

        Returns:
          [G, n].
        """
        if not self.zigzag:
            return work
        mirrored = work[:, self.context :][:, ::-1]
        by_device: np.ndarray = work[:, : self.context] + mirrored
        return by_device


def balanced_order(work: np.ndarray, grid: StepGrid) -> np.ndarray:
    """Permutes the rows of a batch so that its cells have even work.

    Rows are placed from the longest to the shortest. Each goes to the cell with the
    least work that has room. This is LPT with equal counts (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969).

    Shards wait for each other in each part, so cells of similar work form a part.
    Within a part, the shard with the least work so far gets the cell with the most.

    Args:
      work: work of each row [G].
      grid: partition of the batch.

    Returns:
      The row of the batch for each place [G].
    """
    if work.min() == work.max():
        return np.arange(len(work))
    cells = grid.cells(len(work))
    parts, shards, room = cells.shape
    rows = np.array(_even_groups(work, parts * shards, room))
    loads = work[rows].sum(1)
    most_first = np.argsort(-loads, kind="stable").reshape(parts, shards)
    order = np.empty(len(work), np.int64)
    shard_loads = np.zeros(shards, np.int64)
    for part, groups in enumerate(most_first):
        least_first = np.argsort(shard_loads, kind="stable")
        shard_loads[least_first] += loads[groups]
        order[cells[part, least_first]] = np.sort(rows[groups], axis=1)
    return order


def _even_groups(work: np.ndarray, count: int, room: int) -> list[list[int]]:
    """Groups rows into `count` groups of `room` rows with similar work."""
    heap = [(0, group) for group in range(count)]  # (load, group) with room
    groups: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-work, kind="stable").tolist():
        load, group = heapq.heappop(heap)
        groups[group].append(row)
        if len(groups[group]) < room:
            heapq.heappush(heap, (load + int(work[row]), group))
    return groups


def imbalance(work: np.ndarray, grid: StepGrid) -> dict[str, float]:
    """Measures how uneven the attention work of a step is; 1 = even.

    Args:
      work: work of the rows' chunks, in the order of the batch, [G, chunks].
      grid: partition of the batch.

    Returns:
      {name of the metric: value}.
    """
    # [parts, shards, context]
    devices = grid.on_devices(work)[grid.cells(len(work))].sum(2)
    cells = devices.sum(2)
    metrics = {
        # the cell with the most work
        "attention_imbalance": cells.max() / cells.mean(),
        # each part waits for the shard with the most work
        "attention_slowdown": cells.max(1).sum() / cells.mean(1).sum(),
    }
    if grid.context > 1:
        context_imbalance = devices.max(2).sum() / devices.mean(2).sum()
        metrics["attention_imbalance_context"] = context_imbalance
    return {name: float(value) for name, value in metrics.items()}


class Balancer:
    """Measures how even the work of a run's batches is, and may permute their rows.

    It always measures, and permutes only if `balanced` is set. The order is a function
    of the step, the data and the layout. So all processes compute the same order.
    """

    def __init__(
        self, dataset: Dataset, global_size: int, grid: StepGrid, *, balanced: bool
    ) -> None:
        """Makes a balancer for the batches of a dataset.

        Args:
          dataset: dataset of the run.
          global_size: rows of a batch, G.
          grid: partition of a batch.
          balanced: whether rows are permuted. Otherwise only the metrics are computed.
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
        """Measures the `imbalance` of the batch of `step`; {} if all work is even."""
        work = self._work(step)
        if work is None:
            return {}
        return imbalance(work[self.order(step)], self._grid)

    def _work(self, step: int) -> np.ndarray | None:
        """Counts the work of the rows' chunks, [G, chunks]; None if it is even."""
        work = self._dataset.attention_work(step, self._size, self._grid.chunks)
        if work is None or not work.any():
            return None
        return work

    def lines(self) -> list[str]:
        """Formats a line about the mean imbalance of the first steps.

        It compares the order of the run with the other order.
        """
        plain = []
        balanced = []
        for step in range(_SAMPLE_STEPS):
            work = self._work(step)
            if work is not None:
                order = balanced_order(work.sum(1), self._grid)
                plain.append(imbalance(work, self._grid))
                balanced.append(imbalance(work[order], self._grid))
        count = len(plain)
        if not count:
            return []
        means = _means(balanced if self._balanced else plain)
        other_means = _means(plain if self._balanced else balanced)
        alternative = "none" if self._balanced else "attention"
        parts = self._grid.total_microbatches
        shards = self._grid.batch_shards
        context_text = ""
        if self._grid.context > 1:
            value = means["attention_imbalance_context"]
            context_text = f", {value:.2f} of context shards"
        return [
            f"attention work, largest over mean (first {count} steps): "
            f"{means['attention_imbalance']:.2f} of {parts * shards} microbatches "
            f"({parts} x {shards} batch shards), {means['attention_slowdown']:.2f} "
            f"where shards wait for each other{context_text} "
            f"(data.balance={alternative}: {other_means['attention_imbalance']:.2f}, "
            f"{other_means['attention_slowdown']:.2f})"
        ]


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
