"""Megatron's pairs PREFIX.bin and PREFIX.idx (`data.source=megatron`).

The format is that of Megatron-LM (megatron/core/datasets/indexed_dataset.py). The tests
contain an independent writer.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.reading import expanded, one_line, reading
from jaxdist.data.sources.documents import SourceOptions
from jaxdist.data.sources.files import entries_of, find_matches
from jaxdist.data.token_files import DocumentTable, TokenFile, TokenStore, store_of
from jaxdist.storage.untrusted import open_regular

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, borders
# {code of a type: its numpy name}; the codes 6 and 7 are floats
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Index(NamedTuple):
    """Content of an .idx file."""

    dtype: str
    lengths: np.ndarray  # [sequences] int32, tokens
    offsets: np.ndarray  # [sequences] int64, bytes
    borders: np.ndarray  # [documents + 1] int64, first sequence of each, and the end


def open_megatron(options: SourceOptions) -> TokenStore:
    """Opens the pairs of `data.path`: prefixes, .bin or .idx files, or globs of them.

    Raises:
      ConfigError: a pair is incomplete, or its index is invalid.
    """
    indexes = _find_indexes(options.path)
    with reading(options.name):
        tables = [_open_pair(index) for index in indexes]
        return store_of(options.name, tables)


def _find_indexes(path: str) -> list[Path]:
    """Finds the .idx files of `data.path`."""
    indexes: list[Path] = []
    for entry in entries_of(path):
        prefix = str(expanded(entry)).removesuffix(".idx").removesuffix(".bin")
        shown = one_line(entry)
        with reading(f"data.path={shown}"):
            found = find_matches(Path(f"{prefix}.idx"))
        if not found:
            missing = one_line(f"{prefix}.idx")
            raise ConfigError(
                f"data.path={shown}: no file {missing}; give the PREFIX of both."
            )
        indexes += found
    if not indexes:
        raise ConfigError(f"data.path={path!r}: empty. Set data.path.")
    return indexes


def _open_pair(path: Path) -> DocumentTable:
    """Opens the pair of an .idx file, and checks that both fit."""
    data = path.with_suffix(".bin")
    if not data.is_file():
        raise ConfigError(f"{data}: missing beside {path}; a Megatron corpus is both.")
    with reading(path):
        index = _read_index(path)
    with reading(data):
        file = TokenFile(data, index.dtype)
    lengths = index.lengths
    if len(lengths) and lengths.min() < 0:
        sequence = int(np.argmax(lengths < 0))
        raise ConfigError(
            f"{path}: sequence {sequence} has {lengths[sequence]} tokens; "
            "write the pair again."
        )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # The end is compared with the file first, so that byte offsets fit 64 bits.
    if ends[-1] > file.count or not np.array_equal(
        index.offsets, ends[:-1] * np.dtype(index.dtype).itemsize
    ):
        raise ConfigError(
            f"{path}: {len(lengths)} sequences do not follow each other within the "
            f"{file.count} tokens of {data.name}; write the pair again."
        )
    edges = ends[index.borders]
    return DocumentTable(
        file=file, id=path.stem, start=edges[:-1], length=np.diff(edges)
    )


def _read_index(path: Path) -> _Index:
    """Reads an .idx file.

    Raises:
      ConfigError: the file is invalid. The error names the wrong byte.
    """
    with open_regular(path) as file:
        content = file.read()
    code, sequences, borders = _read_header(path, content)
    offsets_byte = _HEADER.size + 4 * sequences
    borders_byte = offsets_byte + 8 * sequences
    index = _Index(
        dtype=_DTYPES[code],
        lengths=np.frombuffer(content, "<i4", count=sequences, offset=_HEADER.size),
        offsets=np.frombuffer(content, "<i8", count=sequences, offset=offsets_byte),
        borders=np.frombuffer(content, "<i8", count=borders, offset=borders_byte),
    )
    # Comparisons cannot wrap around as differences can.
    decreases = np.flatnonzero(index.borders[1:] < index.borders[:-1])
    if decreases.size or index.borders[0] != 0 or index.borders[-1] != sequences:
        border = int(decreases[0]) + 1 if decreases.size else 0
        raise _fault(
            path,
            f"byte {borders_byte + 8 * border}: "
            f"borders of documents do not rise from 0 to {sequences}",
        )
    return index


def _read_header(path: Path, content: bytes) -> tuple[int, int, int]:
    """Reads the header of an .idx file.

    Returns:
      The code of the type, the number of sequences, and the number of borders.

    Raises:
      ConfigError: the header is invalid, or the file is too short for it.
    """
    if len(content) < _HEADER.size:
        raise _fault(
            path, f"it has {len(content)} bytes, its header alone {_HEADER.size}"
        )
    magic, version, code, sequences, borders = _HEADER.unpack_from(content)
    needed = _HEADER.size + 12 * sequences + 8 * borders
    if magic != _MAGIC:
        raise _fault(path, f"byte 0: {magic!r}, required {_MAGIC!r}")
    if version != 1:
        raise _fault(path, f"byte 9: version {version}, required 1")
    if code not in _DTYPES:
        raise _fault(path, f"byte 17: type {code} of tokens, required one of integers")
    if borders < 1:
        raise _fault(path, "byte 26: no border of documents")
    if len(content) < needed:
        raise _fault(
            path,
            f"byte 18: {sequences} sequences and {borders} borders need {needed} "
            f"bytes, and the file has {len(content)}",
        )
    return code, sequences, borders


def _fault(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}: not a Megatron index; {problem}. Write the pair again."
    )
