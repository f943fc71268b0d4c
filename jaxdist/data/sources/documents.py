"""Documents and corpora, and the options that sources read."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class SourceOptions(Protocol):
    """The keys of `data` that a source reads; `DataConfig` has them."""

    @property
    def source(self) -> str:
        """The source's name."""

    @property
    def path(self) -> str:
        """Where it is stored; the source says in which form."""

    @property
    def name(self) -> str:
        """Source and path, for logs and errors."""

    @property
    def endings(self) -> tuple[str, ...]:
        """The file endings of the source's row; () if it takes any file."""

    @property
    def text_field(self) -> str:
        """The field or column with a record's text."""

    @property
    def format(self) -> str:
        """What a record is: text or chat."""

    @property
    def bin_dtype(self) -> str:
        """The type of the ids in files without a header."""


class Document(NamedTuple):
    """One text with an id that does not depend on where the corpus is stored."""

    id: str
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A set of documents."""

    name: str  # "jsonl data/*.jsonl", for logs and errors
    # changes when the documents may have changed; cheap (sizes and times, not contents)
    stamp: str
    summary: str  # one line: how much there is
    documents: Callable[[], Iterator[Document]]  # all of them, always in the same order
