"""Token files: memory-mapped ids, and a table of the documents in them."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.storage.digest import digest, digest_bytes
from jaxdist.storage.untrusted import open_regular

# Tokens that are held out together if there are too few documents to hold out.
BLOCK_TOKENS = 16384
# Largest number of tokens whose ids are scanned when files are opened.
_SCAN_TOKENS = 1 << 27
_MAX_ID = np.iinfo(np.int32).max  # largest id that batches can hold
# What the fingerprint of a file covers: this many bytes at each end, and blocks spread
# evenly between them. A whole file may have terabytes.
_EDGE_BYTES = 1 << 20
_BLOCKS = 16
_BLOCK_BYTES = 4096


class TokenFile:
    """Memory-mapped array of token ids."""

    def __init__(
        self, path: Path, dtype: str, *, offset_bytes: int = 0, count: int | None = None
    ) -> None:
        """Maps a file.

        Args:
          path: the file.
          dtype: numpy's name of the type of an id.
          offset_bytes: offset of the first id.
          count: number of ids. None takes all after the offset.

        Raises:
          ConfigError: the file is too short, or ends within an id.
        """
        open_regular(path).close()
        num_bytes = path.stat().st_size
        kind = np.dtype(dtype)
        extra_bytes = 0  # bytes of an incomplete id at the end
        if count is None:
            count, extra_bytes = divmod(num_bytes - offset_bytes, kind.itemsize)
        self.path = path
        self.count = count
        self.fault = ""  # a text makes readers fail: a check has found damaged ids
        self._end_bytes = offset_bytes + count * kind.itemsize
        if extra_bytes or count < 0 or self._end_bytes > num_bytes:
            ends = f"{count} tokens of {kind} end at byte {self._end_bytes}"
            if extra_bytes:
                ends = (
                    f"token {count} of {kind} has {extra_bytes} of its "
                    f"{kind.itemsize} bytes"
                )
            raise ConfigError(
                f"{path}: {ends}, the file at byte {num_bytes}: it is cut off or of "
                "another type; write it again, or set data.bin_dtype."
            )
        self._tokens = np.zeros(0, dtype)
        if count:  # a plain ndarray, because slices of np.memmap are slow
            mapped = np.memmap(path, dtype, "r", offset_bytes, (count,))
            self._tokens = np.asarray(mapped).view(np.ndarray)

    @property
    def tokens(self) -> np.ndarray:
        """The ids [count].

        Raises:
          OSError: the file is damaged, or it shrank. Reading past its end would kill
            the process.
        """
        if self.fault:
            raise OSError(self.fault)
        num_bytes = os.stat(self.path).st_size
        if num_bytes < self._end_bytes:
            raise OSError(
                f"{self.path} shrank to {num_bytes} bytes from {self._end_bytes}"
            )
        return self._tokens

    @property
    def itemsize(self) -> int:
        """The bytes of an id."""
        return self._tokens.itemsize


class Pieces(NamedTuple):
    """Runs of tokens in the files of a store."""

    owner: np.ndarray  # [P] int32, number of the file; -1 = padding
    start: np.ndarray  # [P] int64, offset of the first token in the file
    # [P] int64, number of tokens; in a sample of `packing`, number of predictions
    length: np.ndarray

    def take(self, chosen: np.ndarray) -> "Pieces":
        """Selects pieces by a mask or by numbers."""
        return Pieces(*(values[chosen] for values in self))

    def tokens(self, files: Sequence[TokenFile]) -> np.ndarray:
        """Reads the pieces, one after another. Padding is 0."""
        contents = {
            number: files[number].tokens
            for number in set(self.owner.tolist())
            if number >= 0
        }
        tokens = np.zeros(self.length.sum(), np.int32)
        begin = 0
        rows = (values.tolist() for values in self)
        for number, first, count in zip(*rows, strict=True):
            if number >= 0:
                piece = contents[number][first : first + count]
                tokens[begin : begin + count] = piece
            begin += count
        return tokens


@dataclass(frozen=True)
class TokenStore:
    """Tokenized documents of one source, in the order of the token stream.

    Document d is `files[file[d]].tokens[start[d] : start[d] + length[d]]`. Its `group`
    is the first byte of the sha256 of its id, and decides whether it is held out.
    """

    name: str
    files: tuple[TokenFile, ...]
    file: np.ndarray  # [documents] int32
    start: np.ndarray  # [documents] int64
    length: np.ndarray  # [documents] int64, tokens
    group: np.ndarray  # [documents] uint8
    # [documents], UTF-8 bytes of the text; None = unknown
    num_bytes: np.ndarray | None
    # largest id; None = the files are too large to scan, and readers check each batch
    max_id: int | None
    fingerprint: str
    # weight of each token in `files`, 1 = learned; () = all are, and documents are
    # texts
    weights: tuple[TokenFile, ...] = ()

    @property
    def documents(self) -> Pieces:
        """The documents as pieces of the files."""
        return Pieces(self.file, self.start, self.length)

    def take(self, chosen: np.ndarray) -> "TokenStore":
        """Selects documents by a mask or by numbers."""
        return replace(
            self,
            file=self.file[chosen],
            start=self.start[chosen],
            length=self.length[chosen],
            group=self.group[chosen],
            num_bytes=None if self.num_bytes is None else self.num_bytes[chosen],
        )


def group_of(ids: Iterable[str]) -> np.ndarray:
    """Hashes ids to the first byte of their sha256, which is the same on every machine.

    Returns:
      [ids] uint8.
    """
    contents = (text.encode("utf-8", "surrogatepass") for text in ids)
    return np.fromiter(
        (hashlib.sha256(content).digest()[0] for content in contents), np.uint8
    )


class DocumentTable(NamedTuple):
    """Documents of a token file, with the ids `id#0`, `id#1` and so on."""

    file: TokenFile
    id: str
    start: np.ndarray  # [documents], tokens
    length: np.ndarray  # [documents], tokens


def store_of(name: str, tables: Sequence[DocumentTable]) -> TokenStore:
    """Makes a store of token files that jaxdist has not written.

    Raises:
      ConfigError: files have ids that no batch can hold. The error names the files.
    """
    files = tuple(table.file for table in tables)
    counts = [len(table.start) for table in tables]
    start = np.concatenate([table.start for table in tables]).astype(np.int64)
    length = np.concatenate([table.length for table in tables]).astype(np.int64)
    ids = (
        f"{table.id}#{number}" for table in tables for number in range(len(table.start))
    )
    return TokenStore(
        name=name,
        files=files,
        file=np.repeat(np.arange(len(files), dtype=np.int32), counts),
        start=start,
        length=length,
        group=group_of(ids),
        num_bytes=None,
        max_id=_check_ids(files),
        fingerprint=digest(
            *map(_sampled_digest, files), start.tobytes(), length.tobytes()
        ),
    )


def _check_ids(files: Sequence[TokenFile]) -> int | None:
    """Finds the largest id of all files; None if they are too large to scan.

    Raises:
      ConfigError: files have ids that no batch can hold. The error names the files.
    """
    is_scanned = sum(file.count for file in files) <= _SCAN_TOKENS
    largest = 0
    faults = []
    for file in files:
        # Ids of 8 bytes wrap around in batches, so they are checked here in any case.
        if not is_scanned and file.itemsize != 8:
            continue
        ids = file.tokens
        low = 0
        if ids.dtype.kind == "i":
            low = int(ids.min(initial=0))
        high = int(ids.max(initial=0))
        largest = max(largest, high)
        if low < 0 or high > _MAX_ID:
            position = int(np.argmax((ids < 0) | (ids > _MAX_ID)))
            faults.append(
                f"{file.path}: token {position} has id {ids[position]}; "
                f"required 0 to {_MAX_ID}. "
                "The file is damaged or of another type: write it again."
            )
    if faults:
        raise ConfigError(faults)
    return largest if is_scanned else None


def _sampled_digest(file: TokenFile) -> str:
    """Hashes a file's length, its first and last MiB, and blocks between them.

    A change elsewhere goes unnoticed (docs/how-to/data-formats.md).
    """
    raw = file.tokens.view(np.uint8)
    parts = [raw[:_EDGE_BYTES], raw[-_EDGE_BYTES:]]
    middle = raw[_EDGE_BYTES:-_EDGE_BYTES]
    for number in range(_BLOCKS):
        first = number * len(middle) // _BLOCKS
        parts.append(middle[first : first + _BLOCK_BYTES])
    sampled = b"".join(part.tobytes() for part in parts)
    return digest(file.count, file.tokens.dtype.str, digest_bytes(sampled))
