"""Batches that a caller hands over, as a dataset: arrays, a function of the step, or an
iterable.

Arrays are shuffled like those of a file. A function or an iterable gives whole batches,
in its own order. An iterator with `state_dict` and `load_state_dict` (torchdata's
StatefulDataLoader, streams of Hugging Face datasets) or `get_state` and `set_state`
(grain) continues where it was; batches of any other iterator are read again.

Shapes: N samples, G global batch.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import iterator_state, samples
from jaxdist.data.dataset import SAMPLE_MASK, Dataset, SourceError
from jaxdist.data.packing import Batch
from jaxdist.data.samples import INDEX, SampleRows
from jaxdist.data.splits import sample_sides
from jaxdist.storage.digest import digest

Batches = (
    Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | Iterable[Mapping[str, Any]]
)
DEFAULT_SIZE = 32  # samples a step, if arrays are given and no size
# States kept behind the last batch read: the reader is ahead of training by
# data.prefetch, 64 at most.
_NUM_STATES = 70


# --- Whole batches, by number ---------------------------------------------------------


class NoBatch(RuntimeError):
    """The caller's batches have no such batch; the text says why."""


class _Holder(NamedTuple):
    """The methods of what has a state."""

    is_iterable: bool  # the iterable itself, not its iterator
    get: Callable[[], Any]
    set: Callable[[Any], None]


