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

# Small batches are made in groups: to hand over a batch from thread to thread costs more
# than to make it. A group has at most so many batches, and so many bytes.
_GROUP = 16
_GROUP_BYTES = 1 << 16
_GROUP_S = 0.05  # a slow source's batches are handed over one by one


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
          prefetch: largest number of batches, or of groups of small batches, that are
            ready ahead. 0 reads in the caller, without a thread.
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
        # Steps of a user's function or iterable are asked for one by one.
        self._groups = split != "train" or source.any_step
        self._group = 1  # number of batches in the next group
        # batches of `self.step` and of the steps after it that have been taken over
        # from the thread; an error stands for the batch that could not be made
        self._ready: deque[DeviceBatch | BaseException] = deque()
        # the groups after them, and the step after the last of them
        self._ahead: deque[Future[list[DeviceBatch | BaseException]]] = deque()
        self._ahead_end = start
        self._thread = None
        if prefetch:
            self._thread = ThreadPoolExecutor(1, f"jaxdist-{split}-data")
        self._prefetch = prefetch
        self._fill()

    def _fill(self) -> None:
        """Submits groups of steps to the thread, up to `prefetch` ahead."""
        while len(self._ahead) < self._prefetch and self._ahead_end < self._stop:
            assert self._thread
            steps = range(self._ahead_end, self._ahead_end + self._group)
            self._ahead.append(self._thread.submit(self._make_group, steps))
            self._ahead_end = steps.stop

    def _make_group(self, steps: range) -> list[DeviceBatch | BaseException]:
        """Makes the batches of some steps, up to the first error."""
        made: list[DeviceBatch | BaseException] = []
        for step in steps:
            if self._closed or step >= self._stop:
                break
            try:
                made.append(self._make(step))
            except BaseException as error:  # raised for its step, not for the first one
                made.append(error)
                break
        return made

    def _make(self, step: int) -> DeviceBatch:
        rows = self._placer.rows
        if self.balancer:
            rows = self.balancer.order(step)[rows]
        began = time.perf_counter()
        batch = self._read(step, self._size, rows)
        if self._groups:
            seconds = time.perf_counter() - began
            num_bytes = sum(values.nbytes for values in batch.values())
            most = min(
                _GROUP_BYTES // max(num_bytes, 1), int(_GROUP_S / max(seconds, 1e-9))
            )
            self._group = max(1, min(_GROUP, most))
        return self._placer(batch)

    def _take(self) -> DeviceBatch:
        """Takes the batch of `self.step`, and waits for it if it is not ready."""
        if not self._thread:
            return self._make(self.step)
        if not self._ready:
            self._ready.extend(self._ahead.popleft().result())
        batch = self._ready.popleft()
        if isinstance(batch, BaseException):
            raise batch
        return batch

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
            batch = self._take()
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
        self._ready.clear()
        self._ahead.clear()
        if self._thread:
            self._thread.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()
