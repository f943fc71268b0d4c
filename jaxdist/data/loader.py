"""Batches on devices: a thread reads ahead, every process reads only the rows its devices hold.

Shapes: G global batch, S sequence length.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jaxdist.data.dataset import SourceError
from jaxdist.data.windows import Batch

DeviceBatch = dict[str, jax.Array]
Shardings = Mapping[str, Sharding] | Callable[[str, int], Sharding]


class BatchSource(Protocol):
    """What a Loader reads from: jaxdist.data.Dataset, or anything like it."""

    name: str

    def train_batch(self, step: int, global_size: int, rows: slice | np.ndarray) -> Batch:
        """Returns the rows `rows` of the global batch of `step`; see Dataset.train_batch."""

    def num_validation_batches(self, global_size: int) -> int:
        """Returns the number of held-out batches."""

    def validation_batch(self, number: int, global_size: int, rows: slice | np.ndarray) -> Batch:
        """Returns the rows `rows` of held-out batch `number`."""


class Placer:
    """Puts the rows of global batches on devices.

    Arrays that are the same object as in the batch before (constant weights, positions) keep their
    device copy, so a step must not donate its batch.
    """

    def __init__(
        self, shardings: Shardings, global_size: int, *, split_reading: bool | None = None
    ):
        """Args:
        shardings: by entry name, or a function of (name, number of dims); dim 0 is the sample.
        global_size: G.
        split_reading: read only the rows of local devices. None: where some devices are not local.
        """
        self._shardings, self._size = shardings, global_size
        self._split = jax.process_count() > 1 if split_reading is None else split_reading
        self._chosen: dict[str, Sharding] = {}
        self._kept: dict[str, tuple[np.ndarray, jax.Array]] = {}
        self._local_row: np.ndarray | None = None  # [G] position among the rows read here
        self.rows: slice | np.ndarray = slice(None)  # of the global batch that this process reads
        if self._split:
            self.rows = _local_rows(self._sharding("tokens", 2), global_size)
            self._local_row = np.zeros(global_size, np.int64)
            self._local_row[self.rows] = np.arange(len(self.rows))

    def __call__(self, batch: Batch) -> DeviceBatch:
        """Returns global arrays made of the rows `self.rows`."""
        new = {name: values for name, values in batch.items() if not self._is_kept(name, values)}
        placed = self._place(new)
        for name, array in placed.items():
            if not batch[name].flags.writeable:
                self._kept[name] = batch[name], array
        return {name: placed[name] if name in placed else self._kept[name][1] for name in batch}

    def _is_kept(self, name: str, values: np.ndarray) -> bool:
        return name in self._kept and self._kept[name][0] is values

    def _place(self, batch: Batch) -> DeviceBatch:
        shardings = {name: self._sharding(name, values.ndim) for name, values in batch.items()}
        if not self._split:
            return jax.device_put(batch, shardings)
        return {name: self._assemble(values, shardings[name]) for name, values in batch.items()}

    def _assemble(self, values: np.ndarray, sharding: Sharding) -> jax.Array:
        assert self._local_row is not None
        local_row = self._local_row

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            rows, *others = index or (slice(None),)
            return values[(local_row[rows], *others)]  # type: ignore[arg-type]

        return jax.make_array_from_callback((self._size, *values.shape[1:]), sharding, shard)

    def _sharding(self, name: str, ndim: int) -> Sharding:
        if name not in self._chosen:
            given = self._shardings
            self._chosen[name] = given(name, ndim) if callable(given) else given[name]
        return self._chosen[name]


def _local_rows(sharding: Sharding, global_size: int) -> np.ndarray:
    """Returns the rows of [G, ...] that devices of this process hold, ascending."""
    # The second dim only has to divide: no sequence is split over more devices than there are.
    shape = (global_size, len(sharding.device_set))
    held = np.zeros(global_size, bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        held[index[0] if index else slice(None)] = True
    return np.flatnonzero(held)


class Loader:
    """Iterates over device batches, prepared ahead by a thread.

    Training batches start at any step and never end; held-out batches end after the last. Use as a
    context manager, or call `close`. `data_wait_s` adds up the time that `next` waited.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        global_size: int,
        shardings: Shardings,
        split: str = "train",
        start: int = 0,
        prefetch: int = 2,
        split_reading: bool | None = None,
    ):
        """Args:
        source: a Dataset.
        global_size: G, sequences per batch.
        shardings, split_reading: see Placer.
        split: "train" or "validation".
        start: first step (updates finished before it), or first held-out batch.
        prefetch: batches ready at most; 0 = read in the caller, no thread.

        Raises:
          ConfigError: for validation, where nothing is held out.
        """
        training = split == "train"
        self._read = source.train_batch if training else source.validation_batch
        self._stop = None if training else source.num_validation_batches(global_size)
        self._name, self._size, self._split = source.name, global_size, split
        self._placer = Placer(shardings, global_size, split_reading=split_reading)
        self.step = start  # of the batch that `next` returns
        self.data_wait_s = 0.0
        self._closed = threading.Event()
        self._ready: queue.Queue[DeviceBatch | BaseException] = queue.Queue(max(prefetch, 1))
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(
                target=self._work, args=(start,), name=f"jaxdist-{split}-data", daemon=True
            )
            self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        """Returns the next batch.

        Raises:
          StopIteration: after the last held-out batch.
          SourceError: naming the source and the step, where reading failed.
          RuntimeError: after `close`.
        """
        if self._closed.is_set():
            raise RuntimeError(f"the loader of {self._name} is closed")
        if self._stop is not None and self.step >= self._stop:
            raise StopIteration
        begin_s = time.perf_counter()
        batch = self._take() if self._thread else self._make(self.step)
        self.data_wait_s += time.perf_counter() - begin_s
        if isinstance(batch, BaseException):
            self.close()
            raise batch
        self.step += 1
        return batch

    def close(self) -> None:
        """Ends the thread and drops what it prepared; may be called again."""
        self._closed.set()
        while self._thread and self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.01)
        self._drain()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, step: int) -> DeviceBatch | BaseException:
        """Returns the batch of `step`, or the error that says which source failed, and where."""
        try:
            return self._placer(self._read(step, self._size, self._placer.rows))
        except Exception as cause:
            error = SourceError(
                f"no {self._split} batch {step} from data source {self._name}: "
                f"{type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
            return error

    def _work(self, step: int) -> None:
        while not self._closed.is_set() and (self._stop is None or step < self._stop):
            batch = self._make(step)
            self._put(batch)
            if isinstance(batch, BaseException):
                return
            step += 1

    def _put(self, batch: DeviceBatch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._ready.put(batch, timeout=0.2)
            except queue.Full:
                continue

    def _take(self) -> DeviceBatch | BaseException:
        assert self._thread is not None
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    return SourceError(f"the reading thread of data source {self._name} died")

    def _drain(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()
