"""Pairs of preferences (`data.format=preferences`) as tokens and rows.

Shapes: S sequence length, N pairs.

Documents 2k and 2k + 1 of a store are a pair: its chosen half and its rejected half,
each a prompt with a completion. A pair is the unit of packing. Both halves stand side
by side in one row, as two pieces:

    segment_ids   1 1 1 1 1 1 2 2 2 2 2 3 3 3 3 4 4 4 4 4 0 0
                  chosen      rejected  chosen  rejected  padding
                  first pair            second pair

The chosen half of the i-th pair of a row, from 1, is segment 2i - 1, and the rejected
half is segment 2i.

A reward model scores a half at its last token, so that token must be an input. Scored
halves therefore have one more token at their end: a target that is not learned.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import packing
from jaxdist.data.chat import ChatEncoder
from jaxdist.data.chat_template import ChatTemplate
from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import DatasetSplit
from jaxdist.data.packing import PackedDocuments, PackingPlan
from jaxdist.data.sources.documents import Document
from jaxdist.data.splits import side_name
from jaxdist.data.token_cache import Log
from jaxdist.data.token_files import Pieces, TokenStore
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.protocols.pair_segments import PAIRS_PER_ROW
from jaxdist.storage.digest import digest

# Version of the encoding and packing rules below, a part of the keys of caches.
_VERSION = 1


# --- Tokens ---------------------------------------------------------------------------


class PreferenceEncoder(ChatEncoder):
    """Encoder of the halves of pairs, which follow each other.

    Tokens may merge across the end of a prompt. The completions of both halves then
    begin at the first token that differs from the prompt's in either half, as in TRL's
    `DPOTrainer`.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        """Makes the encoder; see `ChatEncoder`."""
        super().__init__(tokenizer, template)
        self.fingerprint = digest("pairs", _VERSION, self.fingerprint)

    def notes(self, counts: Counter[str]) -> list[str]:
        """Formats a line about prompts whose tokens differ within a half."""
        if not counts["mismatch"]:
            return []
        return [
            f"{counts['mismatch']} halves of pairs do not begin with the prompt's "
            "tokens; both completions of such a pair begin where they differ"
        ]

    def _completion_starts(
        self, wholes: Sequence[np.ndarray], prompts: Sequence[np.ndarray]
    ) -> list[int]:
        common = [
            _common_length(whole, prompt)
            for whole, prompt in zip(wholes, prompts, strict=True)
        ]
        starts = np.array(common, np.int64).reshape(-1, 2).min(1)
        return np.repeat(starts, 2).tolist()


class ScoredEncoder(PreferenceEncoder):
    """Encoder of halves that are scored at their last token.

    It repeats the last token of a half, with weight 0. The copy is a target only.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        """Makes the encoder; see `ChatEncoder`."""
        super().__init__(tokenizer, template)
        self.fingerprint = digest("scored", self.fingerprint)

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Encodes halves, each with a target after its last token.

        See `ChatEncoder.encode`.
        """
        ids, weights, notes = super().encode(documents)
        ids = [np.append(tokens, tokens[-1:]) for tokens in ids]
        weights = [
            np.append(learned, np.zeros_like(learned[-1:])) for learned in weights
        ]
        return ids, weights, notes


def _common_length(whole: np.ndarray, prompt: np.ndarray) -> int:
    """Counts the tokens at the beginning that both have."""
    shortest = min(len(whole), len(prompt))
    differs = whole[:shortest] != prompt[:shortest]
    if differs.any():
        return int(differs.argmax())
    return shortest


# --- Rows -----------------------------------------------------------------------------


class PackedPairs(PackedDocuments):
    """Rows of pairs, each with two pieces."""

    def __init__(
        self, store: TokenStore, plan: PackingPlan, sequence_length: int
    ) -> None:
        """Makes rows by a plan; see `plan_pairs`."""
        super().__init__(store, plan, sequence_length)
        self.pairs_per_row = np.diff(plan.first) // 2  # [rows]
        self.num_pairs = int(self.pairs_per_row.sum())


