"""Format of a run's files, which decides whether this version of jaxdist reads them.

Each JSON document of a run has `"format": "jaxdist-1"`. The rows of metrics.jsonl,
events.jsonl and arrays.jsonl have none: config.json and run.json of their folder
decide. A folder of another format is refused and left unchanged.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.storage import untrusted

FORMAT = "jaxdist-1"
KEY = "format"
# Files that decide for the folder of a run.
CONFIG = "config.json"
RUN = "run.json"
MEMORY = "memory.json"  # names the history whose steps in memory count


class OtherVersion(ConfigError):
    """Error of files that another version of jaxdist has written."""


def marked(document: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the format to a document."""
    return {KEY: FORMAT, **document}


def fault(document: Mapping[str, Any], place: object) -> str:
    """Describes why a document has another format; "" if it has this version's.

    A config.json of Hugging Face has none.

    Args:
      document: the document.
      place: file or folder to name.
    """
    if document.get(KEY) == FORMAT:
        return ""
    if KEY not in document and {"model_type", "architectures"} & document.keys():
        return (
            f"{place} holds a Hugging Face model, not a run. Train from it with "
            f"init.from_huggingface={place}, or make a run of it: jaxdist convert --from "
            f"{place} --to runs/converted --format jaxdist"
        )
    found = "no format"
    if KEY in document:
        found = f"format {document[KEY]!r:.40}"
    return (
        f"{place} was written by another version of jaxdist. It has {found}, and this "
        f"version reads {FORMAT!r} only. Use the version that wrote it, or give another "
        f"folder; this one stays as it is."
    )


def check(document: Mapping[str, Any], place: object) -> None:
    """Checks that a document has this version's format.

    Raises:
      OtherVersion: the document has another format, or none.
    """
    text = fault(document, place)
    if text:
        raise OtherVersion(text)


def unmarked(document: Mapping[str, Any], place: object) -> dict[str, Any]:
    """Checks a document's format, and removes it.

    Raises:
      OtherVersion: the document has another format, or none.
    """
    check(document, place)
    return {key: value for key, value in document.items() if key != KEY}


def check_folder(folder: Path) -> None:
    """Checks that no other version has written the run in a folder, by reading only.

    A file that is absent or damaged does not count.

    Raises:
      OtherVersion: config.json or run.json has another format.
    """
    for name in (CONFIG, RUN):
        document = None
        with contextlib.suppress(OSError, untrusted.Malformed):
            document = untrusted.read_json(folder / name, dict)
        if document is not None:
            check(document, folder)
