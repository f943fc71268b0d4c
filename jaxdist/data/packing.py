"""Samples: rows of S predictions cut from documents, as windows of one stream or
packed.

Shapes: B rows asked for, S sequence length, P pieces. Either kind has `num_rows`,
`num_targets` (predictions of all rows) and `read(rows) -> Batch`: tokens, targets,
positions int32 and weights float32, all [B, S], of rows [B] in any order; a row number
past the end gives an empty row, weights
0. Every token but a stream's or document's first is a target of exactly one row.
"""

import functools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.data.token_cache import Log, one_builder
from jaxdist.data.token_files import TokenFile, TokenStore
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import open_regular

Batch = dict[str, np.ndarray]

_VERSION = 2  # of rule and file, in the key: a cache of another is made anew


class Windows:
    """Contiguous windows of the concatenated documents (data.packing=window).

    Window w predicts tokens w*S + 1 .. w*S + S of the stream from those before, so
    windows share one token. Documents follow each other without padding; attention
    crosses their borders.
    """

    def __init__(
        self,
        store: TokenStore,
        chosen: np.ndarray,
        sequence_length: int,
        *,
        limit: int = 0,
        partial: bool,
    ):
        """Args:
        chosen: [documents] bool.
        limit: targets at most, 0 = all.
        partial: keep a last window that is not full (held-out data), or leave it out
        (training).
        """
        self._files, self._length_S = store.files, sequence_length
        file, start, length = _runs(
            store.file[chosen], store.start[chosen], store.length[chosen]
        )
        # Padding follows, a run that no file owns: enough for the window after the
        # last.
        self._file, self._start = np.append(file, -1), np.append(start, 0)
        # borders of runs
        self._stream = np.cumsum(
            np.concatenate([[0], length, [2 * sequence_length + 1]])
        )
        targets = max(int(self._stream[-2]) - 1, 0)
        targets = min(targets, limit) if limit else targets
        self.num_targets = targets if partial else targets - targets % sequence_length
        self.num_rows = -(-self.num_targets // sequence_length)

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the windows `rows`. Positions, and weights of full windows, are the
        same objects in each call and not writeable: a loader may keep their device
        copies."""
        begin = np.minimum(rows, self.num_rows) * self._length_S
        end = begin + self._length_S + 1
        first, last = (
            np.searchsorted(self._stream, place, "right") - 1
            for place in (begin, end - 1)
        )
        pieces = last - first + 1
        piece = np.repeat(first, pieces) + count_up(pieces)
        low = np.maximum(self._stream[piece], np.repeat(begin, pieces))
        high = np.minimum(self._stream[piece + 1], np.repeat(end, pieces))
        start = self._start[piece] + low - self._stream[piece]
        window = _gather(self._files, self._file[piece], start, high - low).reshape(
            -1, self._length_S + 1
        )
        tokens, targets = window[:, :-1].copy(), window[:, 1:].copy()
        weights, positions = _constants(len(rows), self._length_S)
        left = self.num_targets - begin
        if np.any(left < self._length_S):
            used = np.arange(self._length_S) < left[:, None]
            tokens[~used], targets[~used], weights = 0, 0, used.astype(np.float32)
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": weights,
            "positions": positions,
        }


def _runs(
    file: np.ndarray, start: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns documents [documents] with those that lie side by side in a file, as in a
    cache, as one.
    """
    if len(file) < 2:
        return file, start, length
    apart = (file[1:] != file[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, apart))
    return file[first], start[first], np.add.reduceat(length, first)


@functools.lru_cache(4)
def _constants(size_B: int, length_S: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights and positions of full windows, read-only."""
    weights = np.ones((size_B, length_S), np.float32)
    positions = np.tile(np.arange(length_S, dtype=np.int32), (size_B, 1))
    weights.flags.writeable = positions.flags.writeable = False
    return weights, positions


def _gather(
    files: Sequence[TokenFile], owner: np.ndarray, start: np.ndarray, length: np.ndarray
) -> np.ndarray:
    """Returns the tokens of pieces [P] of files, one piece after the other; 0 where the
    file is -1.
    """
    contents = {number: files[number].tokens for number in set(owner.tolist()) - {-1}}
    tokens, end = np.zeros(length.sum(), np.int32), 0
    for number, first, count in zip(
        owner.tolist(), start.tolist(), length.tolist(), strict=True
    ):
        begin, end = end, end + count
        if number >= 0:
            tokens[begin:end] = contents[number][first : first + count]
    return tokens


def count_up(counts: np.ndarray) -> np.ndarray:
    """Returns 0 .. counts[0] - 1, 0 .. counts[1] - 1, and so on, as one int64 array."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


# --- Packed documents -----------------------------------------------------------------


class PackingPlan(NamedTuple):
    """Which pieces fill which row: row r holds pieces first[r] : first[r + 1], in their
    order.
    """

    first: np.ndarray  # [rows + 1] int64
    owner: np.ndarray  # [P] int32, number of the file
    start: np.ndarray  # [P] int64, offset of the first input token in the file
    length: np.ndarray  # [P] int64, predictions


class PackedDocuments:
    """Rows of pieces of documents (data.packing=documents): the loss stays inside a
    document.

    A document of n tokens holds n - 1 predictions, split into pieces of at most S or
    truncated to the first, which are packed into rows by best fit, longest first.
    `segment_ids` number a row's pieces from 1, positions restart with each; slots that
    no piece fills have weight, segment and all else 0.

    Of examples (documents of a store with weights) what is not learned has weight 0,
    and pieces of which nothing is learned are in no row.
    """

    def __init__(
        self,
        store: TokenStore,
        plan: PackingPlan,
        sequence_length: int,
        *,
        read: np.ndarray | None = None,
    ):
        """Args:
        read: [P] of each piece how many predictions at its begin have weight 0; None:
        none.
        """
        self._files, self._weights, self._length_S = (
            store.files,
            store.weights,
            sequence_length,
        )
        self.num_rows = len(plan.first) - 1
        skip = 0 if read is None else read
        self.num_targets = int(
            count_learned(
                store, plan.owner, plan.start + skip, plan.length - skip
            ).sum()
        )
        # Padding is a piece that no file owns, the last of each row; and there is an
        # empty row.
        filled = np.diff(np.concatenate([[0], np.cumsum(plan.length)])[plan.first])
        ends = np.append(plan.first[1:], plan.first[-1])
        self._first = np.append(plan.first, plan.first[-1]) + np.arange(
            self.num_rows + 2
        )
        self._owner = np.insert(plan.owner, ends, -1)
        self._start = np.insert(plan.start, ends, 0)
        self._length = np.insert(
            plan.length, ends, np.append(sequence_length - filled, sequence_length)
        )
        self._read = None if read is None else np.insert(read, ends, 0)

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the packed rows, with `segment_ids`."""
        rows = np.minimum(rows, self.num_rows)
        first = self._first[rows]
        pieces = self._first[rows + 1] - first
        rank = count_up(pieces)  # of a piece in its row
        piece = np.repeat(first, pieces) + rank
        owner, length = self._owner[piece], self._length[piece]
        segments = np.repeat(np.where(owner < 0, 0, rank + 1).astype(np.int32), length)
        used = segments > 0
        positions = count_up(length) * used
        content = _gather(self._files, owner, self._start[piece], length + 1)
        # pieces share none
        at = np.arange(len(segments)) + np.repeat(np.arange(len(piece)), length)
        tokens, targets = content[at], content[at + 1]
        if self._read is not None:
            used &= positions >= np.repeat(self._read[piece], length)
        if self._weights:
            used &= (
                _gather(self._weights, owner, self._start[piece], length + 1)[at + 1]
                > 0
            )
        flat = {"tokens": tokens, "targets": targets, "segment_ids": segments}
        flat |= {
            "positions": positions.astype(np.int32),
            "weights": used.astype(np.float32),
        }
        return {
            name: values.reshape(-1, self._length_S) for name, values in flat.items()
        }

    def attention_work(self, rows: np.ndarray, chunks: int = 1) -> np.ndarray:
        """Returns how many pairs of tokens (a query, a key not after it) each of
        `chunks` equal parts of the rows has within pieces, [B, chunks] int64: what
        attention to a piece's own tokens must compute.
        """
        ends, pairs = self._pairs
        borders = np.arange(chunks + 1) * (self._length_S // chunks)
        place = np.minimum(rows, self.num_rows)[:, None] * self._length_S + borders
        piece = np.minimum(np.searchsorted(ends, place, "right"), len(ends) - 1)
        inside = place - (ends[piece] - self._length[piece])
        before = np.where(self._owner[piece] < 0, 0, inside * (inside + 1) // 2)
        return np.diff(pairs[piece] + before)

    @functools.cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns of each piece its end in the stream of all rows, and the pairs of all
        pieces before it.
        """
        pairs = np.where(self._owner < 0, 0, self._length * (self._length + 1) // 2)
        return np.cumsum(self._length), np.cumsum(pairs) - pairs


def open_packing(
    store: TokenStore,
    chosen: np.ndarray,
    sequence_length: int,
    *,
    limit: int,
    truncate: bool,
    folder: Path,
    log: Log,
) -> PackingPlan:
    """Returns `plan_packing`, from the cache folder if it is there, else made and kept
    there.
    """
    kind = ["examples"] if store.weights else []
    # as it was before this could be chosen: no part of the name
    if truncate != bool(store.weights):
        kind.append("truncated" if truncate else "split")
    choice = digest(
        chosen.tobytes(), store.start.tobytes(), store.length.tobytes(), *kind
    )
    key = digest(_VERSION, store.fingerprint, choice, sequence_length, limit)[:16]
    target = folder / f"packing-{key}.npz"
    with one_builder(target, log):
        try:
            with (
                open_regular(target) as content,
                np.load(content, allow_pickle=False) as kept,
            ):
                plan = PackingPlan(**{name: kept[name] for name in PackingPlan._fields})
            if _fits(plan, store, sequence_length):
                return plan
        except Exception:
            # absent or damaged; numpy and zipfile raise many types for that
            pass
        plan = plan_packing(
            store, chosen, sequence_length, limit=limit, truncate=truncate
        )
        with atomic.replacing(target) as partial, partial.open("wb") as file:
            np.savez(file, **plan._asdict())
    return plan


def _fits(plan: PackingPlan, store: TokenStore, sequence_length: int) -> bool:
    """Returns whether a kept plan's pieces lie in the files, and its rows hold them."""
    if any(x.ndim != 1 or x.dtype.kind != "i" for x in plan) or not len(plan.first):
        return False
    first, owner, start, length = plan
    if (
        not len(owner) == len(start) == len(length) == first[-1]
        or first[0] != 0
        or np.any(np.diff(first) < 0)
    ):
        return False
    if (
        np.any(owner < 0)
        or np.any(owner >= len(store.files))
        or np.any(start < 0)
        or np.any(length < 0)
    ):
        return False
    counts = np.array([file.count for file in store.files])
    filled = np.diff(np.concatenate([[0], np.cumsum(length)])[first])
    return bool(
        np.all(start + length < counts[owner]) and np.all(filled <= sequence_length)
    )


def plan_packing(
    store: TokenStore,
    chosen: np.ndarray,
    sequence_length: int,
    *,
    limit: int = 0,
    truncate: bool = False,
) -> PackingPlan:
    """Returns the packing of the documents `chosen` ([documents] bool).

    Args:
      limit: predictions at most, in the order of documents; 0 = all.
      truncate: of a document its first S predictions alone; else the rest are pieces of
        their own.
    """
    predictions = np.maximum(store.length[chosen] - 1, 0)
    if truncate:
        predictions = np.minimum(predictions, sequence_length)
    owner, start = store.file[chosen], store.start[chosen]
    if store.weights and limit:  # whole examples alone
        predictions *= (
            np.cumsum(count_learned(store, owner, start, predictions)) <= limit
        )
    elif limit:
        before = np.cumsum(predictions) - predictions
        predictions = np.clip(limit - before, 0, predictions)
    pieces = -(-predictions // sequence_length)
    document = np.repeat(np.arange(len(pieces)), pieces)
    offset = count_up(pieces) * sequence_length
    length = np.minimum(sequence_length, predictions[document] - offset)
    owner, start = owner[document], start[document] + offset
    if store.weights:
        used = count_learned(store, owner, start, length) > 0
        owner, start, length = owner[used], start[used], length[used]
    order, first = plan_rows(best_fit(length, sequence_length))
    return PackingPlan(first, owner[order], start[order], length[order])


def plan_rows(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of pieces by their row [P], and the first of each row and the
    end, [rows + 1].
    """
    order = np.argsort(row, kind="stable")  # within a row: the order of the stream
    return order, np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))


def learned_targets(
    store: TokenStore, chosen: np.ndarray, sequence_length: int
) -> np.ndarray:
    """Returns how many of each chosen example's first S predictions are learned,
    [examples] int64.
    """
    length = np.clip(store.length[chosen] - 1, 0, sequence_length)
    return count_learned(store, store.file[chosen], store.start[chosen], length)


def count_learned(
    store: TokenStore, owner: np.ndarray, start: np.ndarray, length: np.ndarray
) -> np.ndarray:
    """Returns how many predictions of each piece [P] count: without weights all."""
    if not store.weights:
        return length
    weights = [file.tokens for file in store.weights]
    pieces = zip(owner.tolist(), start.tolist(), length.tolist(), strict=True)
    counts = (
        int(np.count_nonzero(weights[f][s + 1 : s + n + 1])) for f, s, n in pieces
    )
    return np.fromiter(counts, np.int64, len(length))


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece: longest first, into the row with the least room
    that suffices.

    Deterministic; ties go to the piece that comes first and to the row that was touched
    last.
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
