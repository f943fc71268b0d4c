"""File of one process's part of a step, as the memory tier keeps it.

    bytes 0-7     magic, which has the version of this layout
    bytes 8-15    bytes of the header, little endian
    bytes 16-47   SHA-256 of the header
    header        JSON, see `Header`
    pieces        raw bytes in C order, each piece from a multiple of `ALIGNMENT` on
    last 32 bytes SHA-256 of the joined SHA-256 of all blocks of `BLOCK_BYTES`

Blocks have hashes of their own, so that several threads can hash a file.

A piece is a box of an array: a part of it in a sharding. The files of a step hold each
element of its arrays exactly once, whatever the number of processes. The header comes
first and has its own hash, so that it can be used before all bytes are hashed.

Nothing here needs jax or a device.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401 (teaches numpy the names of bfloat16 and its like)
import numpy as np

from jaxdist.checkpoint.folders import ArrayInfo, CheckpointError, StepInfo
from jaxdist.storage import run_format
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import (
    MAX_BYTES,
    Malformed,
    is_count,
    named,
    of_kind,
    parse_json,
)

_NAME = b"JAXDIST"
MAGIC = _NAME + b"2"
ALIGNMENT = 64  # bytes
BLOCK_BYTES = 1 << 24  # bytes that are hashed together
_DIGEST_BYTES = 32
_FIXED_BYTES = len(MAGIC) + 8 + _DIGEST_BYTES  # before the header
_CHUNK_BYTES = 1 << 22  # bytes that are hashed and written at once
# Bytes that are read and hashed at once. They fit into the cache of a core.
_READ_BYTES = 1 << 18
_MOST_THREADS = 8
_MOST_OWNERS = 1 << 20
_MOST_DIMS = 64
_KEYS = {
    run_format.KEY,
    "run",
    "branch",
    "step",
    "owner",
    "owners",
    "arrays",
    "metadata",
    "fingerprints",
    "pieces",
}


class BadFile(CheckpointError):
    """Error of a file that is not what a process has written, or not of this step."""


class OtherBranch(BadFile):
    """Error of a file from a history that the run has left. It is not damaged."""


class Box(NamedTuple):
    """A part of an array: elements from `start` to `stop` in each dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements in each dim."""
        return tuple(
            stop - start for start, stop in zip(self.start, self.stop, strict=True)
        )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Piece(NamedTuple):
    """A box of an array that a file holds."""

    name: str  # canonical name of the array
    box: Box


@dataclass(frozen=True)
class Header:
    """Description of a file. All files of a step agree in all but owner and pieces."""

    run: str  # identity of the run
    # name of the history that the step belongs to. A run that goes back to an older
    # checkpoint begins another one, so that its later steps do not count any more.
    branch: str
    step: int
    owner: int  # number of the file among those of the step; not a device or host
    owners: int  # number of files of the step
    arrays: Mapping[str, ArrayInfo]  # all arrays of the step by canonical name
    metadata: Mapping[str, Any]  # metadata of the run, as in a step of the folder
    fingerprints: Mapping[str, str]  # {array: hex} by `fingerprint.py`
    pieces: tuple[Piece, ...]  # content of this file, in its order

    @cached_property
    def agreed(self) -> str:
        """Digest of what all files of a step have in common."""
        return digest(_dump(self._agreed_document()))

    @property
    def info(self) -> StepInfo:
        """Description of the step, as that of a step in the folder."""
        return StepInfo(dict(self.arrays), dict(self.metadata))

    def _agreed_document(self) -> dict[str, Any]:
        return {
            run_format.KEY: run_format.FORMAT,
            "run": self.run,
            "branch": self.branch,
            "step": self.step,
            "owners": self.owners,
            "arrays": {
                name: [info.dtype, list(info.shape)]
                for name, info in self.arrays.items()
            },
            "metadata": dict(self.metadata),
            "fingerprints": dict(self.fingerprints),
        }

    def to_json(self) -> dict[str, Any]:
        """Makes the JSON document of the header."""
        pieces = [
            [piece.name, list(piece.box.start), list(piece.box.stop)]
            for piece in self.pieces
        ]
        return {**self._agreed_document(), "owner": self.owner, "pieces": pieces}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Header":
        """Reads the JSON document of a header.

        Raises:
          Malformed: the document is no header of this version.
        """
        try:
            return _parsed(document)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Malformed(named(error)) from error

    def piece_bytes(self, piece: Piece) -> int:
        """Computes the bytes of a piece, without padding."""
        return itemsize(self.arrays[piece.name]) * piece.box.size


class Layout(NamedTuple):
    """Places of a file's parts."""

    offsets: tuple[int, ...]  # first byte of each piece, in the order of the header
    end: int  # bytes before the trailer

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.end + _DIGEST_BYTES


def itemsize(info: ArrayInfo) -> int:
    """Computes the bytes of an element."""
    return int(np.dtype(info.dtype).itemsize)


