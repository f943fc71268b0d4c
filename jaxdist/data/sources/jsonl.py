"""Files with a JSON object per line (`data.source=jsonl`), plain or gzipped."""

import gzip
from collections.abc import Iterator
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.data.reading import reading
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.files import File, find_files
from jaxdist.data.sources.records import corpus_of_records, record_document
from jaxdist.storage.untrusted import Malformed, parse_json

# Largest number of bytes of a line. A file without line ends must not fill the memory.
_MAX_LINE = 64 << 20


def open_corpus(options: SourceOptions) -> Corpus:
    """Finds the jsonl files of `data.path`.

    Raises:
      ConfigError: an entry finds nothing.
    """
    return corpus_of_records(options, find_files(options), _read)


def _read(file: File, options: SourceOptions) -> Iterator[Document]:
    """Yields one document per line that is not blank."""
    opener = gzip.open if file.path.suffix == ".gz" else open
    with reading(file.path), opener(file.path, "rb") as lines:
        offset = 0
        number = 0
        while line := lines.readline(_MAX_LINE):
            number += 1
            where = f"{file.path} line {number}"
            if len(line) == _MAX_LINE:
                raise ConfigError(
                    f"{where}: longer than {_MAX_LINE:,} bytes; "
                    "give one object per line."
                )
            if line.strip():
                yield record_document(
                    _parse(line, where, offset),
                    options,
                    where=where,
                    default_id=f"{file.id}#{number}",
                )
            offset += len(line)


def _parse(line: bytes, where: str, offset: int) -> dict[str, Any]:
    """Parses the object of a line that starts at byte `offset` of its file.

    Raises:
      ConfigError: the line is not UTF-8, or not an object.
    """
    # A file may begin with a byte order mark.
    encoding = "utf-8" if offset else "utf-8-sig"
    try:
        return parse_json(line.decode(encoding), dict)
    except UnicodeDecodeError as error:
        place = f"byte {offset + error.start} of the file"
        raise ConfigError(
            f"{where}: not UTF-8 at {place}; write the file again as UTF-8."
        ) from error
    except Malformed as error:
        raise ConfigError(f"{where}: {error}; give one object per line.") from error
