"""Files with a JSON object per line (`data.source=jsonl`), plain or gzipped."""

from collections.abc import Iterator
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.data.reading import reading
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.files import File, Line, find_files, read_lines
from jaxdist.data.sources.records import corpus_of_records, record_documents
from jaxdist.storage.untrusted import Malformed, parse_json


def open_corpus(options: SourceOptions) -> Corpus:
    """Finds the jsonl files of `data.path`.

    Raises:
      ConfigError: an entry finds nothing.
    """
    return corpus_of_records(options, find_files(options), _read)


def _read(file: File, options: SourceOptions) -> Iterator[Document]:
    """Yields the documents of each line that is not blank."""
    with reading(file.path):
        for line in read_lines(file):
            if line.content.strip():
                where = f"{file.path} line {line.number}"
                yield from record_documents(
                    _parse(line, where),
                    options,
                    where=where,
                    default_id=f"{file.id}#{line.number}",
                )


def _parse(line: Line, where: str) -> dict[str, Any]:
    """Parses the object of a line.

    Raises:
      ConfigError: the line is not UTF-8, or not an object.
    """
    # A file may begin with a byte order mark.
    encoding = "utf-8" if line.offset else "utf-8-sig"
    try:
        return parse_json(line.content.decode(encoding), dict)
    except UnicodeDecodeError as error:
        place = f"byte {line.offset + error.start} of the file"
        raise ConfigError(
            f"{where}: not UTF-8 at {place}; write the file again as UTF-8."
        ) from error
    except Malformed as error:
        raise ConfigError(f"{where}: {error}; give one object per line.") from error