def payload_bytes(arrays: Mapping[str, ArrayInfo], pieces: Iterable[Piece]) -> int:
    """Computes the bytes of pieces in a file, with padding and without the header."""
    total = 0
    for piece in pieces:
        total += _aligned(itemsize(arrays[piece.name]) * piece.box.size)
    return total


def layout_of(header: Header, header_bytes: int) -> Layout:
    """Computes where the pieces of a file are.

    Args:
      header: the header.
      header_bytes: bytes of its JSON text.
    """
    offset = _aligned(_FIXED_BYTES + header_bytes)
    offsets = []
    for piece in header.pieces:
        offsets.append(offset)
        offset += _aligned(header.piece_bytes(piece))
    return Layout(tuple(offsets), offset)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"))


# --- Writing --------------------------------------------------------------------------


def write(file: BinaryIO, header: Header, contents: Iterable[np.ndarray]) -> int:
    """Writes a file from its current position on, and returns its bytes.

    Args:
      file: where to write.
      header: description of the file.
      contents: elements of each piece, in the order of `header.pieces`.

    Raises:
      OSError: the file cannot be written.
      ValueError: an array does not have the shape or the type of its piece.
    """
    text = _dump(header.to_json()).encode()
    layout = layout_of(header, len(text))
    hashed = _BlockHash()
    position = 0

    def put(data: Any) -> None:
        nonlocal position
        view = memoryview(data)
        for first in range(0, len(view), _CHUNK_BYTES):
            chunk = view[first : first + _CHUNK_BYTES]
            hashed.update(chunk)
            file.write(chunk)
        position += len(view)

    put(MAGIC + len(text).to_bytes(8, "little"))
    put(hashlib.sha256(text).digest())
    put(text)
    for piece, offset, array in zip(
        header.pieces, layout.offsets, contents, strict=True
    ):
        put(bytes(offset - position))
        put(_raw(array, header, piece))
    put(bytes(layout.end - position))
    file.write(hashed.digest())
    return layout.size


class _BlockHash:
    """Hash of a file's bytes up to the trailer, which come one after another."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []  # of the blocks that are whole
        self._block = hashlib.sha256()
        self._left = BLOCK_BYTES  # bytes that the block still takes

    def update(self, data: memoryview) -> None:
        """Adds bytes."""
        while len(data):
            part = data[: self._left]
            data = data[self._left :]
            self._block.update(part)
            self._left -= len(part)
            if not self._left:
                self._end_block()

    def _end_block(self) -> None:
        self._digests.append(self._block.digest())
        self._block = hashlib.sha256()
        self._left = BLOCK_BYTES

    def digest(self) -> bytes:
        """Makes the trailer. No bytes can be added after it."""
        if self._left < BLOCK_BYTES:
            self._end_block()
        return _trailer(self._digests)


def _trailer(digests: Iterable[bytes]) -> bytes:
    """Makes the trailer from the hashes of all blocks."""
    return hashlib.sha256(b"".join(digests)).digest()


def _raw(array: np.ndarray, header: Header, piece: Piece) -> np.ndarray:
    """Views an array as bytes, if it is that of its piece."""
    dtype = header.arrays[piece.name].dtype
    if array.shape != piece.box.shape or str(array.dtype) != dtype:
        raise ValueError(
            f"{piece.name}: got {array.dtype}{list(array.shape)}, required "
            f"{dtype}{list(piece.box.shape)}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# --- Reading --------------------------------------------------------------------------


class Opened(NamedTuple):
    """Header of a file, and the places of its pieces."""

    header: Header
    layout: Layout

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """Yields each piece with its first byte."""
        yield from zip(self.header.pieces, self.layout.offsets, strict=True)


def read_header(file: BinaryIO) -> Opened:
    """Reads and checks the header of a file. The other bytes are not read.

    Raises:
      BadFile: the header is damaged, or the file has another size than it says.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        fixed = file.read(_FIXED_BYTES)
        if not fixed.startswith(_NAME) or len(fixed) < _FIXED_BYTES:
            raise Malformed("it does not begin as a file of the memory tier")
        if not fixed.startswith(MAGIC):
            raise Malformed("another version of jaxdist has written it")
        count = int.from_bytes(fixed[len(MAGIC) : len(MAGIC) + 8], "little")
        if count > min(size, MAX_BYTES):
            raise Malformed(f"its header has {count:,} bytes")
        text = file.read(count)
        if hashlib.sha256(text).digest() != fixed[-_DIGEST_BYTES:]:
            raise Malformed("its header has changed since it was written")
        header = Header.from_json(parse_json(text, dict))
    except (OSError, ValueError) as error:
        raise BadFile(f"not readable: {named(error)}") from error
    layout = layout_of(header, count)
    if size != layout.size:
        raise BadFile(f"it has {size:,} bytes, {layout.size:,} when written")
    return Opened(header, layout)


def read_into(file: BinaryIO, view: memoryview) -> int:
    """Reads bytes into a view, and returns their number; 0 = the file has ended."""
    return file.readinto(view) or 0  # type: ignore[attr-defined]  # all files have it


