"""Rows of S predictions, which are windows of a stream, or packed documents.

Shapes: B rows to read, S sequence length, P pieces.

Both classes have `num_rows`, `num_targets` (predictions of all rows) and `read(rows) ->
Batch`. A batch holds tokens, targets, positions int32 and weights float32, all [B, S],
of rows [B] in any order. A row number past the end gives an empty row, with weights 0.

A token is a target of at most one row. These tokens are the target of none:
- the first token of a stream (window), or of each document (documents)
- the tokens of a training stream's last window if it is not full
- the tokens of a document after its first S + 1, if `DataConfig.truncates`
- the tokens after the first data.validation_tokens held-out targets
- the tokens of a piece in which nothing is learned
"""

import functools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.data.token_cache import Log, build_lock
from jaxdist.data.token_files import Pieces, TokenStore
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import open_regular

Batch = dict[str, np.ndarray]

# Version of the packing rule and of its file. It is a part of a plan's key, so plans of
# other versions are not read.
_VERSION = 3


class Windows:
    """Contiguous windows of the concatenated documents (data.packing=window).

    They have nothing to do with `sliding`, whose windows overlap inside a document.

    Window w predicts the tokens w S + 1 to w S + S of the stream from the tokens before
    them. Adjacent windows therefore share one token. Documents follow each other
    without padding, and attention crosses their borders.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        *,
        limit: int = 0,
        partial: bool,
    ) -> None:
        """Cuts the stream of documents into windows.

        Args:
          store: tokenized documents.
          sequence_length: S.
          limit: largest number of targets; 0 = all.
          partial: whether to keep a last window that is not full. Held-out data keep
            it, training drops it.
        """
        self._files = store.files
        self._length_S = sequence_length
        runs = _joined(store.documents)
        # A run of padding at the end fills the empty window after the last one.
        self._owner = np.append(runs.owner, -1)
        self._start = np.append(runs.start, 0)
        lengths = np.append(runs.length, 2 * sequence_length + 1)
        # positions in the stream at which runs begin, and the end
        self._borders = np.concatenate([[0], np.cumsum(lengths)])
        self.num_targets = max(int(self._borders[-2]) - 1, 0)
        if limit:
            self.num_targets = min(self.num_targets, limit)
        if not partial:
            self.num_targets -= self.num_targets % sequence_length
        self.num_rows = -(-self.num_targets // sequence_length)

    def read(self, rows: np.ndarray) -> Batch:
        """Reads the windows `rows`.

        The positions are the same read-only object in each call, and so are the weights
        of full windows. A loader can therefore reuse their device copies.
        """
        begin = np.minimum(rows, self.num_rows) * self._length_S
        pieces = self._pieces(begin, begin + self._length_S + 1)
        window = pieces.tokens(self._files).reshape(-1, self._length_S + 1)
        tokens = window[:, :-1].copy()
        targets = window[:, 1:].copy()
        weights, positions = _constants(len(rows), self._length_S)
        remaining = self.num_targets - begin
        if np.any(remaining < self._length_S):
            used = np.arange(self._length_S) < remaining[:, None]
            tokens[~used] = 0
            targets[~used] = 0
            weights = used.astype(np.float32)
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": weights,
            "positions": positions,
        }

    def _pieces(self, begin: np.ndarray, end: np.ndarray) -> Pieces:
        """Finds the pieces of the files between positions of the stream, [B] each."""
        first = np.searchsorted(self._borders, begin, "right") - 1
        last = np.searchsorted(self._borders, end - 1, "right") - 1
        if np.array_equal(first, last):  # each range lies in one run, as in one file
            start = self._start[first] + begin - self._borders[first]
            return Pieces(owner=self._owner[first], start=start, length=end - begin)
        counts = last - first + 1  # runs in each range
        run = np.repeat(first, counts) + count_up(counts)
        low = np.maximum(self._borders[run], np.repeat(begin, counts))
        high = np.minimum(self._borders[run + 1], np.repeat(end, counts))
        start = self._start[run] + low - self._borders[run]
        return Pieces(owner=self._owner[run], start=start, length=high - low)


def _joined(documents: Pieces) -> Pieces:
    """Joins documents that are adjacent in a file, as in a token cache."""
    owner, start, length = documents
    if len(owner) < 2:
        return documents
    has_gap = (owner[1:] != owner[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, has_gap))
    return Pieces(owner[first], start[first], np.add.reduceat(length, first))


@functools.lru_cache(4)
def _constants(size_B: int, length_S: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes weights and positions of full windows, read-only."""
    weights = np.ones((size_B, length_S), np.float32)
    positions = np.tile(np.arange(length_S, dtype=np.int32), (size_B, 1))
    weights.flags.writeable = False
    positions.flags.writeable = False
    return weights, positions


