"""Samples as contiguous windows of the concatenated documents (data.packing=window).

Shapes: B rows asked for, S sequence length. Window w predicts tokens w*S + 1 .. w*S + S of the
stream from those before, so windows share one token and every token but the stream's first is a
target of exactly one window. Documents follow each other without padding; attention crosses them.
"""

from typing import Protocol

import numpy as np

from jaxdist.data.formats import TokenStore

Batch = dict[str, np.ndarray]


class Samples(Protocol):
    """Rows of training or held-out data, addressable in any order."""

    num_rows: int
    num_targets: int  # predictions of all rows together

    def read(self, rows: np.ndarray) -> Batch:
        """Returns tokens, targets, positions int32 and weights float32, all [B, S], of rows [B].

        Packed samples add `segment_ids`. A row number past the end gives an empty row: weights 0.
        """


class Windows:
    """The windows of some documents of a store."""

    def __init__(
        self,
        store: TokenStore,
        chosen: np.ndarray,
        sequence_length: int,
        *,
        validation_limit: int = -1,
    ):
        """Args:
        chosen: [documents] bool.
        validation_limit: targets at most, 0 = all; keeps a partial last window. -1: training,
          which leaves it out.
        """
        self._files, self._length_S = store.files, sequence_length
        chosen = chosen & (store.length > 0)
        file, start, length = store.file[chosen], store.start[chosen], store.length[chosen]
        self._file, self._start, self._stream = _runs(file, start, length)
        self.num_targets = max(int(self._stream[-1]) - 1, 0)
        if validation_limit > 0:
            self.num_targets = min(self.num_targets, validation_limit)
        full = self.num_targets // sequence_length
        if validation_limit < 0:
            self.num_targets = full * sequence_length
        self.num_rows = -(-self.num_targets // sequence_length)
        self._views: dict[int, np.ndarray] = {}
        self._constants: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the windows `rows`; see Samples.read."""
        length_S = self._length_S
        begin = np.asarray(rows, np.int64) * length_S
        run = np.searchsorted(self._stream, begin, "right") - 1
        run = np.minimum(run, len(self._file) - 1)
        tokens, targets = self._read_whole(begin, run)
        weights, positions = self._weights_positions(len(begin))
        ends = begin + length_S
        odd = np.flatnonzero((ends >= self._stream[run + 1]) | (ends > self.num_targets))
        if odd.size:
            valid = np.clip(self.num_targets - begin, 0, length_S)
            if np.any(valid[odd] < length_S):
                weights = (np.arange(length_S) < valid[:, None]).astype(np.float32)
            for i in odd:
                window = self._read_pieces(int(begin[i]), int(run[i]), int(valid[i]))
                tokens[i], targets[i] = 0, 0
                tokens[i, : valid[i]], targets[i, : valid[i]] = window[:-1], window[1:]
        return {"tokens": tokens, "targets": targets, "weights": weights, "positions": positions}

    def _read_whole(self, begin: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens, targets) as if each window lay inside its run; the others are junk."""
        first = self._start[run] + begin - self._stream[run]
        if len(self._files) == 1:
            window = self._window(0, first)
            return window[:, :-1].astype(np.int32), window[:, 1:].astype(np.int32)
        shape, file = (len(begin), self._length_S), self._file[run]
        tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for number in np.unique(file):
            here = np.flatnonzero(file == number)
            window = self._window(int(number), first[here])
            tokens[here], targets[here] = window[:, :-1], window[:, 1:]
        return tokens, targets

    def _window(self, number: int, first: np.ndarray) -> np.ndarray:
        """Returns [B, S + 1] tokens of a file from offsets `first`, moved back to lie inside it."""
        tokens, view = self._files[number].tokens, self._views.get(number)
        if view is None:
            view = self._views[number] = _sliding(tokens, self._length_S + 1)
        return view[np.minimum(first, len(view) - 1)]

    def _read_pieces(self, begin: int, run: int, num_targets: int) -> np.ndarray:
        """Returns the num_targets + 1 tokens of the stream from `begin`, across runs."""
        pieces, left = [np.zeros(0, np.int32)], num_targets + 1 if num_targets else 0
        while left:
            skip = begin - int(self._stream[run])
            count = min(left, int(self._stream[run + 1]) - begin)
            at = int(self._start[run]) + skip
            pieces.append(self._files[self._file[run]].tokens[at : at + count])
            begin, left, run = begin + count, left - count, run + 1
        return np.concatenate(pieces).astype(np.int32)

    def _weights_positions(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns constant arrays, the same objects for each size: a loader may keep them."""
        if num_rows not in self._constants:
            shape = (num_rows, self._length_S)
            weights = np.ones(shape, np.float32)
            positions = np.tile(np.arange(self._length_S, dtype=np.int32), (num_rows, 1))
            weights.flags.writeable = positions.flags.writeable = False
            self._constants[num_rows] = weights, positions
        return self._constants[num_rows]


def _runs(
    file: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (file, start, borders in the stream) of maximal stretches of adjacent documents."""
    if not len(file):
        return np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(2, np.int64)
    follows = (file[1:] == file[:-1]) & (start[1:] == start[:-1] + length[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    stream = np.concatenate([[0], np.cumsum(np.add.reduceat(length, first))])
    return file[first], start[first], stream


def _sliding(tokens: np.ndarray, width: int) -> np.ndarray:
    """Returns a view [positions, width]; a file shorter than a window gets zeros to its right."""
    if len(tokens) < width:
        tokens = np.concatenate([tokens, np.zeros(width - len(tokens), tokens.dtype)])
    return np.lib.stride_tricks.sliding_window_view(tokens, width)
