"""Corpora: documents (id, text) of one source. What `data.path` means, per source:

  stdlib       unused. The sources of the running Python, without tests and bundled packages; where
               they are not installed as .py files, the topics of its reference (pydoc_data).
  text         files, globs (`docs/**/*.md`) or folders (all text files below), comma separated
  jsonl        the same, `.jsonl`, `.json` or `.jsonl.gz`: one object per line, text in text_field
  parquet      the same, `.parquet`, text in column text_field               (extra hf)
  huggingface  NAME[:CONFIG[:SPLIT]] of a dataset, or a folder of one        (extra hf)
  bin          token files: nanoGPT's raw uint16/uint32 (data.bin_dtype), or with Karpathy's header
  megatron     pairs PREFIX.bin + PREFIX.idx

A document's id is its path below the folder or glob that found it, with `#line` or `#row` where a
file holds many (or the record's own `id`), so a corpus can be moved without changing its split.
"""

import gzip
import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxdist import extras
from jaxdist.config import ConfigError
from jaxdist.data.options import DataConfig
from jaxdist.data.tokenizer import digest

_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "encodings"} | {
    "site-packages",
    "dist-packages",
}
_WILDCARDS = frozenset("*?[")


class Document(NamedTuple):
    """One text with an id that does not depend on where the corpus lies."""

    id: str
    text: str


class Corpus(Protocol):
    """A set of documents in a fixed order."""

    name: str  # "jsonl data/*.jsonl", for logs and errors
    stamp: str  # changes when the documents may have changed; cheap (sizes and times, not contents)
    summary: str  # one line: how much there is

    def documents(self) -> Iterator[Document]:
        """Yields all documents, always in the same order."""


@dataclass(frozen=True)
class File:
    """A file and its path below the pattern that found it."""

    path: Path
    id: str


def open_corpus(config: DataConfig) -> Corpus:
    """Returns the corpus of a text source (stdlib, text, jsonl, huggingface, parquet).

    Raises:
      ConfigError: where nothing is found.
      ImportError: naming the extra that a source needs.
    """
    if config.source == "stdlib":
        return _stdlib()
    if config.source == "huggingface":
        return extras.load("jaxdist.data.huggingface", extra="hf").open_corpus(config)
    suffixes = {"jsonl": (".jsonl", ".json", ".gz"), "parquet": (".parquet",), "text": ()}
    files = find_files(config, suffixes[config.source])
    if config.source == "parquet":
        return extras.load("jaxdist.data.parquet", extra="hf").ParquetCorpus(config, files)
    if config.source == "jsonl":
        return JsonLinesCorpus(config, files)
    return TextCorpus(f"text {config.path}", files)


# --- Files ---------------------------------------------------------------------------------------


def find_files(config: DataConfig, suffixes: tuple[str, ...]) -> list[File]:
    """Returns the files of `data.path`: entries in the order given, each one's files sorted by id.

    Folders contribute the files below them that end in one of `suffixes` (all, if empty), without
    hidden ones; a file or glob is taken as it is.

    Raises:
      ConfigError: naming every entry that finds nothing.
    """
    files, faults = [], []
    for entry in filter(None, (part.strip() for part in config.path.split(","))):
        found = _find(Path(entry).expanduser(), suffixes)
        if not found:
            kinds = " or ".join(suffixes) or "text"
            faults.append(
                f"data.path={entry}: no {config.source} file there (looked from {Path.cwd()}); "
                f"give a {kinds} file, a folder of them, or a glob."
            )
        files += found
    if faults or not files:
        raise ConfigError(faults or f"data.path={config.path!r}: empty. Set data.path.")
    return files


def _find(entry: Path, suffixes: tuple[str, ...]) -> list[File]:
    if entry.is_file():
        return [File(entry, entry.name)]
    if entry.is_dir():
        root, pattern = entry, "**/*"
    else:
        fixed = [i for i, part in enumerate(entry.parts) if _WILDCARDS & set(part)]
        if not fixed:
            return []
        root, pattern = Path(*entry.parts[: fixed[0]]), "/".join(entry.parts[fixed[0] :])
    found = [File(path, path.relative_to(root).as_posix()) for path in root.glob(pattern)]
    if entry.is_dir():
        found = [file for file in found if _wanted(file, suffixes)]
    return sorted((file for file in found if file.path.is_file()), key=lambda file: file.id)


