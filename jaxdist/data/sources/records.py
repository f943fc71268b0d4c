"""Records (rows of jsonl files and tables) as documents.

`data.format` names the form of a record (`jaxdist.data.sources.record_formats`). If a
record has an `id` that is not empty, this is the id of its documents.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from jaxdist.config import ConfigError
from jaxdist.data.reading import one_line
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.files import File, corpus_of
from jaxdist.data.sources.record_formats import RECORD_FORMATS
from jaxdist.storage.untrusted import Malformed


def corpus_of_records(
    options: SourceOptions,
    files: list[File],
    read: Callable[[File, SourceOptions], Iterator[Document]],
) -> Corpus:
    """Makes a corpus of the records in files.

    Args:
      options: settings of the data.
      files: files of the corpus.
      read: yields the documents of one file.

    Raises:
      ConfigError: a file cannot be read.
    """
    return corpus_of(options.name, files, lambda file: read(file, options))


def columns_of(
    options: SourceOptions, names: Sequence[str], where: object
) -> list[str]:
    """Chooses the columns of a table that are read.

    Raises:
      ConfigError: the table lacks a required column.
    """
    check_fields(options, names, where)
    columns = (*RECORD_FORMATS[options.format].fields(options), "id")
    return [name for name in names if name in columns]


def check_fields(options: SourceOptions, names: Collection[str], where: object) -> None:
    """Checks that fields or columns of these names make up a record.

    Args:
      options: settings of the data.
      names: names of the fields or columns.
      where: file and line or row, for errors.

    Raises:
      ConfigError: a field is missing that the config's format requires. If the fields
        fit another format, the error names it.
    """
    record_format = RECORD_FORMATS[options.format]
    if record_format.fits(options, names):
        return
    fix = record_format.fields_fix
    for name, other in RECORD_FORMATS.items():
        if other.is_recognized and other.fits(options, names):
            fix = f"Set data.format={name}"
    present = f"(has: {one_line(', '.join(sorted(names)))})"
    raise ConfigError(f"{where}: no {record_format.needed(options)} {present}. {fix}.")


def record_documents(
    record: object, options: SourceOptions, *, where: str, default_id: str
) -> Iterator[Document]:
    """Yields the documents of one record, at least one. All have the same id.

    Args:
      record: the record.
      options: settings of the data.
      where: file and line or row, for errors.
      default_id: id of the documents if the record has no `id`, or an empty one.

    Raises:
      ConfigError: the record does not have the form of `data.format`.
    """
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: it is {type(record).__name__}; required: an object with fields."
        )
    check_fields(options, record, where)
    name = default_id
    # Documents of one id are held out together, so an empty id counts as none.
    if record.get("id") not in (None, ""):
        name = str(record["id"])
    record_format = RECORD_FORMATS[options.format]
    try:
        texts = record_format.texts(options, record)
    except Malformed as error:
        raise ConfigError(f"{where}: {error}. {record_format.values_fix}.") from error
    for number, text in enumerate(texts):
        yield Document(name, text, continues_record=number > 0)
