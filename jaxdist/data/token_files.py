"""Token files: memory-mapped ids with a table of documents. Formats: .bin and Megatron
.bin/.idx.

Layouts. nanoGPT: raw little-endian uint16 (or uint32), nothing else. Karpathy's later
files (llm.c, modded-nanogpt): 256 int32 = (20240520, version 1, number of tokens,
0...), then uint16. Megatron: as Megatron-LM reads it
(megatron/core/datasets/indexed_dataset.py); the tests have a writer of their own.
"""

import glob
import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.sources import (
    DataConfig,
    File,
    expanded,
    find_files,
    one_line,
    reading,
)
from jaxdist.storage.digest import digest, digest_bytes
from jaxdist.storage.untrusted import open_regular

# .bin files have no documents: this many tokens are held out together
BLOCK_TOKENS = 16384
_KARPATHY_MAGIC, _KARPATHY_HEADER_BYTES = 20240520, 1024
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
# 6, 7: floats
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# magic, version, dtype, sequences, document borders
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
# up to this many tokens the largest id is found when the files are opened
_SCAN_TOKENS = 1 << 27
_MAX_ID = np.iinfo(np.int32).max  # what batches hold
# hashed at each end of a foreign file: all of it may be terabytes
_EDGE_BYTES = 1 << 20


class TokenFile:
    """A memory-mapped array of token ids."""

    def __init__(
        self, path: Path, dtype: str, *, offset_bytes: int = 0, count: int | None = None
    ):
        open_regular(path).close()
        present, kind = path.stat().st_size, np.dtype(dtype)
        whole, odd = (
            divmod(present - offset_bytes, kind.itemsize)
            if count is None
            else (count, 0)
        )
        self.path, self.count = path, whole
        self.fault = ""  # set by whoever finds the ids damaged; readers then stop
        self._end_bytes = offset_bytes + self.count * kind.itemsize
        if odd or self.count < 0 or self._end_bytes > present:
            torn = f"token {whole} of {kind} has {odd} of its {kind.itemsize} bytes"
            ends = (
                torn
                if odd
                else f"{count} tokens of {kind} end at byte {self._end_bytes}"
            )
            raise ConfigError(
                f"{path}: {ends}, the file at byte {present}: it is cut off or of another type; write it "
                f"again, or set data.bin_dtype."
            )
        self._tokens = np.zeros(0, dtype)
        if self.count:  # a plain ndarray, because np.memmap slices slowly
            map_ = np.memmap(path, dtype, "r", offset_bytes, (self.count,))
            self._tokens = np.asarray(map_).view(np.ndarray)

    @property
    def tokens(self) -> np.ndarray:
        """[count] ids.

        Raises:
          OSError: the file is damaged, or it shrank: reading past its end would kill
            the process.
        """
        if self.fault:
            raise OSError(self.fault)
        if (size := os.stat(self.path).st_size) < self._end_bytes:
            raise OSError(f"{self.path} shrank to {size} bytes from {self._end_bytes}")
        return self._tokens

    @property
    def itemsize(self) -> int:
        return self._tokens.itemsize


@dataclass(frozen=True)
class TokenStore:
    """Tokenised documents of one source, in the order of the token stream.

    Document d is `files[file[d]].tokens[start[d] : start[d] + length[d]]`. Its `group`,
    the first byte of the sha256 of its id, decides whether it is held out.
    """

    name: str
    files: tuple[TokenFile, ...]
    file: np.ndarray  # [documents] int32
    start: np.ndarray  # [documents] int64
    length: np.ndarray  # [documents] int64, tokens
    group: np.ndarray  # [documents] uint8
    # [documents], UTF-8 bytes of the text; None if unknown
    num_bytes: np.ndarray | None
    max_id: int | None  # None: not scanned (too large); readers check what they read
    fingerprint: str
    # Of each file's tokens: 1 = learned. (): all are, and documents are texts.
    weights: tuple[TokenFile, ...] = ()