def _wanted(file: File, suffixes: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") for part in Path(file.id).parts)
    return not hidden and (not suffixes or file.path.name.endswith(suffixes))


def stamp_of(files: list[File]) -> str:
    """Returns a digest of the files' ids, sizes and modification times."""
    stats = ((file.id, os.stat(file.path)) for file in files)
    return digest(*((id_, stat.st_size, stat.st_mtime_ns) for id_, stat in stats))


def megabytes(files: list[File]) -> float:
    """Returns the files' total size in MB (10^6 bytes)."""
    return sum(os.path.getsize(file.path) for file in files) / 1e6


# --- Text ----------------------------------------------------------------------------------------


class TextCorpus:
    """One document per file, read as UTF-8 (other bytes become U+FFFD); binary files left out."""

    def __init__(self, name: str, files: list[File]):
        self.name, self._files = name, files
        self.stamp = stamp_of(files)
        self.summary = f"{len(files)} files, {megabytes(files):.2f} MB"

    def documents(self) -> Iterator[Document]:
        """Yields the text files, by entry of data.path and then by id."""
        for file in self._files:
            content = file.path.read_bytes()
            if b"\0" not in content[:8192]:  # a NUL byte: not text
                yield Document(file.id, content.decode("utf-8", "replace"))


class TopicsCorpus:
    """The topics of the Python reference, which every Python has inside a module."""

    def __init__(self) -> None:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError as error:
            raise ConfigError(
                "data.source=stdlib: this Python has neither .py sources nor pydoc_data; "
                "set data.source=text and data.path."
            ) from error
        self._topics = dict(sorted(topics.items()))
        self.name = "stdlib (pydoc_data.topics)"
        self.stamp = digest(*self._topics.values())
        self.summary = (
            f"this Python has no .py sources; {len(topics)} topics of its reference instead, "
            f"sha256 {self.stamp[:12]}"
        )

    def documents(self) -> Iterator[Document]:
        """Yields the topics by name."""
        for name, text in self._topics.items():
            yield Document(name, text)


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [File(path, path.relative_to(root).as_posix()) for path in paths]
    if len(files) < 100:  # zipped, or compiled only
        return TopicsCorpus()
    files.sort(key=lambda file: file.id)
    corpus = TextCorpus("stdlib", files)
    content = hashlib.sha256()
    for file in files:
        content.update(file.path.read_bytes())
    corpus.stamp = content.hexdigest()  # 10 MB: the contents themselves, in 20 ms
    corpus.summary += f", sha256 {corpus.stamp[:12]} ({root})"
    return corpus


# --- JSON lines ----------------------------------------------------------------------------------


class JsonLinesCorpus:
    """One document per line; `id` is the record's `id` if it has one, else `file#line`."""

    def __init__(self, config: DataConfig, files: list[File]):
        self.name, self._files, self._field = f"jsonl {config.path}", files, config.text_field
        self.stamp = digest(stamp_of(files), config.text_field)
        self.summary = f"{len(files)} files, {megabytes(files):.2f} MB"

    def documents(self) -> Iterator[Document]:
        """Yields the records in file order.

        Raises:
          ConfigError: naming file and line of a record that is no JSON object with text_field.
        """
        for file in self._files:
            opener = gzip.open if file.path.suffix == ".gz" else open
            with opener(file.path, "rt", encoding="utf-8", errors="replace") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._document(line, file, number)

    def _document(self, line: str, file: File, number: int) -> Document:
        where = f"{file.path} line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error}); give one object per line.") from error
        return document_of(record, self._field, where=where, default_id=f"{file.id}#{number}")


def document_of(record: object, field: str, *, where: str, default_id: str) -> Document:
    """Returns the document of one record.

    Raises:
      ConfigError: where the record has no text under `field`.
    """
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        given = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"{where}: no text in field {field!r} (has: {given}). Set data.text_field."
        )
    identity = record.get("id")
    return Document(default_id if identity is None else str(identity), record[field])
