"""Order, splits, windows, packing and mixtures, on tiny real corpora."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxdist.config import ConfigError, schema
from jaxdist.data import (
    ByteTokenizer,
    DataConfig,
    SourceError,
    load_tokenizer,
    open_dataset,
)
from jaxdist.data.config import parts_of
from jaxdist.data.dataset import Dataset
from jaxdist.data.packing import PackedDocuments, Windows, best_fit, plan_packing
from jaxdist.data.shuffle import Mixture, order_key, permute
from jaxdist.data.splits import split
from jaxdist.data.token_files import TokenFile, TokenStore, group_of
from jaxdist.data.tokenizer import Tokenizer

LENGTH_S = 16


def write_texts(folder: Path, count: int = 60) -> Path:
    """Writes files whose text tells file and place, so that borders can be seen in
    tokens.
    """
    for number in range(count):
        file = folder / f"part{number % 3}" / f"{number:03d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"<{number}>" + "abcdefghij"[number % 10] * (5 + 7 * number % 90)
        )
    return folder


def open_texts(
    folder: Path, tmp_path: Path, lines: list | None = None, seed=0, **options
):
    options = {
        "source": "text",
        "path": str(folder),
        "cache_dir": str(tmp_path / "cache"),
    } | options
    log = (lines if lines is not None else []).append
    return open_dataset(
        DataConfig(**options), sequence_length=LENGTH_S, seed=seed, log=log
    )


def store_of(
    tmp_path: Path, documents: list[np.ndarray], gap: int = 0, files: int = 1
) -> TokenStore:
    """Returns documents in `files` files, with `gap` junk tokens between neighbours."""
    owner = np.sort(np.arange(len(documents)) % files)
    starts, token_files = [], []
    for number in range(files):
        content: list[np.ndarray] = []
        for document, own in zip(documents, owner, strict=True):
            if own == number:
                starts.append(sum(map(len, content)))
                content += [document, np.full(gap, 9999)]
        path = tmp_path / f"{number}.bin"
        np.concatenate(content).astype("<u2").tofile(path)
        token_files.append(TokenFile(path, "<u2"))
    length = np.array([len(document) for document in documents], np.int64)
    return TokenStore(
        "test",
        tuple(token_files),
        owner.astype(np.int32),
        np.array(starts, np.int64),
        length,
        group=np.zeros(len(documents), np.uint8),
        num_bytes=None,
        max_id=None,
        fingerprint="test",
    )


def validation_batches(dataset, global_size: int) -> list[dict[str, np.ndarray]]:
    count = dataset.num_validation_batches(global_size)
    return [dataset.validation_batch(number, global_size) for number in range(count)]


def numbered(lengths) -> list[np.ndarray]:
    """Returns documents whose token ids are 100 * document + place: every token tells
    its home.
    """
    return [100 * number + np.arange(length) for number, length in enumerate(lengths)]


# --- Order ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 97, 1000, 4096])
def test_every_epoch_is_a_permutation_of_its_own(size):
    key = order_key(3, "0")
    epochs = [permute(np.arange(size) + e * size, size, key) for e in range(3)]
    for order in epochs:
        assert np.array_equal(np.sort(order), np.arange(size))
    if size > 16:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(
            epochs[0], permute(np.arange(size), size, order_key(4, "0"))
        )
        assert abs(np.corrcoef(epochs[0], np.arange(size))[0, 1]) < 0.5


def test_permutations_of_four_are_uniform():
    orders = [tuple(permute(np.arange(4) + 4 * epoch, 4, 9)) for epoch in range(4800)]
    counts = np.array([orders.count(one) for one in set(orders)])
    assert len(counts) == 24
    # chi-square, 23 degrees of freedom: p < 1e-4
    assert np.sum((counts - 200) ** 2 / 200) < 60


def test_order_reaches_indices_beyond_32_bits():
    start = 10 * 2**40
    order = permute(np.arange(start, start + 1000), 2**40, 1)
    assert order.min() >= 0
    assert len(np.unique(order)) == 1000


def test_sources_of_different_sizes_are_permuted_together():
    index, sizes = np.arange(300), np.array([7, 50, 1000])[np.arange(300) % 3]
    keys = np.array([order_key(1, str(size)) for size in sizes], np.uint64)
    alone = [permute(index[i : i + 1], int(sizes[i]), int(keys[i]))[0] for i in index]
    assert permute(index, sizes, keys).tolist() == alone


@pytest.mark.parametrize(
    "weights", [[1, 1], [0.7, 0.3], [5, 3, 1.5, 0.5], [0.9999, 0.0001]]
)
def test_mixture_counts_and_running_indices(weights):
    mixture, total = Mixture(weights), 3 * Mixture.PERIOD + 123
    source, running = mixture.locate(np.arange(total))
    share = np.array(weights) / np.sum(weights)
    for number in range(len(weights)):
        assert (
            abs(np.mean(source == number) - share[number])
            < 2 / Mixture.PERIOD + 2 / total
        )
        whole = running[: 3 * Mixture.PERIOD][source[: 3 * Mixture.PERIOD] == number]
        # each index exactly once
        assert np.array_equal(np.sort(whole), np.arange(len(whole)))
    for begin in (0, 1000, 5000):  # any stretch has the proportions
        counts = np.bincount(source[begin : begin + 200], minlength=len(weights))
        assert np.all(np.abs(counts - 200 * share) < 2)
    again = mixture.locate(np.array([total - 1, 7]))  # closed form: no history needed
    assert again[0].tolist() == [source[-1], source[7]]
    assert again[1][0] == running[-1]


# --- Windows --------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "gap"), [(1, 0), (1, 3), (3, 0), (3, 2)])
@pytest.mark.parametrize("limit", [0, 1, 50])
def test_windows_score_each_token_of_the_stream_once(tmp_path, files, gap, limit):
    documents = numbered([1, 40, 0, 7, 90, 2, 33, 33])
    chosen = np.array([True, True, True, False, True, True, True, False])
    stream = np.concatenate([d for d, c in zip(documents, chosen, strict=True) if c])
    store = store_of(tmp_path, documents, gap, files)
    windows = Windows(store.take(chosen), LENGTH_S, limit=limit, partial=True)
    assert windows.num_targets == (limit or len(stream) - 1)
    batch = windows.read(np.arange(windows.num_rows + 2))
    scored = batch["weights"] == 1
    assert scored.sum() == windows.num_targets
    assert not scored[-2:].any()
    assert np.array_equal(batch["targets"][scored], stream[1 : windows.num_targets + 1])
    assert np.array_equal(batch["tokens"][scored], stream[: windows.num_targets])
    assert not batch["tokens"][~scored].any()
    assert not batch["targets"][~scored].any()
    assert batch["positions"].tolist() == [list(range(LENGTH_S))] * len(scored)


def test_windows_do_not_depend_on_how_many_are_read(tmp_path):
    store = store_of(tmp_path, numbered([30] * 10), gap=1, files=2)
    windows = Windows(store, LENGTH_S, partial=False)
    rows = np.array([5, 0, 17, 3])
    together = windows.read(rows)
    for place, row in enumerate(rows):
        alone = windows.read(np.array([row]))
        assert all(
            np.array_equal(alone[name][0], together[name][place]) for name in together
        )
    assert together["weights"].min() == 1
    assert windows.num_rows == 299 // LENGTH_S


# --- Packing --------------------------------------------------------------------------


def test_best_fit_fills_rows_and_never_overflows():
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    rows = best_fit(lengths, 64)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 64
    assert len(filled) == -(-lengths.sum() // 64)
    assert np.array_equal(rows, best_fit(lengths, 64))


class Packed(NamedTuple):
    """Documents in rows of LENGTH_S, and a batch of all rows with one of padding."""

    documents: list[np.ndarray]
    limit: int  # of targets; 0: none
    rows: PackedDocuments
    batch: dict[str, np.ndarray]


@pytest.fixture(
    params=[
        pytest.param({}, id="one file"),
        pytest.param({"files": 2, "gap": 3}, id="two files with junk between"),
    ]
)
def packed(request, limit, tmp_path):
    documents = numbered([1, 40, 0, 17, 16, 2, 33, 5, 6, 7, 8])
    is_chosen = np.ones(len(documents), bool)
    is_chosen[7] = False
    store = store_of(tmp_path, documents, **request.param)
    plan = plan_packing(store.take(is_chosen), LENGTH_S, limit=limit)
    rows = PackedDocuments(store, plan, LENGTH_S)
    batch = rows.read(np.arange(rows.num_rows + 1))
    return Packed([*documents[:7], *documents[8:]], limit, rows, batch)


LIMITS = pytest.mark.parametrize("limit", [0, 77])


@LIMITS
def test_packing_never_crosses_a_border(packed):
    is_scored = packed.batch["weights"] == 1
    tokens, targets = (packed.batch[key][is_scored] for key in ("tokens", "targets"))
    assert np.array_equal(targets, tokens + 1), "a target follows its token"
    assert np.array_equal(targets // 100, tokens // 100), "in the same document"


@LIMITS
def test_packing_scores_each_target_once_up_to_the_limit(packed):
    expected = np.concatenate([document[1:] for document in packed.documents])
    if packed.limit:
        assert packed.limit < len(expected)
        expected = expected[: packed.limit]

    assert packed.rows.num_targets == len(expected)
    is_scored = packed.batch["weights"] == 1
    assert np.array_equal(np.sort(packed.batch["targets"][is_scored]), expected)


@LIMITS
def test_packing_numbers_documents_of_a_row_and_their_positions(packed):
    """Segments count from 1 without gaps, and positions from 0 in each."""
    segment_ids, positions = packed.batch["segment_ids"], packed.batch["positions"]
    assert segment_ids.max() > 1, "some rows hold several documents"
    for row in range(packed.rows.num_rows):
        numbers = np.unique(segment_ids[row][segment_ids[row] > 0])
        assert np.array_equal(numbers, np.arange(1, len(numbers) + 1))
        for number in numbers:
            here = positions[row][segment_ids[row] == number]
            assert np.array_equal(here, np.arange(len(here)))


@LIMITS
def test_padding_of_packed_rows_has_neither_weight_nor_segment(packed):
    weights, segment_ids = packed.batch["weights"], packed.batch["segment_ids"]
    assert np.array_equal(weights == 1, segment_ids > 0)
    assert not weights[-1].any(), "a row beyond the last"


def test_packed_dataset_reads_its_plan_back(tmp_path):
    folder = write_texts(tmp_path / "texts")
    first = open_texts(folder, tmp_path, packing="documents")
    assert list((tmp_path / "cache").glob("packing-*.npz"))
    again = open_texts(folder, tmp_path, packing="documents")
    one, two = first.train_batch(3, 8), again.train_batch(3, 8)
    assert "segment_ids" in one
    assert all(np.array_equal(one[name], two[name]) for name in one)


# --- Datasets -------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["window", "documents"])
def test_batches_do_not_depend_on_processes_or_on_where_one_starts(tmp_path, packing):
    folder = write_texts(tmp_path / "texts")
    dataset = open_texts(folder, tmp_path, packing=packing, seed=5)
    steps = 2 * dataset.num_train_samples // 8 + 2  # more than two epochs
    straight = [dataset.train_batch(step, 8) for step in range(steps)]
    fresh = open_texts(folder, tmp_path, packing=packing, seed=5)
    for step in reversed(range(steps)):  # resume at every step
        halves = [
            fresh.train_batch(step, 8, rows) for rows in (slice(0, 4), np.arange(4, 8))
        ]
        for name, values in straight[step].items():
            assert np.array_equal(
                values, np.concatenate([half[name] for half in halves])
            )
    samples = np.concatenate([batch["sample"] for batch in straight])
    assert np.array_equal(samples, np.arange(8 * steps))
    other = open_texts(folder, tmp_path, packing=packing, seed=6).train_batch(0, 8)
    assert not np.array_equal(other["tokens"], straight[0]["tokens"])


def test_an_epoch_shows_every_sample_once(tmp_path):
    dataset = open_texts(write_texts(tmp_path / "texts"), tmp_path)
    count = dataset.num_train_samples
    assert count > 50
    rows = [
        dataset.read("train", np.arange(count) + e * count)["tokens"] for e in (0, 1)
    ]
    first, second = (sorted(map(bytes, epoch)) for epoch in rows)
    assert first == second
    assert not np.array_equal(*rows)


@pytest.mark.parametrize("packing", ["window", "documents"])
def test_validation_scores_each_held_out_token_once(tmp_path, packing):
    dataset = open_texts(write_texts(tmp_path / "texts"), tmp_path, packing=packing)
    for size in (1, 4, 7, 1000):
        batches = validation_batches(dataset, size)
        assert all(batch["tokens"].shape == (size, LENGTH_S) for batch in batches)
        assert (
            sum(batch["weights"].sum() for batch in batches)
            == dataset.num_validation_tokens
        )


def test_train_and_validation_share_no_document(tmp_path):
    folder = write_texts(tmp_path / "texts")
    dataset = open_texts(folder, tmp_path, packing="documents")
    text = dict.fromkeys(("train", "validation"), "")
    count = dataset.num_train_samples
    train = dataset.read("train", np.arange(count))
    held = dataset.validation_batch(0, 200)
    for name, batch in (("train", train), ("validation", held)):
        text[name] = dataset.tokenizer.decode(batch["tokens"][batch["weights"] > 0])
    names = [f"<{number}>" for number in range(60)]
    sides = [
        ("train" * (n in text["train"]), "validation" * (n in text["validation"]))
        for n in names
    ]
    assert all(bool(a) != bool(b) for a, b in sides)
    assert any(b for _, b in sides)


def test_split_is_stable_when_the_corpus_moves(tmp_path):
    one = open_texts(write_texts(tmp_path / "here"), tmp_path)
    two = open_texts(write_texts(tmp_path / "some" / "where" / "else"), tmp_path)
    three = open_texts(
        tmp_path / "here", tmp_path, path=str(tmp_path / "here" / "**" / "*.txt")
    )
    assert one.num_validation_tokens > 0
    assert one.fingerprint == two.fingerprint == three.fingerprint


def test_stdlib_is_the_default_and_needs_no_download(tmp_path):
    lines: list[str] = []
    config = DataConfig(cache_dir=str(tmp_path))
    dataset = open_dataset(config, sequence_length=64, vocab_size=256, log=lines.append)
    assert config.source == "stdlib"
    assert "sha256" in lines[0]
    assert "files" in lines[0]
    assert dataset.num_train_tokens > 500_000
    assert dataset.num_validation_tokens > 10_000
    assert dataset.bytes_per_token == 1.0
    batch = dataset.train_batch(0, 4)
    assert {name: (v.shape, v.dtype.name) for name, v in batch.items()} == {
        "tokens": ((4, 64), "int32"),
        "targets": ((4, 64), "int32"),
        "weights": ((4, 64), "float32"),
        "positions": ((4, 64), "int32"),
        "sample": ((4,), "int32"),
    }
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_one_file_is_split_by_blocks(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(
        "".join(f"line {number} of a long book\n" for number in range(30_000))
    )
    lines: list[str] = []
    dataset = open_texts(file, tmp_path, lines, path=str(file))
    assert any("blocks" in line for line in lines)
    assert 0 < dataset.num_validation_tokens < dataset.num_train_tokens
    assert dataset.bytes_per_token == 1.0


def test_split_share(tmp_path):
    store = dataclasses.replace(
        store_of(tmp_path, numbered([20] * 4)),
        group=np.array([0, 12, 13, 255], np.uint8),
    )
    assert split(store, 13, print)[1].tolist() == [True, True, False, False]
    assert split(store, 0, print)[1].tolist() == [False] * 4


def test_validation_path_replaces_the_split(tmp_path):
    train, held = write_texts(tmp_path / "train", 20), write_texts(tmp_path / "held", 4)
    dataset = open_texts(train, tmp_path, validation_path=str(held))
    size = {f: sum(p.stat().st_size for p in f.rglob("*.txt")) for f in (train, held)}
    assert dataset.num_train_tokens == size[train]
    assert dataset.num_validation_tokens == size[held] - 1


def test_mixture_proportions_resume_and_validation(tmp_path):
    low, high = tmp_path / "low.txt", tmp_path / "high.txt"
    low.write_text("a" * 400_000)
    high.write_text("b" * 700_000)
    mixture = (f"3:text:{low}", f"1:text:{high}")

    def opened():
        return open_texts(
            tmp_path, tmp_path, source="mixture", path="", mixture=mixture
        )

    dataset, fresh = opened(), opened()
    straight = [dataset.train_batch(step, 8) for step in range(30)]
    tokens = np.concatenate([batch["tokens"] for batch in straight])
    assert abs(np.mean(tokens == ord("a")) - 0.75) < 0.01
    assert set(np.unique(tokens)) == {ord("a"), ord("b")}
    for step in (29, 3, 17):
        again = fresh.train_batch(step, 8, slice(2, 5))
        assert all(
            np.array_equal(straight[step][name][2:5], again[name]) for name in again
        )
    batches = validation_batches(dataset, 5)
    assert sum(b["weights"].sum() for b in batches) == dataset.num_validation_tokens > 0


def test_text_is_tokenized_once(tmp_path):
    folder = write_texts(tmp_path / "texts")
    first: list[str] = []
    second: list[str] = []
    open_texts(folder, tmp_path, first)
    open_texts(folder, tmp_path, second)
    assert any("tokenized 60 documents" in line for line in first)
    assert not any("tokenized 60" in line for line in second)
    (cache,) = (tmp_path / "cache").glob("tokens-*/tokens.bin")
    cache.write_bytes(cache.read_bytes()[:-5])  # damaged: made again
    open_texts(folder, tmp_path, second)
    assert any("damaged" in line for line in second)
    (folder / "part0" / "000.txt").write_text("changed")  # changed: another entry
    open_texts(folder, tmp_path, third := [])
    assert any("tokenized 60" in line for line in third)


def test_a_damaged_packing_is_made_again(tmp_path):
    folder = write_texts(tmp_path / "texts")
    expected = open_texts(folder, tmp_path, packing="documents").train_batch(0, 4)
    kept = min((tmp_path / "cache").glob("packing-*.npz"))
    sound = kept.read_bytes()
    for place in range(0, len(sound), len(sound) // 40):
        kept.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        again = open_texts(folder, tmp_path, packing="documents").train_batch(0, 4)
        assert all(np.array_equal(expected[name], again[name]) for name in expected), (
            place
        )


# --- Tokenizers -----------------------------------------------------------------------


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "naïve 文\n\t🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).max() < tokenizer.vocab_size == 256
    assert tokenizer.decode([104, 105, 300, 255]) == "hi\ufffd\ufffd"


class Bpe(NamedTuple):
    """Texts, and their data set whose opening trained a tokenizer."""

    texts: Path
    workdir: Path
    options: DataConfig
    dataset: Dataset
    saved: Tokenizer  # read back from the run
    lines: list[str]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers", reason="extra `text` is not installed")
    folder = tmp_path_factory.mktemp("bpe")
    texts, workdir = write_texts(folder / "texts"), folder / "run"
    options = DataConfig(
        source="text",
        path=str(texts),
        tokenizer="bpe:300",
        special_tokens="text",
        packing="documents",
        cache_dir=str(folder / "cache"),
    )
    lines: list[str] = []
    dataset = open_dataset(
        options, sequence_length=64, folder=workdir, log=lines.append
    )
    saved = load_tokenizer("bpe:300", folder=workdir, special_tokens="text")
    return Bpe(texts, workdir, options, dataset, saved, lines)


def test_bpe_is_trained_once_and_saved_with_the_run(bpe):
    later: list[str] = []
    open_dataset(bpe.options, sequence_length=64, log=later.append)

    assert any("training a byte-level BPE" in line for line in bpe.lines)
    assert not any("training a" in line for line in later)
    assert bpe.saved.fingerprint == bpe.dataset.tokenizer.fingerprint


def test_bpe_round_trips_text_that_spells_a_special_token(bpe):
    tokenizer = bpe.saved
    text = "aaaa <|endoftext|> naïve 文"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.end_of_document is not None
    assert tokenizer.end_of_document not in tokens, "no text ends a document"


def test_the_end_of_a_bpe_document_is_learned_and_never_read(bpe):
    end = bpe.saved.end_of_document
    batch = bpe.dataset.validation_batch(0, 100)
    is_scored = batch["weights"] > 0
    assert np.any(batch["targets"][is_scored] == end)
    assert not np.any(batch["tokens"][is_scored] == end)


def test_bytes_per_bpe_token_are_counted_for_each_split(bpe):
    held_out = [
        file
        for file in bpe.texts.rglob("*.txt")
        if group_of([file.relative_to(bpe.texts).as_posix()])[0] < 13
    ]
    assert len(held_out) > 1
    # a document's first token is no target
    num_targets = (bpe.dataset.validation_batch(0, 100)["weights"] > 0).sum()
    num_tokens = num_targets + len(held_out)
    num_bytes = sum(file.stat().st_size for file in held_out)

    found = bpe.dataset.validation_bytes_per_token
    assert found == pytest.approx(num_bytes / num_tokens)
    assert bpe.dataset.bytes_per_token > 1.5
    assert bpe.dataset.bytes_per_token != found


def test_a_vocabulary_smaller_than_that_of_bpe_is_refused(bpe):
    with pytest.raises(ConfigError, match="vocab_size=256"):
        open_dataset(bpe.options, sequence_length=64, vocab_size=256, log=print)


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "/nowhere/*.txt"}, "data.path=/nowhere"),
        ({"path": ""}, "needs data.path"),
        ({"source": "jsonl"}, "no jsonl file"),
        ({"source": "bin"}, "no bin file"),
        ({"source": "megatron", "path": "/nowhere/x"}, "/nowhere/x.idx"),
        ({"source": "bin", "packing": "documents"}, "data.packing=documents"),
        ({"source": "mixture"}, "data.mixture"),
        (
            {"source": "stdlib"},
            "texts is not read by data.source=stdlib: set data.source=text to read it",
        ),
        (
            {"source": "stdlib", "path": "a/b.jsonl.gz"},
            "set data.source=jsonl to read it, or clear data.path",
        ),
        ({"source": "digits", "path": "train.npz"}, "set data.source=arrays"),
        (
            {"source": "mixture", "path": "", "mixture": ("1:txet:a", "0:text:b")},
            "weight:source:path",
        ),
        ({"mixture": ("1:text:a",)}, "data.mixture"),
        (
            {"validation_share": 256},
            "data.validation_share: got 256, required int >= 0 and <= 255",
        ),
        ({"tokenizer": "bpe:12"}, "SIZE >= 257"),
        ({"tokenizer": "/nowhere.json"}, "data.tokenizer=/nowhere.json"),
        ({"cache_dir": "/proc/none"}, "data.cache_dir"),
    ],
)
def test_faults_name_the_option_and_the_cure(tmp_path, options, words):
    folder = write_texts(tmp_path / "texts", 4)
    with pytest.raises(ConfigError) as caught:
        open_texts(folder, tmp_path, **options)
    assert words in str(caught.value)
    assert all("\n" not in fault for fault in caught.value.faults)


def test_small_and_empty_corpora_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no text file"):
        open_texts(empty, tmp_path)
    (empty / "binary.txt").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigError, match="no documents"):
        open_texts(empty, tmp_path)
    (empty / "short.txt").write_text("x" * LENGTH_S)
    with pytest.raises(
        ConfigError, match=f"16 training tokens, but one sample needs {LENGTH_S + 1}"
    ):
        open_texts(empty, tmp_path, validation_share=0)
    (empty / "short.txt").write_text("x" * (LENGTH_S + 1))
    dataset = open_texts(empty, tmp_path, validation_share=0)
    assert dataset.num_train_samples == 1
    with pytest.raises(ConfigError, match="nothing is held out"):
        dataset.num_validation_batches(4)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    folder = write_texts(tmp_path / "texts", 20)
    config = DataConfig(
        source="text", path=str(folder), cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(ConfigError, match="Set model.vocab_size to 107"):
        open_dataset(config, sequence_length=LENGTH_S, vocab_size=106, log=print)
    assert open_dataset(config, sequence_length=LENGTH_S, vocab_size=107, log=print)


def test_a_source_that_ends_is_named(tmp_path):
    dataset = open_texts(write_texts(tmp_path / "texts"), tmp_path)
    dataset.train_batch(0, 4)
    (cache,) = (tmp_path / "cache").glob("tokens-*/tokens.bin")
    with cache.open("r+b") as stream:
        stream.truncate(10)
    fault = "text .*texts ended or failed at train sample 4: .*shrank to 10 bytes"
    with pytest.raises(SourceError, match=fault):
        dataset.train_batch(1, 4)


def test_options_read_from_the_command_line():
    fields = schema.schema_of(DataConfig, "data.")
    assert len(fields) <= 18  # with data.truncation, for pairs of preferences
    assert all(field.doc for field in fields.values())
    text = "0.7:stdlib:,0.3:jsonl:/x/y.jsonl,/x/z.jsonl, .5:bin:/b"
    mixture = schema.parse_value(text, fields["data.mixture"])
    weights, sources = parts_of(DataConfig(source="mixture", mixture=mixture))
    assert weights == [0.7, 0.3, 0.5]
    assert [one.path for one in sources] == ["", "/x/y.jsonl,/x/z.jsonl", "/b"]
    assert json.dumps(dataclasses.asdict(DataConfig()))


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Grüße ".encode("latin-1") * 200)
    (tmp_path / "utf8.txt").write_text("Grüße \ufffd " * 200, encoding="utf-8")
    lines = []
    config = DataConfig(
        source="text",
        path=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        validation_share=0,
    )
    for _ in range(2):  # made, and found in the cache
        open_dataset(config, sequence_length=16, log=lines.append)
        (line,) = (line for line in lines if "UTF-8" in line)
        assert "not UTF-8: 1, for example latin.txt;" in line
        lines.clear()


@pytest.mark.parametrize("packing", ["window", "documents"])
def test_batches_in_any_order_are_those_of_their_rows(tmp_path, packing):
    """Rows of many steps are located at once; the steps may be asked for in any order."""
    dataset = open_dataset(
        DataConfig(
            source="text",
            path=str(write_texts(tmp_path / "texts")),
            cache_dir=str(tmp_path / "cache"),
            packing=packing,
        ),
        sequence_length=LENGTH_S,
        log=print,
    )
    draw = np.random.default_rng(0)
    for _ in range(60):
        size = int(draw.choice([4, 8, 1500]))
        step = int(draw.integers(0, 400))
        rows = draw.choice(size, 3, replace=False)
        found = dataset.train_batch(step, size, rows)
        wanted = dataset.read("train", step * size + rows)
        for name, values in found.items():
            np.testing.assert_array_equal(values, wanted[name])
