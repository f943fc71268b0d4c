"""Samples as packed documents (data.packing=documents): the loss stays inside a document.

Shapes: B rows asked for, S sequence length, P pieces. A document of n tokens holds n - 1
predictions; they are cut into pieces of at most S, and the pieces are packed into rows by best fit,
longest first. Every token but a document's first is a target exactly once; slots that no piece
fills have weight 0 and segment 0. Positions restart at 0 with every piece.
"""

import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.data.cache import one_builder
from jaxdist.data.formats import TokenStore
from jaxdist.data.tokenizer import digest
from jaxdist.data.windows import Batch

VERSION = 1  # of the packing rule; part of the cache key


class Plan(NamedTuple):
    """Which pieces fill which row: row r holds pieces first[r] : first[r + 1], in their order."""

    first: np.ndarray  # [rows + 1] int64
    owner: np.ndarray  # [P] int32, number of the file
    start: np.ndarray  # [P] int64, offset of the first input token in the file
    length: np.ndarray  # [P] int64, predictions


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


def plan_packing(
    store: TokenStore, chosen: np.ndarray, sequence_length: int, *, limit: int = 0
) -> Plan:
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
    first = np.searchsorted(row[order], np.arange((row.max(initial=-1)) + 2))
    start = store.start[chosen][document] + offset
    return Plan(first, store.file[chosen][document][order], start[order], length[order])


def open_packing(
    store: TokenStore,
    chosen: np.ndarray,
    sequence_length: int,
    *,
    limit: int,
    folder: Path,
    log: Callable[[str], None],
) -> Plan:
    """Returns `plan_packing`, from the cache folder if it is there, else made and kept there."""
    choice = digest(chosen.tobytes(), store.start.tobytes(), store.length.tobytes())
    key = digest(VERSION, store.fingerprint, choice, sequence_length, limit)[:16]
    target = folder / f"packing-{key}.npz"
    with one_builder(target, log):
        try:
            with np.load(target, allow_pickle=False) as kept:
                return Plan(**{name: kept[name] for name in Plan._fields})
        except (OSError, ValueError, KeyError):  # absent or damaged
            plan = plan_packing(store, chosen, sequence_length, limit=limit)
        part = target.with_name(f"{target.stem}.{os.getpid()}.part.npz")
        np.savez(part, **plan._asdict())
        part.replace(target)
    return plan


class PackedDocuments:
    """The rows of a packing; see windows.Samples."""

    def __init__(self, store: TokenStore, plan: Plan, sequence_length: int):
        self._files, self._plan, self._length_S = store.files, plan, sequence_length
        self.num_rows = len(plan.first) - 1
        self.num_targets = int(plan.length.sum())

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the packed rows with `segment_ids` (1 for a row's first piece; 0 = padding)."""
        first, owner, start, length = self._plan
        rows = np.asarray(rows, np.int64)
        inside = np.minimum(rows, self.num_rows - 1)
        pieces = np.where(rows < self.num_rows, first[inside + 1] - first[inside], 0)
        rank = count_up(pieces)  # of a piece in its row
        piece = np.repeat(first[inside], pieces) + rank
        length = length[piece]
        position = count_up(length)
        source = np.repeat(start[piece], length) + position

        shape = (len(rows), self._length_S)
        batch = {
            name: np.zeros(shape, np.int32)
            for name in ("tokens", "targets", "positions", "segment_ids")
        }
        filled = np.bincount(
            np.repeat(np.arange(len(rows)), pieces), weights=length, minlength=len(rows)
        )
        used = np.arange(self._length_S) < filled[:, None]  # pieces fill a row from the left
        batch["segment_ids"][used] = np.repeat(rank + 1, length)
        batch["positions"][used] = position
        batch["tokens"][used] = self._gather(owner[piece], length, source)
        batch["targets"][used] = self._gather(owner[piece], length, source + 1)
        return {**batch, "weights": used.astype(np.float32)}

    def _gather(self, owner: np.ndarray, length: np.ndarray, source: np.ndarray) -> np.ndarray:
        """Returns the tokens at offsets `source` of the files that own the pieces."""
        if len(self._files) == 1:
            return self._files[0].tokens[source]
        tokens, file = np.zeros(len(source), np.int32), np.repeat(owner, length)
        for number in np.unique(owner):
            here = file == number
            tokens[here] = self._files[number].tokens[source[here]]
        return tokens


def count_up(counts: np.ndarray) -> np.ndarray:
    """Returns 0 .. counts[0] - 1, 0 .. counts[1] - 1, and so on, as one int64 array."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
