"""Hugging Face datasets as a corpus (package `datasets`); load it with `extras.load`."""

from collections.abc import Iterator
from pathlib import Path

import datasets

from jaxdist.config import ConfigError
from jaxdist.data.corpora import Document, document_of
from jaxdist.data.options import DataConfig
from jaxdist.data.tokenizer import digest

_SAVED = ("dataset_info.json", "dataset_dict.json")  # files of save_to_disk


class HuggingFaceCorpus:
    """The rows of one split; `id` is the row's `id` if it has one, else its number."""

    def __init__(self, config: DataConfig, rows: datasets.Dataset):
        self.name, self._field = f"huggingface {config.path}", config.text_field
        if config.text_field not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise ConfigError(
                f"data.path={config.path}: no column {config.text_field!r} (has: {columns}). "
                "Set data.text_field."
            )
        keep = [name for name in rows.column_names if name in (config.text_field, "id")]
        self._rows = rows.select_columns(keep)
        files = (Path(file["filename"]) for file in rows.cache_files)
        stats = ((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        self.stamp = digest(config.path, config.text_field, rows.num_rows, *stats)
        self.summary = f"{rows.num_rows} rows"

    def documents(self) -> Iterator[Document]:
        """Yields the rows in order."""
        for number, row in enumerate(self._rows):
            where = f"{self.name} row {number}"
            yield document_of(row, self._field, where=where, default_id=str(number))


def open_corpus(config: DataConfig) -> HuggingFaceCorpus:
    """Returns the dataset `NAME[:CONFIG[:SPLIT]]` (split: train), or a folder of save_to_disk.

    Raises:
      ConfigError: with the message of `datasets`, where it cannot be had.
    """
    name, subset, split, *rest = (*config.path.split(":"), "", "")
    if any(rest):
        raise ConfigError(f"data.path={config.path}: required NAME[:CONFIG[:SPLIT]].")
    try:
        if any((Path(name) / file).is_file() for file in _SAVED):
            found = datasets.load_from_disk(name)
            found = found[split or "train"] if isinstance(found, datasets.DatasetDict) else found
        else:
            found = datasets.load_dataset(name, subset or None, split=split or "train")
    except Exception as error:  # many kinds: network, names, splits, formats
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"data.path={config.path}: `datasets` cannot load it as NAME[:CONFIG[:SPLIT]] "
            f"({type(error).__name__}: {reason})."
        ) from error
    return HuggingFaceCorpus(config, found)
