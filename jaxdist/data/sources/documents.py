"""Documents and corpora, and the settings that sources read."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class SourceOptions(Protocol):
    """What a source may read: its name and path, and the keys that its row declares.

    `DataConfig` has them all. `data.opening` gives a source no key but those.
    """

    @property
    def source(self) -> str:
        """The name of the source."""

    @property
    def path(self) -> str:
        """The place of the data, in a form that depends on the source."""

    @property
    def name(self) -> str:
        """The source and its path, for logs and errors."""

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of files that the source reads from a folder; () = all."""

    @property
    def text_field(self) -> str:
        """The field or column with a record's text."""

    @property
    def format(self) -> str:
        """The content of a record: the name of a record format."""

    @property
    def bin_dtype(self) -> str:
        """The type of the ids in files without a header."""


class Document(NamedTuple):
    """Text with an id that does not depend on the place of the corpus."""

    id: str
    text: str
    is_damaged: bool = False  # some bytes were not UTF-8 and became U+FFFD
    # whether it belongs to the record of the document before; both are encoded in one
    # call
    continues_record: bool = False


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Set of documents."""

    name: str  # "jsonl data/*.jsonl", for logs and errors
    # text that differs if the documents may differ; usually made of the files' sizes
    # and times, not of their contents (stdlib reads the contents)
    stamp: str
    summary: str  # the amount of data, on one line
    documents: Callable[[], Iterator[Document]]  # yields all, always in the same order
    # keys of `data.*` that decide which text the documents have, for errors
    keys: tuple[str, ...] = ()
