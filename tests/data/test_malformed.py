"""Data files that are cut off, damaged, lying or made to harm: refused by a ConfigError
that names them.
"""

import gzip
import importlib
import io
import json
import os
import re
import struct
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, SourceError, bpe, open_dataset, token_cache
from jaxdist.data.sources.documents import Corpus, Document
from jaxdist.data.sources.megatron import open_megatron
from jaxdist.data.sources.table import SOURCES
from jaxdist.data.token_cache import TextEncoder, open_tokens
from jaxdist.data.token_files import BLOCK_TOKENS
from support.paths import ROOT

LENGTH_S = 16


def opened(cache: Path, lines: list | None = None, length: int = LENGTH_S, **options):
    config = DataConfig(**{"cache_dir": str(cache)} | options)
    return open_dataset(
        config, sequence_length=length, log=(lines if lines is not None else []).append
    )


def refusal(cache: Path, **options) -> str:
    """Returns the one line with which a source is refused."""
    with pytest.raises(ConfigError) as caught:
        opened(cache, **options)
    (fault,) = caught.value.faults
    assert "\n" not in fault
    assert len(fault) < 1000
    return fault


def put_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def promptly(work: Callable[[], Any]) -> Any:
    """Returns what work does; fails where it waits, as for somebody who writes to a
    pipe.
    """
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "still waiting, or failed: see above"
    return results[0]


@pytest.mark.parametrize("file", ["rows.npz", "c.idx", "c.bin"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, file):
    """Nobody writes into it: to open it is to wait for ever."""
    path = write_pair(tmp_path, megatron([400], IDS.tobytes()))
    np.savez(tmp_path / "rows.npz", label=np.arange(9))
    put_pipe(tmp_path / file)
    source = (
        {"source": "arrays", "path": str(tmp_path / file)} if file == "rows.npz" else {}
    )
    source = source or {"source": "megatron", "path": path}
    assert file in promptly(lambda: refusal(tmp_path / "cache", **source))


@pytest.mark.parametrize(
    "kept",
    ["tokens-????????????????/tokens.bin", "tokens-*/documents.npy", "packing-*.npz"],
)
def test_a_pipe_in_the_cache_is_replaced(tmp_path, kept):
    (tmp_path / "text.txt").write_text("the cat in the hat " * 200)
    text = {
        "source": "text",
        "path": str(tmp_path / "text.txt"),
        "packing": "documents",
    }
    text["validation_path"] = text["path"]
    expected = opened(tmp_path / "cache", **text).train_batch(0, 2)
    put_pipe(min((tmp_path / "cache").glob(kept)))
    again = promptly(lambda: opened(tmp_path / "cache", **text).train_batch(0, 2))
    assert all(np.array_equal(expected[name], again[name]) for name in expected)


# --- Token ids ------------------------------------------------------------------------


def megatron(
    lengths, ids: bytes, *, code: int = 4, borders=None, offsets=None
) -> tuple[bytes, bytes]:
    """Returns .idx and .bin; by default each sequence is a document."""
    count, size = len(lengths), {4: 4, 5: 8, 8: 2}[code]
    borders = range(count + 1) if borders is None else borders
    offsets = (
        [sum(lengths[:n]) * size for n in range(count)] if offsets is None else offsets
    )
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, count, len(borders))
    return index + struct.pack(
        f"<{count}i{count}q{len(borders)}q", *lengths, *offsets, *borders
    ), ids


def write_pair(folder: Path, pair: tuple[bytes, bytes]) -> str:
    (folder / "c.idx").write_bytes(pair[0])
    (folder / "c.bin").write_bytes(pair[1])
    return str(folder / "c")


IDS = np.arange(400, dtype="<i4")
DAMAGED_PAIRS = {
    "negative id": (
        megatron([400], np.where(IDS == 77, -5, IDS).tobytes()),
        "token 77 has id -5",
    ),
    "id beyond int32": (
        megatron([400], (IDS.astype("<i8") + (1 << 40)).tobytes(), code=5),
        "token 0 has id 109",
    ),
    "negative length": (
        megatron([300, -100, 200], IDS.tobytes()),
        "sequence 1 has -100 tokens",
    ),
    "lengths beyond the file": (
        megatron([2**31 - 1] * 3, IDS.tobytes()),
        "do not follow each other",
    ),
    "borders that wrap": (
        megatron([100] * 3, IDS.tobytes(), borders=[0, 2**63 - 1, -2, 3]),
        "not a Megatron",
    ),
}


