"""Files that `data.path` names, their lines, and corpora of files.

A corpus of text files (`data.source=text`) has one document per file. The id of a
document is its path below the folder or glob that found it. A corpus can therefore be
moved without changing which documents are held out.
"""

import fnmatch
import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import ConfigError
from jaxdist.data.reading import expanded, one_line, reading
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.storage.digest import digest


class File(NamedTuple):
    """File, with its path below the pattern that found it."""

    path: Path
    id: str


def entries_of(path: str) -> list[str]:
    """Splits a comma-separated `data.path`, and drops empty entries."""
    entries = [entry.strip() for entry in path.split(",")]
    return [entry for entry in entries if entry]


def find_files(options: SourceOptions) -> list[File]:
    """Finds the files of `data.path`, entry by entry, sorted by id within an entry.

    A folder contributes all files below it with one of the source's endings, except
    hidden ones. A file or a glob is taken as it is.

    Raises:
      ConfigError: entries find nothing. The error names each.
    """
    files = []
    faults = []
    for entry in entries_of(options.path):
        shown = one_line(entry)
        try:
            matches = _find(expanded(entry), options.endings)
        except PermissionError as error:
            unreadable = one_line(error.filename)
            faults.append(
                f"data.path={shown}: {unreadable} cannot be read ({error.strerror}), so its "
                f"files would be missing. Make it readable, or give a glob without it."
            )
            continue
        except (OSError, ValueError, RecursionError) as error:
            faults.append(f"data.path={shown}: no path or glob ({one_line(error)}).")
            continue
        if not matches:
            kinds = " or ".join(options.endings) or "text"
            faults.append(
                f"data.path={shown}: no {options.source} file there "
                f"(looked from {Path.cwd()}); "
                f"give a {kinds} file, a folder of them, or a glob."
            )
        files += matches
    if not files and not faults:
        faults.append(f"data.path={options.path!r}: empty. Set data.path.")
    if faults:
        raise ConfigError(faults)
    return files


def _find(entry: Path, endings: tuple[str, ...]) -> list[File]:
    """Finds the files of an entry.

    Raises:
      OSError: the entry cannot be looked up, or a folder below it cannot be read.
      ValueError: the entry is neither a path nor a glob.
    """
    if entry.is_file():
        return [File(entry, entry.name)]
    if entry.is_dir():
        files = [
            file
            for file in _files_below(entry)
            if not endings or file.id.endswith(endings)
        ]
    else:
        files = [_file_below(root, path) for root, path in _matches(entry)]
    return sorted(files, key=lambda file: file.id)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _files_below(root: Path) -> Iterator[File]:
    """Yields the files below a folder. Hidden files and folders are skipped.

    Raises:
      OSError: a folder cannot be read.
    """
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not _is_hidden(name)]
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not _is_hidden(name):
                yield _file_below(root, path)


def _raise(error: OSError) -> None:
    raise error


def _file_below(root: Path, path: Path) -> File:
    return File(path, path.relative_to(root).as_posix())


def find_matches(entry: Path) -> list[Path]:
    """Finds the files of a glob, sorted. A path without wildcards is its own match.

    Raises:
      OSError: a folder cannot be read.
      ValueError: the entry is no glob.
    """
    if entry.is_file():
        return [entry]
    return sorted(path for _, path in _matches(entry))


def _matches(entry: Path) -> list[tuple[Path, Path]]:
    """Finds the files of a glob, each with the folder before the first wildcard.

    [] if the path has no wildcard.
    """
    for depth, part in enumerate(entry.parts):
        if _has_wildcards(part):
            root = Path(*entry.parts[:depth])
            parts = _parts_of_pattern(entry.parts[depth:])
            return [
                (root, path) for path in _glob(root, parts, set()) if path.is_file()
            ]
    return []


def _has_wildcards(part: str) -> bool:
    return not set("*?[").isdisjoint(part)


