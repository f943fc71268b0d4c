"""Sliding windows: each token counts once, after exactly the tokens that its window
should have.
"""

import dataclasses

import numpy as np
import pytest

from jaxdist.data.packing import PackedDocuments, plan_packing
from jaxdist.data.sliding import SlidingWindows
from jaxdist.data.token_files import TokenFile, TokenStore

LENGTH_S = 16
# None, no prediction, one, fewer than a window, exactly one, one more, and many.
LENGTHS = (0, 1, 2, 9, LENGTH_S + 1, LENGTH_S + 2, 3 * LENGTH_S, 83, 100)


@pytest.fixture(name="store")
def store_fixture(tmp_path):
    """Returns documents whose ids are 100 * document + place: every token tells its
    home.
    """
    length = np.array(LENGTHS, np.int64)
    ids = np.concatenate(
        [100 * number + np.arange(count) for number, count in enumerate(LENGTHS)]
    )
    ids.astype("<u2").tofile(tmp_path / "0.bin")
    owner, groups = np.zeros(len(length), np.int32), np.zeros(len(length), np.uint8)
    files = (TokenFile(tmp_path / "0.bin", "<u2"),)
    start = np.cumsum(length) - length
    return TokenStore(
        "test",
        files,
        owner,
        start,
        length,
        groups,
        None,
        max_id=999,
        fingerprint="test",
    )


def scored(windows: SlidingWindows, size: int = 3) -> dict[int, list[int]]:
    """Returns of each target that counts the tokens before it that its window has; it
    counts once.
    """
    before: dict[int, list[int]] = {}
    for begin in range(0, windows.num_rows, size):
        batch = windows.read(np.arange(begin, begin + size))
        segments = batch.get("segment_ids", np.ones_like(batch["tokens"]))
        for row, slot in zip(*np.nonzero(batch["weights"]), strict=True):
            assert batch["weights"][row, slot] == 1
            assert segments[row, slot]
            own = np.flatnonzero(segments[row] == segments[row, slot])
            own = own[own <= slot]
            assert batch["positions"][row, own].tolist() == list(range(len(own)))
            target = int(batch["targets"][row, slot])
            assert target not in before
            before[target] = batch["tokens"][row, own].tolist()
    return before


def exact(chosen: np.ndarray, stride: int) -> dict[int, list[int]]:
    """Returns the same, from the definition."""
    found = {}
    for number in np.flatnonzero(chosen):
        for place in range(1, LENGTHS[number]):
            first = stride * max(0, -(-(place - LENGTH_S) // stride))
            found[100 * number + place] = [
                100 * number + i for i in range(first, place)
            ]
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_every_token_counts_once_after_its_own_window(store, packed):
    chosen = np.arange(len(LENGTHS)) != 3
    for stride in range(1, LENGTH_S + 1):
        windows = SlidingWindows(
            store.take(chosen), LENGTH_S, stride=stride, packed=packed
        )
        found = scored(windows)
        assert found == exact(chosen, stride)
        for target, before in found.items():
            assert len(before) >= min(target % 100, LENGTH_S - stride)
        assert windows.num_targets == len(found)
        assert windows.counts.documents == 6
        assert packed or windows.num_rows == windows.counts.windows
        assert "segment_ids" in windows.read(np.arange(1)) or not packed
        empty = windows.read(np.array([windows.num_rows + 5]))  # fills a last batch
        assert not empty["weights"].any()
        assert not empty["tokens"].any()


def test_a_whole_stride_is_the_rows_of_packed_documents(store):
    chosen = np.ones(len(LENGTHS), bool)
    windows = SlidingWindows(store.take(chosen), LENGTH_S, stride=LENGTH_S, packed=True)
    rows = PackedDocuments(store, plan_packing(store.take(chosen), LENGTH_S), LENGTH_S)
    assert windows.num_rows == rows.num_rows
    one, other = (part.read(np.arange(rows.num_rows)) for part in (windows, rows))
    assert all(np.array_equal(one[name], other[name]) for name in other)
    assert one.keys() == other.keys()


def test_a_limit_takes_the_first_targets(store):
    chosen = np.ones(len(LENGTHS), bool)
    whole = list(exact(chosen, 5))
    for limit in (1, 10, 40, 99, 1000):
        windows = SlidingWindows(
            store.take(chosen), LENGTH_S, stride=5, limit=limit, packed=False
        )
        assert sorted(scored(windows)) == whole[:limit]


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_what_is_not_learned_is_read_and_does_not_count(store, tmp_path, stride):
    learned = np.random.default_rng(stride).random(sum(LENGTHS)) < 0.2
    learned[-100:-30] = False  # windows without a learned token
    learned.astype(np.uint8).tofile(tmp_path / "weights.bin")
    chats = dataclasses.replace(
        store, weights=(TokenFile(tmp_path / "weights.bin", "<u1"),)
    )
    chosen = np.ones(len(LENGTHS), bool)
    ids = store.files[0].tokens[: sum(LENGTHS)]
    expected = {
        t: before
        for t, before in exact(chosen, stride).items()
        if learned[np.flatnonzero(ids == t)[0]]
    }
    windows = SlidingWindows(chats.take(chosen), LENGTH_S, stride=stride, packed=True)
    assert scored(windows) == expected
    assert windows.num_targets == len(expected) > 20
    everything = SlidingWindows(
        store.take(chosen), LENGTH_S, stride=stride, packed=True
    )
    assert windows.counts.windows < everything.counts.windows
    # A limit takes whole examples alone.
    some = SlidingWindows(
        chats.take(chosen),
        LENGTH_S,
        stride=stride,
        limit=len(expected) // 2,
        packed=True,
    )
    documents = {target // 100 for target in scored(some)}
    assert documents
    assert scored(some) == {t: b for t, b in expected.items() if t // 100 in documents}
    assert some.num_targets <= len(expected) // 2
