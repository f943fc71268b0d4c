"""Parquet files as documents (package `pyarrow`); load it with `extras.load`."""

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet

from jaxdist.config import ConfigError
from jaxdist.data.sources import (
    READ_ERRORS,
    DataConfig,
    Document,
    File,
    columns_of,
    one_line,
    reading,
    record_document,
)


def read_parquet(file: File, config: DataConfig) -> Iterator[Document]:
    """Yields the rows of a file, holding one batch of rows in memory.
    Raises ConfigError where it is no parquet file or lacks the columns that the config
    names."""
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
    except (pyarrow.ArrowException, *READ_ERRORS) as error:
        cure = "Write it again, or set data.source to what it is."
        raise ConfigError(
            f"{file.path}: not a parquet file ({one_line(error)}). {cure}"
        ) from error
    with reading(file.path, pyarrow.ArrowException):
        columns = columns_of(config, table.schema_arrow.names, file.path)
        for number, row in enumerate(_rows(table, file, columns)):
            where = f"{file.path} row {number}"
            yield record_document(
                row, config, where=where, default_id=f"{file.id}#{number}"
            )


def _rows(
    table: pyarrow.parquet.ParquetFile, file: File, columns: list[str]
) -> Iterator[Any]:
    """Yields the rows, a group at a time; raises ConfigError naming the group that
    cannot be read.
    """
    for group in range(table.num_row_groups):
        about = table.metadata.row_group(group)
        first = min(
            (about.column(i).data_page_offset for i in range(about.num_columns)),
            default=0,
        )
        batches = table.iter_batches(
            batch_size=1024, row_groups=[group], columns=columns
        )
        with reading(
            f"{file.path} row group {group}, from byte {first} on",
            pyarrow.ArrowException,
        ):
            yield from (row for batch in batches for row in batch.to_pylist())
