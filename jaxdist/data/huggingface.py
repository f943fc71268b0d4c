"""Hugging Face datasets as a corpus (package `datasets`); load it with
`extras.load`.
"""

from collections.abc import Iterator
from pathlib import Path

import datasets

from jaxdist.config import ConfigError
from jaxdist.data.sources import (
    Corpus,
    DataConfig,
    Document,
    columns_of,
    fields_of,
    one_line,
    reading,
    record_document,
)
from jaxdist.storage.digest import digest

_SAVED = ("dataset_info.json", "dataset_dict.json")  # files of save_to_disk


def open_corpus(config: DataConfig) -> Corpus:
    """Returns the dataset `NAME[:CONFIG[:SPLIT]]` (split: train), or a folder of
    save_to_disk.

    A row's id is its column `id` if there is one, else its number.
    Raises ConfigError with the message of `datasets`, where it cannot be had."""
    rows = _load(config)
    rows = rows.select_columns(
        columns_of(config, rows.column_names, f"data.path={config.path}")
    )
    files = (Path(file["filename"]) for file in rows.cache_files)
    stats = (
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files
    )
    stamp = digest(config.path, *fields_of(config), rows.num_rows, *stats)
    name = config.name

    def documents() -> Iterator[Document]:
        with reading(name, Exception):  # as many kinds as below
            for number, row in enumerate(rows):
                yield record_document(
                    row, config, where=f"{name} row {number}", default_id=str(number)
                )

    return Corpus(name, stamp, f"{rows.num_rows} rows", documents)


def _load(config: DataConfig) -> datasets.Dataset:
    name, subset, split, *rest = (*config.path.split(":"), "", "")
    if any(rest):
        raise ConfigError(f"data.path={config.path}: required NAME[:CONFIG[:SPLIT]].")
    try:
        if any((Path(name) / file).is_file() for file in _SAVED):
            dataset = datasets.load_from_disk(name)
            return (
                dataset[split or "train"]
                if isinstance(dataset, datasets.DatasetDict)
                else dataset
            )
        return datasets.load_dataset(name, subset or None, split=split or "train")
    except Exception as error:  # many kinds: network, names, splits, formats
        raise ConfigError(
            f"data.path={config.path}: `datasets` cannot load it as NAME[:CONFIG[:SPLIT]] "
            f"({type(error).__name__}: {one_line(error)})."
        ) from error