class _Halves(NamedTuple):
    """Halves of pairs after truncation. Entries 2k and 2k + 1 are a pair."""

    pieces: Pieces  # [2 N], with the number of predictions as length
    learned: np.ndarray  # [2 N], number of learned predictions
    is_kept: np.ndarray  # [N], whether both halves have a learned prediction

    def taken(self) -> tuple[Pieces, np.ndarray]:
        """Selects the halves of pairs that are kept, and their learned predictions."""
        chosen = np.repeat(self.is_kept, 2)
        return self.pieces.take(chosen), self.learned[chosen]


def cut_pairs(
    config: DataConfig,
    store: TokenStore,
    *,
    sequence_length: int,
    log: Log,
    held_out: bool = False,
    stride: int | None = None,
    scored: bool = False,
) -> DatasetSplit:
    """Cuts pairs into rows, and logs how many are truncated or dropped.

    The tokens of the side are the learned tokens of its pairs.

    Args:
      config: settings of the data.
      store: halves of one side of a source. Documents 2k and 2k + 1 are a pair.
      sequence_length: S.
      log: receives the lines.
      held_out: whether the pairs are held out.
      stride: must be None, because pairs have no sliding windows.
      scored: whether the halves are those of a `ScoredEncoder`.

    Raises:
      ConfigError: the training side has no pair, or there is a stride.
    """
    if stride is not None:
        raise ConfigError(
            f"stride={stride}: windows slide over texts and chats, and "
            f"data.format={config.format} has pairs. Leave the stride out."
        )
    halves = _cut_halves(store, sequence_length, config.truncation, scored=scored)
    _log_pairs(
        config, store, sequence_length, halves, log, held_out=held_out, scored=scored
    )
    limit = config.validation_tokens if held_out else 0
    plan = packing.stored_plan(
        store,
        sequence_length,
        rule=(
            "scored pairs" if scored else "pairs",
            _VERSION,
            PAIRS_PER_ROW,
            limit,
            config.truncation,
        ),
        make=lambda: _pack(halves, sequence_length, limit),
        fits=_has_whole_pairs,
        folder=config.cache_folder(),
        log=log,
    )
    _, learned = halves.taken()
    return DatasetSplit(
        name=store.name,
        samples=PackedPairs(store, plan, sequence_length),
        num_tokens=int(learned.sum()),
        scanned=store.max_id is not None,
    )


cut_scored_pairs = partial(cut_pairs, scored=True)


def plan_pairs(
    store: TokenStore,
    sequence_length: int,
    *,
    limit: int = 0,
    truncation: str = "keep_start",
) -> PackingPlan:
    """Packs pairs into rows by best fit, at most PAIRS_PER_ROW in a row.

    A half has at most S // 2 predictions. Pairs with a half in which nothing is learned
    are in no row.

    Args:
      store: halves. Documents 2k and 2k + 1 are a pair.
      sequence_length: S.
      limit: largest number of learned predictions, in the order of pairs; 0 = all.
      truncation: end of a half that is kept, keep_start or keep_end.
    """
    halves = _cut_halves(store, sequence_length, truncation, scored=False)
    return _pack(halves, sequence_length, limit)


