"""Parquet files as documents (package `pyarrow`); load it with `extras.load`."""

from collections.abc import Iterator

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
    Raises ConfigError where it is no parquet file or lacks the columns that the config names."""
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
    except (pyarrow.ArrowException, *READ_ERRORS) as error:
        raise ConfigError(f"{file.path}: not a parquet file ({one_line(error)}).") from error
    with reading(file.path, pyarrow.ArrowException):
        columns = columns_of(config, table.schema_arrow.names, file.path)
        batches = table.iter_batches(batch_size=1024, columns=columns)
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            where = f"{file.path} row {number}"
            yield record_document(row, config, where=where, default_id=f"{file.id}#{number}")
