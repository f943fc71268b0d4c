"""Token files: memory-mapped ids with a table of documents. Formats: .bin and Megatron .bin/.idx.

Layouts. nanoGPT: raw little-endian uint16 (or uint32), nothing else. Karpathy's later files (llm.c,
modded-nanogpt): 256 int32 = (20240520, version 1, number of tokens, 0...), then uint16. Megatron:
facts/ecosystem.md section 1 [read in Megatron-LM; our writer and reader agree with each other].
"""

import glob
import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.corpora import find_files
from jaxdist.data.options import DataConfig
from jaxdist.data.tokenizer import digest

_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6, 7: floats
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document borders
_KARPATHY_MAGIC, _KARPATHY_HEADER_BYTES = 20240520, 1024
_EDGE_BYTES = 1 << 20  # hashed at each end of a foreign file: all of it may be terabytes


class TokenFile:
    """A memory-mapped array of token ids."""

    def __init__(self, path: Path, dtype: str, *, offset_bytes: int = 0, count: int | None = None):
        self.path, self.dtype, self.offset_bytes = path, np.dtype(dtype), offset_bytes
        size = path.stat().st_size - offset_bytes
        self.count = size // self.dtype.itemsize if count is None else count
        self._end_bytes = offset_bytes + self.count * self.dtype.itemsize
        if size < 0 or self._end_bytes > path.stat().st_size or (count is None and self._odd(size)):
            raise ConfigError(
                f"{path}: {path.stat().st_size} bytes do not hold {self.count} tokens of "
                f"{self.dtype} after {offset_bytes} bytes; the file is cut off or of another type."
            )

    def _odd(self, size: int) -> bool:
        return size % self.dtype.itemsize != 0

    @property
    def tokens(self) -> np.ndarray:
        """[count] ids, read on access.

        Raises:
          OSError: where the file shrank, since reading past its end would kill the process.
        """
        if (size := os.stat(self.path).st_size) < self._end_bytes:
            raise OSError(f"{self.path} shrank to {size} bytes from {self._end_bytes}")
        return self._map

    @cached_property
    def _map(self) -> np.ndarray:
        """A plain ndarray, because np.memmap slices slowly."""
        if self.count == 0:
            return np.zeros(0, self.dtype)
        map_ = np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.count,))
        return np.asarray(map_).view(np.ndarray)


@dataclass(frozen=True)
class TokenStore:
    """Tokenised documents of one source, in the order of the token stream.

    Document d is `files[file[d]].tokens[start[d] : start[d] + length[d]]`. Its `group`, the first
    byte of the sha256 of its id, decides whether it is held out.
    """

    name: str
    files: tuple[TokenFile, ...]
    file: np.ndarray  # [documents] int32
    start: np.ndarray  # [documents] int64
    length: np.ndarray  # [documents] int64, tokens
    group: np.ndarray  # [documents] uint8
    num_bytes: np.ndarray | None  # [documents] int64, UTF-8 bytes of the text; None if unknown
    max_id: int | None  # None: not scanned (too large); readers check what they read
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.length.sum())


def group_of(ids: Iterable[str]) -> np.ndarray:
    """Returns the first byte of the sha256 of each id, [documents] uint8."""
    return np.fromiter((hashlib.sha256(i.encode()).digest()[0] for i in ids), np.uint8)