GARBLED_INDEXES = {
    "byte 0: ": lambda index: b"X" + index[1:],
    "byte 9: version": lambda index: index[:9] + b"\7" + index[10:],
    "byte 17: type 99 of tokens": lambda index: index[:17] + b"\x63" + index[18:],
    "byte 18: .* need 4294967": lambda index: (
        index[:26] + struct.pack("<Q", 2**29) + index[34:]
    ),
    "byte 26: no border": lambda index: index[:26] + bytes(8) + index[34:],
    "it has 20 bytes, its header alone 34": lambda index: index[:20],
    "byte 86: borders of documents do not rise from 0 to 3": lambda index: (
        index[:78] + b"\xff" + index[79:]
    ),
}


@pytest.mark.parametrize("words", GARBLED_INDEXES)
def test_a_garbled_index_names_the_byte(tmp_path, words):
    index, ids = megatron([100, 100, 200], IDS.tobytes())
    fault = refusal(
        tmp_path,
        source="megatron",
        path=write_pair(tmp_path, (GARBLED_INDEXES[words](index), ids)),
    )
    assert re.search(
        rf"c\.idx: not a Megatron index; {words}.*Write the pair again", fault
    ), fault


def test_an_odd_bin_names_the_byte(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(401))
    odd = "a.bin: token 200 of uint16 has 1 of its 2 bytes, the file at byte 401: .*; write it again"
    assert re.search(odd, refusal(tmp_path, source="bin", path=str(tmp_path / "a.bin")))
    header = np.array([20240520, 1, 500, *[0] * 253], "<i4").tobytes()
    (tmp_path / "a.bin").write_bytes(header + bytes(400))
    cut = "a.bin: 500 tokens of uint16 end at byte 2024, the file at byte 1424: it is cut off"
    assert re.search(cut, refusal(tmp_path, source="bin", path=str(tmp_path / "a.bin")))


def test_a_damaged_row_group_of_parquet_is_named(tmp_path):
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="extra `hf` is not installed"
    )
    file = tmp_path / "a.parquet"
    table = importlib.import_module("pyarrow").table(
        {"text": [f"some text {n} " * 9 for n in range(300)]}
    )
    parquet.write_table(table, file, row_group_size=100, compression="zstd")
    column = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    content, at = (
        bytearray(file.read_bytes()),
        column.dictionary_page_offset or column.data_page_offset,
    )
    content[at : at + 40] = bytes(40)
    file.write_bytes(content)
    fault = refusal(tmp_path, source="parquet", path=str(file))
    assert re.search(
        r"a.parquet row group 1, from byte \d+ on: cannot be read .* Mend or replace it",
        fault,
    )
    file.write_bytes(b"nothing of the kind")
    assert "not a parquet file" in refusal(tmp_path, source="parquet", path=str(file))


@pytest.mark.parametrize("kind", DAMAGED_PAIRS)
def test_megatron_ids_and_lengths_are_checked(tmp_path, kind):
    pair, words = DAMAGED_PAIRS[kind]
    fault = refusal(tmp_path, source="megatron", path=write_pair(tmp_path, pair))
    assert words in fault
    assert str(tmp_path / "c.") in fault


def test_megatron_pairs_of_8_bytes_are_read(tmp_path):
    store = open_megatron(
        DataConfig(
            path=write_pair(tmp_path, megatron([400], IDS.astype("<i8"), code=5))
        )
    )
    assert store.max_id == 399


def test_bin_ids_beyond_int32_are_refused(tmp_path):
    ids = np.arange(400, dtype="<u4")
    ids[9] = 1 << 31
    ids.tofile(tmp_path / "a.bin")
    fault = refusal(
        tmp_path, source="bin", path=str(tmp_path / "a.bin"), bin_dtype="uint32"
    )
    assert "a.bin: token 9 has id 2147483648" in fault


