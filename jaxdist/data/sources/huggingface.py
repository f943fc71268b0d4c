"""Datasets of Hugging Face (`data.source=huggingface`, package `datasets`).

Load this module with `extras.load`.
"""

from collections.abc import Iterator
from pathlib import Path

import datasets

from jaxdist.config import ConfigError
from jaxdist.data.reading import one_line, reading
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.records import columns_of, record_documents
from jaxdist.storage.digest import digest

_SAVED = ("dataset_info.json", "dataset_dict.json")  # files of save_to_disk


def open_corpus(options: SourceOptions) -> Corpus:
    """Opens the dataset `NAME[:CONFIG[:SPLIT]]`, or a folder of save_to_disk.

    The default split is train. A row's id is its column `id` if there is one, or else
    its number.

    Raises:
      ConfigError: the dataset cannot be loaded. It contains the message of `datasets`.
    """
    name = options.name
    rows = _load(options.path)
    columns = columns_of(options, rows.column_names, f"data.path={options.path}")
    rows = rows.select_columns(columns)
    stamps = []
    for cached in rows.cache_files:
        file = Path(cached["filename"])
        status = file.stat()
        stamps.append((file.name, status.st_size, status.st_mtime_ns))

    def documents() -> Iterator[Document]:
        with reading(name, Exception):  # `datasets` raises many types
            for number, row in enumerate(rows):
                yield from record_documents(
                    row,
                    options,
                    where=f"{name} row {number}",
                    default_id=str(number),
                )

    return Corpus(
        name=name,
        stamp=digest(options.path, rows.num_rows, *stamps),
        summary=f"{rows.num_rows} rows",
        documents=documents,
    )


def _load(path: str) -> datasets.Dataset:
    """Loads `NAME[:CONFIG[:SPLIT]]`, or a folder of save_to_disk.

    Raises:
      ConfigError: the dataset cannot be loaded.
    """
    parts = [*path.split(":"), "", ""]
    name, subset, split = parts[:3]
    if any(parts[3:]):
        raise ConfigError(f"data.path={path}: required NAME[:CONFIG[:SPLIT]].")
    split = split or "train"
    try:
        if not any((Path(name) / file).is_file() for file in _SAVED):
            return datasets.load_dataset(name, subset or None, split=split)
        dataset = datasets.load_from_disk(name)
        if isinstance(dataset, datasets.DatasetDict):
            return dataset[split]
        return dataset
    except Exception as error:  # many types: network, names, splits, formats
        raise ConfigError(
            f"data.path={path}: `datasets` cannot load it as NAME[:CONFIG[:SPLIT]] "
            f"({type(error).__name__}: {one_line(error)})."
        ) from error