def table_of(
    lengths: list[np.ndarray], starts: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (file, start, length) of the documents of several files, given per file."""
    file = np.repeat(np.arange(len(lengths), dtype=np.int32), [len(one) for one in lengths])
    return file, np.concatenate(starts).astype(np.int64), np.concatenate(lengths).astype(np.int64)


# --- nanoGPT .bin --------------------------------------------------------------------------------

BLOCK_TOKENS = 16384  # .bin files have no documents: this many tokens are held out together


def open_bin(config: DataConfig) -> TokenStore:
    """Returns the .bin files of `data.path` in blocks of BLOCK_TOKENS with ids `file#number`.

    Raises:
      ConfigError: where a file is missing or cut off.
    """
    found = find_files(config, (".bin",))
    files = tuple(_open_bin_file(file.path, config.bin_dtype) for file in found)
    starts = [np.arange(0, file.count, BLOCK_TOKENS) for file in files]
    lengths = [
        np.minimum(BLOCK_TOKENS, file.count - s) for file, s in zip(files, starts, strict=True)
    ]
    ids = [f"{f.id}#{i}" for f, s in zip(found, starts, strict=True) for i in range(len(s))]
    return _foreign_store(f"bin {config.path}", files, ids, lengths, starts)


def _open_bin_file(path: Path, dtype: str) -> TokenFile:
    with path.open("rb") as stream:
        head = np.frombuffer(stream.read(12), "<i4") if path.stat().st_size >= 1024 else [0]
    if head[0] == _KARPATHY_MAGIC and head[1] == 1:
        return TokenFile(path, "<u2", offset_bytes=_KARPATHY_HEADER_BYTES, count=int(head[2]))
    return TokenFile(path, {"uint16": "<u2", "uint32": "<u4"}[dtype])


# --- Megatron ------------------------------------------------------------------------------------


def open_megatron(config: DataConfig) -> TokenStore:
    """Returns the Megatron pairs of `data.path`: prefixes, .bin or .idx files, or globs of them.

    Raises:
      ConfigError: where a pair is incomplete, no Megatron index, or inconsistent.
    """
    prefixes = _megatron_prefixes(config.path)
    files: list[TokenFile] = []
    ids: list[str] = []
    lengths: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    for prefix in prefixes:
        file, length, start = _open_megatron_pair(prefix)
        files.append(file)
        lengths.append(length)
        starts.append(start)
        ids += [f"{prefix.name}#{number}" for number in range(len(length))]
    return _foreign_store(f"megatron {config.path}", tuple(files), ids, lengths, starts)


def _megatron_prefixes(paths: str) -> list[Path]:
    prefixes = []
    for entry in filter(None, (part.strip() for part in paths.split(","))):
        entry = str(Path(entry).expanduser())
        prefix = entry.removesuffix(".idx").removesuffix(".bin")
        found = sorted(glob.glob(f"{prefix}.idx", recursive=True))
        if not found:
            raise ConfigError(f"data.path={entry}: no file {prefix}.idx; give the PREFIX of both.")
        prefixes += [Path(name.removesuffix(".idx")) for name in found]
    return prefixes


def _open_megatron_pair(prefix: Path) -> tuple[TokenFile, np.ndarray, np.ndarray]:
    """Returns (tokens, length and start of each document)."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if not data.is_file():
        raise ConfigError(f"{data}: missing beside {index}; a Megatron corpus is both.")
    dtype, lengths, offsets, borders = _read_megatron_index(index)
    file = TokenFile(data, dtype)
    size = np.dtype(dtype).itemsize
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not np.array_equal(offsets, ends[:-1] * size) or ends[-1] > file.count:
        raise ConfigError(
            f"{index}: {len(lengths)} sequences do not follow each other within the {file.count} "
            f"tokens of {data.name}; write the pair again."
        )
    edges = ends[borders]
    return file, np.diff(edges), edges[:-1]


def _read_megatron_index(index: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (dtype, tokens per sequence, byte offset per sequence, sequence index of borders)."""
    content = index.read_bytes()
    fault = ConfigError(f"{index}: not a Megatron index (MMIDIDX, version 1, integer tokens).")
    if len(content) < _MEGATRON_HEADER.size:
        raise fault
    magic, version, code, sequences, borders = _MEGATRON_HEADER.unpack_from(content)
    expected = _MEGATRON_HEADER.size + 12 * sequences + 8 * borders
    if magic != _MAGIC or version != 1 or code not in _MEGATRON_TYPES or len(content) < expected:
        raise fault
    at = _MEGATRON_HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    offsets = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(content, "<i8", borders, at + 12 * sequences)
    ends = (int(documents[0]), int(documents[-1])) if borders else ()
    if ends != (0, sequences) or np.any(np.diff(documents) < 0):
        raise fault
    return _MEGATRON_TYPES[code], lengths, offsets, documents


def write_megatron(prefix: Path, documents: Iterable[np.ndarray], *, dtype: str = "uint16") -> None:
    """Writes PREFIX.bin and PREFIX.idx, one sequence per document.

    Args:
      documents: token ids, [length] each.
      dtype: uint16 for ids below 65536, else int32 (the format has no uint32).

    Raises:
      ValueError: where an id does not fit.
      FileExistsError: where one of the files exists.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    code = next((c for c, name in _MEGATRON_TYPES.items() if np.dtype(name) == stored), None)
    if code is None:
        raise ValueError(f"dtype {dtype}: required one of uint8, int8, int16, uint16, int32, int64")
    lengths: list[int] = []
    with open(f"{prefix}.idx", "xb") as index, open(f"{prefix}.bin", "xb") as data:
        for ids in documents:
            tokens = np.asarray(ids).astype(stored)
            if not np.array_equal(tokens, ids):
                raise ValueError(f"document {len(lengths)}: an id does not fit in {dtype}")
            data.write(tokens.tobytes())
            lengths.append(tokens.size)
        count = len(lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1] * stored.itemsize
        index.write(_MEGATRON_HEADER.pack(_MAGIC, 1, code, count, count + 1))
        index.write(np.asarray(lengths, "<i4").tobytes() + offsets.astype("<i8").tobytes())
        index.write(np.arange(count + 1, dtype="<i8").tobytes())


# --- Both ----------------------------------------------------------------------------------------

SCAN_TOKENS = 1 << 27  # up to this many tokens the largest id is found when the files are opened


def _foreign_store(
    name: str,
    files: tuple[TokenFile, ...],
    ids: list[str],
    lengths: list[np.ndarray],
    starts: list[np.ndarray],
) -> TokenStore:
    total = sum(file.count for file in files)
    scanned = total <= SCAN_TOKENS
    file, start, length = table_of(lengths, starts)
    return TokenStore(
        name,
        files,
        file,
        start,
        length,
        group=group_of(ids),
        num_bytes=None,
        max_id=max((int(f.tokens.max()) for f in files if f.count), default=0) if scanned else None,
        fingerprint=digest(*map(_edges_digest, files), start.tobytes(), length.tobytes()),
    )


def _edges_digest(file: TokenFile) -> str:
    """Returns a digest of a file's length and its first and last MiB."""
    raw = file.tokens.view(np.uint8)
    edges = raw[:_EDGE_BYTES].tobytes() + raw[-_EDGE_BYTES:].tobytes()
    return digest(file.count, file.dtype.str, hashlib.sha256(edges).hexdigest())
