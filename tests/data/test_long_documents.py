"""Documents longer than a sequence: split, nothing is lost or counted twice; truncated,
the count is told.
"""

import json
import re

import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, open_dataset
from jaxdist.data.packing import PackedDocuments, plan_packing
from jaxdist.data.token_files import TokenFile, TokenStore

LENGTH_S = 16


class Kept(TokenFile):
    """Tokens in memory."""

    def __init__(self, tokens: np.ndarray):
        self.kept = tokens

    @property
    def tokens(self) -> np.ndarray:
        return self.kept

    @property
    def count(self) -> int:
        return len(self.kept)


def store_of(lengths: list[int], learned: list[int] | None = None) -> TokenStore:
    """Returns documents whose ids are 1000 * document + place; learned: of each from
    which place on.
    """
    length = np.array(lengths, np.int64)
    ids = np.concatenate(
        [1000 * number + np.arange(count) for number, count in enumerate(lengths)]
    )
    weights = ()
    if learned is not None:
        places = zip(lengths, learned, strict=True)
        weights = (
            Kept(
                np.concatenate(
                    [np.arange(count) >= first for count, first in places]
                ).astype(int)
            ),
        )
    owner, groups = np.zeros(len(length), np.int32), np.zeros(len(length), np.uint8)
    start, files = np.cumsum(length) - length, (Kept(ids),)
    store = TokenStore(
        "test",
        files,
        owner,
        start,
        length,
        groups,
        None,
        max_id=None,
        fingerprint="test",
    )
    return store if not weights else TokenStore(**vars(store) | {"weights": weights})


def scored(
    store: TokenStore, *, truncate: bool
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Returns the targets that count, in order, and all rows."""
    chosen = np.ones(len(store.length), bool)
    packed = PackedDocuments(
        store, plan_packing(store.take(chosen), LENGTH_S, truncate=truncate), LENGTH_S
    )
    batch = packed.read(np.arange(packed.num_rows))
    used = batch["weights"] == 1
    assert used.sum() == packed.num_targets
    # the one after, of its document
    assert np.array_equal(batch["targets"][used], batch["tokens"][used] + 1)
    return sorted(batch["targets"][used].tolist()), batch


LENGTHS = st.lists(st.integers(0, 5 * LENGTH_S), min_size=1, max_size=20)


@given(LENGTHS, st.booleans())
@settings(deadline=None)
def test_each_token_is_a_target_once_or_cut_off(lengths, truncate):
    end = LENGTH_S + 1 if truncate else 10**6
    expected = [
        1000 * n + place
        for n, count in enumerate(lengths)
        for place in range(1, min(count, end))
    ]
    found, batch = scored(store_of(lengths), truncate=truncate)
    assert found == expected
    segments = batch["segment_ids"]
    starts = np.diff(segments, axis=1, prepend=0) != 0
    # the rest of a document sees itself alone, from 0 on
    assert not batch["positions"][starts].any()


@given(
    st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=20
    ),
    st.booleans(),
)
@settings(deadline=None)
def test_of_examples_each_learned_token_is_a_target_once(pairs, truncate):
    lengths, learned = ([pair[n] for pair in pairs] for n in (0, 1))
    end = LENGTH_S + 1 if truncate else 10**6
    expected = [
        1000 * n + place
        for n, (count, first) in enumerate(pairs)
        for place in range(max(first, 1), min(count, end))
    ]
    found, batch = scored(store_of(lengths, learned), truncate=truncate)
    assert found == expected
    assert batch["weights"].any(axis=1).all()  # no row of which nothing is learned


def open_jsonl(tmp_path, lines: list[str], **options):
    file = tmp_path / "documents.jsonl"
    if not file.exists():
        texts = ("abcdefghij"[n % 10] * (3 + 7 * n % 90) for n in range(60))
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {
        "source": "jsonl",
        "path": str(file),
        "cache_dir": str(tmp_path / "cache"),
    } | options
    return open_dataset(
        DataConfig(packing="documents", **options),
        sequence_length=LENGTH_S,
        log=lines.append,
    )


@pytest.fixture
def datasets(tmp_path):
    """Returns long_documents -> a data set of the same texts, and the lines it logs."""
    lines = {"auto": [], "split": [], "truncate": []}
    return {
        way: (open_jsonl(tmp_path, lines[way], long_documents=way), lines[way])
        for way in lines
    }


def test_auto_splits_long_documents(datasets):
    auto, split, truncated = (dataset for dataset, _ in datasets.values())
    assert auto.fingerprint == split.fingerprint
    assert truncated.fingerprint != split.fingerprint


@pytest.mark.parametrize(
    ("documents", "count"),
    [
        pytest.param(
            "training documents", lambda dataset: dataset.num_train_tokens, id="train"
        ),
        pytest.param(
            "held-out documents",
            lambda dataset: dataset.num_validation_tokens,
            id="held out",
        ),
    ],
)
def test_the_log_counts_the_tokens_that_truncation_leaves_out(
    documents, count, datasets
):
    split, split_lines = datasets["split"]
    truncated, truncated_lines = datasets["truncate"]
    (split_line,) = (line for line in split_lines if documents in line)
    (truncated_line,) = (line for line in truncated_lines if documents in line)

    assert "longer than 17 tokens and split, and continued in other rows" in split_line
    counts = re.search(r"(\d+) of (\d+) tokens are dropped", truncated_line)
    left_out, total = (int(number) for number in counts.groups())
    assert 0 < left_out < total
    assert count(split) - count(truncated) == left_out


def test_the_log_counts_the_tokens_of_all_training_documents(datasets):
    split, (_, lines) = datasets["split"][0], datasets["truncate"]
    (line,) = (line for line in lines if "training documents" in line)
    total = int(re.search(r"\d+ of (\d+) tokens are dropped", line)[1])
    assert total == split.num_train_tokens


def test_truncation_changes_bytes_per_token_little(datasets):
    split, truncated = datasets["split"][0], datasets["truncate"][0]
    expected = pytest.approx(split.bytes_per_token, rel=0.05)
    assert truncated.bytes_per_token == expected


def test_a_truncated_dataset_is_read_back_from_its_cache(datasets, tmp_path):
    first = datasets["truncate"][0]
    again = open_jsonl(tmp_path, [], long_documents="truncate")
    chex.assert_trees_all_equal(again.train_batch(3, 8), first.train_batch(3, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"long_documents": "truncate"},
            "data.long_documents=truncate: windows cut nothing off; set data.packing",
        ),
        (
            {"balance": "attention"},
            "data.balance=attention: windows all have the same work; set data.packing",
        ),
    ],
)
def test_windows_are_refused_what_only_documents_have(options, message):
    with pytest.raises(ConfigError, match=message):
        open_dataset(DataConfig(**options), sequence_length=LENGTH_S)
