"""Source files of the running Python (`data.source=stdlib`).

Tests and bundled packages are skipped. If no .py files are installed, the corpus is the
topics of Python's reference.
"""

import dataclasses
import importlib
import os
import sysconfig
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.data.sources.documents import Corpus, Document, SourceOptions
from jaxdist.data.sources.files import File, corpus_of, read_text
from jaxdist.storage.digest import digest, digest_bytes

_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "encodings",
    "site-packages",
    "dist-packages",
}
_FEWEST = 100  # least number of files; with fewer, this Python is zipped or compiled


def open_corpus(options: SourceOptions) -> Corpus:
    """Finds the source files of the running Python.

    Raises:
      ConfigError: this Python has neither source files nor topics.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                files.append(File(path, path.relative_to(root).as_posix()))
    if len(files) < _FEWEST:
        return _topics()
    files.sort(key=lambda file: file.id)
    corpus = corpus_of("stdlib", files, read_text)
    # The stamp covers the contents, because 10 MB take only 20 ms.
    stamp = digest_bytes(b"".join(file.path.read_bytes() for file in files))
    summary = f"{corpus.summary}, sha256 {stamp[:12]} ({root})"
    return dataclasses.replace(corpus, stamp=stamp, summary=summary)


def _topics() -> Corpus:
    """Opens the topics of Python's reference, which are a module of every Python."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigError(
            "data.source=stdlib: this Python has neither .py sources nor pydoc_data; "
            "set data.source=text and data.path."
        ) from error
    documents = [Document(name, text) for name, text in sorted(topics.items())]
    stamp = digest(*(document.text for document in documents))
    summary = (
        f"no .py sources here; {len(topics)} topics of Python's reference, "
        f"sha256 {stamp[:12]}"
    )
    return Corpus(
        name="stdlib (pydoc_data.topics)",
        stamp=stamp,
        summary=summary,
        documents=lambda: iter(documents),
    )
