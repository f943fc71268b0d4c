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

# where borders of documents are unknown, this many tokens are held out together
BLOCK_TOKENS = 16384
# up to this many tokens the largest id is found when the files are opened
_SCAN_TOKENS = 1 << 27
_MAX_ID = np.iinfo(np.int32).max  # that batches can hold
# hashed at each end of a foreign file: all of it may be terabytes
_EDGE_BYTES = 1 << 20


class TokenFile:
    """A memory-mapped array of token ids."""

    def __init__(
        self, path: Path, dtype: str, *, offset_bytes: int = 0, count: int | None = None
    ) -> None:
        """Maps a file.

        Args:
          offset_bytes: of the first id.
          count: ids in the file; None: all after the offset.

        Raises:
          ConfigError: the file is too short, or ends within an id.
        """
        open_regular(path).close()
        num_bytes = path.stat().st_size
        kind = np.dtype(dtype)
        rest = 0
        if count is None:
            count, rest = divmod(num_bytes - offset_bytes, kind.itemsize)
        self.path = path
        self.count = count
        self.fault = ""  # set by whoever finds the ids damaged; readers then stop
        self._end_bytes = offset_bytes + count * kind.itemsize
        if rest or count < 0 or self._end_bytes > num_bytes:
            ends = f"{count} tokens of {kind} end at byte {self._end_bytes}"
            if rest:
                ends = (
                    f"token {count} of {kind} has {rest} of its {kind.itemsize} bytes"
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
        """[count] ids.

        Raises:
          OSError: the file is damaged, or it shrank: reading past its end would kill
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
        """Bytes of an id."""
        return self._tokens.itemsize


class Pieces(NamedTuple):
    """Runs of tokens in the files of a store."""

    owner: np.ndarray  # [P] int32, number of the file; -1 = padding, of no file
    start: np.ndarray  # [P] int64, offset of the first token in the file
    length: np.ndarray  # [P] int64, tokens; of pieces to learn from: predictions

    def take(self, chosen: np.ndarray) -> "Pieces":
        """Selects pieces, by a mask or by number."""
        return Pieces(*(values[chosen] for values in self))

    def tokens(self, files: Sequence[TokenFile]) -> np.ndarray:
        """Reads the pieces, one after the other; padding is 0."""
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

    @property
    def documents(self) -> Pieces:
        """The documents as pieces of the files."""
        return Pieces(self.file, self.start, self.length)

    def take(self, chosen: np.ndarray) -> "TokenStore":
        """Selects documents, by a mask or by number."""
        return replace(
            self,
            file=self.file[chosen],
            start=self.start[chosen],
            length=self.length[chosen],
            group=self.group[chosen],
            num_bytes=None if self.num_bytes is None else self.num_bytes[chosen],
        )


def group_of(ids: Iterable[str]) -> np.ndarray:
    """Hashes ids to the first byte of their sha256, on every machine the same.

    Returns:
      [ids] uint8.
    """
    contents = (text.encode("utf-8", "surrogatepass") for text in ids)
    return np.fromiter(
        (hashlib.sha256(content).digest()[0] for content in contents), np.uint8
    )


class DocumentTable(NamedTuple):
    """The documents of a token file, `id#0`, `id#1` and so on."""

    file: TokenFile
    id: str
    start: np.ndarray  # [documents], tokens
    length: np.ndarray  # [documents], tokens


def store_of(name: str, tables: Sequence[DocumentTable]) -> TokenStore:
    """Makes a store of token files that somebody else wrote.

    Raises:
      ConfigError: names the files with an id that no batch can hold.
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
            *map(_edges_digest, files), start.tobytes(), length.tobytes()
        ),
    )


def _check_ids(files: Sequence[TokenFile]) -> int | None:
    """Finds the largest id of all files; None where they are too large to scan.

    Raises:
      ConfigError: names the files with an id that no batch can hold.
    """
    is_scanned = sum(file.count for file in files) <= _SCAN_TOKENS
    largest = 0
    faults = []
    for file in files:
        # Batches show ids of 8 bytes wrapped, so that those must be looked at here,
        # however many there are.
        if is_scanned or file.itemsize == 8:
            ids = file.tokens
            low = 0
            if ids.dtype.kind == "i":
                low = int(ids.min(initial=0))
            high = int(ids.max(initial=0))
            largest = max(largest, high)
            if low < 0 or high > _MAX_ID:
                place = int(np.argmax((ids < 0) | (ids > _MAX_ID)))
                faults.append(
                    f"{file.path}: token {place} has id {ids[place]}; "
                    f"required 0 to {_MAX_ID}. "
                    "The file is damaged or of another type: write it again."
                )
    if faults:
        raise ConfigError(faults)
    return largest if is_scanned else None


def _edges_digest(file: TokenFile) -> str:
    """Hashes a file's length and its first and last MiB."""
    raw = file.tokens.view(np.uint8)
    edges = raw[:_EDGE_BYTES].tobytes() + raw[-_EDGE_BYTES:].tobytes()
    return digest(file.count, file.tokens.dtype.str, digest_bytes(edges))
