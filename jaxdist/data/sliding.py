"""Sliding windows: exact scores of documents longer than a row.

They overlap inside one document. The windows of `packing.Windows` follow each other in
the stream of all documents.

Windows move by a stride. Window k of a document reads its tokens k N .. k N + S - 1,
and predicts the token after each. All predictions of the first window count. In each
other window only the last N count, which no earlier window has made.

Each token but a document's first is therefore scored once. It is predicted from at
least S - N + 1 tokens of its document, or from all earlier ones if they are fewer.
Hugging Face's page on the perplexity of fixed-length models describes the same method.

Shapes: B rows to read, S sequence length, N stride, P windows.
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
    """Number of documents and of windows that are scored."""

    documents: int  # documents with a token that counts
    windows: int


class SlidingWindows(PackedDocuments):
    """Rows of sliding windows. Predictions that a window only repeats have weight 0.

    A packed row holds several windows, separated by `segment_ids`. Otherwise a row
    holds one window, and a batch has no `segment_ids`.

    A store with weights holds examples. Their tokens that are not learned have weight
    0. Windows in which nothing counts are skipped, and no example is truncated.
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
          store: tokenized documents.
          sequence_length: S.
          stride: N, from 1 to S.
          limit: largest number of targets, in the order of documents; 0 = all. Examples
            are kept whole or dropped.
          packed: whether the model separates segments, so that rows can hold several
            windows.
        """
        documents = store.documents
        predictions = count_predictions(store, limit=limit)
        # windows after the first one of each document
        further = -(-np.maximum(predictions - sequence_length, 0) // stride)
        counts = (predictions > 0) * (1 + further)
        document = np.repeat(np.arange(len(counts)), counts)
        number = count_up(counts)
        offset = number * stride
        windows = Pieces(
            owner=documents.owner[document],
            start=documents.start[document] + offset,
            length=np.minimum(sequence_length, predictions[document] - offset),
        )
        # predictions that earlier windows have made
        unscored = np.where(number > 0, sequence_length - stride, 0)
        used = count_learned(store, windows, unscored) > 0
        windows = windows.take(used)
        row = np.arange(len(windows.length))
        if packed:
            row = best_fit(windows.length, sequence_length)
        order, first = plan_rows(row)
        plan = PackingPlan(first, *windows.take(order))
        super().__init__(store, plan, sequence_length, unscored=unscored[used][order])
        self._packed = packed
        num_documents = len(np.unique(document[used]))
        self.counts = SlidingCounts(num_documents, len(windows.length))

    def read(self, rows: np.ndarray) -> Batch:
        """Reads rows, with `segment_ids` if they are packed."""
        batch = super().read(rows)
        if not self._packed:
            del batch["segment_ids"]
        return batch


def total(sources: Iterable[Any]) -> SlidingCounts | None:
    """Adds up the counts of sliding windows; None if no source has any."""
    counts = [rows.counts for rows in sources if isinstance(rows, SlidingWindows)]
    if not counts:
        return None
    return SlidingCounts(*map(sum, zip(*counts, strict=True)))
