"""A dataset: samples of fixed length, ordered by (seed, global sample index) and nothing else.

Shapes: B rows asked for, S sequence length, G global batch. Nothing here knows of processes:
whoever asks names the rows of the global batch that it wants.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.formats import TokenStore
from jaxdist.data.order import Mixture, order_key, permute
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.data.windows import Batch, Samples

_SAMPLE_MASK = 0x7FFFFFFF  # `sample` is int32; randomness folded from it repeats after 2^31 samples
EVERY_ROW = slice(None)


class SourceError(RuntimeError):
    """A source that failed while it was read; the text names it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One source, cut into samples."""

    stores: tuple[TokenStore, ...]  # all that it reads from
    train: Samples
    validation: Samples
    train_tokens: int
    train_bytes: int | None
    tokenizer: Tokenizer | None  # None: its tokens came without one

    @property
    def name(self) -> str:
        return self.stores[0].name


class Dataset:
    """Training and held-out samples of one source or a mixture; made by `open_dataset`."""

    def __init__(
        self,
        parts: list[Part],
        weights: list[float],
        *,
        sequence_length: int,
        vocab_size: int | None,
        seed: int,
        fingerprint: str,
    ):
        self.sequence_length = sequence_length
        self.name = " + ".join(part.name for part in parts)
        self.fingerprint = fingerprint  # of the tokens, the split, the cut and the mixture
        known = (part.tokenizer for part in parts if part.tokenizer)
        self.tokenizer: Tokenizer | None = next(known, None)
        self.num_train_samples = sum(part.train.num_rows for part in parts)  # one epoch of each
        self.num_train_tokens = sum(part.train_tokens for part in parts)
        self.num_validation_tokens = sum(part.validation.num_targets for part in parts)
        self.bytes_per_token = _bytes_per_token(parts)
        self._parts, self._vocab_size = parts, vocab_size
        self._mixture = Mixture(weights) if len(parts) > 1 else None
        self._keys = [order_key(seed, str(number)) for number in range(len(parts))]
        self._scanned = all(s.max_id is not None for part in parts for s in part.stores)
        ends = np.cumsum([part.validation.num_rows for part in parts])
        self._validation_ends = ends  # held-out rows are numbered through all parts

    # --- Training ---

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = EVERY_ROW
    ) -> Batch:
        """Returns rows of the global batch of `step` (updates finished before it, from 0).

        Args:
          global_size: sequences per step, G.
          rows: which of the G rows, all by default; a slice or [B] integers.

        Returns:
          tokens, targets, positions [B, S] int32, weights [B, S] float32, sample [B] int32 (the
          global sample index, modulo 2^31); with packing=documents also segment_ids [B, S] int32.

        Raises:
          SourceError: where a source cannot be read or holds an id beyond the vocabulary.
        """
        return self.read("train", step * global_size + np.arange(global_size)[rows])

    def read(self, split: str, indices: np.ndarray) -> Batch:
        """Returns samples [B] of split `train` (any index >= 0) or `validation`; see train_batch.

        A validation index past the end gives an empty row (weights 0).
        """
        indices = np.asarray(indices, np.int64)
        try:
            batch = self._read_train(indices) if split == "train" else self._read_held_out(indices)
        except (OSError, IndexError) as error:
            raise SourceError(f"data source {self.name} ended or failed: {error}") from error
        if not self._scanned:
            self._check_ids(batch)
        return {**batch, "sample": (indices & _SAMPLE_MASK).astype(np.int32)}

    def _read_train(self, indices: np.ndarray) -> Batch:
        if self._mixture is None:
            return self._read_part(0, indices)
        source, running = self._mixture.locate(indices)
        return _merge(source, running, self._read_part)

    def _read_part(self, number: int, running: np.ndarray) -> Batch:
        samples = self._parts[number].train
        return samples.read(permute(running, samples.num_rows, self._keys[number]))

    def _check_ids(self, batch: Batch) -> None:
        largest = max(int(batch["tokens"].max()), int(batch["targets"].max()))
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise SourceError(
                f"data source {self.name}: token id {largest} with model.vocab_size="
                f"{self._vocab_size}. Set model.vocab_size above every id."
            )

    # --- Validation ---

    def num_validation_batches(self, global_size: int) -> int:
        """Returns how many batches of `global_size` rows hold all held-out samples.

        Raises:
          ConfigError: where nothing is held out.
        """
        if not self.num_validation_tokens:
            raise ConfigError(
                f"data source {self.name}: nothing is held out for evaluation. Set "
                "data.validation_path, raise data.validation_share, or set train.eval_every=0."
            )
        return -(-int(self._validation_ends[-1]) // global_size)

    def validation_batch(
        self, number: int, global_size: int, rows: slice | np.ndarray = EVERY_ROW
    ) -> Batch:
        """Returns rows of held-out batch `number`; as train_batch, the last filled with empty rows.

        Over all batches every held-out token that has a predecessor is a target once: weights sum
        to `num_validation_tokens`.
        """
        return self.read("validation", number * global_size + np.arange(global_size)[rows])

    def validation_batches(self, global_size: int) -> Iterator[Batch]:
        """Yields all held-out batches, whole."""
        for number in range(self.num_validation_batches(global_size)):
            yield self.validation_batch(number, global_size)

    def _read_held_out(self, indices: np.ndarray) -> Batch:
        ends = self._validation_ends
        source = np.minimum(np.searchsorted(ends, indices, "right"), len(ends) - 1)
        running = indices - np.concatenate([[0], ends[:-1]])[source]
        if len(ends) == 1:
            return self._parts[0].validation.read(running)
        return _merge(source, running, lambda k, rows: self._parts[k].validation.read(rows))


def _merge(
    source: np.ndarray, running: np.ndarray, read: Callable[[int, np.ndarray], Batch]
) -> Batch:
    """Returns one batch whose row i is row `running[i]` of part `source[i]`."""
    batch: Batch = {}
    for number in np.unique(source):
        here = np.flatnonzero(source == number)
        for name, values in read(int(number), running[here]).items():
            if name not in batch:
                batch[name] = np.empty((len(source), *values.shape[1:]), values.dtype)
            batch[name][here] = values
    return batch


def _bytes_per_token(parts: list[Part]) -> float | None:
    """Returns UTF-8 bytes per training token over all parts; None where one is unknown."""
    counts = [part.train_bytes for part in parts]
    tokens = sum(part.train_tokens for part in parts)
    return None if None in counts or not tokens else sum(filter(None, counts)) / tokens
