"""Parquet files (`data.source=parquet`, package `pyarrow`).

Load this module with `extras.load`.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet

from jaxdist.config import ConfigError
from jaxdist.data.reading import READ_ERRORS, one_line, reading
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.files import File, find_files
from jaxdist.data.sources.records import (
    columns_of,
    corpus_of_records,
    record_documents,
)


def open_corpus(options: SourceOptions) -> Corpus:
    """Finds the parquet files of `data.path`.

    Raises:
      ConfigError: an entry finds nothing.
    """
    return corpus_of_records(options, find_files(options), _read)


def _read(file: File, options: SourceOptions) -> Iterator[Document]:
    """Yields the documents of a file's rows, with one batch of rows in memory at a time.

    Raises:
      ConfigError: the file is not a parquet file, or lacks a required column.
    """
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
    except (pyarrow.ArrowException, *READ_ERRORS) as error:
        raise ConfigError(
            f"{file.path}: not a parquet file ({one_line(error)}). "
            "Write it again, or set data.source to what it is."
        ) from error
    with reading(file.path, pyarrow.ArrowException):
        columns = columns_of(options, table.schema_arrow.names, file.path)
        for number, row in enumerate(_rows(table, file, columns)):
            yield from record_documents(
                row,
                options,
                where=f"{file.path} row {number}",
                default_id=f"{file.id}#{number}",
            )


def _rows(
    table: pyarrow.parquet.ParquetFile, file: File, columns: list[str]
) -> Iterator[Any]:
    """Yields the rows, a row group at a time.

    Raises:
      ConfigError: a group cannot be read. The error names the group.
    """
    for group in range(table.num_row_groups):
        metadata = table.metadata.row_group(group)
        offsets = [
            metadata.column(number).data_page_offset
            for number in range(metadata.num_columns)
        ]
        first = min(offsets, default=0)
        batches = table.iter_batches(
            batch_size=1024, row_groups=[group], columns=columns
        )
        where = f"{file.path} row group {group}, from byte {first} on"
        with reading(where, pyarrow.ArrowException):
            for batch in batches:
                yield from batch.to_pylist()
