"""Batches that a caller hands over: arrays, a function of the step, or an iterable, as
a dataset.

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
from jaxdist.data.dataset import SAMPLE_MASK, Dataset, SourceError
from jaxdist.data.iterated import Iterated, NoBatch
from jaxdist.data.packing import Batch
from jaxdist.data.splits import array_splits
from jaxdist.storage.digest import digest

Batches = (
    Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | Iterable[Mapping[str, Any]]
)
DEFAULT_SIZE = 32  # samples a step, where arrays are given and no size


def open_user_batches(
    batches: Batches,
    *,
    size: int | None = None,
    validation: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> tuple[UserDataset, int]:
    """Returns a dataset of what was given, and the samples of a global batch.

    Args:
      batches: {entry: [N, ...]}, whose order is ours; or a function from the step
        (updates finished, from 0) to its global batch {entry: [G, ...]}; or an iterable
        of global batches, begun anew where it ends, if it can be.
      size: G; default: that of the first batch, for arrays DEFAULT_SIZE.
      validation: {entry: [N, ...]}, held out.

    Raises:
      ConfigError: every fault of the arrays, or of the first batch.
    """
    compute: Callable[[int], Any] | None = None
    if fault := _library_fault(batches):
        raise ConfigError(f"batches: {fault}")
    if isinstance(batches, Mapping):
        rows = _checked("batches", batches)
        train, fingerprint = (
            ArrayRows(rows, np.arange(arrays.count_of(rows))),
            _contents(rows),
        )
        size = size or DEFAULT_SIZE
    elif callable(batches) or isinstance(batches, Iterable):
        compute = batches if callable(batches) else Iterated(batches)
        try:
            rows = _converted("batches: the first", compute(0))
        except NoBatch as error:
            raise ConfigError(f"batches: {error}") from error
        train, count = ArrayRows({}, np.arange(1)), arrays.count_of(rows)
        fingerprint = (
            _contents(rows)
            if callable(batches)
            else digest(arrays.describe_samples(rows))
        )
        if size not in (None, count):
            raise ConfigError(
                f"batch_size={size}: the batches have {count} samples; leave it out"
            )
        size = count
    else:
        raise ConfigError(
            f"batches: {type(batches).__name__}; required a dict of arrays [N, ...], a function from the "
            f"step to a batch, or an iterable of batches"
        )
    like = arrays.describe_samples(_without_index(rows))
    none = ArrayRows({}, np.arange(0))
    held = (
        none if validation is None else _held_out("validation", validation, like, size)
    )
    sides = array_splits("batches", train, held)
    return UserDataset(
        [sides], seed=seed, fingerprint=fingerprint, compute=compute, example=rows
    ), size


def open_held_out(data: Mapping[str, Any], *, like: str, size: int) -> Dataset:
    """Returns arrays {entry: [N, ...]} as a dataset that is held out.

    Args:
      like: what a sample of the run's batches holds, as `data.path` has it.
      size: G.

    Raises:
      ConfigError: they hold something else, or no whole batch.
    """
    held = _held_out("data", data, like, size)
    return Dataset([array_splits("data", held, held)], seed=0, fingerprint="")


def _held_out(what: str, data: Any, like: str, size: int) -> ArrayRows:
    """Returns what is held out, checked: whole batches alone are scored."""
    rows = _checked(what, data)
    count = arrays.count_of(rows)
    if (theirs := arrays.describe_samples(_without_index(rows))) != like:
        raise ConfigError(f"{what}: a sample has {theirs}; in batches {like}")
    if count < size:
        raise ConfigError(
            f"{what}: {count} samples, and a batch has {size}; whole batches alone are scored: give {size} "
            f"samples or more, or a smaller batch_size"
        )
    if left := count % size:
        print(
            f"{what}: the last {left} of {count} samples are no whole batch of {size}, and not scored"
        )
    return ArrayRows(rows, np.arange(count))


def _library_fault(batches: Any) -> str:
    """Returns what is wrong with a dataset of a library that gives no batches; "" if
    nothing is known.
    """
    kinds = {
        kind.__name__
        for kind in type(batches).__mro__
        if kind.__module__.startswith("datasets.")
    }
    if kinds & {"DatasetDict", "IterableDatasetDict"}:
        return f"{type(batches).__name__}: the splits of a Hugging Face dataset; choose one, ['train'] say"
    if "Dataset" in kinds:
        return (
            "a Hugging Face Dataset gives a row at a time; give its columns as arrays, "
            "dataset.with_format('numpy')[:], or batches, "
            "dataset.to_iterable_dataset().with_format('numpy').batch(32)"
        )
    if "IterableDataset" in kinds and any(
        np.ndim(x) == 0 for x in next(iter(batches), {}).values()
    ):
        return "a Hugging Face stream gives a row at a time; give stream.with_format('numpy').batch(32)"
    return ""


class UserDataset(Dataset):
    """A dataset whose training batches may come whole from a source, in its order."""

    def __init__(
        self,
        *args: Any,
        compute: Callable[[int], Any] | None,
        example: Batch,
        **options: Any,
    ):
        super().__init__(*args, **options)
        # as `data.path` has it
        self.samples = arrays.describe_samples(_without_index(example))
        self._compute, self._first = compute, example

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = slice(None)
    ) -> Batch:
        """Returns rows of a global batch, see Dataset.

        Raises:
          SourceError: the batch has other entries, dims or dtypes than the first, or
            there is none.
        """
        if self._compute is None:
            return super().train_batch(step, global_size, rows)
        batch = self._first if step == 0 else self._computed(step, self._compute)
        numbers = ((step * global_size + np.arange(global_size)) & SAMPLE_MASK).astype(
            np.int32
        )
        return {
            name: values[rows] for name, values in ({INDEX: numbers} | batch).items()
        }

    def reader_state(self, step: int) -> Any:
        """Returns the state of an iterator that has one, before the batch after `step`
        updates; else None.
        """
        return (
            self._compute.state(step) if isinstance(self._compute, Iterated) else None
        )

    def go_to(self, step: int, state: Any) -> str:
        """Prepares an iterator to give the batch after `step` updates; returns a line
        that says how.

        Raises:
          ConfigError: the iterator does not take the state.
        """
        try:
            return (
                self._compute.go_to(step, state)
                if isinstance(self._compute, Iterated)
                else ""
            )
        except NoBatch as error:
            raise ConfigError(f"batches: {error}") from error

    def _computed(self, step: int, compute: Callable[[int], Any]) -> Batch:
        """Returns the batch after `step` updates, checked."""
        name = f"batches: the one after {step} updates"
        try:
            given = compute(step)  # may have a ConfigError of its own to raise
        except NoBatch as error:
            raise SourceError(f"batches: {error}") from error
        try:
            converted = _converted(name, given)
        except ConfigError as error:
            raise SourceError(str(error)) from error
        this, first = (
            f"{arrays.count_of(x)} x {arrays.describe_samples(x)}"
            for x in (converted, self._first)
        )
        if this != first:
            raise SourceError(
                f"{name} has {this}; the first {first}, and all must be alike"
            )
        return converted


def _checked(what: str, batch: Any, *, whole: bool = False) -> dict[str, np.ndarray]:
    """Returns a batch as numpy arrays; a `whole` one may bring its own sample numbers.

    Raises:
      ConfigError: every fault.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{what}: {type(batch).__name__}; required a dict of arrays, e.g. dict(x=x, y=y)"
        )
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
    sums = (
        zlib.crc32(np.ascontiguousarray(x).view(np.uint8).ravel().data)
        for x in batch.values()
    )
    return digest(arrays.describe_samples(batch), arrays.count_of(batch), *sums)
