"""Samples: rows of S predictions cut from documents, as windows of one stream or packed.

Shapes: B rows asked for, S sequence length, P pieces. Either kind has `num_rows`, `num_targets`
(predictions of all rows) and `read(rows) -> Batch`: tokens, targets, positions int32 and weights
float32, all [B, S], of rows [B] in any order; a row number past the end gives an empty row, weights
0. Every token but a stream's or document's first is a target of exactly one row.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.data.token_cache import Log, one_builder
from jaxdist.data.token_files import TokenStore
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest

Batch = dict[str, np.ndarray]

_VERSION = 1  # of the packing rule; part of the cache key


class Windows:
    """Contiguous windows of the concatenated documents (data.packing=window).

    Window w predicts tokens w*S + 1 .. w*S + S of the stream from those before, so windows share one
    token. Documents follow each other without padding; attention crosses their borders.
    """

    def __init__(
        self, store: TokenStore, chosen: np.ndarray, sequence_length: int, *, limit: int = 0, partial: bool
    ):
        """Args:
        chosen: [documents] bool.
        limit: targets at most, 0 = all.
        partial: keep a last window that is not full (held-out data), or leave it out (training).
        """
        self._length_S = sequence_length
        chosen = chosen & (store.length > 0)
        self._file, self._start, self._stream = _runs(
            store.file[chosen], store.start[chosen], store.length[chosen]
        )
        targets = max(int(self._stream[-1]) - 1, 0)
        targets = min(targets, limit) if limit else targets
        self.num_targets = targets if partial else targets - targets % sequence_length
        self.num_rows = -(-self.num_targets // sequence_length)
        self._files, self._views = store.files, [_sliding(f.tokens, sequence_length + 1) for f in store.files]
        self._ones = np.ones((0, sequence_length), np.float32)
        self._places = np.zeros((0, sequence_length), np.int32)

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the windows `rows`. Weights and positions are the same objects as in the call
        before where they can be, and not writeable: a loader may keep their device copies."""
        length_S, size_B = self._length_S, len(rows)
        begin = rows * length_S
        run = np.minimum(np.searchsorted(self._stream, begin, "right"), len(self._file)) - 1
        first = self._start[run] + begin - self._stream[run]
        tokens, targets = np.empty((2, size_B, length_S), np.int32)
        for number, here in groups(self._file[run]):
            self._files[number].check()
            view = self._views[number]
            window = view[np.minimum(first[here], len(view) - 1)]
            tokens[here], targets[here] = window[:, :-1], window[:, 1:]
        weights, positions = self._constants(size_B)
        left = self.num_targets - begin
        odd = (begin + length_S >= self._stream[run + 1]) | (left < length_S)
        for i in np.flatnonzero(odd):  # not inside one run, so that the above read junk
            count = max(min(int(left[i]), length_S), 0)
            tokens[i], targets[i] = 0, 0
            window = self._read_pieces(int(begin[i]), int(run[i]), count)
            tokens[i, :count], targets[i, :count] = window[:-1], window[1:]
        if np.any(left < length_S):
            weights = (np.arange(length_S) < left[:, None]).astype(np.float32)
        return {"tokens": tokens, "targets": targets, "weights": weights, "positions": positions}

    def _read_pieces(self, begin: int, run: int, num_targets: int) -> np.ndarray:
        """Returns the num_targets + 1 tokens of the stream from `begin`, across runs."""
        pieces, left = [np.zeros(0, np.int32)], num_targets + 1 if num_targets else 0
        while left:
            count = min(left, int(self._stream[run + 1]) - begin)
            at = int(self._start[run]) + begin - int(self._stream[run])
            pieces.append(self._files[self._file[run]].tokens[at : at + count])
            begin, left, run = begin + count, left - count, run + 1
        return np.concatenate(pieces)

    def _constants(self, size_B: int) -> tuple[np.ndarray, np.ndarray]:
        if len(self._ones) < size_B:
            self._ones = np.ones((size_B, self._length_S), np.float32)
            self._places = np.tile(np.arange(self._length_S, dtype=np.int32), (size_B, 1))
            self._ones.flags.writeable = self._places.flags.writeable = False
        if len(self._ones) == size_B:
            return self._ones, self._places
        return self._ones[:size_B], self._places[:size_B]


def _runs(file: np.ndarray, start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, ...]:
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


def groups(numbers: np.ndarray) -> list[tuple[int, slice | np.ndarray]]:
    """Returns each distinct number with its places in `numbers` [B]."""
    if np.all(numbers == numbers[0]):
        return [(int(numbers[0]), slice(None))]
    return [(int(number), np.flatnonzero(numbers == number)) for number in np.unique(numbers)]


