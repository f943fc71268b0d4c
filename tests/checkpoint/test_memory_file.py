"""The file of the memory tier: what is written is read, and nothing else is."""

import hashlib
import io
import json
import random
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxdist.checkpoint import memory_file
from jaxdist.checkpoint.folders import ArrayInfo
from jaxdist.checkpoint.memory_file import BadFile, Box, Header, Opened, Piece
from jaxdist.storage.untrusted import Malformed

ARRAYS = {
    "step": np.array(7, np.int32),
    "trainable/w": np.arange(24, dtype=np.float32).reshape(4, 6),
    "trainable/b": np.arange(5).astype(ml_dtypes.bfloat16),
    "frozen/flags": np.array([[True, False]]),
    "frozen/none": np.zeros((0, 3), np.float32),
}
BOXES = [
    Piece("step", Box((), ())),
    Piece("trainable/w", Box((0, 2), (4, 6))),
    Piece("trainable/w", Box((1, 0), (3, 2))),
    Piece("trainable/b", Box((0,), (5,))),
    Piece("frozen/flags", Box((0, 0), (1, 2))),
    Piece("frozen/none", Box((0, 0), (0, 3))),
]


def content(piece: Piece) -> np.ndarray:
    index = tuple(map(slice, *piece.box))
    return ARRAYS[piece.name][(*index, ...)]


def header(**changes) -> Header:
    fields = {
        "run": "run-a",
        "branch": "b",
        "step": 7,
        "owner": 1,
        "owners": 2,
        "arrays": {
            name: ArrayInfo(x.shape, str(x.dtype)) for name, x in ARRAYS.items()
        },
        "metadata": {"progress": {"step": 7}, "text": "é\n"},
        "fingerprints": dict.fromkeys(ARRAYS, "0123abcd"),
        "pieces": tuple(BOXES),
    }
    return Header(**fields | changes)


def written(head: Header | None = None) -> bytes:
    head = head or header()
    file = io.BytesIO()
    size = memory_file.write(file, head, [content(piece) for piece in head.pieces])
    assert size == len(file.getvalue())
    return file.getvalue()


def verified(folder: Path, data: bytes) -> Opened:
    path = folder / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        return memory_file.verify(file)


def test_every_piece_comes_back(tmp_path):
    data = written()
    opened = verified(tmp_path, data)
    assert opened.header == header()
    assert opened.header.agreed == header(owner=0, pieces=()).agreed
    for piece, offset in opened.pieces():
        want = content(piece)
        assert offset % memory_file.ALIGNMENT == 0
        got = np.frombuffer(data, want.dtype, want.size, offset)
        np.testing.assert_array_equal(got.reshape(want.shape), want)
    payload = memory_file.payload_bytes(header().arrays, BOXES)
    assert opened.layout.end - opened.layout.offsets[0] == payload


@pytest.mark.parametrize(
    "field", ["run", "branch", "step", "owners", "metadata", "fingerprints"]
)
def test_parts_of_one_step_must_agree(field):
    other = {"step": 8, "owners": 3}.get(field, "x")
    if field in ("metadata", "fingerprints"):
        other = {"x": "y"}
    assert header().agreed != header(**{field: other}).agreed


@pytest.mark.parametrize("block", [1 << 24, 100])
def test_a_flipped_bit_anywhere_is_seen(tmp_path, monkeypatch, block):
    monkeypatch.setattr(memory_file, "BLOCK_BYTES", block)
    data = written()
    rng = random.Random(0)
    for _ in range(2_000):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(BadFile):
            verified(tmp_path, bytes(damaged))


def test_blocks_that_have_changed_places_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_file, "BLOCK_BYTES", 64)
    data = written()
    end = (len(data) - 32) // 64 * 64
    one, other = data[end - 128 : end - 64], data[end - 64 : end]
    assert one != other
    verified(tmp_path, data)
    with pytest.raises(BadFile, match="content has changed"):
        verified(tmp_path, data[: end - 128] + other + one + data[end:])


def test_a_file_of_another_version_is_refused_by_that_name():
    with pytest.raises(BadFile, match="another version of jaxdist"):
        memory_file.read_header(io.BytesIO(b"JAXDIST1" + written()[8:]))


def test_a_file_cut_short_or_extended_is_seen_by_its_size():
    data = written()
    for count in range(len(data)):
        with pytest.raises(BadFile):
            memory_file.read_header(io.BytesIO(data[:count]))
    with pytest.raises(BadFile, match="bytes"):
        memory_file.read_header(io.BytesIO(data + b"\0"))


@pytest.mark.parametrize("seed", range(20))
def test_junk_is_no_file(seed):
    rng = random.Random(seed)
    for _ in range(50):
        junk = rng.randbytes(rng.randrange(400))
        for data in (junk, memory_file.MAGIC + junk):
            with pytest.raises(BadFile):
                memory_file.read_header(io.BytesIO(data))


def with_header(document: object) -> bytes:
    """Return a file whose header has a correct hash, and any content."""
    text = json.dumps(document).encode()
    size = struct.pack("<Q", len(text))
    return memory_file.MAGIC + size + hashlib.sha256(text).digest() + text


VALUES = [
    None, True, -1, 0, 1, 2**31, 2**53, 10**30, 1.5, "", "float32", "O", "i4,i4",
    "V8", [], [0], [-1], [1.0], [[]], {}, {"a": 1}, ["float32", [4]], "nothing",
]  # fmt: skip


def mutated(rng: random.Random, value: object) -> object:
    """Return the value with one place replaced by another value, or removed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:place] + value[place + 1 :]
        changed = mutated(rng, value[place])
        return [*value[:place], changed, *value[place + 1 :]]
    return rng.choice(VALUES)


def test_headers_with_any_content_are_refused_or_read():
    """A header with a correct hash and wrong content raises one type of error."""
    rng = random.Random(1)
    good = header().to_json()
    refused = 0
    for _ in range(5_000):
        document = mutated(rng, good)
        try:
            head = Header.from_json(document)  # type: ignore[arg-type]
        except Malformed:
            refused += 1
            with pytest.raises(BadFile):
                memory_file.read_header(io.BytesIO(with_header(document)))
        else:
            assert Header.from_json(head.to_json()) == head
    assert 3_000 < refused < 5_000


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"run": "run-b"}, "another run"),
        ({"branch": "c"}, "history"),
        ({"step": 8}, "step 7, not part 1 of step 8"),
        ({"owner": 0}, "part 1 of step 7, not part 0"),
    ],
)
def test_another_file_in_its_place_is_refused(tmp_path, expected, words):
    opened = verified(tmp_path, written())
    right = {"run": "run-a", "branch": "b", "step": 7, "owner": 1}
    memory_file.require(opened, **right)
    with pytest.raises(BadFile, match=words):
        memory_file.require(opened, **right | expected)


@pytest.mark.parametrize("array", [np.zeros((4, 5), np.float32), np.zeros((4, 4))])
def test_only_the_arrays_of_the_header_are_written(array):
    head = header(pieces=(BOXES[1],))
    with pytest.raises(ValueError, match="trainable/w"):
        memory_file.write(io.BytesIO(), head, [array])
