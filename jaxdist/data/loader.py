"""Loader of batches onto devices, with a thread that reads ahead.

Every process reads only the rows that its devices hold. Shapes: G rows of the global
batch, S sequence length.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import Sharding

from jaxdist.data.balance import Balancer
from jaxdist.data.dataset import Dataset
from jaxdist.data.packing import Batch

DeviceBatch = dict[str, jax.Array]


class Placer:
    """Placement of the rows of global batches on devices.

    Some arrays of a batch are the same read-only object in each batch, such as constant
    weights and positions. Their device copies are reused, so a step must not donate its
    batch.
    """

    def __init__(self, shardings: Mapping[str, Sharding], global_size: int) -> None:
        """Finds the rows of this process.

        Args:
          shardings: {name of an entry: its sharding}. Dim 0 is the row.
          global_size: rows of a global batch, G.
        """
        self._shardings = shardings
        self._size = global_size
        # {name: (read-only host array, its device copy)}
        self._kept: dict[str, tuple[np.ndarray, jax.Array]] = {}
        # `rows` are the rows of the global batch that this process reads, ascending.
        # `_local_row` [G] is the position of a row among them.
        self.rows = _local_rows(next(iter(shardings.values())), global_size)
        self._local_row = np.zeros(global_size, np.int64)
        self._local_row[self.rows] = np.arange(len(self.rows))

    def __call__(self, batch: Batch) -> DeviceBatch:
        """Makes global arrays of the rows `self.rows`."""
        kept = {
            name: array
            for name, (host, array) in self._kept.items()
            if batch.get(name) is host
        }
        new = {name: values for name, values in batch.items() if name not in kept}
        placed = {
            name: self._assemble(values, self._shardings[name])
            for name, values in new.items()
        }
        for name, array in placed.items():
            if not new[name].flags.writeable:
                self._kept[name] = new[name], array
        return kept | placed

    def _assemble(self, values: np.ndarray, sharding: Sharding) -> jax.Array:
        """Makes a global array of this process's rows."""

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            rows, *others = index or (slice(None),)
            return values[self._local_row[rows]][(slice(None), *others)]

        return jax.make_array_from_callback(
            (self._size, *values.shape[1:]), sharding, shard
        )


def _local_rows(sharding: Sharding, global_size: int) -> np.ndarray:
    """Lists the rows of [G, ...] that devices of this process hold, ascending."""
    # A sharding only says which rows a device holds for a given shape. Dim 1 may be
    # split, too (the sequence), and its size must be divisible by the number of shards.
    # The real size is unknown here and does not affect the rows. The number of devices
    # is divisible by each possible number of shards, so it stands for the real size.
    shape = (global_size, len(sharding.device_set))
    held = np.zeros(global_size, bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        held[index[0] if index else slice(None)] = True
    return np.flatnonzero(held)


class Loader(Iterator[DeviceBatch], AbstractContextManager["Loader", None]):
    """Iterator over device batches, which a thread prepares ahead.

    Training batches start at any step and never end. Held-out batches end after the
    last one. Use the loader as a context manager, or call `close`. `data_wait_s` is the
    total time that `next` has waited.
    """

    def __init__(
        self,
        source: Dataset,
        *,
        global_size: int,
        shardings: Mapping[str, Sharding],
        split: str = "train",
        start: int = 0,
        prefetch: int = 2,
        balancer: Balancer | None = None,
    ) -> None:
        """Starts to read ahead.

        Args:
          source: dataset to read.
          global_size: rows per batch, G.
          shardings: {name of an entry: its sharding}.
          split: "train" or "validation".
          start: first step (updates finished before it), or first held-out batch.
          prefetch: largest number of batches that are ready ahead. 0 reads in the
            caller, without a thread.
          balancer: reorders the rows of training batches. None keeps their order.

        Raises:
          ConfigError: the split is "validation", and no whole batch is held out.
        """
        self._read: Callable[..., Batch] = source.train_batch
        self._stop = sys.maxsize
        if split != "train":
            self._read = source.validation_batch
            self._stop = source.num_validation_batches(global_size)
        self._name = source.name
        self._size = global_size
        self.balancer = balancer
        self._placer = Placer(shardings, global_size)
        self.step = start  # the step whose batch `next` returns
        self.data_wait_s = 0.0
        self._closed = False
        # batches of `self.step` and of the steps after it
        self._ahead: deque[Future[DeviceBatch]] = deque()
        self._thread = None
        if prefetch:
            self._thread = ThreadPoolExecutor(1, f"jaxdist-{split}-data")
        self._prefetch = prefetch
        self._fill()

    def _fill(self) -> None:
        """Submits steps to the thread, up to `prefetch` ahead."""
        end = min(self.step + self._prefetch, self._stop)
        for step in range(self.step + len(self._ahead), end):
            assert self._thread
            self._ahead.append(self._thread.submit(self._make, step))

    def _make(self, step: int) -> DeviceBatch:
        rows = self._placer.rows
        if self.balancer:
            rows = self.balancer.order(step)[rows]
        return self._placer(self._read(step, self._size, rows))

    def __next__(self) -> DeviceBatch:
        """Takes the next batch.

        Raises:
          StopIteration: after the last held-out batch.
          SourceError: reading failed. The error names the source and the sample.
          RuntimeError: after `close`, or after any error.
        """
        if self._closed:
            raise RuntimeError(f"the loader of {self._name} is closed")
        if self.step >= self._stop:
            raise StopIteration
        begin_s = time.perf_counter()
        try:
            if self._thread:
                batch = self._ahead.popleft().result()
            else:
                batch = self._make(self.step)
        except BaseException:
            self.close()
            raise
        self.data_wait_s += time.perf_counter() - begin_s
        self.step += 1
        self._fill()
        return batch

    def close(self) -> None:
        """Ends the thread and drops the prepared batches. It may be called again."""
        self._closed = True
        self._ahead.clear()
        if self._thread:
            self._thread.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()
