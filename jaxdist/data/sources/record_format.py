"""Format of records (`data.format`): its fields, its rules, and its documents.

A format is a row of `jaxdist.data.sources.record_formats`. `jaxdist.data.formats` adds
the encoder of its documents, and the way they are cut into rows of tokens.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxdist.data.sources.documents import SourceOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """Facts of one format of records."""

    name: str  # value of data.format
    contents: str  # noun of what the records hold, for errors: "chats"
    # names of the fields or columns that are read, except `id`
    fields: Callable[[SourceOptions], tuple[str, ...]]
    # whether fields of these names make up a record
    fits: Callable[[SourceOptions, Collection[str]], bool]
    # the fields that a record needs, for errors: "'prompt' and 'completion'"
    needed: Callable[[SourceOptions], str]
    # Formats the texts of a record, one for each document, at least one. Raises
    # Malformed for values of another form.
    texts: Callable[[SourceOptions, Mapping[str, Any]], Sequence[str]]
    fields_fix: str  # fix of missing fields, for errors
    values_fix: str  # fix of values of another form, for errors
    # whether names of fields alone tell that records have this format
    is_recognized: bool = True
    # keys of `data.*` that are read with this format alone, or with few others
    reads: tuple[str, ...] = ()
    # whether documents are examples. They need a source of records,
    # packing=documents and special_tokens=tokens.
    has_examples: bool = False
    uses_template: bool = False  # whether a chat template may render the documents
    truncates: bool = False  # the meaning of long_documents=auto: drop the excess
