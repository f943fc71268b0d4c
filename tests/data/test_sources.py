"""The table of data sources: each row's facts are rules of the config, and each source
keeps the promises of all.
"""

import errno
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, open_dataset, opening, sample_shapes
from jaxdist.data.config import parts_of
from jaxdist.data.sources.files import find_files
from jaxdist.data.sources.source import SampleSource, TextSource, TokenSource
from jaxdist.data.sources.table import SOURCES, guess_source
from jaxdist.trainer import run_config

TEXTS = [f"<{number}>" + "abcdefghij"[number % 10] * 40 for number in range(60)]
# columns of records: a text, another one, and a chat
RECORDS = {
    "text": TEXTS,
    "body": [text.upper() for text in TEXTS],
    "prompt": TEXTS,
    "completion": TEXTS,
}


def write_text(folder: Path) -> str:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


def write_jsonl(folder: Path) -> str:
    rows = zip(*RECORDS.values(), strict=True)
    lines = [json.dumps(dict(zip(RECORDS, row, strict=True))) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder / "rows.jsonl")


def write_bin(folder: Path) -> str:
    # ids of two bytes, and of four
    np.arange(30_000, dtype="<u4").tofile(folder / "tokens.bin")
    return str(folder / "tokens.bin")


def write_megatron(folder: Path) -> str:
    np.arange(6000, dtype="<u2").tofile(folder / "pair.bin")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 60, 61)
    lengths = np.full(60, 100, "<i4")
    offsets = 200 * np.arange(60, dtype="<i8")
    borders = np.arange(61, dtype="<i8")
    parts = [header, lengths.tobytes(), offsets.tobytes(), borders.tobytes()]
    (folder / "pair.idx").write_bytes(b"".join(parts))
    return str(folder / "pair")


def write_parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="extra `hf` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(RECORDS), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def write_huggingface(folder: Path) -> str:
    datasets = pytest.importorskip("datasets", reason="extra `hf` is not installed")
    datasets.Dataset.from_dict(RECORDS).save_to_disk(str(folder / "rows"))
    return str(folder / "rows")


def write_arrays(folder: Path) -> str:
    np.savez(folder / "rows.npz", x=np.arange(120.0).reshape(60, 2))
    return str(folder / "rows.npz")


# How to write a small corpus of each source that reads a path.
WRITERS = {
    "text": write_text,
    "jsonl": write_jsonl,
    "bin": write_bin,
    "megatron": write_megatron,
    "huggingface": write_huggingface,
    "parquet": write_parquet,
    "arrays": write_arrays,
}


def written(name: str, folder: Path) -> DataConfig:
    """Writes a corpus of a source, and gives the config that reads it."""
    folder.mkdir(parents=True)
    path = WRITERS[name](folder)
    cache = str(folder.parent / "cache")
    return DataConfig(source=name, path=path, validation_share=60, cache_dir=cache)


def opened(config: DataConfig, lines: list[str] | None = None, seed: int = 3):
    log = (lines if lines is not None else []).append
    return open_dataset(config, sequence_length=16, seed=seed, log=log)


def faults(**options) -> str:
    return "\n".join(DataConfig(**options).faults())


def test_each_source_with_a_path_is_tested():
    names = {
        name
        for name, source in SOURCES.items()
        if source.takes_path and not source.from_caller
    }
    assert names == set(WRITERS)


@pytest.mark.parametrize("name", WRITERS)
def test_a_source_is_the_same_wherever_it_is_stored(name, tmp_path):
    lines: list[str] = []
    config = written(name, tmp_path / "here")
    dataset = opened(config, lines)
    is_text = isinstance(SOURCES[name], TextSource)
    assert any("tokenized" in line for line in lines) == is_text
    steps = 2 * dataset.num_train_samples // 4 + 1  # more than two epochs
    batches = [dataset.train_batch(step, 4) for step in range(steps)]
    again = opened(config, later := [])
    assert not any("tokenized" in line for line in later)
    for step in reversed(range(steps)):  # resume at every step
        for entry, values in again.train_batch(step, 4).items():
            np.testing.assert_array_equal(values, batches[step][entry])
    moved = opened(written(name, tmp_path / "some" / "where" / "else"))
    if name != "huggingface":  # its cached files have times
        assert moved.fingerprint == dataset.fingerprint
    shapes = sample_shapes(config, 16)
    assert {entry: (x.shape[1:], x.dtype.name) for entry, x in batches[0].items()} == {
        entry: tuple(shape) for entry, shape in shapes.items()
    }


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_held_out_is_not_trained_on(name, tmp_path):
    config = written(name, tmp_path / "here")
    dataset = opened(config)
    entry = "tokens" if config.is_text else "x"
    train = dataset.read("train", np.arange(dataset.num_train_samples))[entry]
    held_out = dataset.read("validation", np.arange(1))[entry]
    assert dataset.num_validation_tokens > 0
    seen = {row.tobytes() for row in train}
    assert held_out[0].tobytes() not in seen