def test_ids_of_a_file_too_large_to_scan_are_checked_as_they_are_read(tmp_path):
    with (tmp_path / "a.bin").open("wb") as file:
        file.write(np.full(8, 0xFFFFFFFE, "<u4").tobytes())
        file.truncate(4 * (2**27 + BLOCK_TOKENS))  # holes
    path = str(tmp_path / "a.bin")
    dataset = opened(
        tmp_path, source="bin", path=path, bin_dtype="uint32", validation_path=path
    )
    assert dataset.validation_batch(1, 4)["tokens"].max() == 0
    with pytest.raises(
        SourceError, match="token id -2 among validation samples 0 to 3"
    ):
        dataset.validation_batch(0, 4)


def word_level(ids: dict[str, int]) -> str:
    """Returns a tokenizer.json that splits at white space."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="extra `text` is not installed"
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def test_a_vocabulary_with_gaps_has_the_size_of_its_largest_id(tmp_path):
    (tmp_path / "t.json").write_text(word_level({"a": 0, "b": 1, "c": 70_097}))
    (tmp_path / "a.txt").write_text("a b c " * 200)
    options = {
        "source": "text",
        "path": str(tmp_path / "a.txt"),
        "tokenizer": str(tmp_path / "t.json"),
    }
    dataset = opened(tmp_path / "cache", **options)
    assert dataset.tokenizer.vocab_size == 70_098
    assert set(np.unique(dataset.train_batch(0, 8)["tokens"])) == {0, 1, 70_097}
    with pytest.raises(ConfigError, match="Set model.vocab_size to 70098"):
        open_dataset(
            DataConfig(cache_dir=str(tmp_path), **options),
            sequence_length=LENGTH_S,
            vocab_size=3,
        )


def test_ids_that_no_batch_can_hold_are_refused(tmp_path):
    (tmp_path / "t.json").write_text(
        word_level({"a": 0, "b": 1}).replace('"b":1', f'"b":{2**32 - 1}')
    )
    (tmp_path / "a.txt").write_text("a b " * 200)
    fault = refusal(
        tmp_path,
        source="text",
        path=str(tmp_path / "a.txt"),
        tokenizer=str(tmp_path / "t.json"),
    )
    assert "t.json: " in fault
    assert "its largest id is 4294967295" in fault


class Liar:
    """A tokenizer whose ids are not below its vocab_size."""

    vocab_size, end_of_document, begin_of_document = 200, None, None
    fingerprint, content, special_tokens = "liar", None, {}

    def encode_documents(self, texts):
        return [np.array([1, 2, 256 + 3])] * len(texts)


def test_an_id_outside_the_vocabulary_never_wraps(tmp_path):
    corpus = Corpus("text x", "stamp", "", lambda: iter([Document("a", "x")]))
    with pytest.raises(
        ConfigError, match="makes id 259, outside .* 0 to 199 .fingerprint liar"
    ):
        open_tokens(corpus, TextEncoder(Liar()), tmp_path, print)


# --- The token cache ------------------------------------------------------------------


def test_any_flipped_bit_of_the_token_cache_is_found_and_mended(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 300)
    options = {"source": "text", "path": str(tmp_path / "a.txt")}
    whole = opened(tmp_path / "cache", **options)
    (folder,) = (tmp_path / "cache").glob("tokens-*[!k]")
    expected = whole.train_batch(0, 8)

    @settings(max_examples=60)
    @given(
        name=st.sampled_from(["tokens.bin", "documents.npy", "meta.json"]),
        data=st.data(),
    )
    def check(name, data):
        content = bytearray((folder / name).read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        (folder / name).write_bytes(content)
        dataset = opened(tmp_path / "cache", lines := [], **options)
        assert any("damaged; made again" in line for line in lines), (name, place)
        assert dataset.fingerprint == whole.fingerprint
        assert np.array_equal(dataset.train_batch(0, 8)["tokens"], expected["tokens"])

    check()


def test_a_large_cache_is_checked_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_CHECKED_BYTES", 4 << 20)
    check_slowly = token_cache._check_slowly
    may_check = threading.Event()

    def check_later(*arguments):
        assert may_check.wait(60)
        check_slowly(*arguments)

    monkeypatch.setattr(token_cache, "_check_slowly", check_later)
    (tmp_path / "a.txt").write_text("0123456789abcde\n" * (5 << 16))  # 5 MiB
    options = {"source": "text", "path": str(tmp_path / "a.txt"), "validation_share": 0}
    whole = opened(tmp_path / "cache", **options)
    (tokens,) = (tmp_path / "cache").glob("tokens-*/tokens.bin")
    with tokens.open("r+b") as file:
        file.seek((4 << 20) + 12345)
        file.write(b"!")
    damaged = opened(tmp_path / "cache", lines := [], **options)
    assert not any("damaged" in line for line in lines)
    may_check.set()
    deadline_s = time.monotonic() + 60
    while any(t.name == "jaxdist-token-check" for t in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(
        SourceError,
        match="tokens.bin: the 4 MiB from byte 4194304 are not what was written",
    ):
        damaged.train_batch(0, 2)
    again = opened(tmp_path / "cache", lines, **options)
    assert any("damaged; made again" in line for line in lines)
    assert again.fingerprint == whole.fingerprint
    assert again.train_batch(0, 2)


# --- Compressed files, paths, names ---------------------------------------------------

LINES = "".join(
    json.dumps({"text": f"text {n} " * 9, "id": n}) + "\n" for n in range(50)
).encode()


@pytest.mark.parametrize("kind", ["none", "cut", "checksum", "body", "empty text"])
def test_a_damaged_gz_is_named_and_the_cache_is_not_blamed(tmp_path, kind):
    whole = gzip.compress(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(
        {
            "none": LINES,
            "cut": whole[: len(whole) // 2],
            "checksum": whole[:-8] + b"\0\0\0\0" + whole[-4:],
            "body": whole[:40] + bytes(20) + whole[60:],
            "empty text": gzip.compress(b"\xff\xfe{"),
        }[kind]
    )
    fault = refusal(
        tmp_path / "cache", source="jsonl", path=str(tmp_path / "a.jsonl.gz")
    )
    assert "a.jsonl.gz" in fault
    assert "cache" not in fault


@pytest.mark.parametrize("source", ["text", "jsonl", "bin", "megatron", "arrays"])
@pytest.mark.parametrize(
    "path",
    ["x" * 5000, "a/" * 2500 + "b", "/tmp/**.txt", "a**/b", "~nobody/x", "\0", ","],
)
def test_paths_that_cannot_be_are_refused(tmp_path, source, path):
    fault = refusal(tmp_path, source=source, path=path)
    assert fault.startswith("data.path=")


def test_many_wildcards_take_no_time(tmp_path):
    for number in range(30):
        folder = tmp_path / "/".join("abc"[: number % 4]) / str(number)
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("some text " * 10)
    one, two = (
        opened(tmp_path / ".c", source="text", path=str(tmp_path / glob))
        for glob in ("**/a.txt", "**/" * 200 + "a.txt")
    )
    assert one.num_train_tokens == two.num_train_tokens > 1000


def test_names_and_ids_that_are_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"corpus\xff")
    folder.mkdir()
    for number in range(40):
        (folder / os.fsdecode(b"f\xfe%d.txt" % number)).write_text(
            f"text {number} " * 9
        )
    text = opened(
        tmp_path / "cache",
        lines := [],
        source="text",
        path=str(folder),
        packing="documents",
    )
    assert text.num_train_tokens > 1000
    assert text.num_validation_tokens
    assert r"corpus\udcff" in "".join(lines)
    assert "".join(lines).encode()
    records = [
        {"text": "half \ud83d" * 9, "id": f"\ud800{n}", "\udfff": 1} for n in range(40)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = str(folder / "a.jsonl")
    assert opened(tmp_path / "cache", source="jsonl", path=path).num_validation_tokens
    assert "no text in field 'x'" in refusal(
        tmp_path, source="jsonl", path=path, text_field="x"
    )
    (tmp_path / "t.json").write_text(word_level({"a": 0, "half": 1}))
    options = {"source": "jsonl", "path": path, "tokenizer": str(tmp_path / "t.json")}
    assert opened(tmp_path / "cache", **options).num_train_tokens
    np.arange(400, dtype="<u2").tofile(folder / "a.bin")
    assert opened(
        tmp_path, source="bin", path=str(folder / "a.bin"), validation_share=0
    ).num_train_tokens


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"text": ' * 50_000, '{"text": "a", "n": %s}' % ("9" * 9999)],
)
def test_deep_and_wide_json_names_its_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    fault = refusal(tmp_path, source="jsonl", path=str(tmp_path / "a.jsonl"))
    assert "a.jsonl line 2: " in fault


# --- Arrays ---------------------------------------------------------------------------


def npz(
    header: str,
    body: bytes = b"",
    *,
    compression: int = zipfile.ZIP_STORED,
    name: str = "x.npy",
) -> bytes:
    """Returns an archive with one array of that header and those bytes."""
    text = header.encode().ljust(118) + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(
            name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body
        )
    return file.getvalue()


def header(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


GOOD_NPZ = npz(header("(20,)"), bytes(80))
LYING_NPZ = {
    "huge": npz(header("(1099511627776, 1024)"), bytes(80)),
    "beyond 64 bits": npz(header(f"({2**60}, 16)"), bytes(80)),
    "negative": npz(header("(-20,)"), bytes(80)),
    "negative twice": npz(header("(-20, -1)"), bytes(80)),
    "more": npz(header("(21,)"), bytes(80)),
    "less": npz(header("(19,)"), bytes(80)),
    "objects": npz(header("(20,)", "'|O'"), bytes(160)),
    "records": npz(header("(20,)", "[('a', '<f4')]"), bytes(80)),
    "no dtype": npz(header("(20,)", "'<f99999'"), bytes(80)),
    "nested": npz("-" * 9000 + "1"),
    "parentheses": npz("(" * 9000),
    "checksum": GOOD_NPZ[:180] + b"\1" + GOOD_NPZ[181:],
    "bzip2": npz(header("(20,)"), bytes(80), compression=zipfile.ZIP_BZIP2),
    "cut": GOOD_NPZ[:-10],
    "none": b"nothing",
    "empty": b"",
}


@pytest.mark.parametrize("kind", LYING_NPZ)
def test_arrays_whose_header_lies_are_refused_unread(tmp_path, kind):
    (tmp_path / "a.npz").write_bytes(LYING_NPZ[kind])
    assert "a.npz" in refusal(tmp_path, source="arrays", path=str(tmp_path / "a.npz"))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_sound_arrays_are_read(tmp_path, compression):
    (tmp_path / "a.npz").write_bytes(
        npz(header("(1000, 5000)"), bytes(20_000_000), compression=compression)
    )
    assert (
        opened(
            tmp_path, source="arrays", path=str(tmp_path / "a.npz")
        ).num_train_samples
        > 900
    )


# --- Tokenizers -----------------------------------------------------------------------


def with_pattern(pattern: str, *, normalizer: bool = False) -> str:
    """Returns a tokenizer.json that splits at a pattern, or replaces it."""
    content = json.loads(word_level({"a": 0, "b": 1}))
    if normalizer:
        content["normalizer"] = {
            "type": "Replace",
            "pattern": {"Regex": pattern},
            "content": "b",
        }
    else:
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        content["pre_tokenizer"] = split
    return json.dumps(content)


def growing() -> str:
    """Returns a tokenizer.json that makes 10^18 letters of one."""
    content = json.loads(word_level({"a": 0}))
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    return json.dumps(
        content | {"normalizer": {"type": "Sequence", "normalizers": [step] * 6}}
    )


HARMFUL = {
    "panic": lambda: with_pattern(r"(a+)+$"),
    "panic of a normalizer": lambda: with_pattern(r"(a|aa)+$", normalizer=True),
    "endless": lambda: with_pattern(r"q*q*(?<=z)"),
    "memory": growing,
    "deep": lambda: '{"normalizer": ' * 100_000,
    "no UTF-8": lambda: "\udcff",
    "no JSON": lambda: "{",
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_harmful_tokenizer_is_refused_before_it_is_used(tmp_path, kind):
    (tmp_path / "t.json").write_text(HARMFUL[kind](), errors="surrogateescape")
    (tmp_path / "a.txt").write_text("a b " * 200)
    options = {
        "source": "text",
        "path": str(tmp_path / "a.txt"),
        "tokenizer": str(tmp_path / "t.json"),
    }
    assert "t.json: " in refusal(tmp_path / "cache", **options)


def test_a_tokenizer_that_fails_on_a_text_alone_is_named(tmp_path):
    """A pattern whose trigger no short text of the trial has."""
    (tmp_path / "t.json").write_text(with_pattern(r"(?:kx|k|x)+(?<=z)"))
    (tmp_path / "a.txt").write_text("kx" * 400)
    options = {
        "source": "text",
        "path": str(tmp_path / "a.txt"),
        "tokenizer": str(tmp_path / "t.json"),
    }
    assert "cannot encode" in refusal(tmp_path / "cache", **options)


def test_a_tokenizer_that_takes_long_for_a_text_alone_is_named(
    tmp_path, monkeypatch, capfd
):
    (tmp_path / "t.json").write_text(with_pattern(r"(?:kx)*(?:kx)*(?<=z)"))
    tokenizer = bpe.load(tmp_path / "t.json")
    monkeypatch.setattr(bpe, "_PATIENCE_S", 0.01)
    tokenizer.encode("kx" * 300)
    assert (
        "data: the tokenizer (data.tokenizer) has worked 0 s" in capfd.readouterr().err
    )


def test_a_tokenizer_is_tried_out_once(tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text(with_pattern(" "))
    (tmp_path / "a.txt").write_text("a b " * 200)
    options = {
        "source": "text",
        "path": str(tmp_path / "a.txt"),
        "tokenizer": str(tmp_path / "t.json"),
    }
    first = opened(tmp_path / "cache", **options)
    monkeypatch.setattr("sys.executable", "/nowhere")  # no process can be started
    assert opened(tmp_path / "cache", **options).fingerprint == first.fingerprint


# --- Any bytes ------------------------------------------------------------------------

MEGATRON = megatron(
    [10, 0, 90, 100], np.arange(200, dtype="<i4").tobytes(), borders=[0, 1, 3, 4]
)
SOUND = {  # source, file: a sound one
    ("text", "a.txt"): b"some text " * 30,
    ("jsonl", "a.jsonl"): b"".join(LINES.splitlines(True)[:6]),
    ("jsonl", "a.jsonl.gz"): gzip.compress(LINES),
    ("bin", "a.bin"): np.array([20240520, 1, 100, *[0] * 253], "<i4").tobytes()
    + bytes(range(200)),
    ("megatron", "a.idx"): MEGATRON[0],
    ("megatron", "a.bin"): MEGATRON[1],
    ("arrays", "a.npz"): GOOD_NPZ,
}


def test_each_source_of_files_has_a_sound_one():
    of_packages = {"parquet", "huggingface"}  # parquet has a test of its own below
    paths = {
        name
        for name, source in SOURCES.items()
        if source.takes_path and not source.from_caller
    }
    assert paths == {source for source, _ in SOUND} | of_packages


def test_each_source_of_files_is_read_by_the_fuzzer():
    text = (ROOT / "tests/support/untrusted_readers.py").read_text()
    for source, _ in SOUND:
        assert f'opened("{source}"' in text, source


def damaged(sound: bytes) -> st.SearchStrategy[bytes]:
    """Returns files like a sound one with some bytes changed, added or left out."""

    def edited(edits: list[tuple[int, int, bytes]]) -> bytes:
        content = sound
        for place, removed, added in edits:
            content = content[:place] + added + content[place + removed :]
        return content

    numbers = st.sampled_from(
        [b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f", b"\x80", b"9" * 9, b"[", b"-1"]
    )
    edit = st.tuples(
        st.integers(0, len(sound)),
        st.integers(0, 9),
        st.one_of(st.binary(max_size=8), numbers),
    )
    return st.one_of(
        st.lists(edit, min_size=1, max_size=4).map(edited), st.binary(max_size=200)
    )


def check_samples_or_a_line(file: Path, source: str) -> None:
    try:
        dataset = opened(file.parent / "cache", length=4, source=source, path=str(file))
        batch = dataset.train_batch(0, 4)
        assert source == "arrays" or batch["tokens"].min() >= 0
    except ConfigError as error:
        assert error.faults
        assert not any("\n" in fault for fault in error.faults)
        assert not any("cache" in fault for fault in error.faults)
    except SourceError:
        pass


@pytest.mark.parametrize(("source", "name"), SOUND)
def test_any_bytes_give_samples_or_a_line(source, name):
    @given(content=damaged(SOUND[source, name]))
    def check(content):
        with tempfile.TemporaryDirectory() as folder:
            for (other, file), sound in SOUND.items():
                if other == source == "megatron":
                    (Path(folder) / file).write_bytes(sound)
            (Path(folder) / name).write_bytes(content)
            check_samples_or_a_line(Path(folder) / name, source)

    with tempfile.TemporaryDirectory() as folder:  # the sound ones are
        for (_, file), sound in SOUND.items():
            (Path(folder) / file).write_bytes(sound)
        assert opened(
            Path(folder) / "c", length=4, source=source, path=f"{folder}/{name}"
        ).num_train_samples
    check()


def test_any_bytes_of_parquet_give_samples_or_a_line(tmp_path):
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="extra `hf` is not installed"
    )
    table = importlib.import_module("pyarrow").table(
        {"text": [f"some text {n} " for n in range(50)]}
    )
    parquet.write_table(table, tmp_path / "a.parquet", compression="none")

    @given(content=damaged((tmp_path / "a.parquet").read_bytes()))
    def check(content):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "a.parquet").write_bytes(content)
            check_samples_or_a_line(Path(folder) / "a.parquet", "parquet")

    check()


@settings(max_examples=300)
@given(content=damaged(json.dumps({"text": "a", "id": 1}).encode()))
def test_any_line_gives_a_document_or_a_line(content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.jsonl"
        file.write_bytes(content + b"\n" + LINES)
        try:
            opened(Path(folder), source="jsonl", path=str(file))
        except ConfigError as error:
            assert (
                "a.jsonl line 1" in str(error)
                or content.count(b"\n")
                or content.count(b"\r")
            )


def test_any_tokenizer_json_gives_a_tokenizer_or_a_line():
    bpe = pytest.importorskip(
        "jaxdist.data.bpe", reason="extra `text` is not installed"
    )

    @given(content=damaged(word_level({"a": 0, "b": 1}).encode()))
    def check(content):
        try:
            tokenizer = bpe.BpeTokenizer(content.decode("utf-8", "replace"))
            assert tokenizer.encode("a b").max(initial=0) < tokenizer.vocab_size
        except ConfigError as error:
            assert "\n" not in str(error)

    check()


PAIR = {
    "prompt": [{"role": "user", "content": "a"}],
    "chosen": [{"role": "assistant", "content": "b"}],
    "rejected": [{"role": "assistant", "content": "c"}],
    "tools": "[]",
}


@settings(max_examples=200)
@given(content=damaged(json.dumps(PAIR).encode()))
def test_any_line_gives_a_pair_or_a_line(content):
    sound = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.jsonl"
        file.write_bytes(content + b"\n" + sound)
        try:
            dataset = opened(
                Path(folder),
                source="jsonl",
                path=str(file),
                format="preferences",
                packing="documents",
                validation_share=0,
            )
        except ConfigError as error:
            assert all("\n" not in fault for fault in error.faults)
            assert "a.jsonl" in str(error)
        else:
            segments = dataset.train_batch(0, 1)["segment_ids"]
            assert segments.max() % 2 == 0