def count_up(counts: np.ndarray) -> np.ndarray:
    """Counts up from 0 for each count: [2, 3] becomes [0, 1, 0, 1, 2], int64."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = ends[-1] if len(ends) else 0
    positions: np.ndarray = np.arange(total) - np.repeat(ends - counts, counts)
    return positions


# --- Packed documents -----------------------------------------------------------------


class PackingPlan(NamedTuple):
    """Assignment of pieces to rows.

    Row r holds the pieces first[r] : first[r + 1], in this order.
    """

    first: np.ndarray  # [rows + 1] int64
    owner: np.ndarray  # [P] int32, number of the file
    start: np.ndarray  # [P] int64, offset of the first input token in the file
    length: np.ndarray  # [P] int64, number of predictions


class PackedDocuments:
    """Rows of pieces of documents (data.packing=documents).

    The loss stays inside a document. A document of n tokens holds n - 1 predictions.
    They are split into pieces of at most S, or truncated to the first S. The pieces are
    packed into rows by best fit, longest first.

    `segment_ids` number a row's pieces from 1, and positions restart with each piece.
    In slots without a piece all entries are 0.

    A store with weights holds examples. Their tokens that are not learned have weight
    0, and pieces without learned tokens are in no row.
    """

    def __init__(
        self,
        store: TokenStore,
        plan: PackingPlan,
        sequence_length: int,
        *,
        unscored: np.ndarray | None = None,
    ) -> None:
        """Makes rows by a plan.

        Args:
          store: tokenized documents.
          plan: assignment of pieces to rows.
          sequence_length: S.
          unscored: [P], number of predictions at the start of each piece that have
            weight 0. None is 0 for all.
        """
        self._files = store.files
        self._weights = store.weights
        self._length_S = sequence_length
        self.num_rows = len(plan.first) - 1
        pieces = Pieces(plan.owner, plan.start, plan.length)
        self.num_targets = int(count_learned(store, pieces, unscored).sum())
        # The last piece of each row is padding, which no file owns. An empty row
        # follows the last one.
        filled = _filled(plan)
        ends = np.append(plan.first[1:], plan.first[-1])
        padding = np.append(sequence_length - filled, sequence_length)
        self._first = np.append(plan.first, plan.first[-1])
        self._first = self._first + np.arange(self.num_rows + 2)
        self._owner = np.insert(plan.owner, ends, -1)
        self._start = np.insert(plan.start, ends, 0)
        self._length = np.insert(plan.length, ends, padding)
        self._unscored = None if unscored is None else np.insert(unscored, ends, 0)
        self._ends = ends
        # fields of `set_piece_field`, by name
        self.piece_fields: dict[str, np.ndarray] = {}
        self.pieces = pieces
        # number of pieces in each row
        self.piece_counts = np.diff(plan.first)

    def set_piece_field(self, name: str, values: np.ndarray) -> None:
        """Adds a field to the batches: a value for each piece, at its first token.

        The field is 0 at all other tokens.

        Args:
          name: name of the field, [B, S] float32.
          values: [P], in the order of `pieces`.
        """
        padded = np.insert(values.astype(np.float32), self._ends, 0)
        self.piece_fields[name] = padded

    def read(self, rows: np.ndarray) -> Batch:
        """Reads the packed rows, with `segment_ids`."""
        rows = np.minimum(rows, self.num_rows)
        first = self._first[rows]
        pieces = self._first[rows + 1] - first
        rank = count_up(pieces)  # number of a piece in its row
        piece = np.repeat(first, pieces) + rank
        owner = self._owner[piece]
        length = self._length[piece]
        segments = np.repeat(np.where(owner < 0, 0, rank + 1).astype(np.int32), length)
        used = segments > 0
        positions = count_up(length) * used
        # A span has one token more than its piece: the last target.
        spans = Pieces(owner, self._start[piece], length + 1)
        content = spans.tokens(self._files)
        index = np.arange(len(segments)) + np.repeat(np.arange(len(piece)), length)
        if self._unscored is not None:
            used &= positions >= np.repeat(self._unscored[piece], length)
        if self._weights:
            used &= spans.tokens(self._weights)[index + 1] > 0
        flat = {
            "tokens": content[index],
            "targets": content[index + 1],
            "segment_ids": segments,
            "positions": positions.astype(np.int32),
            "weights": used.astype(np.float32),
        }
        is_first = (positions == 0) & (segments > 0)
        for name, values in self.piece_fields.items():
            flat[name] = np.where(is_first, np.repeat(values[piece], length), 0)
        return {
            name: values.reshape(-1, self._length_S) for name, values in flat.items()
        }

    def attention_work(self, rows: np.ndarray, chunks: int = 1) -> np.ndarray:
        """Counts the attention work of rows. A token attends to its own piece.

        Args:
          rows: numbers of rows [B].
          chunks: number of equal parts of a row that are counted separately.

        Returns:
          Pairs of a query and a key that is not after it, in the same piece, [B,
          chunks] int64.
        """
        ends, pairs = self._pairs
        borders = np.arange(chunks + 1) * (self._length_S // chunks)
        position = np.minimum(rows, self.num_rows)[:, None] * self._length_S + borders
        piece = np.minimum(np.searchsorted(ends, position, "right"), len(ends) - 1)
        inside = position - (ends[piece] - self._length[piece])
        pairs_in_piece = np.where(self._owner[piece] < 0, 0, inside * (inside + 1) // 2)
        return np.diff(pairs[piece] + pairs_in_piece)

    @functools.cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of pieces in the stream of all rows, and pairs of all earlier pieces."""
        pairs = np.where(self._owner < 0, 0, self._length * (self._length + 1) // 2)
        return np.cumsum(self._length), np.cumsum(pairs) - pairs


def open_packing(
    store: TokenStore,
    sequence_length: int,
    *,
    limit: int,
    truncate: bool,
    folder: Path,
    log: Log,
) -> PackingPlan:
    """Reads a stored plan of `plan_packing`, or makes and stores it."""
    return stored_plan(
        store,
        sequence_length,
        rule=(limit, truncate, bool(store.weights)),
        make=lambda: plan_packing(
            store, sequence_length, limit=limit, truncate=truncate
        ),
        folder=folder,
        log=log,
    )


def stored_plan(
    store: TokenStore,
    sequence_length: int,
    *,
    rule: tuple[object, ...],
    make: Callable[[], PackingPlan],
    fits: Callable[[PackingPlan], bool] = lambda plan: True,
    folder: Path,
    log: Log,
) -> PackingPlan:
    """Reads a stored plan, or makes and stores it.

    Args:
      store: tokenized documents.
      sequence_length: S.
      rule: what decides the plan, apart from the documents and S.
      make: makes the plan.
      fits: checks a stored plan for more than that its pieces fit.
      folder: folder of the plans.
      log: receives a line if another process makes the plan.

    Raises:
      ConfigError: files cannot be read or written.
    """
    documents = digest(*(values.tobytes() for values in store.documents))
    key = digest(_VERSION, store.fingerprint, documents, sequence_length, *rule)[:16]
    target = folder / f"packing-{key}.npz"
    with build_lock(target, log):
        plan = _read_plan(target)
        if plan is None or not _fits(plan, store, sequence_length) or not fits(plan):
            plan = make()
            with atomic.replacing(target) as partial, partial.open("wb") as file:
                np.savez(file, **plan._asdict())
    return plan


def _read_plan(path: Path) -> PackingPlan | None:
    """Reads a stored plan; None if it is absent or damaged."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as kept:
            # numpy returns a member that is no array as bytes.
            arrays = [np.asarray(kept[name]) for name in PackingPlan._fields]
            return PackingPlan(*arrays)
    except Exception:  # numpy and zipfile raise many types for damaged files
        return None


def _fits(plan: PackingPlan, store: TokenStore, sequence_length: int) -> bool:
    """Checks that a stored plan's pieces are in the files and fit into their rows."""
    first, owner, start, length = plan
    if any(x.ndim != 1 or x.dtype.kind != "i" for x in plan) or not len(first):
        return False
    if any(len(values) != first[-1] or np.any(values < 0) for values in plan[1:]):
        return False
    if first[0] != 0 or np.any(np.diff(first) < 0) or np.any(owner >= len(store.files)):
        return False
    counts = np.array([file.count for file in store.files])
    is_inside = np.all(start + length < counts[owner])
    return bool(is_inside and np.all(_filled(plan) <= sequence_length))


def _filled(plan: PackingPlan) -> np.ndarray:
    """Counts the predictions that each row of a plan holds, [rows]."""
    starts = np.concatenate([[0], np.cumsum(plan.length)])
    return np.diff(starts[plan.first])


def plan_packing(
    store: TokenStore,
    sequence_length: int,
    *,
    limit: int = 0,
    truncate: bool = False,
) -> PackingPlan:
    """Packs documents into rows.

    Args:
      store: tokenized documents.
      sequence_length: S.
      limit: largest number of predictions, in the order of documents; 0 = all.
      truncate: whether only the first S predictions of a document are kept. Otherwise
        the others become further pieces.
    """
    documents = store.documents
    longest = sequence_length if truncate else None
    predictions = count_predictions(store, longest=longest, limit=limit)
    counts = -(-predictions // sequence_length)
    document = np.repeat(np.arange(len(counts)), counts)
    offset = count_up(counts) * sequence_length
    pieces = Pieces(
        owner=documents.owner[document],
        start=documents.start[document] + offset,
        length=np.minimum(sequence_length, predictions[document] - offset),
    )
    if store.weights:
        pieces = pieces.take(count_learned(store, pieces) > 0)
    order, first = plan_rows(best_fit(pieces.length, sequence_length))
    return PackingPlan(first, *pieces.take(order))


def plan_rows(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orders pieces by their row.

    Args:
      row: row of each piece [P].

    Returns:
      The order of the pieces [P], and the first piece of each row and the end, [rows +
      1].
    """
    order = np.argsort(row, kind="stable")  # a row keeps the order of the stream
    return order, np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))


def count_predictions(
    store: TokenStore, *, longest: int | None = None, limit: int = 0
) -> np.ndarray:
    """Counts the predictions of each document: all tokens but its first.

    Args:
      store: tokenized documents.
      longest: largest number of predictions of a document; None = all.
      limit: largest number of predictions of all documents, in their order; 0 = all.
        Examples are kept whole or dropped.

    Returns:
      [documents] int64.
    """
    predictions: np.ndarray = np.clip(store.length - 1, 0, longest)
    if not limit:
        return predictions
    if store.weights:
        learned = count_learned(store, store.documents._replace(length=predictions))
        kept: np.ndarray = predictions * (np.cumsum(learned) <= limit)
        return kept
    before = np.cumsum(predictions) - predictions
    remaining: np.ndarray = np.clip(limit - before, 0, predictions)
    return remaining


def count_learned(
    store: TokenStore, pieces: Pieces, unscored: np.ndarray | None = None
) -> np.ndarray:
    """Counts the learned predictions of each piece. Without weights, all are learned.

    Args:
      store: tokenized documents.
      pieces: pieces of the store's files.
      unscored: [P], number of predictions at the start of each piece to skip; None = 0.

    Returns:
      [P] int64.
    """
    owner, start, length = pieces
    if unscored is not None:
        start = start + unscored
        length = length - unscored
    if not store.weights:
        return length
    weights = [file.tokens for file in store.weights]
    rows = zip(owner.tolist(), start.tolist(), length.tolist(), strict=True)
    counts = (
        int(np.count_nonzero(weights[number][first + 1 : first + count + 1]))
        for number, first, count in rows
    )
    return np.fromiter(counts, np.int64, len(length))


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Chooses the row of each piece: the row with the least room that suffices.

    Longer pieces are placed first. The result is deterministic. Among equal pieces the
    first one is placed first. Among rows with equal room, the row that was filled last
    is used.

    Args:
      lengths: number of predictions of each piece [P].
      capacity: predictions that a row holds.

    Returns:
      [P] int64.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    rooms: list[int] = []  # the distinct free sizes of open rows, ascending
    open_rows: defaultdict[int, list[int]] = defaultdict(list)  # {free size: rows}
    num_rows = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room = capacity
            row = num_rows
            num_rows += 1
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del rooms[at]
        rows[piece] = row
        remaining = room - length
        if remaining:
            if not open_rows[remaining]:
                insort(rooms, remaining)
            open_rows[remaining].append(row)
    return rows