def _cut_halves(
    store: TokenStore, sequence_length: int, truncation: str, *, scored: bool
) -> _Halves:
    """Truncates the halves to S // 2 predictions, and finds the pairs to keep.

    A score depends on inputs alone. So a scored half needs a learned input.
    """
    assert len(store.length) % 2 == 0, "a half has no other one"
    assert np.array_equal(store.group[::2], store.group[1::2]), "halves of two pairs"
    predictions = packing.count_predictions(store)
    kept = np.minimum(predictions, sequence_length // 2)
    pieces = store.documents._replace(length=kept)
    if truncation == "keep_end":
        pieces = pieces._replace(start=pieces.start + predictions - kept)
    read = pieces
    if scored:  # without the last target
        read = pieces._replace(length=np.maximum(kept - 1, 0))
    learned = packing.count_learned(store, read)
    is_kept = np.all(learned.reshape(-1, 2) > 0, axis=1)
    return _Halves(pieces, learned, is_kept)


def _pack(halves: _Halves, sequence_length: int, limit: int) -> PackingPlan:
    """Packs the pairs that are kept into rows; see `plan_pairs`."""
    pieces, learned = halves.taken()
    if limit:
        is_within = np.cumsum(learned.reshape(-1, 2).sum(1)) <= limit
        pieces = pieces.take(np.repeat(is_within, 2))
    # No pair counts as less than S / 64, so 65 pairs do not fit into a row.
    smallest = -(-sequence_length // PAIRS_PER_ROW)
    length = np.maximum(pieces.length.reshape(-1, 2).sum(1), smallest)
    pairs, first = packing.plan_rows(packing.best_fit(length, sequence_length))
    order = np.stack([2 * pairs, 2 * pairs + 1], 1).reshape(-1)
    return PackingPlan(2 * first, *pieces.take(order))


def _has_whole_pairs(plan: PackingPlan) -> bool:
    """Checks that the rows of a stored plan have whole pairs, and not too many."""
    counts = np.diff(plan.first)
    has_pairs = not np.any(counts % 2) and bool(np.all(plan.length > 0))
    return has_pairs and int(counts.max(initial=0)) <= 2 * PAIRS_PER_ROW


def _log_pairs(
    config: DataConfig,
    store: TokenStore,
    sequence_length: int,
    halves: _Halves,
    log: Log,
    *,
    held_out: bool,
    scored: bool,
) -> None:
    """Logs how many pairs there are, are truncated, and are dropped.

    Raises:
      ConfigError: training has no pairs.
    """
    longest = sequence_length // 2 + (not scored)
    # without the target after the last token
    length = np.maximum(store.length - scored, 0)
    end = "first" if config.truncation == "keep_start" else "last"
    longer = int((length > longest).sum())
    all_learned = packing.count_learned(
        store, store.documents._replace(length=packing.count_predictions(store))
    )
    _, learned = halves.taken()
    log(
        f"data: {store.name}: {len(halves.is_kept)} {side_name(held_out)} pairs, "
        f"{learned.sum()} of {length.sum()} tokens learned; "
        f"{longer} halves longer than {longest} tokens and cut to their {end} ones, "
        f"{(~halves.is_kept).sum()} pairs dropped without a learned token in a half "
        f"({all_learned.sum() - learned.sum()} learned tokens lost), "
        f"{_count_equal(store, halves, scored=scored)} kept with equal halves"
    )
    if not held_out and not halves.is_kept.any():
        raise ConfigError(
            f"data source {store.name}: no pair has learned tokens in both halves "
            f"among their {end} {longest} tokens. Raise batch.sequence_length, or give "
            "pairs with shorter prompts."
        )


def _count_equal(store: TokenStore, halves: _Halves, *, scored: bool) -> int:
    """Counts the pairs that are kept and whose halves have equal tokens.

    Truncation may have made them equal, or a template that trims texts.
    """
    length = halves.pieces.length.reshape(-1, 2)
    candidates = halves.is_kept & (length[:, 0] == length[:, 1])
    contents = [file.tokens for file in store.files]
    count = 0
    for pair in np.flatnonzero(candidates).tolist():
        chosen, rejected = (
            contents[owner][start : start + predictions + (not scored)]
            for owner, start, predictions in zip(
                *(values[2 * pair : 2 * pair + 2].tolist() for values in halves.pieces),
                strict=True,
            )
        )
        count += np.array_equal(chosen, rejected)
    return count