def group_of(ids: Iterable[str]) -> np.ndarray:
    """Returns the first byte of the sha256 of each id: the same on every machine, [ids]
    uint8.
    """
    digests = (
        hashlib.sha256(id_.encode("utf-8", "surrogatepass")).digest() for id_ in ids
    )
    return np.fromiter((one[0] for one in digests), np.uint8)


# A token file, its id, and start and length of its documents, which are called `id#0`,
# `id#1`, ...
_Opened = tuple[TokenFile, str, np.ndarray, np.ndarray]


def _store_of(name: str, opened: list[_Opened]) -> TokenStore:
    files, ids, starts, lengths = zip(*opened, strict=True)
    start, length = (
        np.concatenate(starts).astype(np.int64),
        np.concatenate(lengths).astype(np.int64),
    )
    counts = [len(one) for one in starts]
    owner = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    group = group_of(
        f"{id_}#{i}" for id_, n in zip(ids, counts, strict=True) for i in range(n)
    )
    # Batches show ids of 8 bytes wrapped, so that those must be looked at here, however
    # many there are.
    scanned = sum(file.count for file in files) <= _SCAN_TOKENS
    extremes = [
        _extremes(file) if scanned or file.itemsize == 8 else (0, 0) for file in files
    ]
    faults = [
        _range_fault(file, *pair) for file, pair in zip(files, extremes, strict=True)
    ]
    if any(faults):
        raise ConfigError(filter(None, faults))
    max_id = max(high for _, high in extremes) if scanned else None
    fingerprint = digest(*map(_edges_digest, files), start.tobytes(), length.tobytes())
    return TokenStore(
        name, files, owner, start, length, group, None, max_id, fingerprint
    )


def _extremes(file: TokenFile) -> tuple[int, int]:
    """Returns the smallest and the largest id; 0 among them."""
    ids = file.tokens
    return int(ids.min(initial=0)) if ids.dtype.kind == "i" else 0, int(
        ids.max(initial=0)
    )


def _range_fault(file: TokenFile, low: int, high: int) -> str:
    """Returns what is wrong with a file's extremes, and where; empty where
    nothing is.
    """
    if low >= 0 and high <= _MAX_ID:
        return ""
    place = int(np.argmax((file.tokens < 0) | (file.tokens > _MAX_ID)))
    return (
        f"{file.path}: token {place} has id {file.tokens[place]}; required 0 to {_MAX_ID}. "
        "The file is damaged or of another type: write it again."
    )


def _edges_digest(file: TokenFile) -> str:
    """Returns a digest of a file's length and its first and last MiB."""
    raw = file.tokens.view(np.uint8)
    edges = raw[:_EDGE_BYTES].tobytes() + raw[-_EDGE_BYTES:].tobytes()
    return digest(file.count, file.tokens.dtype.str, digest_bytes(edges))


# --- nanoGPT .bin ---------------------------------------------------------------------


def open_bin(config: DataConfig) -> TokenStore:
    """Returns the .bin files of `data.path` in blocks of BLOCK_TOKENS with ids
    `file#number`. Raises ConfigError where a file is missing or cut off."""
    files = find_files(config, ".bin")
    with reading(config.name):
        return _store_of(
            config.name, [_open_bin_file(file, config.bin_dtype) for file in files]
        )


def _open_bin_file(source: File, dtype: str) -> _Opened:
    with reading(source.path), source.path.open("rb") as stream:
        head = stream.read(_KARPATHY_HEADER_BYTES)
    magic, version, count = struct.unpack_from("<3i", head.ljust(12, b"\0"))
    if len(head) == _KARPATHY_HEADER_BYTES and (magic, version) == (_KARPATHY_MAGIC, 1):
        file = TokenFile(source.path, "<u2", offset_bytes=len(head), count=count)
    else:
        file = TokenFile(source.path, {"uint16": "<u2", "uint32": "<u4"}[dtype])
    start = np.arange(0, file.count, BLOCK_TOKENS)
    return file, source.id, start, np.minimum(BLOCK_TOKENS, file.count - start)


