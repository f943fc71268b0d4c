"""A dataset: samples of fixed length, ordered by (seed, global sample index) and
nothing else.

Shapes: B rows asked for, S sequence length, G global batch. Nothing here knows of
processes: the caller names the rows of the global batch that it wants.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import sliding
from jaxdist.data.packing import Batch, PackedDocuments
from jaxdist.data.shuffle import Mixture, order_key, permute
from jaxdist.data.tokenizer import Tokenizer

# `sample` is int32; randomness folded from it repeats after 2^31 samples
SAMPLE_MASK = 0x7FFFFFFF
_ALL_ROWS = slice(None)


class SourceError(RuntimeError):
    """A source failed while it was read; the text names it."""


class Samples(Protocol):
    """Rows of a batch, by number."""

    num_rows: int
    num_targets: int  # predictions of all rows

    def read(self, rows: np.ndarray) -> Batch:
        """Reads the rows [B], in any order."""


@dataclasses.dataclass(frozen=True)
class DatasetSplit:
    """The training or the held-out part of one source, cut into samples."""

    name: str
    samples: Samples
    num_tokens: int  # of arrays: samples
    num_bytes: float | None = None  # of their text, UTF-8; None: unknown
    scanned: bool = True  # whether all token ids are known to be in the vocabulary
    pads: bool = True  # whether rows past the end are empty, with weight 0


class Dataset:
    """Training and held-out samples of one source or a mixture; `open_dataset` makes
    it.
    """

    def __init__(
        self,
        sides: Sequence[tuple[DatasetSplit, DatasetSplit]],
        weights: Sequence[float] = (1.0,),
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        seed: int,
        fingerprint: str,
    ) -> None:
        """Puts the samples of all sources in one order.

        Args:
          sides: the training part and the held-out part of each source.
          weights: of the sources, in the training batches.
          tokenizer: None: the tokens came without one.
          vocab_size: of the model; None: ids are not checked.
          seed: of the order.
          fingerprint: of the tokens, the split, the cut and the mixture.
        """
        train = [side[0] for side in sides]
        held_out = [side[1] for side in sides]
        self.name = " + ".join(side.name for side in train)
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.bytes_per_token = _bytes_per_token(train)
        # of all held-out documents
        self.validation_bytes_per_token = _bytes_per_token(held_out)
        self._samples: dict[str, list[Samples]] = {
            "train": [side.samples for side in train],
            "validation": [side.samples for side in held_out],
        }
        self._sizes = np.array([side.samples.num_rows for side in train])
        keys = [order_key(seed, str(number)) for number in range(len(train))]
        self._keys = np.array(keys, np.uint64)
        self._mixture = Mixture(weights)
        self._vocab_size = vocab_size
        self._ids_are_checked = all(side.scanned for side in (*train, *held_out))
        self._pads = all(side.pads for side in held_out)
        self.num_train_samples = int(self._sizes.sum())  # one epoch of each
        self.num_train_tokens = sum(side.num_tokens for side in train)
        self.num_validation_tokens = sum(side.samples.num_targets for side in held_out)
        # None: they do not slide
        self.validation_windows = sliding.total(self._samples["validation"])
        # Held-out rows are numbered through all sources.
        self._ends = np.cumsum([side.samples.num_rows for side in held_out])

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = _ALL_ROWS
    ) -> Batch:
        """Reads rows of the global batch of `step`.

        Args:
          step: updates finished before it, from 0.
          global_size: sequences per step, G.
          rows: which of the G rows, all by default; a slice or [B] integers.

        Returns:
          tokens, targets, positions [B, S] int32, weights [B, S] float32, sample [B]
          int32 (the global sample index, modulo 2^31); with packing=documents also
          segment_ids [B, S] int32.

        Raises:
          SourceError: a source cannot be read, or holds an id beyond the vocabulary.
        """
        return self.read("train", step * global_size + np.arange(global_size)[rows])

    def reader_state(self, step: int) -> Any:
        """Gives what a reader must be told to continue at `step`, as JSON; None: the
        step says all.
        """
        return None

    def go_to(self, step: int, state: Any) -> str:
        """Tells the reader that `step` comes next.

        Args:
          state: of `reader_state`; None: unknown.

        Returns:
          A line to print; "" if there is none.
        """
        return ""

    def num_validation_batches(self, global_size: int) -> int:
        """Counts the batches of `global_size` rows that hold all held-out samples.

        Samples of arrays have no weights, so no empty row can fill their last batch:
        only whole batches count.

        Raises:
          ConfigError: nothing is held out, or no whole batch.
        """
        rows = int(self._ends[-1])
        count = rows // global_size
        if self._pads:
            count = -(-rows // global_size)
        if not self.num_validation_tokens or not count:
            problem = "nothing is held out"
            if rows:
                problem = (
                    f"the {rows} samples held out are no whole batch of {global_size}"
                )
            raise ConfigError(
                f"data source {self.name}: {problem} for evaluation. Set "
                "data.validation_path, raise data.validation_share, or set "
                "train.eval_every=0."
            )
        return count

    def validation_batch(
        self, number: int, global_size: int, rows: slice | np.ndarray = _ALL_ROWS
    ) -> Batch:
        """Reads rows of held-out batch `number`; the last is filled with empty rows.

        Over all batches every held-out token that has a predecessor is a target once:
        weights sum to `num_validation_tokens`. See `train_batch`.
        """
        return self.read(
            "validation", number * global_size + np.arange(global_size)[rows]
        )

    def read(self, split: str, indices: np.ndarray) -> Batch:
        """Reads samples [B] of a split; see `train_batch`.

        Args:
          split: "train" (any index >= 0) or "validation" (an index past the end gives
            an empty row, with weights 0).
        """
        indices = np.asarray(indices, np.int64)
        if split == "train":
            source, rows = self._locate(indices)
        else:
            source, rows = self._locate_held_out(indices)
        try:
            batch = _read(self._samples[split], source, rows)
        except (OSError, IndexError) as error:
            raise SourceError(
                f"data source {self.name} ended or failed at "
                f"{split} sample {indices[0]}: {error}"
            ) from error
        if not self._ids_are_checked:
            self._check_ids(
                batch, f"among {split} samples {indices[0]} to {indices[-1]}"
            )
        return batch | {"sample": (indices & SAMPLE_MASK).astype(np.int32)}

    def _check_ids(self, batch: Batch, place: str) -> None:
        """Raises SourceError if a batch has an id outside the vocabulary."""
        tokens = batch["tokens"]
        targets = batch["targets"]
        smallest = min(int(tokens.min()), int(targets.min()))
        if smallest < 0:
            raise SourceError(
                f"data source {self.name}: token id {smallest} {place}; "
                "required 0 or more"
            )
        largest = max(int(tokens.max()), int(targets.max()))
        if fault := vocabulary_fault(self.name, largest, self._vocab_size):
            raise SourceError(fault)

    def attention_work(
        self, step: int, global_size: int, chunks: int = 1
    ) -> np.ndarray | None:
        """Counts the attention that each row of the global batch of `step` needs.

        Args:
          chunks: equal parts of a row, counted apart.

        Returns:
          Pairs of tokens of the same document, [G, chunks] int64; None if all rows need
          the same.
        """
        packed = []
        for samples in self._samples["train"]:
            if not isinstance(samples, PackedDocuments):
                return None
            packed.append(samples)
        source, rows = self._locate(step * global_size + np.arange(global_size))
        work = np.empty((global_size, chunks), np.int64)
        for number in np.unique(source):
            mine = source == number
            work[mine] = packed[number].attention_work(rows[mine], chunks)
        return work

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the source and its row of training samples, both [B]."""
        source, running = self._mixture.locate(indices)
        return source, permute(running, self._sizes[source], self._keys[source])

    def _locate_held_out(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the source and its row of held-out samples, both [B]."""
        last = len(self._ends) - 1
        source = np.minimum(np.searchsorted(self._ends, indices, "right"), last)
        starts = np.concatenate([[0], self._ends[:-1]])
        return source, indices - starts[source]


def vocabulary_fault(name: str, largest: int | None, vocab_size: int | None) -> str:
    """Explains why a source's largest token id does not fit the model; "" if it does,
    or if one of them is unknown.
    """
    if largest is None or vocab_size is None or largest < vocab_size:
        return ""
    return (
        f"data source {name}: token id {largest} with model.vocab_size={vocab_size}. "
        f"Set model.vocab_size to {largest + 1} or more, above every id."
    )


def _read(samples: list[Samples], source: np.ndarray, rows: np.ndarray) -> Batch:
    """Reads a batch whose row i is row `rows[i]` of `samples[source[i]]`."""
    numbers = np.unique(source)
    if len(numbers) == 1:  # nothing to merge, and constant arrays stay the same objects
        return samples[numbers[0]].read(rows)
    batch: Batch = {}
    for number in numbers:
        mine = source == number
        for name, values in samples[number].read(rows[mine]).items():
            if name not in batch:
                batch[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
            batch[name][mine] = values
    return batch


def _bytes_per_token(sides: list[DatasetSplit]) -> float | None:
    """Divides UTF-8 bytes by tokens, over all sides; None if one is unknown, or there
    are no tokens.
    """
    num_bytes = 0.0
    num_tokens = 0
    for side in sides:
        if side.num_bytes is None:
            return None
        num_bytes += float(side.num_bytes)
        num_tokens += side.num_tokens
    if not num_tokens:
        return None
    return num_bytes / num_tokens
