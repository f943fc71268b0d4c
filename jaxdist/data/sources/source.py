"""Data source: its needs, its content, and the function that opens it.

A source is a row of `jaxdist.data.sources.table`, and its class tells its content. A
`TextSource` has documents that jaxdist tokenizes. A `TokenSource` has token ids of a
tokenizer that jaxdist does not know. A `SampleSource` has arrays without tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdist.data.sources.documents import Corpus, SourceOptions
from jaxdist.data.token_files import TokenStore


class SampleShape(NamedTuple):
    """Shape of one sample's array, and its dtype in a batch."""

    dims: tuple[int, ...]
    dtype: str


SampleShapes = dict[str, SampleShape]  # {entry of a batch: its shape}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Facts of one kind of data."""

    takes_path: bool = True  # whether data.path is required, or must be empty
    # endings of file names by which a path is recognized
    endings: tuple[str, ...] = ()
    # whether borders of documents are known, for data.packing=documents
    has_documents: bool = True
    has_records: bool = False  # whether it reads records, which have a data.format
    # keys of `data.*` that `open` reads besides data.path; they are a part of the
    # corpus's stamp, and `open` gets no others
    reads: tuple[str, ...] = ()
    # whether the caller of `jaxdist.fit` passes the batches; commands cannot open them
    from_caller: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Source of documents, which are tokenized with `data.tokenizer` on first use."""

    # Opens the corpus. Raises ConfigError if nothing is found. Reading the documents
    # raises it, too, and names the file and the line or row. Raises ImportError for a
    # missing package.
    open: Callable[[SourceOptions], Corpus]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSource(Source):
    """Source of token ids, made by a tokenizer that jaxdist does not know."""

    # Opens the tokens. Raises ConfigError if a file is missing or damaged.
    open: Callable[[SourceOptions], TokenStore]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSource(Source):
    """Source of samples, which are rows of named arrays [N, ...] without tokens."""

    has_documents: bool = False
    # Reads the shapes of one sample from a data.path, without reading values.
    shapes: Callable[[str], SampleShapes]
    # Reads the arrays of a data.path, and a stamp of their contents. Raises ConfigError
    # with all faults of the file.
    read: Callable[[str], tuple[dict[str, np.ndarray], str]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Source):
    """Mixture of sources of text or tokens, with weights (`data.mixture`)."""
