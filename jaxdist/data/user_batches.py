"""Batches that a caller hands over: arrays, a function of the step, or an iterable, as a dataset.

Shapes: N samples, G global batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import arrays
from jaxdist.data.arrays import INDEX, ArrayRows
from jaxdist.data.dataset import SAMPLE_MASK, Dataset, SourceError, array_splits
from jaxdist.data.packing import Batch
from jaxdist.storage.digest import digest

Batches = Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | Iterable[Mapping[str, Any]]
DEFAULT_SIZE = 32  # samples a step, where arrays are given and no size


def open_user_batches(
    batches: Batches, *, size: int | None = None, validation: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[UserDataset, int]:
    """Returns a dataset of what was given, and the samples of a global batch.

    Args:
      batches: {entry: [N, ...]}, whose order is ours; or a function from the step (updates finished, from
        0) to its global batch {entry: [G, ...]}; or an iterable of global batches, begun anew where it
        ends, if it can be.
      size: G; default: that of the first batch, for arrays DEFAULT_SIZE.
      validation: {entry: [N, ...]}, held out.

    Raises:
      ConfigError: every fault of the arrays, or of the first batch.
    """
    compute: Callable[[int], Any] | None = None
    if isinstance(batches, Mapping):
        rows = _checked("batches", batches)
        train, fingerprint = ArrayRows(rows, np.arange(arrays.count_of(rows))), _contents(rows)
        size = size or DEFAULT_SIZE
    elif callable(batches) or isinstance(batches, Iterable):
        compute = batches if callable(batches) else _Iterated(batches)
        try:
            rows = _converted("batches: the first", compute(0))
        except SourceError as error:
            raise ConfigError(str(error)) from error
        train, count = ArrayRows({}, np.arange(1)), arrays.count_of(rows)
        fingerprint = _contents(rows) if callable(batches) else digest(arrays.describe_samples(rows))
        if size not in (None, count):
            raise ConfigError(f"batch_size={size}: the batches have {count} samples; leave it out")
        size = count
    else:
        raise ConfigError(
            f"batches: {type(batches).__name__}; required a dict of arrays [N, ...], a function from the "
            f"step to a batch, or an iterable of batches"
        )
    held: dict[str, np.ndarray] = {} if validation is None else _checked("validation", validation)
    ours, theirs = (arrays.describe_samples(_without_index(x)) for x in (rows, held))
    if held and ours != theirs:
        raise ConfigError(f"validation: a sample has {theirs}; in batches {ours}")
    sides = array_splits("batches", train, ArrayRows(held, np.arange(arrays.count_of(held))))
    return UserDataset([sides], seed=seed, fingerprint=fingerprint, compute=compute, example=rows), size


class UserDataset(Dataset):
    """A dataset whose training batches may come whole from a source, in its order."""

    def __init__(self, *args: Any, compute: Callable[[int], Any] | None, example: Batch, **options: Any):
        super().__init__(*args, **options)
        self.samples = arrays.describe_samples(_without_index(example))  # as `data.path` has it
        self._compute, self._first = compute, example

    def train_batch(self, step: int, global_size: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Returns rows of a global batch, see Dataset.

        Raises:
          SourceError: the batch has other entries, dims or dtypes than the first, or there is none.
        """
        if self._compute is None:
            return super().train_batch(step, global_size, rows)
        batch = self._first if step == 0 else self._computed(step, self._compute(step))
        numbers = ((step * global_size + np.arange(global_size)) & SAMPLE_MASK).astype(np.int32)
        return {name: values[rows] for name, values in ({INDEX: numbers} | batch).items()}

    def _computed(self, step: int, batch: Any) -> Batch:
        """Returns the batch after `step` updates, checked."""
        name = f"batches: the one after {step} updates"
        try:
            converted = _converted(name, batch)
        except ConfigError as error:
            raise SourceError(str(error)) from error
        this, first = (
            f"{arrays.count_of(x)} x {arrays.describe_samples(x)}" for x in (converted, self._first)
        )
        if this != first:
            raise SourceError(f"{name} has {this}; the first {first}, and all must be alike")
        return converted


class _Iterated:
    """An iterable's batches as a function of the step; those before it are passed over."""

    def __init__(self, batches: Iterable[Any]):
        self._batches, self._iterator = batches, iter(())
        self._next = 0  # of the batch that the iterator gives

    def __call__(self, step: int) -> Any:
        if step == 0 or step < self._next:
            if not self._restart():
                raise SourceError(
                    f"batches: the iterator cannot go back to the batch after {step} updates; give an "
                    f"iterable that can be begun anew, or a function of the step"
                )
            self._next = 0
        batch = None
        while self._next <= step:
            batch = next(self._iterator, None)
            if batch is None and self._restart():
                batch = next(self._iterator, None)
            if batch is None:
                why = f"the iterator ended after {self._next} batches; give more or lower steps"
                raise SourceError(f"batches: {why}")
            self._next += 1
        return batch

    def _restart(self) -> bool:
        """Begins anew, where the iterable can; returns whether it can."""
        before, self._iterator = self._iterator, iter(self._batches)
        return self._iterator is not before


def _checked(what: str, batch: Any, *, whole: bool = False) -> dict[str, np.ndarray]:
    """Returns a batch as numpy arrays; a `whole` one may bring its own sample numbers.

    Raises:
      ConfigError: every fault.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(f"{what}: {type(batch).__name__}; required a dict of arrays, e.g. dict(x=x, y=y)")
    checked = {str(name): np.asarray(values) for name, values in batch.items()}
    faults = arrays.faults_of(_without_index(checked) if whole else checked)
    faults += [f"{name} exceeds int32" for name in arrays.beyond_int32(checked)]
    if faults:
        raise ConfigError(f"{what}: {fault}" for fault in faults)
    return checked


def _converted(what: str, batch: Any) -> Batch:
    """Returns a whole batch as batches hold it."""
    checked = _checked(what, batch, whole=True)
    return {name: arrays.converted(name, values) for name, values in checked.items()}


def _without_index(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in batch.items() if name != INDEX}


def _contents(batch: Mapping[str, np.ndarray]) -> str:
    """Returns a hash of values, cheap enough for gigabytes."""
    sums = (zlib.crc32(np.ascontiguousarray(x).view(np.uint8).ravel().data) for x in batch.values())
    return digest(arrays.describe_samples(batch), arrays.count_of(batch), *sums)
