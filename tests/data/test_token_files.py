"""Token files and text formats: .bin, Megatron, jsonl, parquet, Hugging Face."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, open_dataset
from jaxdist.data.sources import files
from jaxdist.data.sources.bin_files import open_bin
from jaxdist.data.sources.megatron import open_megatron
from jaxdist.data.token_files import BLOCK_TOKENS

LENGTH_S = 32


def opened(tmp_path: Path, vocab_size: int | None = None, **options):
    config = DataConfig(**{"cache_dir": str(tmp_path / "cache")} | options)
    return open_dataset(
        config, sequence_length=LENGTH_S, vocab_size=vocab_size, log=print
    )


def stream_of(dataset) -> np.ndarray:
    """Returns the training tokens that an epoch shows, sorted, each as often as it is a
    target.
    """
    return np.sort(
        dataset.read("train", np.arange(dataset.num_train_samples))["targets"].ravel()
    )


# --- .bin -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_nanogpt_bin(tmp_path, dtype):
    tokens = np.arange(10 * BLOCK_TOKENS + 77) % 60_000
    tokens.astype(dtype).tofile(tmp_path / "train.bin")
    path = str(tmp_path / "train.bin")
    dataset = opened(
        tmp_path, source="bin", path=path, bin_dtype=dtype, validation_share=0
    )
    count = (len(tokens) - 1) // LENGTH_S * LENGTH_S
    assert np.array_equal(stream_of(dataset), np.sort(tokens[1 : count + 1]))
    assert dataset.tokenizer is None
    assert dataset.bytes_per_token is None
    with pytest.raises(ConfigError, match="model.vocab_size to 60000"):
        opened(tmp_path, 50_257, source="bin", path=path, bin_dtype=dtype)


def test_bin_holds_out_blocks_or_another_file(tmp_path):
    # every token tells its block
    tokens = np.arange(300 * BLOCK_TOKENS) // BLOCK_TOKENS
    tokens.astype(np.uint16).tofile(tmp_path / "train.bin")
    tokens[:500].astype(np.uint16).tofile(tmp_path / "val.bin")
    path = str(tmp_path / "train.bin")
    dataset = opened(
        tmp_path, source="bin", path=path, validation_tokens=BLOCK_TOKENS * 40
    )
    batches = [
        dataset.validation_batch(n, 512)
        for n in range(dataset.num_validation_batches(512))
    ]
    held = {t for b in batches for t in np.unique(b["tokens"][b["weights"] > 0])}
    train = set(
        np.unique(dataset.read("train", np.arange(dataset.num_train_samples))["tokens"])
    )
    assert 5 < len(held) < 30
    assert not held & train
    assert len(held | train) == 300
    other = opened(
        tmp_path, source="bin", path=path, validation_path=str(tmp_path / "val.bin")
    )
    assert other.num_validation_tokens == 499
    assert other.num_train_tokens == len(tokens)


def test_bin_with_header_and_several_shards(tmp_path):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 1000
    for number in range(3):
        body = (np.arange(1000) + 1000 * number).astype(np.uint16)
        (tmp_path / f"fineweb_{number}.bin").write_bytes(
            header.tobytes() + body.tobytes()
        )
    store = open_bin(DataConfig(source="bin", path=str(tmp_path / "fineweb_*.bin")))
    assert store.length.sum() == 3000
    assert store.max_id == 2999
    dataset = opened(
        tmp_path, source="bin", path=str(tmp_path / "fineweb_*.bin"), validation_share=0
    )
    count = 2999 // LENGTH_S * LENGTH_S
    assert np.array_equal(stream_of(dataset), np.arange(1, count + 1))  # across shards


def test_a_rewritten_middle_of_a_bin_file_is_another_corpus(tmp_path):
    path = tmp_path / "a.bin"
    tokens = np.arange(4 << 20, dtype=np.uint16)  # 8 MiB
    config = DataConfig(source="bin", path=str(path))
    tokens.tofile(path)
    fingerprint = open_bin(config).fingerprint
    tokens.tofile(path)
    assert open_bin(config).fingerprint == fingerprint
    tokens[1 << 20 : 3 << 20] += 1  # both ends stay
    tokens.tofile(path)
    assert open_bin(config).fingerprint != fingerprint


def test_a_bin_file_cut_off_is_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"\1\2\3")
    with pytest.raises(ConfigError, match="cut off"):
        opened(tmp_path, source="bin", path=str(tmp_path / "odd.bin"))


# --- Megatron -------------------------------------------------------------------------


def write_megatron(prefix: Path, documents, dtype: str = "uint16") -> None:
    """Writes PREFIX.bin and PREFIX.idx as Megatron does, one sequence per document."""
    lengths = [len(ids) for ids in documents]
    tokens = [np.asarray(ids).astype(dtype) for ids in documents]
    assert all(
        np.array_equal(stored, ids)
        for stored, ids in zip(tokens, documents, strict=True)
    )
    Path(f"{prefix}.bin").write_bytes(b"".join(stored.tobytes() for stored in tokens))
    offsets = [sum(lengths[:n]) * np.dtype(dtype).itemsize for n in range(len(lengths))]
    code, count = {"uint16": 8, "int32": 4}[dtype], len(lengths)
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, count, count + 1)
    index += struct.pack(
        f"<{count}i{count}q{count + 1}q", *lengths, *offsets, *range(count + 1)
    )
    Path(f"{prefix}.idx").write_bytes(index)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_round_trip(tmp_path, dtype):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 60_000, n) for n in rng.integers(0, 200, 300)]
    write_megatron(tmp_path / "corpus", documents, dtype=dtype)
    for path in ("corpus", "corpus.bin", "corpus.idx", "c*"):
        store = open_megatron(DataConfig(source="megatron", path=str(tmp_path / path)))
        found = [
            store.files[f].tokens[s : s + n]
            for f, s, n in zip(store.file, store.start, store.length, strict=True)
        ]
        assert len(found) == len(documents)
        assert all(np.array_equal(a, b) for a, b in zip(found, documents, strict=True))


def test_megatron_documents_of_several_sequences(tmp_path):
    np.arange(10, dtype="<u2").tofile(tmp_path / "m.bin")
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3)
    index += struct.pack("<3i3q3q", 4, 2, 4, 0, 8, 12, 0, 2, 3)  # sequences 0, 1 | 2
    (tmp_path / "m.idx").write_bytes(index)
    store = open_megatron(DataConfig(source="megatron", path=str(tmp_path / "m")))
    assert store.start.tolist() == [0, 6]
    assert store.length.tolist() == [6, 4]


def test_megatron_trains_packed(tmp_path):
    write_megatron(tmp_path / "corpus", [np.full(50, n) for n in range(200)])
    dataset = opened(
        tmp_path, source="megatron", path=str(tmp_path / "corpus"), packing="documents"
    )
    batch = dataset.train_batch(0, 16)
    used = batch["weights"] > 0
    assert used.any()
    assert np.array_equal(batch["tokens"][used], batch["targets"][used])
    assert dataset.num_validation_tokens % 49 == 0
    assert dataset.num_validation_tokens > 0


@pytest.mark.parametrize("damage", ["magic", "short", "no data", "too little data"])
def test_damaged_megatron_is_refused(tmp_path, damage):
    write_megatron(tmp_path / "c", [np.arange(100)] * 3)
    index, data = tmp_path / "c.idx", tmp_path / "c.bin"
    if damage == "magic":
        index.write_bytes(b"X" + index.read_bytes()[1:])
    elif damage == "short":
        index.write_bytes(index.read_bytes()[:-1])
    elif damage == "no data":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ConfigError):
        opened(tmp_path, source="megatron", path=str(tmp_path / "c"))


# --- jsonl ----------------------------------------------------------------------------

RECORDS = [{"body": f"text number {n} " * 5, "id": f"doc-{n}"} for n in range(100)]


def test_jsonl_plain_and_compressed_agree(tmp_path):
    lines = "\n".join(map(json.dumps, RECORDS)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write(lines)
    plain, packed = (
        opened(tmp_path, source="jsonl", path=str(tmp_path / name), text_field="body")
        for name in ("a.jsonl", "a.jsonl.gz")
    )
    assert plain.fingerprint == packed.fingerprint
    assert plain.num_validation_tokens > 0
    assert plain.num_train_tokens < sum(len(record["body"]) for record in RECORDS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b'{"a": 1}', "has: a"),
        (b"[1]", "it is list; required: dict"),
        (b'{"text": 3}', "field 'text' is int; required: a text"),
        (
            b'{"text": "fin\xe9"}',
            "not UTF-8 at byte 30 of the file; write the file again as UTF-8",
        ),
    ],
)
def test_jsonl_faults_name_the_line(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match="line 2") as caught:
        opened(tmp_path, source="jsonl", path=str(tmp_path))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 64)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as stream:
        stream.write('{"text": "fine"}\n' + "[" * 1000)
    with pytest.raises(ConfigError, match="line 2: longer than 64 bytes; write one"):
        opened(tmp_path, source="jsonl", path=str(tmp_path / name))


def test_records_with_an_empty_id_are_held_out_one_by_one(tmp_path):
    """As one id they would be one document, of which blocks are held out."""

    def data_of(**fields):
        lines = [json.dumps({"text": f"text {n} " * 9} | fields) for n in range(100)]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        dataset = opened(tmp_path, source="jsonl", path=str(tmp_path / "a.jsonl"))
        return dataset.fingerprint

    without = data_of()
    assert data_of(id="") == data_of(id=None) == without
    assert data_of(id=0) != without


# --- parquet, Hugging Face ------------------------------------------------------------


def test_parquet_equals_jsonl(tmp_path):
    reason = "extra `hf` is not installed"
    arrow = pytest.importorskip("pyarrow", reason=reason)
    parquet = pytest.importorskip("pyarrow.parquet", reason=reason)
    parquet.write_table(arrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    one, two = (
        opened(
            tmp_path, source=kind, path=str(tmp_path / f"a.{kind}"), text_field="body"
        )
        for kind in ("parquet", "jsonl")
    )
    assert one.fingerprint == two.fingerprint
    with pytest.raises(ConfigError, match="no text in field 'text' .has: body, id"):
        opened(tmp_path, source="parquet", path=str(tmp_path / "a.parquet"))
    (tmp_path / "b.parquet").write_text("nothing")
    with pytest.raises(ConfigError, match="not a parquet file"):
        opened(tmp_path, source="parquet", path=str(tmp_path / "b.parquet"))


def test_huggingface_folder_equals_jsonl(tmp_path):
    datasets = pytest.importorskip("datasets", reason="extra `hf` is not installed")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    name = str(tmp_path / "data")
    datasets.load_dataset(name, split="train").save_to_disk(tmp_path / "hf")
    paths = {"huggingface": (str(tmp_path / "hf"), f"{name}::train"), "jsonl": (name,)}
    one, two, three = (
        opened(tmp_path, source=source, path=path, text_field="body")
        for source in paths
        for path in paths[source]
    )
    assert one.fingerprint == two.fingerprint == three.fingerprint
    with pytest.raises(ConfigError, match="no text in field 'text'"):
        opened(tmp_path, source="huggingface", path=str(tmp_path / "hf"))
    with pytest.raises(ConfigError, match="cannot load it"):
        opened(tmp_path, source="huggingface", path=f"{name}::nosplit")
