"""Raw token files (`data.source=bin`), without borders of documents.

nanoGPT's files are raw little-endian uint16, or uint32 (`data.bin_dtype`). Karpathy's
later files (llm.c, modded-nanogpt) begin with a header of 256 int32: 20240520, version
1, the number of tokens, and zeros. Their tokens are uint16.
"""

import struct

import numpy as np

from jaxdist.data.reading import reading
from jaxdist.data.sources.documents import SourceOptions
from jaxdist.data.sources.files import File, find_files
from jaxdist.data.token_files import (
    BLOCK_TOKENS,
    DocumentTable,
    TokenFile,
    TokenStore,
    store_of,
)

_MAGIC = 20240520
_VERSION = 1
_HEADER_BYTES = 1024
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}


def open_bin(options: SourceOptions) -> TokenStore:
    """Opens the .bin files of `data.path` as blocks of BLOCK_TOKENS, `file#number`.

    Raises:
      ConfigError: a file is missing or truncated, or holds an id that no batch can
        hold.
    """
    files = find_files(options)
    with reading(options.name):
        tables = [_open_file(file, options.bin_dtype) for file in files]
        return store_of(options.name, tables)


def _open_file(source: File, dtype: str) -> DocumentTable:
    """Opens a file with or without Karpathy's header, as documents of BLOCK_TOKENS."""
    with reading(source.path), source.path.open("rb") as stream:
        head = stream.read(_HEADER_BYTES)
    magic, version, count = struct.unpack_from("<3i", head.ljust(12, b"\0"))
    has_header = (magic, version) == (_MAGIC, _VERSION) and len(head) == _HEADER_BYTES
    if has_header:
        file = TokenFile(source.path, "<u2", offset_bytes=_HEADER_BYTES, count=count)
    else:
        file = TokenFile(source.path, _DTYPES[dtype])
    start = np.arange(0, file.count, BLOCK_TOKENS)
    return DocumentTable(
        file=file,
        id=source.id,
        start=start,
        length=np.minimum(BLOCK_TOKENS, file.count - start),
    )
