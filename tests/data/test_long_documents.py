"""Documents longer than a sequence: split, nothing is lost or counted twice; truncated,
the count is told.
"""

import json

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


def test_a_dataset_tells_what_it_leaves_out(tmp_path):
    lines: dict[str, list[str]] = {"auto": [], "split": [], "truncate": []}
    sets = {
        name: open_jsonl(tmp_path, lines[name], long_documents=name) for name in lines
    }
    assert (
        sets["auto"].fingerprint
        == sets["split"].fingerprint
        != sets["truncate"].fingerprint
    )
    for side in ("training", "held-out"):
        whole, cut = (
            next(line for line in lines[name] if f"{side} documents are longer" in line)
            for name in ("split", "truncate")
        )
        assert "longer than 17 tokens and split, and go on in other rows" in whole
        left_out, total = (int(cut.split(": ")[-1].split()[place]) for place in (0, 2))
        assert 0 < left_out < total
        if side == "training":
            assert sets["split"].num_train_tokens == total
            assert sets["truncate"].num_train_tokens == total - left_out
        else:
            counts = [
                sets[name].num_validation_tokens for name in ("split", "truncate")
            ]
            assert counts[0] - counts[1] == left_out
    assert sets["truncate"].bytes_per_token == pytest.approx(
        sets["split"].bytes_per_token, rel=0.05
    )
    one, two = (
        sets["truncate"].train_batch(3, 8),
        open_jsonl(tmp_path, [], long_documents="truncate"),
    )
    assert all(
        np.array_equal(values, two.train_batch(3, 8)[name])
        for name, values in one.items()
    )


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