# --- Megatron -------------------------------------------------------------------------


def open_megatron(config: DataConfig) -> TokenStore:
    """Returns the Megatron pairs of `data.path`: prefixes, .bin or .idx files, or globs
    of them. Raises ConfigError where a pair is incomplete, no Megatron index, or
    inconsistent."""
    indexes: list[str] = []
    for entry in filter(None, (part.strip() for part in config.path.split(","))):
        prefix = str(expanded(entry)).removesuffix(".idx").removesuffix(".bin")
        with reading(f"data.path={one_line(entry)}"):
            there = sorted(glob.glob(f"{prefix}.idx", recursive=True))
        if not there:
            shown, missing = one_line(entry), one_line(f"{prefix}.idx")
            raise ConfigError(
                f"data.path={shown}: no file {missing}; give the PREFIX of both."
            )
        indexes += there
    if not indexes:
        raise ConfigError(f"data.path={config.path!r}: empty. Set data.path.")
    with reading(config.name):
        return _store_of(
            config.name, [_open_megatron_pair(Path(index)) for index in indexes]
        )


def _open_megatron_pair(index: Path) -> _Opened:
    data = index.with_suffix(".bin")
    if not data.is_file():
        raise ConfigError(f"{data}: missing beside {index}; a Megatron corpus is both.")
    with reading(index):
        dtype, lengths, offsets, borders = _read_megatron_index(index)
    with reading(data):
        file = TokenFile(data, dtype)
    if len(lengths) and lengths.min() < 0:
        place = int(np.argmax(lengths < 0))
        raise ConfigError(
            f"{index}: sequence {place} has {lengths[place]} tokens; write the pair again."
        )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # Ends within the file first: then bytes cannot exceed 64 bits.
    if ends[-1] > file.count or not np.array_equal(
        offsets, ends[:-1] * np.dtype(dtype).itemsize
    ):
        raise ConfigError(
            f"{index}: {len(lengths)} sequences do not follow each other within the {file.count} "
            f"tokens of {data.name}; write the pair again."
        )
    edges = ends[borders]
    return file, index.stem, edges[:-1], np.diff(edges)


def _read_megatron_index(index: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (dtype, tokens per sequence, byte offset per sequence, sequence index of
    borders).
    """
    with open_regular(index) as file:
        content, at = file.read(), _MEGATRON_HEADER.size
    if len(content) < at:
        raise _index_fault(index, f"it has {len(content)} bytes, its header alone {at}")
    magic, version, code, sequences, borders = _MEGATRON_HEADER.unpack_from(content)
    needed = at + 12 * sequences + 8 * borders
    short = f"{sequences} sequences and {borders} borders need {needed} bytes, and the file has {len(content)}"
    faults = [
        (magic != _MEGATRON_MAGIC, f"byte 0: {magic!r}, required {_MEGATRON_MAGIC!r}"),
        (version != 1, f"byte 9: version {version}, required 1"),
        (
            code not in _MEGATRON_TYPES,
            f"byte 17: type {code} of tokens, required one of integers",
        ),
        (borders < 1, "byte 26: no border of documents"),
        (len(content) < needed, f"byte 18: {short}"),
    ]
    for wrong, text in faults:
        if wrong:
            raise _index_fault(index, text)
    lengths = np.frombuffer(content, "<i4", sequences, at)
    offsets = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(content, "<i8", borders, at + 12 * sequences)
    # Compared, not subtracted: differences wrap.
    falls = np.flatnonzero(documents[1:] < documents[:-1])
    if (documents[0], documents[-1]) != (0, sequences) or falls.size:
        place = at + 12 * sequences + 8 * (int(falls[0]) + 1 if falls.size else 0)
        raise _index_fault(
            index,
            f"byte {place}: borders of documents do not rise from 0 to {sequences}",
        )
    return _MEGATRON_TYPES[code], lengths, offsets, documents


def _index_fault(index: Path, what: str) -> ConfigError:
    return ConfigError(f"{index}: not a Megatron index; {what}. Write the pair again.")
