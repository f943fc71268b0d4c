"""Dataset: samples of fixed length, in an order of (seed, global sample index) alone.

Shapes: B rows to read, S sequence length, G global batch. A dataset does not know of
processes: the caller names the rows of the global batch that it wants.

A resumed run continues with the same samples only if all of these are the same. Each is
checked or restored at the place that its line names:

- The seed, the global batch size, the sequence length and the weights of the mixture
  are keys of the config that may not change (`trainer.workdir.check_stored_config`).
- The fingerprint of text covers the tokens, the split, the cut, the sequence length
  and the weights of the mixture (`data.opening.open_dataset`). The fingerprint of arrays
  in a file covers the samples and the split (`data.splits.split_samples`). The
  fingerprint of a caller's batches covers the arrays, the first batch of a function, or
  the shapes of an iterable (`data.user_batches.open_user_batches`). The checkpoint has
  the fingerprint (`trainer.restore.check_data`).
- The windows of skipped batches are in skipped.json and in the checkpoint
  (`trainer.run_metadata.skipped_windows`). All processes compare them
  (`trainer.start.init_or_restore`).
- The number of updates done is the checkpoint's progress (`trainer.run_metadata`).
- The state of a caller's iterator is in the checkpoint (`reader_state`, `go_to`). Other
  datasets have none, because the step determines the batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import sliding
from jaxdist.data.packing import Batch, PackedDocuments
from jaxdist.data.shuffle import Mixture, order_key, permute
from jaxdist.data.tokenizer import Tokenizer

# `sample` is int32, so random numbers that are derived from it repeat after 2^31
# samples.
SAMPLE_MASK = 0x7FFFFFFF
_ALL_ROWS = slice(None)
# rows that are located in one call, in batches of fewer rows: it costs as much for one
_LOCATED = 1024


class SourceError(RuntimeError):
    """Error of a source that failed while it was read. The text names the source."""


class Samples(Protocol):
    """All rows of one side of a source, by number.

    A row is what one row of a batch holds: a window, packed pieces, or a sample of
    arrays.
    """

    num_rows: int
    num_targets: int  # number of predictions in all rows

    def read(self, rows: np.ndarray) -> Batch:
        """Reads the rows [B], in any order."""


@dataclasses.dataclass(frozen=True)
class DatasetSplit:
    """One side of a source, cut into rows: its training data or its held-out data."""

    name: str
    samples: Samples
    # number of tokens; of learned tokens in chats; of samples if the source has arrays
    num_tokens: int
    num_bytes: float | None = None  # UTF-8 bytes of the text; None = unknown
    scanned: bool = True  # whether all token ids are known to be in the vocabulary
    pads: bool = True  # whether rows past the end are empty rows with weight 0


class _Located(NamedTuple):
    """The sources and row numbers of some consecutive training batches."""

    first: int  # first step
    end: int
    size: int  # rows of a batch, G
    source: np.ndarray  # [(end - first) G]
    row: np.ndarray  # [(end - first) G]


class Dataset:
    """Training rows and held-out rows of one source or of a mixture.

    `open_dataset` makes it.
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
        """Puts the rows of all sources in one order.

        Args:
          sides: the training side and the held-out side of each source.
          weights: shares of the sources in the training batches, of any sum.
          tokenizer: tokenizer of the tokens; None if the source had tokens.
          vocab_size: vocabulary size of the model. None skips the check of ids.
          seed: seed of the order.
          fingerprint: hash of the tokens, the split, the cut and the mixture.
        """
        train = [train_side for train_side, _ in sides]
        held_out = [held_out_side for _, held_out_side in sides]
        self.name = " + ".join(side.name for side in train)
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.bytes_per_token = _bytes_per_token(train)
        # over all held-out documents
        self.validation_bytes_per_token = _bytes_per_token(held_out)
        self._samples: dict[str, list[Samples]] = {
            "train": [side.samples for side in train],
            "validation": [side.samples for side in held_out],
        }
        self._sizes = np.array([side.samples.num_rows for side in train])
        keys = [order_key(seed, str(number)) for number in range(len(train))]
        self._keys = np.array(keys, np.uint64)
        self._mixture = Mixture(weights)
        nothing = np.empty(0, np.int64)
        self._located = _Located(0, 0, 0, nothing, nothing)
        self._vocab_size = vocab_size
        self._ids_are_checked = all(side.scanned for side in (*train, *held_out))
        self._pads = all(side.pads for side in held_out)
        # rows of one epoch, summed over the sources
        self.num_train_samples = int(self._sizes.sum())
        self.num_train_tokens = sum(side.num_tokens for side in train)
        self.num_validation_tokens = sum(side.samples.num_targets for side in held_out)
        # counts of sliding windows; None if held-out rows have none
        self.validation_windows = sliding.total(self._samples["validation"])
        # Held-out rows have consecutive numbers over all sources.
        self._ends = np.cumsum([side.samples.num_rows for side in held_out])

    def rows_of(self, split: str) -> list[Samples]:
        """Lists the rows of each source on one side.

        Args:
          split: "train" or "validation".
        """
        return self._samples[split]

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = _ALL_ROWS
    ) -> Batch:
        """Reads rows of the global batch of `step`.

        Args:
          step: updates finished before this batch, from 0.
          global_size: rows per step, G.
          rows: rows to read out of G, as a slice or [B] integers. The default is all.

        Returns:
          tokens, targets, positions [B, S] int32, weights [B, S] float32, and sample
          [B] int32 (the global sample index, modulo 2^31). With packing=documents also
          segment_ids [B, S] int32.

        Raises:
          SourceError: a source cannot be read, or holds an id beyond the vocabulary.
        """
        chosen = np.arange(global_size)[rows]
        source, row = self._locate_batch(step, global_size)
        indices = step * global_size + chosen
        return self._read_located("train", indices, source[chosen], row[chosen])

    @property
    def any_step(self) -> bool:
        """Whether steps can be read in any order, and long before they are needed.

        Only a function or an iterable of a user wants its steps in turn.
        """
        return True

    @property
    def epoch_samples(self) -> int | None:
        """The number of training samples in an epoch.

        It is None for a mixture, which reads some sources more often than others, and
        for the batches of a user, whose number is unknown.
        """
        if len(self._sizes) > 1:
            return None
        return self.num_train_samples

    def reader_state(self, step: int) -> Any:
        """Gives the JSON state from which a reader continues at `step`.

        Only iterators have one. Here it is None: the step alone determines the batch.
        """
        return None

    def go_to(self, step: int, state: Any) -> str:
        """Makes `step` the next one to read. Only iterators of a user need this call.

        This dataset does nothing, because it reads each batch by the number of its step.
        The dataset of an iterator (`user_batches`) overrides this method.

        Args:
          step: the next step.
          state: result of `reader_state`, or None if it is unknown.

        Returns:
          A line to print; "" if there is none, as here.
        """
        return ""

    def num_validation_batches(self, global_size: int) -> int:
        """Counts the batches of `global_size` rows that hold all held-out rows.

        Rows of arrays have no weights, so no empty rows can fill their last batch.
        Only whole batches of them count.

        Raises:
          ConfigError: there are no held-out rows, or fewer than a whole batch.
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
        """Reads rows of held-out batch `number`. Empty rows fill the last batch.

        Over all batches, every held-out token with a predecessor is a target once: the
        weights sum to `num_validation_tokens`. See `train_batch`.
        """
        return self.read(
            "validation", number * global_size + np.arange(global_size)[rows]
        )

    def read(self, split: str, indices: np.ndarray) -> Batch:
        """Reads rows [B] of a split; see `train_batch` for the entries.

        Args:
          split: "train" or "validation".
          indices: numbers of rows in the split's order, [B], from 0. For "validation", an index past the
            end gives an empty row with weights 0.
        """
        indices = np.asarray(indices, np.int64)
        if split == "train":
            source, rows = self._locate(indices)
        else:
            source, rows = self._locate_held_out(indices)
        return self._read_located(split, indices, source, rows)

    def _read_located(
        self, split: str, indices: np.ndarray, source: np.ndarray, rows: np.ndarray
    ) -> Batch:
        """Reads rows whose places are known; see `read`.

        Args:
          split: "train" or "validation".
          indices: numbers of rows in the split's order, [B].
          source: number of the source of each row, [B].
          rows: number of each row in its source, [B].
        """
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
        """Checks that all ids of a batch are in the vocabulary.

        Raises:
          SourceError: an id is not.
        """
        tokens = batch["tokens"]
        targets = batch["targets"]
        smallest = min(int(tokens.min()), int(targets.min()))
        if smallest < 0:
            raise SourceError(
                f"data source {self.name}: token id {smallest} {place}; "
                "required 0 or more"
            )
        largest = max(int(tokens.max()), int(targets.max()))
        fault = vocabulary_fault(self.name, largest, self._vocab_size)
        if fault:
            raise SourceError(fault)

    def attention_work(
        self, step: int, global_size: int, chunks: int = 1
    ) -> np.ndarray | None:
        """Counts the attention work of each row of the global batch of `step`.

        Args:
          step: updates finished before the batch.
          global_size: rows per step, G.
          chunks: number of equal parts of a row that are counted separately.

        Returns:
          Pairs of tokens of the same document, [G, chunks] int64. None if all rows have
          the same work.
        """
        packed = []
        for samples in self._samples["train"]:
            if not isinstance(samples, PackedDocuments):
                return None
            packed.append(samples)
        source, rows = self._locate_batch(step, global_size)
        work = np.empty((global_size, chunks), np.int64)
        for number in np.unique(source):
            chosen = source == number
            work[chosen] = packed[number].attention_work(rows[chosen], chunks)
        return work

    def _locate_batch(
        self, step: int, global_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the sources and the rows in them of the batch of `step`, both [G].

        The batches after it are located with it, and kept for the next calls.
        """
        located = self._located
        is_known = located.first <= step < located.end
        if not is_known or located.size != global_size:
            end = step + max(1, _LOCATED // global_size)
            indices = np.arange(step * global_size, end * global_size)
            located = _Located(step, end, global_size, *self._locate(indices))
            # one assignment: the loader's thread and the loop call this method
            self._located = located
        begin = (step - located.first) * global_size
        rows = slice(begin, begin + global_size)
        return located.source[rows], located.row[rows]

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the source of training rows, and the row in it, both [B]."""
        source, running = self._mixture.locate(indices)
        return source, permute(running, self._sizes[source], self._keys[source])

    def _locate_held_out(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the source of held-out rows, and the row in it, both [B]."""
        last = len(self._ends) - 1
        source = np.minimum(np.searchsorted(self._ends, indices, "right"), last)
        starts = np.concatenate([[0], self._ends[:-1]])
        return source, indices - starts[source]


def vocabulary_fault(name: str, largest: int | None, vocab_size: int | None) -> str:
    """Describes a token id that does not fit the model's vocabulary.

    The result is "" if the ids fit, or if one of the arguments is unknown.

    Args:
      name: name of the source.
      largest: largest token id of the source; None = unknown.
      vocab_size: vocabulary size of the model; None = unknown.
    """
    if largest is None or vocab_size is None or largest < vocab_size:
        return ""
    text = (
        f"data source {name}: token id {largest} with model.vocab_size={vocab_size}. "
        f"Set model.vocab_size to {largest + 1} or more, above every id."
    )
    if name == "bin":  # any file can be read as tokens
        text += " Or the file holds other data: text, or integers of another size (data.bin_dtype)."
    return text


def _read(samples: list[Samples], source: np.ndarray, rows: np.ndarray) -> Batch:
    """Reads a batch whose row i is row `rows[i]` of `samples[source[i]]`."""
    numbers = np.unique(source)
    if len(numbers) == 1:
        # Constant arrays stay the same objects, which `loader.Placer` places only once.
        return samples[int(numbers[0])].read(rows)
    batch: Batch = {}
    for number in numbers:
        chosen = source == number
        for name, values in samples[number].read(rows[chosen]).items():
            if name not in batch:
                batch[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
            batch[name][chosen] = values
    return batch


def _bytes_per_token(sides: list[DatasetSplit]) -> float | None:
    """Divides UTF-8 bytes by tokens, over all sides.

    The result is None if the bytes of a side are unknown, or if there are no tokens.
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
