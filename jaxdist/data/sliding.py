"""Documents longer than a sequence, scored exactly: windows that move by a stride.

A document's window k reads its tokens k N .. k N + S - 1 and predicts the one after
each. Of the first window all predictions count, of the others the last N, which no
window before has made: each token but a document's first is scored once, after at least
S - N + 1 tokens of its own document where so many are before it. This is what Hugging
Face's page on the perplexity of fixed-length models does.

Shapes: B rows asked for, S sequence length, N stride, P windows.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxdist.data.packing import (
    Batch,
    PackedDocuments,
    PackingPlan,
    best_fit,
    count_learned,
    count_up,
    plan_rows,
)
from jaxdist.data.token_files import TokenStore


class SlidingCounts(NamedTuple):
    """How much is scored by sliding windows."""

    documents: int  # with a token that counts
    windows: int


class SlidingWindows(PackedDocuments):
    """Rows of sliding windows, with weight 0 where a window only reads.

    Packed, a row holds windows side by side, kept apart by `segment_ids`; else it holds
    one, and there is no such entry. Of examples (documents of a store with weights)
    what is not learned has weight 0, windows in which nothing counts are left out, and
    nothing is cut off.
    """

    def __init__(
        self,
        store: TokenStore,
        chosen: np.ndarray,
        sequence_length: int,
        *,
        stride: int,
        limit: int = 0,
        packed: bool,
    ):
        """Args:
        chosen: [documents] bool.
        stride: N, 1 to S.
        limit: targets at most, in the order of documents, of examples whole ones alone;
        0 = all. packed: whether models tell segments apart.
        """
        document, offset, length, read = _windows(
            _predictions(store, chosen, limit), sequence_length, stride
        )
        owner, start = (
            store.file[chosen][document],
            store.start[chosen][document] + offset,
        )
        used = count_learned(store, owner, start + read, length - read) > 0
        document, owner, start, length, read = (
            x[used] for x in (document, owner, start, length, read)
        )
        row = best_fit(length, sequence_length) if packed else np.arange(len(length))
        order, first = plan_rows(row)
        plan = PackingPlan(first, owner[order], start[order], length[order])
        super().__init__(store, plan, sequence_length, read=read[order])
        self._packed = packed
        self.counts = SlidingCounts(len(np.unique(document)), len(length))

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the rows; see the class."""
        batch = super().read(rows)
        if not self._packed:
            del batch["segment_ids"]
        return batch


def total(samples: Iterable[Any]) -> SlidingCounts | None:
    """Returns the counts of all parts of a set; None: it is not made of sliding
    windows.
    """
    counts = [part.counts for part in samples if isinstance(part, SlidingWindows)]
    return SlidingCounts(*map(sum, zip(*counts, strict=True))) if counts else None


def _predictions(store: TokenStore, chosen: np.ndarray, limit: int) -> np.ndarray:
    """Returns how many predictions of each chosen document are to be scored,
    [documents] int64.
    """
    predictions = np.maximum(store.length[chosen] - 1, 0)
    if limit and store.weights:
        learned = count_learned(
            store, store.file[chosen], store.start[chosen], predictions
        )
        return predictions * (np.cumsum(learned) <= limit)
    if not limit:
        return predictions
    return np.clip(limit - (np.cumsum(predictions) - predictions), 0, predictions)


def _windows(
    predictions: np.ndarray, length_S: int, stride_N: int
) -> tuple[np.ndarray, ...]:
    """Returns of each window [P] its document, its offset there, its predictions, and
    how many of them windows before have made."""
    # windows after a document's first
    more = -(-np.maximum(predictions - length_S, 0) // stride_N)
    windows = (predictions > 0) * (1 + more)
    document, number = np.repeat(np.arange(len(windows)), windows), count_up(windows)
    offset = number * stride_N
    length = np.minimum(length_S, predictions[document] - offset)
    return document, offset, length, np.where(number > 0, length_S - stride_N, 0)