class Iterated:
    """The batches of an iterable; it restarts at its end, if it can."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._iterator: Iterator[Any] = iter(())
        self._next = 0  # of the batch that the iterator gives
        self._states: dict[int, Any] = {}  # encoded, each as it was before that batch
        self._epoch = 0  # of the next restart

    def __call__(self, step: int) -> Any:
        """Gives the batch after `step` updates.

        Raises:
          NoBatch: there is none.
        """
        if step == 0 or step < self._next:
            self._epoch = 0
            if not self._restart():
                raise NoBatch(
                    f"the iterator cannot go back to the batch after {step} updates; "
                    "give an iterable that can be begun anew, or a function of the step"
                )
            self._next = 0
        batch = None
        while self._next <= step:
            batch = next(self._iterator, None)
            if batch is None and self._restart():
                batch = next(self._iterator, None)
            if batch is None:
                raise NoBatch(
                    f"the iterator ended after {self._next} batches; "
                    "give more or lower steps"
                )
            self._next += 1
            self._note_state()
        return batch

    def state(self, step: int) -> Any:
        """Gives the state before the batch after `step` updates, as JSON; None: it is
        unknown, or there is none.
        """
        return self._states.get(step)

    def go_to(self, step: int, state: Any) -> str:
        """Prepares to give the batch after `step` updates next.

        Args:
          state: of `state`, from a checkpoint; None: there was none.

        Returns:
          A line for people that says how; "" if there is nothing to say.

        Raises:
          NoBatch: the iterator does not take the state.
        """
        holder = self._holder()
        if state is None or holder is None:
            if step < self._next:
                return ""
            return (
                "batches: the iterator has no state to go on from; "
                f"its first {step - self._next} batches are passed over"
            )
        try:
            self._epoch, value = iterator_state.decode(state)
            if holder.is_iterable:  # its state counts from the next restart on
                holder.set(value)
                self._restart()
            else:
                self._restart()
                holder = self._holder()
                assert holder
                holder.set(value)
        except Exception as error:
            # The library's own, if the state is another iterator's.
            raise NoBatch(
                "the iterator does not take the state that was saved "
                f"({error!r:.200}); give the one that the run began with, "
                "or a new folder"
            ) from error
        self._next = step
        self._states = {step: state}
        return (
            "batches: the iterator goes on by its own state "
            f"at the batch after {step} updates"
        )

    def _restart(self) -> bool:
        """Starts the next epoch; False: the iterable is its own iterator."""
        before = self._iterator
        # It shuffles by the epoch; a stream's state counts in its epoch alone.
        set_epoch = getattr(self._batches, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        self._iterator = iter(self._batches)
        self._epoch += 1
        return self._iterator is not before

    def _holder(self) -> _Holder | None:
        """Finds what has a state: the iterator, else the iterable."""
        for holder in (self._iterator, self._batches):
            for names in (
                ("state_dict", "load_state_dict"),
                ("get_state", "set_state"),
            ):
                getter, setter = (getattr(holder, name, None) for name in names)
                if callable(getter) and callable(setter):
                    return _Holder(holder is self._batches, getter, setter)
        return None

    def _note_state(self) -> None:
        holder = self._holder()
        if holder is None:
            return
        try:
            encoded = iterator_state.encode((self._epoch - 1, holder.get()))
        except TypeError:  # JSON cannot hold it: then the batches are read again
            return
        self._states[self._next] = encoded
        self._states.pop(self._next - _NUM_STATES, None)


# --- The dataset ----------------------------------------------------------------------


class UserDataset(Dataset):
    """A dataset whose training batches may come whole from a caller, in its order."""

    def __init__(
        self,
        *args: Any,
        reader: Callable[[int], Any] | None,
        example: Batch,
        **options: Any,
    ) -> None:
        """Makes a dataset; other arguments are those of Dataset.

        Args:
          reader: gives the training batch of a step; None: they are samples of arrays.
          example: the reader's first batch, or all arrays.
        """
        super().__init__(*args, **options)
        # as `data.path` has it
        self.samples = _describe(example)
        self._reader = reader
        self._first = example

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = slice(None)
    ) -> Batch:
        """Reads rows of a global batch, see Dataset.

        Raises:
          SourceError: the batch has other entries, dims or dtypes than the first, or
            there is none.
        """
        if self._reader is None:
            return super().train_batch(step, global_size, rows)
        batch = self._first
        if step:
            batch = self._read_batch(self._reader, step)
        indices = (step * global_size + np.arange(global_size)) & SAMPLE_MASK
        whole = {INDEX: indices.astype(np.int32)} | batch
        return {name: values[rows] for name, values in whole.items()}

    def reader_state(self, step: int) -> Any:
        """Gives the state of an iterator that has one, before the batch after `step`
        updates; else None.
        """
        if not isinstance(self._reader, Iterated):
            return None
        return self._reader.state(step)

    def go_to(self, step: int, state: Any) -> str:
        """Prepares an iterator to give the batch after `step` updates.

        Returns:
          A line that says how.

        Raises:
          ConfigError: the iterator does not take the state.
        """
        if not isinstance(self._reader, Iterated):
            return ""
        try:
            return self._reader.go_to(step, state)
        except NoBatch as error:
            raise ConfigError(f"batches: {error}") from error

    def _read_batch(self, reader: Callable[[int], Any], step: int) -> Batch:
        """Reads the batch after `step` updates, and checks it."""
        name = f"batches: the one after {step} updates"
        try:
            batch = reader(step)  # may have a ConfigError of its own to raise
        except NoBatch as error:
            raise SourceError(f"batches: {error}") from error
        try:
            converted = _convert(name, batch)
        except ConfigError as error:
            raise SourceError(str(error)) from error
        found = _describe_batch(converted)
        first = _describe_batch(self._first)
        if found != first:
            raise SourceError(
                f"{name} has {found}; the first {first}, and all must be alike"
            )
        return converted


def open_user_batches(
    batches: Batches,
    *,
    size: int | None = None,
    validation: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> tuple[UserDataset, int]:
    """Makes a dataset of a caller's batches.

    Args:
      batches: {entry: [N, ...]}, whose order is ours; or a function from the step
        (updates finished, from 0) to its global batch {entry: [G, ...]}; or an iterable
        of global batches, which restarts at its end, if it can.
      size: G; default: that of the first batch, for arrays DEFAULT_SIZE.
      validation: {entry: [N, ...]}, held out.

    Returns:
      The dataset and G.

    Raises:
      ConfigError: every fault of the arrays, or of the first batch.
    """
    if fault := _library_fault(batches):
        raise ConfigError(f"batches: {fault}")
    reader = _reader_of(batches)
    if reader:
        example = _first_batch(reader)
        count = samples.count_samples(example)
        if size not in (None, count):
            raise ConfigError(
                f"batch_size={size}: the batches have {count} samples; leave it out"
            )
        size = count
        train = SampleRows({}, np.arange(1))
    else:
        example = _check("batches", batches)
        size = size or DEFAULT_SIZE
        train = samples.all_rows(example)
    if isinstance(reader, Iterated):  # may give other values each time
        fingerprint = digest(samples.describe_samples(example))
    else:
        fingerprint = _hash_values(example)
    held_out = SampleRows({}, np.arange(0))
    if validation is not None:
        held_out = _held_out("validation", validation, _describe(example), size)
    dataset = UserDataset(
        [sample_sides("batches", train, held_out)],
        seed=seed,
        fingerprint=fingerprint,
        reader=reader,
        example=example,
    )
    return dataset, size


def open_held_out(data: Mapping[str, Any], *, like: str, size: int) -> Dataset:
    """Makes a dataset of arrays {entry: [N, ...]} that are all held out.

    Args:
      like: what a sample of the run's batches holds, as `data.path` has it.
      size: G.

    Raises:
      ConfigError: they hold something else, or no whole batch.
    """
    held_out = _held_out("data", data, like, size)
    sides = sample_sides("data", held_out, held_out)
    return Dataset([sides], seed=0, fingerprint="")


def _reader_of(batches: Batches) -> Callable[[int], Any] | None:
    """Makes a function from the step to its whole batch; None: they are arrays."""
    if isinstance(batches, Mapping):
        return None
    if callable(batches):
        return batches
    if isinstance(batches, Iterable):
        return Iterated(batches)
    raise ConfigError(
        f"batches: {type(batches).__name__}; required a dict of arrays [N, ...], "
        "a function from the step to a batch, or an iterable of batches"
    )


def _first_batch(reader: Callable[[int], Any]) -> Batch:
    try:
        return _convert("batches: the first", reader(0))
    except NoBatch as error:
        raise ConfigError(f"batches: {error}") from error


def _held_out(what: str, data: Any, like: str, size: int) -> SampleRows:
    """Makes held-out samples of arrays, and checks them: only whole batches are
    scored.
    """
    arrays = _check(what, data)
    count = samples.count_samples(arrays)
    found = _describe(arrays)
    if found != like:
        raise ConfigError(f"{what}: a sample has {found}; in batches {like}")
    if count < size:
        raise ConfigError(
            f"{what}: {count} samples, and a batch has {size}; whole batches alone are "
            f"scored: give {size} samples or more, or a smaller batch_size"
        )
    if left := count % size:
        print(
            f"{what}: the last {left} of {count} samples are no whole batch of {size}, "
            "and not scored"
        )
    return samples.all_rows(arrays)


def _library_fault(batches: Any) -> str:
    """Explains why a dataset of a library gives no batches; "" if nothing is known."""
    kinds = {
        kind.__name__
        for kind in type(batches).__mro__
        if kind.__module__.startswith("datasets.")
    }
    if kinds & {"DatasetDict", "IterableDatasetDict"}:
        return (
            f"{type(batches).__name__}: the splits of a Hugging Face dataset; "
            "choose one, ['train'] say"
        )
    if "Dataset" in kinds:
        return (
            "a Hugging Face Dataset gives a row at a time; give its columns as arrays, "
            "dataset.with_format('numpy')[:], or batches, "
            "dataset.to_iterable_dataset().with_format('numpy').batch(32)"
        )
    if "IterableDataset" in kinds:
        row: Mapping[str, Any] = next(iter(batches), {})
        if any(np.ndim(value) == 0 for value in row.values()):
            return (
                "a Hugging Face stream gives a row at a time; "
                "give stream.with_format('numpy').batch(32)"
            )
    return ""


# --- Checks ---------------------------------------------------------------------------


def _check(
    what: str, batch: Any, *, may_have_index: bool = False
) -> dict[str, np.ndarray]:
    """Turns a mapping into numpy arrays that can be samples.

    Args:
      may_have_index: whether it may bring its own sample numbers.

    Raises:
      ConfigError: every fault.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{what}: {type(batch).__name__}; required a dict of arrays, "
            "e.g. dict(x=x, y=y)"
        )
    arrays = {str(name): np.asarray(values) for name, values in batch.items()}
    checked = _without_index(arrays) if may_have_index else arrays
    faults = samples.faults_of(checked)
    faults += [f"{name} exceeds int32" for name in samples.beyond_int32(arrays)]
    if faults:
        raise ConfigError(f"{what}: {fault}" for fault in faults)
    return arrays


def _convert(what: str, batch: Any) -> Batch:
    """Checks a whole batch, and converts it to the dtypes of batches."""
    arrays = _check(what, batch, may_have_index=True)
    return {
        name: samples.to_batch_values(name, values) for name, values in arrays.items()
    }


def _without_index(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values for name, values in arrays.items() if name != INDEX}


def _describe(arrays: Mapping[str, np.ndarray]) -> str:
    """Writes what one sample holds, as `data.path` has it."""
    return samples.describe_samples(_without_index(arrays))


def _describe_batch(batch: Batch) -> str:
    return f"{samples.count_samples(batch)} x {samples.describe_samples(batch)}"


def _hash_values(arrays: Mapping[str, np.ndarray]) -> str:
    """Hashes values, cheaply enough for gigabytes."""
    checksums = []
    for values in arrays.values():
        content = np.ascontiguousarray(values).view(np.uint8).ravel()
        checksums.append(zlib.crc32(content.data))
    return digest(
        samples.describe_samples(arrays), samples.count_samples(arrays), *checksums
    )
