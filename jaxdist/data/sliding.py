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
    count_predictions,
    count_up,
    plan_rows,
)
from jaxdist.data.token_files import Pieces, TokenStore


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
        sequence_length: int,
        *,
        stride: int,
        limit: int = 0,
        packed: bool,
    ) -> None:
        """Cuts documents into windows.

        Args:
          stride: N, 1 to S.
          limit: targets at most, in the order of documents, of examples whole ones
            alone; 0 = all.
          packed: whether models tell segments apart.
        """
        documents = store.documents
        predictions = count_predictions(store, limit=limit)
        # windows after a document's first
        more = -(-np.maximum(predictions - sequence_length, 0) // stride)
        counts = (predictions > 0) * (1 + more)
        document = np.repeat(np.arange(len(counts)), counts)
        number = count_up(counts)
        offset = number * stride
        windows = Pieces(
            owner=documents.owner[document],
            start=documents.start[document] + offset,
            length=np.minimum(sequence_length, predictions[document] - offset),
        )
        # predictions that windows before have made
        read = np.where(number > 0, sequence_length - stride, 0)
        used = count_learned(store, windows, read) > 0
        windows = windows.take(used)
        row = np.arange(len(windows.length))
        if packed:
            row = best_fit(windows.length, sequence_length)
        order, first = plan_rows(row)
        plan = PackingPlan(first, *windows.take(order))
        super().__init__(store, plan, sequence_length, read=read[used][order])
        self._packed = packed
        num_documents = len(np.unique(document[used]))
        self.counts = SlidingCounts(num_documents, len(windows.length))

    def read(self, rows: np.ndarray) -> Batch:
        """Reads the rows; see the class."""
        batch = super().read(rows)
        if not self._packed:
            del batch["segment_ids"]
        return batch


def total(samples: Iterable[Any]) -> SlidingCounts | None:
    """Adds up the counts of all parts of a set; None: it is not made of sliding
    windows.
    """
    counts = [part.counts for part in samples if isinstance(part, SlidingWindows)]
    if not counts:
        return None
    return SlidingCounts(*map(sum, zip(*counts, strict=True)))