def verify(file: BinaryIO) -> Opened:
    """Checks every byte of a file, by several threads.

    Args:
      file: a file of the system. The threads read it by its number.

    Raises:
      BadFile: the file is not what was written.
    """
    opened = read_header(file)
    end = opened.layout.end
    blocks = [
        (first, min(first + BLOCK_BYTES, end)) for first in range(0, end, BLOCK_BYTES)
    ]
    try:
        found = _trailer(_hash_blocks(file, blocks))
        trailer = os.pread(file.fileno(), _DIGEST_BYTES, end)
    except OSError as error:
        raise BadFile(f"not readable: {named(error)}") from error
    if found != trailer:
        raise BadFile("its content has changed since it was written")
    return opened


def _hash_blocks(file: BinaryIO, blocks: list[tuple[int, int]]) -> list[bytes]:
    """Computes the SHA-256 of each block, given by its first byte and its end.

    Raises:
      BadFile: the file ends early.
      OSError: it cannot be read.
    """

    def hash_block(block: tuple[int, int]) -> bytes:
        return _hash_block(file, *block)

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(threads, "hash") as pool:
            return list(pool.map(hash_block, blocks))
    except RuntimeError:  # this host starts no more threads
        return list(map(hash_block, blocks))


def _hash_block(file: BinaryIO, first: int, stop: int) -> bytes:
    """Computes the SHA-256 of the bytes of a file from `first` to `stop`.

    Raises:
      BadFile: the file ends early.
      OSError: it cannot be read.
    """
    hashed = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, stop - first)))
    while first < stop:
        count = os.preadv(file.fileno(), [buffer[: stop - first]], first)
        if not count:
            raise BadFile(f"it ends {stop - first:,} bytes early")
        hashed.update(buffer[:count])
        first += count
    return hashed.digest()


def require(opened: Opened, *, run: str, branch: str, step: int, owner: int) -> None:
    """Checks that a file is the one that its name says.

    Raises:
      BadFile: it is a file of another run, history, step or owner.
    """
    header = opened.header
    if header.run != run:
        raise BadFile(f"it belongs to another run ({header.run}; this one is {run})")
    if header.branch != branch:
        raise OtherBranch("it belongs to a history that the run has left")
    if (header.step, header.owner) != (step, owner):
        raise BadFile(
            f"it is part {header.owner} of step {header.step}, not part {owner} of "
            f"step {step}"
        )


def _parsed(document: Mapping[str, Any]) -> Header:
    if document.keys() != _KEYS:
        raise Malformed(f"keys {sorted(document)}")
    if document[run_format.KEY] != run_format.FORMAT:
        raise Malformed(f"format {document[run_format.KEY]!r:.40}")
    arrays = {name: _array(name, entry) for name, entry in document["arrays"].items()}
    pieces = of_kind(document["pieces"], list, "pieces")
    return Header(
        run=of_kind(document["run"], str, "run"),
        branch=of_kind(document["branch"], str, "branch"),
        step=_count(document, "step", below=2**31),
        owner=_count(document, "owner", below=_count(document, "owners", _MOST_OWNERS)),
        owners=document["owners"],
        arrays=arrays,
        metadata=of_kind(document["metadata"], dict, "metadata"),
        fingerprints={
            name: of_kind(value, str, name)
            for name, value in document["fingerprints"].items()
        },
        pieces=tuple(_piece(entry, arrays) for entry in pieces),
    )


def _count(document: Mapping[str, Any], key: str, below: int) -> int:
    value = document[key]
    if not is_count(value, below):
        raise Malformed(f"{key} is {value!r:.40}")
    return int(value)


def _array(name: str, entry: Any) -> ArrayInfo:
    dtype, shape = of_kind(entry, list, name)
    of_kind(dtype, str, name)
    if not _is_index(shape):
        raise Malformed(f"{name} has the shape {shape!r:.60}")
    known = np.dtype(dtype)
    if str(known) != dtype or known.hasobject or known.names is not None:
        raise Malformed(f"{name} has the type {dtype:.40}")
    return ArrayInfo(tuple(shape), dtype)


def _piece(entry: Any, arrays: Mapping[str, ArrayInfo]) -> Piece:
    name, start, stop = of_kind(entry, list, "a piece")
    shape = arrays[of_kind(name, str, "a piece's name")].shape
    if not (_is_index(start) and _is_index(stop)):
        raise Malformed(f"a piece of {name} is {start!r:.60} to {stop!r:.60}")
    if not len(start) == len(stop) == len(shape):
        raise Malformed(f"a piece of {name} has {len(start)} dims, not {len(shape)}")
    bounds = zip(start, stop, shape, strict=True)
    if not all(first <= last <= size for first, last, size in bounds):
        raise Malformed(f"a piece of {name} is outside of {shape}")
    return Piece(name, Box(tuple(start), tuple(stop)))


def _is_index(value: Any) -> bool:
    """Tests whether a value is a list of sizes or positions, one for each dim."""
    is_short = isinstance(value, list) and len(value) <= _MOST_DIMS
    return is_short and all(is_count(item) for item in value)
