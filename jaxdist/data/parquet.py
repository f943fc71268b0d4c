"""Parquet files as a corpus (package `pyarrow`); load it with `extras.load`."""

from collections.abc import Iterator

import pyarrow.parquet

from jaxdist.config import ConfigError
from jaxdist.data.corpora import Document, File, document_of, megabytes, stamp_of
from jaxdist.data.options import DataConfig
from jaxdist.data.tokenizer import digest


class ParquetCorpus:
    """The rows of all files; `id` is the row's `id` if it has one, else `file#row`."""

    def __init__(self, config: DataConfig, files: list[File]):
        self.name, self._files, self._field = f"parquet {config.path}", files, config.text_field
        self.stamp = digest(stamp_of(files), config.text_field)
        self.summary = f"{len(files)} files, {megabytes(files):.2f} MB"

    def documents(self) -> Iterator[Document]:
        """Yields the rows in file order, holding one batch of rows in memory.

        Raises:
          ConfigError: where a file is no parquet file or lacks the column.
        """
        for file in self._files:
            number = 0
            for batch in self._batches(file):
                for row in batch.to_pylist():
                    where = f"{file.path} row {number}"
                    yield document_of(
                        row, self._field, where=where, default_id=f"{file.id}#{number}"
                    )
                    number += 1

    def _batches(self, file: File) -> Iterator[pyarrow.RecordBatch]:
        try:
            table = pyarrow.parquet.ParquetFile(file.path)
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"{file.path}: not a parquet file ({error}).") from error
        names = table.schema_arrow.names
        if self._field not in names:
            raise ConfigError(
                f"{file.path}: no column {self._field!r} (has: {', '.join(names)}). "
                "Set data.text_field."
            )
        columns = [name for name in names if name in (self._field, "id")]
        yield from table.iter_batches(batch_size=1024, columns=columns)