# another value of each key that sources read
OTHER = {"text_field": "body", "format": "chat", "bin_dtype": "uint32"}
READ_KEYS = [(name, key) for name, source in SOURCES.items() for key in source.reads]


def stamp_of(config: DataConfig) -> str:
    """Reads what names the tokens of a source in caches and checkpoints."""
    source = SOURCES[config.source]
    if isinstance(source, TokenSource):
        return source.open(config).fingerprint
    return opening.open_corpus(config, lambda line: None).stamp


@pytest.mark.parametrize(("name", "key"), READ_KEYS)
def test_another_value_of_a_key_that_a_source_reads_is_another_stamp(
    name, key, tmp_path
):
    config = written(name, tmp_path / "here")
    assert stamp_of(config) == stamp_of(replace(config, prefetch=0))
    assert stamp_of(config) != stamp_of(replace(config, **{key: OTHER[key]}))


def test_a_source_gets_no_key_that_its_row_does_not_declare(tmp_path, monkeypatch):
    config = written("jsonl", tmp_path / "here")
    monkeypatch.setitem(SOURCES, "jsonl", replace(SOURCES["jsonl"], reads=("format",)))
    with pytest.raises(AttributeError, match="data.text_field: .* does not declare"):
        opened(config)


def test_a_corpus_without_documents_is_refused_with_its_size_and_what_to_change(
    tmp_path,
):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError) as error:
        opened(DataConfig(source="jsonl", path=path, cache_dir=str(tmp_path)))
    assert str(error.value).endswith(
        f"data.source: jsonl {path} has no documents (1 files, 0.00 MB). Set data.path "
        "to other data, or change data.format, data.text_field."
    )


def test_a_key_that_the_source_does_not_read_is_named():
    config = run_config.default_config()
    config.data.text_field = "body"
    config.data.bin_dtype = "uint32"
    assert list(run_config.unread_options(run_config.from_config(config))) == [
        "data.text_field=body has no effect: data.source=stdlib does not read it, only "
        "jsonl, huggingface, parquet, mixture. If you set it, leave it out, or change data.source.",
        "data.bin_dtype=uint32 has no effect: data.source=stdlib does not read it, only "
        "bin, mixture. If you set it, leave it out, or change data.source.",
    ]


def test_a_key_with_two_conditions_is_named_for_each_that_does_not_hold():
    config = run_config.default_config()
    config.data.source = "jsonl"
    config.data.text_field = "body"
    assert not list(run_config.unread_options(run_config.from_config(config)))
    config.data.format = "chat"
    of_chats = (
        "data.text_field=body has no effect: data.format=chat does not read it, only "
        "text. If you set it, leave it out, or change data.format."
    )
    lines = list(run_config.unread_options(run_config.from_config(config)))
    assert lines == [of_chats]
    config.data.source = "stdlib"
    lines = list(run_config.unread_options(run_config.from_config(config)))
    assert len(lines) == 2
    assert "data.source=stdlib does not read it" in lines[0]
    assert lines[1] == of_chats