def count_up(counts: np.ndarray) -> np.ndarray:
    """Returns 0 .. counts[0] - 1, 0 .. counts[1] - 1, and so on, as one int64 array."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


# --- Packed documents -----------------------------------------------------------------------------


class PackingPlan(NamedTuple):
    """Which pieces fill which row: row r holds pieces first[r] : first[r + 1], in their order."""

    first: np.ndarray  # [rows + 1] int64
    owner: np.ndarray  # [P] int32, number of the file
    start: np.ndarray  # [P] int64, offset of the first input token in the file
    length: np.ndarray  # [P] int64, predictions


class PackedDocuments:
    """Rows of pieces of documents (data.packing=documents): the loss stays inside a document.

    A document of n tokens holds n - 1 predictions, cut into pieces of at most S, which are packed
    into rows by best fit, longest first. `segment_ids` number a row's pieces from 1, positions
    restart with each; slots that no piece fills have weight, segment and all else 0.
    """

    def __init__(self, store: TokenStore, plan: PackingPlan, sequence_length: int):
        self._files, self._length_S = store.files, sequence_length
        self.num_rows, self.num_targets = len(plan.first) - 1, int(plan.length.sum())
        # Padding is a piece that no file owns, the last of each row; and there is an empty row.
        filled = np.diff(np.concatenate([[0], np.cumsum(plan.length)])[plan.first])
        ends = np.append(plan.first[1:], plan.first[-1])
        self._first = np.append(plan.first, plan.first[-1]) + np.arange(self.num_rows + 2)
        self._owner = np.insert(plan.owner, ends, -1)
        self._start = np.insert(plan.start, ends, 0)
        self._length = np.insert(plan.length, ends, np.append(sequence_length - filled, sequence_length))

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the packed rows, with `segment_ids`."""
        rows = np.minimum(rows, self.num_rows)
        first = self._first[rows]
        pieces = self._first[rows + 1] - first
        rank = count_up(pieces)  # of a piece in its row
        piece = np.repeat(first, pieces) + rank
        owner, length = self._owner[piece], self._length[piece]
        segments = np.repeat(np.where(owner < 0, 0, rank + 1).astype(np.int32), length)
        positions = count_up(length)
        source = np.repeat(self._start[piece], length) + positions
        tokens, targets = np.zeros((2, segments.size), np.int32)
        for number in set(owner.tolist()) - {-1}:
            places, file = np.repeat(owner == number, length), self._files[number].tokens
            at = source[places]
            tokens[places], targets[places] = file[at], file[at + 1]
        used = segments > 0
        flat = {"tokens": tokens, "targets": targets, "segment_ids": segments}
        flat |= {"positions": (positions * used).astype(np.int32), "weights": used.astype(np.float32)}
        return {name: values.reshape(-1, self._length_S) for name, values in flat.items()}


def open_packing(
    store: TokenStore, chosen: np.ndarray, sequence_length: int, *, limit: int, folder: Path, log: Log
) -> PackingPlan:
    """Returns `plan_packing`, from the cache folder if it is there, else made and kept there."""
    choice = digest(chosen.tobytes(), store.start.tobytes(), store.length.tobytes())
    key = digest(_VERSION, store.fingerprint, choice, sequence_length, limit)[:16]
    target = folder / f"packing-{key}.npz"
    with one_builder(target, log):
        try:
            with np.load(target, allow_pickle=False) as kept:
                return PackingPlan(**{name: kept[name] for name in PackingPlan._fields})
        except (OSError, ValueError, KeyError):  # absent or damaged
            plan = plan_packing(store, chosen, sequence_length, limit=limit)
        with atomic.replacing(target) as partial, partial.open("wb") as file:
            np.savez(file, **plan._asdict())
    return plan


def plan_packing(
    store: TokenStore, chosen: np.ndarray, sequence_length: int, *, limit: int = 0
) -> PackingPlan:
    """Returns the packing of the documents `chosen` ([documents] bool).

    Args:
      limit: predictions at most, in the order of documents; 0 = all.
    """
    predictions = np.maximum(store.length[chosen] - 1, 0)
    if limit:
        before = np.cumsum(predictions) - predictions
        predictions = np.clip(limit - before, 0, predictions)
    pieces = -(-predictions // sequence_length)
    document = np.repeat(np.arange(len(pieces)), pieces)
    offset = count_up(pieces) * sequence_length
    length = np.minimum(sequence_length, predictions[document] - offset)
    row = best_fit(length, sequence_length)
    order = np.argsort(row, kind="stable")  # within a row: the order of the stream
    first = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
    start = store.start[chosen][document] + offset
    return PackingPlan(first, store.file[chosen][document][order], start[order], length[order])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece: longest first, into the row with the least room that suffices.

    Deterministic; ties go to the piece that comes first and to the row that was touched last.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    rooms: list[int] = []  # sizes of room for which some row is open, ascending
    open_rows: defaultdict[int, list[int]] = defaultdict(list)
    num_rows = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, num_rows
            num_rows += 1
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del rooms[at]
        rows[piece] = row
        if left := room - length:
            if not open_rows[left]:
                insort(rooms, left)
            open_rows[left].append(row)
    return rows
