"""Batches that a caller hands over: arrays, a function of the step, or an iterable, as a dataset.

Shapes: N samples, G global batch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import arrays
from jaxdist.data.arrays import INDEX, ArrayHeader, ArrayRows
from jaxdist.data.dataset import Dataset, DatasetSplit, SourceError
from jaxdist.data.packing import Batch
from jaxdist.storage.digest import digest

Batches = Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | Iterable[Mapping[str, Any]]
DEFAULT_SIZE = 32  # samples a step, where arrays are given and no size


def open_given(
    batches: Batches, *, size: int | None = None, validation: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[GivenBatches, int]:
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
    source: _Computed | None = None
    if isinstance(batches, Mapping):
        rows = _checked("batches", batches)
        train, fingerprint = ArrayRows(rows, np.arange(_count(rows))), _contents(rows)
        size = size or DEFAULT_SIZE
    elif callable(batches) or isinstance(batches, Iterable):
        source = _Computed(batches) if callable(batches) else _Iterated(batches)
        rows, train = source.first, ArrayRows({}, np.arange(1))
        fingerprint = _contents(rows) if callable(batches) else digest(arrays.describe_samples(rows))
        if size not in (None, _count(rows)):
            raise ConfigError(f"batch_size={size}: the batches have {_count(rows)} samples; leave it out")
        size = _count(rows)
    else:
        raise ConfigError(
            f"batches: {type(batches).__name__}; required a dict of arrays [N, ...], a function from the "
            f"step to a batch, or an iterable of batches"
        )
    held: dict[str, np.ndarray] = {} if validation is None else _checked("validation", validation)
    ours, theirs = (arrays.describe_samples(_without_index(x)) for x in (rows, held))
    if held and ours != theirs:
        raise ConfigError(f"validation: a sample has {theirs}; in batches {ours}")
    out = ArrayRows(held, np.arange(_count(held)))
    sides = DatasetSplit("batches", train, train.num_rows), DatasetSplit("validation", out, out.num_rows)
    options: dict[str, Any] = dict(tokenizer=None, vocab_size=None, seed=seed, fingerprint=fingerprint)
    return GivenBatches([sides], [1.0], source=source, example=rows, **options), size


class GivenBatches(Dataset):
    """A dataset whose training batches may come whole from a source, in its order."""

    def __init__(self, *args: Any, source: _Computed | None, example: Batch, **options: Any):
        super().__init__(*args, **options)
        self.samples = arrays.describe_samples(_without_index(example))  # as `data.path` has it
        self._source = source

    def train_batch(self, step: int, global_size: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Returns rows of a global batch, see Dataset."""
        if self._source is None:
            return super().train_batch(step, global_size, rows)
        batch = self._source.at(step)
        numbers = ((step * global_size + np.arange(global_size)) & 0x7FFFFFFF).astype(np.int32)
        return {name: values[rows] for name, values in ({INDEX: numbers} | batch).items()}


class _Computed:
    """Batches as a function of the step."""

    def __init__(self, batches: Any):
        self._batches = batches
        try:
            batch = self._get(0)
        except SourceError as error:
            raise ConfigError(str(error)) from error
        self.first = _converted(_checked("batches: the first", batch, whole=True))

    def _get(self, step: int) -> Any:
        return self._batches(step)

    def at(self, step: int) -> Batch:
        """Returns the global batch after `step` updates.

        Raises:
          SourceError: it has other entries, dims or dtypes than the first, or there is none.
        """
        if step == 0:
            return self.first
        batch, first = self._get(step), arrays.describe_samples(self.first)
        try:
            converted = _converted(_checked(f"batches: the one after {step} updates", batch, whole=True))
        except ConfigError as error:
            raise SourceError(str(error)) from error
        if (_count(converted), arrays.describe_samples(converted)) != (_count(self.first), first):
            raise SourceError(
                f"batches: the one after {step} updates has {_count(converted)} x "
                f"{arrays.describe_samples(converted)}; the first {_count(self.first)} x {first}, and all "
                f"must be alike"
            )
        return converted


class _Iterated(_Computed):
    """Batches in an iterable's order; those before the step that is asked for are passed over."""

    _iterator: Iterator[Any] = iter(())
    _next = 0  # of the batch that the iterator gives

    def _get(self, step: int) -> Any:
        if step == 0 or step < self._next:
            self._begin(step)
        for number in itertools.count(self._next):
            self._next = number + 1
            batch = next(self._iterator, None)
            batch = self._first_again(number) if batch is None else batch
            if number == step:
                return batch

    def _begin(self, step: int) -> None:
        before, self._iterator, self._next = self._iterator, iter(self._batches), 0
        if self._iterator is before:
            raise SourceError(
                f"batches: the iterator cannot go back to the batch after {step} updates; give an iterable "
                f"that can be begun anew, or a function of the step"
            )

    def _first_again(self, number: int) -> Any:
        before, self._iterator = self._iterator, iter(self._batches)
        batch = None if self._iterator is before else next(self._iterator, None)
        if batch is None:
            raise SourceError(f"batches: the iterator ended after {number} batches; give more or lower steps")
        return batch


def _checked(what: str, batch: Any, *, whole: bool = False) -> dict[str, np.ndarray]:
    """Returns a batch as numpy arrays; a `whole` one may bring its own sample numbers.

    Raises:
      ConfigError: every fault.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(f"{what}: {type(batch).__name__}; required a dict of arrays, e.g. dict(x=x, y=y)")
    checked = {str(name): np.asarray(values) for name, values in batch.items()}
    kinds = {name: ArrayHeader(x.shape, x.dtype) for name, x in checked.items()}
    faults = arrays.faults_of(_without_index(kinds) if whole else kinds)
    wide = [n for n, x in checked.items() if x.dtype.kind in "iu" and x.size and arrays.overflows(x)]
    if faults or wide:
        raise ConfigError([*(f"{what}: {f}" for f in faults), *(f"{what}: {n} exceeds int32" for n in wide)])
    return checked


def _converted(batch: Batch) -> Batch:
    return {name: arrays.converted(name, values) for name, values in batch.items()}


def _without_index(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in batch.items() if name != INDEX}


def _count(batch: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(batch.values()))) if batch else 0


def _contents(batch: Mapping[str, np.ndarray]) -> str:
    """Returns a hash of values, cheap enough for gigabytes."""
    sums = (zlib.crc32(np.ascontiguousarray(x).view(np.uint8).ravel().data) for x in batch.values())
    return digest(arrays.describe_samples(batch), _count(batch), *sums)