def test_long_documents_are_split_in_packed_rows_alone():
    config = run_config.default_config()
    config.data.long_documents = "split"
    assert list(run_config.unread_options(run_config.from_config(config))) == [
        "data.long_documents=split has no effect: data.packing=window does not read "
        "it, only documents. If you set it, leave it out, or change data.packing."
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_the_facts_of_a_source_are_rules_of_the_config(name):
    source = SOURCES[name]
    needs_path = f"data.source={name} needs data.path"
    assert (needs_path in faults(source=name)) == source.takes_path
    not_read = f"data.path=x is not read by data.source={name}"
    assert (not_read in faults(source=name, path="x")) != source.takes_path
    packed = faults(source=name, path="x", packing="documents")
    assert (f"data.source={name} has none" in packed) != source.has_documents
    chats = faults(source=name, path="x", packing="documents", format="chat")
    assert (f"data.source={name} has no chats" in chats) != source.has_records
    assert ("is only for jaxdist.fit" in faults(source=name)) == (source.from_caller)
    assert DataConfig(source=name).is_text != isinstance(source, SampleSource)


@pytest.mark.parametrize("name", SOURCES)
def test_mixtures_have_parts_of_tokens(name):
    config = DataConfig(source="mixture", mixture=(f"1:{name}:x",))
    source = SOURCES[name]
    is_part = isinstance(source, TextSource | TokenSource)
    if is_part and source.takes_path:
        weights, parts = parts_of(config)
        assert weights == [1.0]
        assert (parts[0].source, parts[0].path) == (name, "x")
        return
    fault = "is not read by" if is_part else "a source of stdlib, text"
    with pytest.raises(ConfigError, match=fault):
        parts_of(config)


def test_an_ending_belongs_to_one_source():
    endings = [ending for source in SOURCES.values() for ending in source.endings]
    assert len(set(endings)) == len(endings) > 5
    for name, source in SOURCES.items():
        for ending in source.endings:
            assert guess_source(f"folder/file{ending}") == name
    assert guess_source("notes.md") == "text"


@pytest.mark.parametrize("name", ["jsonl", "bin", "parquet"])
def test_a_folder_gives_the_files_with_its_source_s_endings(name, tmp_path):
    own = {f"rows{ending}" for ending in SOURCES[name].endings}
    others = {"rows.txt", "rows.txt.gz", "rows.tar.gz", "rows.other", f".{min(own)}"}
    for file in own | others:
        (tmp_path / file).write_text("x")
    files = find_files(DataConfig(source=name, path=str(tmp_path)))
    assert {file.id for file in files} == own


@pytest.fixture
def closed_folders(monkeypatch):
    """Makes folders named `closed` unreadable, for root, too."""
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)


@pytest.mark.parametrize("glob", ["", "**/*.txt", "*/*.txt", "*/closed/*"])
def test_a_folder_that_may_not_be_read_is_a_fault(glob, tmp_path, closed_folders):
    closed = tmp_path / "a" / "closed"
    closed.mkdir(parents=True)
    (closed / "lost.txt").write_text("x")
    (tmp_path / "a" / "found.txt").write_text("x")
    config = DataConfig(source="text", path=str(tmp_path / glob))
    if glob == "*/*.txt":  # which does not look there
        assert [file.id for file in find_files(config)] == ["a/found.txt"]
        return
    with pytest.raises(ConfigError, match=f"{closed} cannot be read .Permission"):
        find_files(config)


def test_a_hidden_folder_that_may_not_be_read_is_left_out(tmp_path, closed_folders):
    (tmp_path / ".git" / "closed").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("x")
    (file,) = find_files(DataConfig(source="text", path=str(tmp_path)))
    assert file.id == "a.txt"


@pytest.mark.parametrize("source", ["text", "megatron"])
def test_a_glob_reads_each_folder_a_few_times(source, tmp_path, monkeypatch):
    """Two `**` could meet in each folder between them."""
    tmp_path.joinpath(*"abcdefghijklmn").mkdir(parents=True)
    read = []
    scandir = os.scandir

    def counting(path):
        read.append(path)
        assert len(read) < 1000, "folders are read again and again"
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counting)
    config = DataConfig(source=source, path=str(tmp_path / ("**/*/" * 6 + "none")))
    with pytest.raises(ConfigError, match="no text file there|no file"):
        SOURCES[source].open(config)
    assert len(read) >= 15


@pytest.mark.parametrize(
    "glob",
    ["*", "**/*", "**/*.txt", "a/**/*", "*/b/*.txt", "?/[bc]/*", "**/b/**/*", "no/*"],
)
def test_a_glob_finds_what_pathlib_finds(glob, tmp_path):
    for name in ("x.txt", "a/x.txt", "a/b/y.txt", "a/b/c/b/z.md", "a/c/.h", ".g/b/x"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    expected = {path for path in tmp_path.glob(glob) if path.is_file()}
    config = DataConfig(source="text", path=str(tmp_path / glob))
    if not expected:
        assert glob == "no/*"
        with pytest.raises(ConfigError, match="no text file there"):
            find_files(config)
        return
    files = find_files(config)
    assert [file.path for file in files] == sorted(expected)
