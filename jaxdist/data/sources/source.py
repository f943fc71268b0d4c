"""A data source: what it needs, what it holds, and the function that opens it.

A source is a row of `jaxdist.data.sources.table`. Its class says what it holds: a
`TextSource` documents that jaxdist tokenizes, a `TokenSource` token ids of a tokenizer
that jaxdist does not know, a `SampleSource` arrays without tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdist.data.sources.documents import Corpus, SourceOptions
from jaxdist.data.token_files import TokenStore


class SampleShape(NamedTuple):
    """The shape of one sample's array, and its dtype in a batch."""

    dims: tuple[int, ...]
    dtype: str


SampleShapes = dict[str, SampleShape]  # by entry of a batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The facts of one kind of data."""

    takes_path: bool = True  # False: data.path must be empty
    # ends of file names by which a path is recognized
    endings: tuple[str, ...] = ()
    has_documents: bool = True  # their borders are known: data.packing=documents
    has_chats: bool = False  # its records may be chats: data.format=chat
    # The caller of `jaxdist.fit` hands the batches over; no command can open them.
    from_caller: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Documents, tokenized with `data.tokenizer` when they are first read."""

    # Raises ConfigError if nothing is found, and while documents are read, naming the
    # file and the line or row. Raises ImportError for a missing package.
    open: Callable[[SourceOptions], Corpus]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSource(Source):
    """Token ids, made with a tokenizer that jaxdist does not know."""

    # Raises ConfigError if a file is missing or damaged.
    open: Callable[[SourceOptions], TokenStore]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSource(Source):
    """Samples that are rows of named arrays [N, ...], without tokens."""

    has_documents: bool = False
    # Gives what one sample holds, of a data.path; reads no values.
    shapes: Callable[[str], SampleShapes]
    # Reads the arrays of a data.path, and gives a stamp of their contents.
    # Raises ConfigError with all faults of the file.
    read: Callable[[str], tuple[dict[str, np.ndarray], str]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Source):
    """Parts of other sources of text or tokens, with weights (`data.mixture`)."""
