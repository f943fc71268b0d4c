"""Records (rows of jsonl files and tables) as documents.

A record is a text in the field `data.text_field`, or a chat (`data.format=chat`). If it
has an `id` that is not empty, this is the id of the document.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxdist.config import ConfigError
from jaxdist.data.reading import one_line
from jaxdist.data.sources import chat_rows
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.files import File, corpus_of
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


def fields_of(options: SourceOptions) -> tuple[str, ...]:
    """Lists the fields or columns of a record that are read, except its `id`."""
    if options.format == "text":
        return (options.text_field,)
    return chat_rows.FIELDS


def columns_of(
    options: SourceOptions, names: Sequence[str], where: object
) -> list[str]:
    """Chooses the columns of a table that are read.

    Raises:
      ConfigError: the table lacks a required column.
    """
    check_fields(options, names, where)
    columns = (*fields_of(options), "id")
    return [name for name in names if name in columns]


def check_fields(options: SourceOptions, names: Iterable[str], where: object) -> None:
    """Checks that fields or columns of these names make up a record.

    Args:
      options: settings of the data.
      names: names of the fields or columns.
      where: file and line or row, for errors.

    Raises:
      ConfigError: a field is missing that the config's format requires.
    """
    known = set(names)
    has_chats = "messages" in known or {"prompt", "completion"} <= known
    present = f"(has: {one_line(', '.join(sorted(known)))})"
    if options.format == "chat" and not has_chats:
        raise ConfigError(
            f"{where}: no {chat_rows.NEEDED} {present}. "
            "Rename the fields, or set data.format=text."
        )
    if options.format == "text" and options.text_field not in known:
        fix = "Set data.format=chat" if has_chats else "Set data.text_field"
        raise ConfigError(
            f"{where}: no text in field {options.text_field!r} {present}. {fix}."
        )


def record_document(
    record: object, options: SourceOptions, *, where: str, default_id: str
) -> Document:
    """Makes a document of one record.

    Args:
      record: the record.
      options: settings of the data.
      where: file and line or row, for errors.
      default_id: id of the document if the record has no `id`, or an empty one.

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
    if options.format == "chat":
        try:
            return Document(name, chat_rows.chat_row(record))
        except Malformed as error:
            raise ConfigError(f"{where}: {error}. Mend or remove the row.") from error
    text = record[options.text_field]
    if not isinstance(text, str):
        raise ConfigError(
            f"{where}: field {options.text_field!r} is {type(text).__name__}; "
            "required: a text. Mend the row, or set data.text_field."
        )
    # JSON may contain half a surrogate pair, which no tokenizer accepts.
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return Document(name, text)