def _parts_of_pattern(parts: Sequence[str]) -> list[str]:
    """Drops each `**` that follows another one, which would multiply the time.

    Raises:
      ValueError: `**` is a part of a name.
    """
    kept: list[str] = []
    for part in parts:
        if "**" in part and part != "**":
            raise ValueError("** can only be a whole part of a path")
        if part != "**" or kept[-1:] != ["**"]:
            kept.append(part)
    return kept


def _glob(
    folder: Path, pattern: Sequence[str], seen: set[tuple[Path, int]]
) -> Iterator[Path]:
    """Yields the paths of a glob below a folder.

    `Path.glob` would skip folders without read permission, and miss their files.

    Args:
      folder: the folder.
      pattern: the parts of the glob.
      seen: (folder, number of parts) of those before. Several `**` would else lead to a
        folder in very many ways.

    Raises:
      OSError: a folder cannot be read.
    """
    if (folder, len(pattern)) in seen:
        return
    seen.add((folder, len(pattern)))
    if not pattern:
        yield folder
        return
    part, *remaining = pattern
    if not _has_wildcards(part):
        yield from _glob(folder / part, remaining, seen)
        return
    if part == "**":
        yield from _glob(folder, remaining, seen)
    for entry in _entries(folder):
        path = folder / entry.name
        if part == "**":
            # A link could lead back to a folder above.
            if entry.is_dir(follow_symlinks=False):
                yield from _glob(path, pattern, seen)
        elif fnmatch.fnmatchcase(entry.name, part):
            yield from _glob(path, remaining, seen)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Lists a folder; [] if the path is no folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def corpus_of(
    name: str, files: list[File], read: Callable[[File], Iterator[Document]]
) -> Corpus:
    """Makes a corpus of the documents in files, stamped with their sizes and times.

    Args:
      name: name of the corpus, for logs and errors.
      files: files of the corpus.
      read: yields the documents of one file.

    Raises:
      ConfigError: a file cannot be read.
    """
    stamps = []
    num_bytes = 0
    with reading(name):
        for file in files:
            status = os.stat(file.path)
            stamps.append((file.id, status.st_size, status.st_mtime_ns))
            num_bytes += status.st_size
    return Corpus(
        name=name,
        stamp=digest(*stamps),
        summary=f"{len(files)} files, {num_bytes / 1e6:.2f} MB",
        documents=lambda: chain.from_iterable(map(read, files)),
    )


# Largest number of bytes of a line. A file without line ends must not fill the memory.
MAX_LINE_BYTES = 64 << 20


class Line(NamedTuple):
    """Line of a file, with its end."""

    content: bytes
    number: int  # 1 for the first line
    offset: int  # byte of the file at which it starts


def read_lines(file: File) -> Iterator[Line]:
    """Yields the lines of a file, plain or gzipped (`.gz`), one at a time in memory.

    Raises:
      ConfigError: a line is too long.
    """
    opener = gzip.open if file.path.suffix == ".gz" else open
    with reading(file.path), opener(file.path, "rb") as lines:
        offset = 0
        number = 0
        while content := lines.readline(MAX_LINE_BYTES):
            number += 1
            if len(content) == MAX_LINE_BYTES:
                raise ConfigError(
                    f"{file.path} line {number}: longer than {MAX_LINE_BYTES:,} bytes; "
                    "write one record per line."
                )
            yield Line(content, number, offset)
            offset += len(content)


def open_text(options: SourceOptions) -> Corpus:
    """Finds the text files of `data.path`.

    Raises:
      ConfigError: an entry finds nothing.
    """
    return corpus_of(options.name, find_files(options), read_text)


def read_text(file: File) -> Iterator[Document]:
    """Yields a file as a UTF-8 document; nothing if it is binary.

    Other bytes than UTF-8 become U+FFFD.
    """
    with reading(file.path):
        content = file.path.read_bytes()
    if b"\0" in content[:8192]:
        return
    try:
        yield Document(file.id, content.decode("utf-8"))
    except UnicodeDecodeError:
        yield Document(file.id, content.decode("utf-8", "replace"), is_damaged=True)
