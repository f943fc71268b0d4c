"""Batches of a caller as a dataset: arrays, a function of the step, or an iterable.

Arrays are shuffled like those of a file. A function or an iterable returns whole
batches, in its own order.

Some iterators have a state: `state_dict` and `load_state_dict` (torchdata's
StatefulDataLoader, streams of Hugging Face datasets) or `get_state` and `set_state`
(grain). They continue where the checkpoint was written. The batches of other iterators
are read again.

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
from jaxdist.storage.untrusted import Malformed, of_kind

Batches = (
    Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | Iterable[Mapping[str, Any]]
)
DEFAULT_SIZE = 32  # samples per step of arrays without a size
# Number of latest states that are kept. The reader is ahead of training by
# data.prefetch, which is 64 at most.
_NUM_STATES = 70


# --- Whole batches, by number ---------------------------------------------------------


class NoBatch(RuntimeError):
    """Error of a batch that the caller's batches do not have. The text says why."""


class _StateMethods(NamedTuple):
    """Methods that read and set the state of an iterator or of an iterable."""

    of_iterable: bool  # whether they belong to the iterable, not to its iterator
    get: Callable[[], Any]
    set: Callable[[Any], None]


class Iterated:
    """Batches of an iterable, which restarts at its end if it can."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._iterator: Iterator[Any] = iter(())
        self._next = 0  # number of the batch that the iterator returns next
        # {number of a batch: encoded state from which the iterator returns it}
        self._states: dict[int, Any] = {}
        self._epoch = 0  # number of the epoch that the next restart begins

    def __call__(self, step: int) -> Any:
        """Reads the batch after `step` updates.

        Raises:
          NoBatch: there is none.
        """
        if step == 0 or step < self._next:
            self._epoch = 0
            if not self._restart():
                raise NoBatch(
                    f"the iterator cannot go back to the batch after {step} updates; "
                    "give an iterable that can be restarted, or a function of the step"
                )
            self._next = 0
        batch = None
        while self._next <= step:
            batch = self._read_next()
        return batch

    def state(self, step: int) -> Any:
        """Looks up the state before the batch after `step` updates, as JSON.

        It is None if it is unknown, or if the iterator has no state.
        """
        return self._states.get(step)

    def go_to(self, step: int, state: Any) -> str:
        """Prepares to return the batch after `step` updates next.

        The state may be that before an earlier batch, if the batches in between are
        skipped since then. They are read and dropped.

        Args:
          step: number of updates.
          state: result of `state`, from a checkpoint. None if there was none. Without
            the number of its batch, it is that before the batch after `step` updates.

        Returns:
          A line for the user that says how; "" if there is nothing to say.

        Raises:
          NoBatch: the iterator does not accept the state, or ends before the batch.
        """
        methods = self._state_methods()
        if state is None or methods is None:
            if step < self._next:
                return ""
            return (
                "batches: the iterator has no state to continue from; "
                f"its first {step - self._next} batches are passed over"
            )
        try:
            self._epoch, value, *numbers = iterator_state.decode(state)
            number = _check_number(*numbers, step=step) if numbers else step
            if methods.of_iterable:  # an iterable applies its state at a restart
                methods.set(value)
                self._restart()
            else:
                self._restart()
                methods = self._state_methods()
                assert methods
                methods.set(value)
        except Exception as error:
            # Libraries raise many types if the state is that of another iterator.
            raise NoBatch(
                "the iterator does not take the state that was saved "
                f"({error!r:.200}); give the one that the run began with, "
                "or a new folder"
            ) from error
        self._next = number
        self._states = {number: state}
        while self._next < step:
            self._read_next()
        return (
            "batches: the iterator continues from its own state "
            f"at the batch after {step} updates"
        )

    def _read_next(self) -> Any:
        """Reads the next batch, and stores the state after it.

        Raises:
          NoBatch: there is none.
        """
        batch = next(self._iterator, None)
        if batch is None and self._restart():
            batch = next(self._iterator, None)
        if batch is None:
            raise NoBatch(
                f"the iterator ended after {self._next} batches; "
                "give more or lower steps"
            )
        self._next += 1
        self._store_state()
        return batch

    def _restart(self) -> bool:
        """Starts the next epoch; returns False if the iterable is its own iterator."""
        previous = self._iterator
        # A stream of `datasets` shuffles by its epoch, and its state is valid only in
        # that epoch.
        set_epoch = getattr(self._batches, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        self._iterator = iter(self._batches)
        self._epoch += 1
        return self._iterator is not previous

    def _state_methods(self) -> _StateMethods | None:
        """Finds the methods for the state, of the iterator or else of the iterable."""
        for owner in (self._iterator, self._batches):
            for getter_name, setter_name in (
                ("state_dict", "load_state_dict"),
                ("get_state", "set_state"),
            ):
                getter = getattr(owner, getter_name, None)
                setter = getattr(owner, setter_name, None)
                if callable(getter) and callable(setter):
                    return _StateMethods(owner is self._batches, getter, setter)
        return None

    def _store_state(self) -> None:
        methods = self._state_methods()
        if methods is None:
            return
        try:
            encoded = iterator_state.encode(
                (self._epoch - 1, methods.get(), self._next)
            )
        except TypeError:  # JSON cannot hold the state: a resume reads batches again
            return
        self._states[self._next] = encoded
        self._states.pop(self._next - _NUM_STATES, None)


def _check_number(number: Any, *, step: int) -> int:
    """Checks the number of a state's batch, from which `step` must be reached.

    Raises:
      Malformed: it is no number, or that of a later batch.
    """
    checked: int = of_kind(number, int, "the number of its batch")
    if not 0 <= checked <= step:
        raise Malformed(f"it is that before batch {checked}, not {step}")
    return checked


# --- The dataset ----------------------------------------------------------------------


class UserDataset(Dataset):
    """Dataset whose training batches may come whole from a caller, in its order."""

    def __init__(
        self,
        *args: Any,
        reader: Callable[[int], Any] | None,
        example: Batch,
        **options: Any,
    ) -> None:
        """Makes a dataset.

        Args:
          *args: positional arguments of Dataset.
          reader: function that returns the training batch of a step. None if the
            batches are samples of arrays.
          example: the reader's first batch, or all arrays.
          **options: keyword arguments of Dataset.
        """
        super().__init__(*args, **options)
        # description of one sample, the value of `data.path`
        self.samples = _describe(example)
        self._reader = reader
        self._first = example

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = slice(None)
    ) -> Batch:
        """Reads rows of a global batch; see Dataset.

        Raises:
          SourceError: there is no such batch, or its entries, dims or dtypes differ
            from those of the first batch.
        """
        if self._reader is None:
            return super().train_batch(step, global_size, rows)
        batch = self._first
        if step:
            batch = self._read_batch(self._reader, step)
        indices = (step * global_size + np.arange(global_size)) & SAMPLE_MASK
        whole = {INDEX: indices.astype(np.int32)} | batch
        return {name: values[rows] for name, values in whole.items()}

    @property
    def any_step(self) -> bool:
        """Whether the batches are arrays; a reader's steps are read in turn."""
        return self._reader is None

    @property
    def epoch_samples(self) -> int | None:
        """The number of samples of arrays; None for a reader's batches."""
        return super().epoch_samples if self._reader is None else None

    def reader_state(self, step: int) -> Any:
        """Looks up an iterator's state before the batch after `step` updates.

        It is None if the iterator has no state.
        """
        if not isinstance(self._reader, Iterated):
            return None
        return self._reader.state(step)

    def go_to(self, step: int, state: Any) -> str:
        """Prepares an iterator to return the batch after `step` updates.

        Args:
          step: number of updates.
          state: result of `reader_state`, or None.

        Returns:
          A line that says how; "" if there is nothing to say.

        Raises:
          ConfigError: the iterator does not accept the state, or ends before the batch.
        """
        if not isinstance(self._reader, Iterated):
            return ""
        try:
            return self._reader.go_to(step, state)
        except NoBatch as error:
            raise ConfigError(f"batches: {error}") from error

    def _read_batch(self, reader: Callable[[int], Any], step: int) -> Batch:
        """Reads and checks the batch after `step` updates."""
        name = f"batches: the one after {step} updates"
        try:
            batch = reader(step)  # a ConfigError of the caller passes through
        except NoBatch as error:
            raise SourceError(f"batches: {error}") from error
        try:
            converted = _convert(name, batch)
        except ConfigError as error:
            raise SourceError(str(error)) from error
        layout = _describe_batch(converted)
        first_layout = _describe_batch(self._first)
        if layout != first_layout:
            raise SourceError(
                f"{name} has {layout}; the first {first_layout}, and all must be alike"
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
      batches: arrays {entry: [N, ...]}, which are shuffled. Or a function from the step
        (updates finished, from 0) to its global batch {entry: [G, ...]}. Or an iterable
        of global batches, which restarts at its end if it can.
      size: G. The default is that of the first batch, and DEFAULT_SIZE for arrays.
      validation: held-out arrays {entry: [N, ...]}.
      seed: seed of the order of arrays.

    Returns:
      The dataset and G.

    Raises:
      ConfigError: every fault of the arrays, or of the first batch.
    """
    fault = _library_fault(batches)
    if fault:
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
    if isinstance(reader, Iterated):  # its values may differ each time
        fingerprint = digest(samples.describe_samples(example))
    else:
        fingerprint = _hash_values(example)
    held_out = SampleRows({}, np.arange(0))
    if validation is not None:
        held_out = _held_out(
            "validation", validation, like=_describe(example), size=size
        )
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
      data: the arrays.
      like: description of a sample of the run's batches, the value of `data.path`.
      size: G.

    Raises:
      ConfigError: the samples differ from those of the run, or fill no whole batch.
    """
    held_out = _held_out("data", data, like=like, size=size)
    sides = sample_sides("data", held_out, held_out)
    return Dataset([sides], seed=0, fingerprint="")


def _reader_of(batches: Batches) -> Callable[[int], Any] | None:
    """Makes a function from the step to its whole batch; None for arrays."""
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


def _held_out(what: str, data: Any, *, like: str, size: int) -> SampleRows:
    """Makes held-out samples of arrays, and checks them.

    Only whole batches are scored. The remaining samples are reported.
    """
    arrays = _check(what, data)
    count = samples.count_samples(arrays)
    layout = _describe(arrays)
    if layout != like:
        raise ConfigError(f"{what}: a sample has {layout}; in batches {like}")
    if count < size:
        raise ConfigError(
            f"{what}: {count} samples, and a batch has {size}; whole batches alone are "
            f"scored: give {size} samples or more, or a smaller batch_size"
        )
    remainder = count % size
    if remainder:
        print(
            f"{what}: the last {remainder} of {count} samples are no whole batch of "
            f"{size}, and not scored"
        )
    return samples.all_rows(arrays)


def _library_fault(batches: Any) -> str:
    """Explains why a library's dataset returns no batches; "" if nothing is known."""
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
    """Converts a mapping to numpy arrays that can be samples.

    Args:
      what: name of the mapping in messages.
      batch: the mapping.
      may_have_index: whether the mapping may have its own sample numbers.

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
    """Describes one sample, as in `data.path`."""
    return samples.describe_samples(_without_index(arrays))


def _describe_batch(batch: Batch) -> str:
    return f"{samples.count_samples(batch)} x {samples.describe_samples(batch)}"


def _hash_values(arrays: Mapping[str, np.ndarray]) -> str:
    """Hashes values, by checksums that are fast enough for gigabytes."""
    checksums = []
    for values in arrays.values():
        content = np.ascontiguousarray(values).view(np.uint8).ravel()
        checksums.append(zlib.crc32(content.data))
    return digest(
        samples.describe_samples(arrays), samples.count_samples(arrays), *checksums
    )
