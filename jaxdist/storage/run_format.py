"""The format of a run's files: which of them this version of jaxdist can read.

Each JSON document that a run writes carries `"format": "jaxdist-1"`. The rows of
metrics.jsonl, events.jsonl and arrays.jsonl carry none: config.json and run.json of
their folder speak for them. A folder of another format is refused and left as it is.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.storage import untrusted

FORMAT = "jaxdist-1"
KEY = "format"
# they decide for the folder of a run
CONFIG = "config.json"
RUN = "run.json"


class OtherVersion(ConfigError):
    """Files that another version of jaxdist has written."""


def marked(document: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the format to a document."""
    return {KEY: FORMAT, **document}


def fault(document: Mapping[str, Any], place: object) -> str:
    """Names what is wrong with a document's format; "" if it is this version's.

    Args:
      place: the file or folder to name.
    """
    if document.get(KEY) == FORMAT:
        return ""
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
      OtherVersion: it has another one, or none.
    """
    text = fault(document, place)
    if text:
        raise OtherVersion(text)


def unmarked(document: Mapping[str, Any], place: object) -> dict[str, Any]:
    """Checks a document's format, and removes it.

    Raises:
      OtherVersion: it has another one, or none.
    """
    check(document, place)
    return {key: value for key, value in document.items() if key != KEY}


def check_folder(folder: Path) -> None:
    """Checks that no other version has written the run in a folder; reads, no more.

    A file that is absent or damaged says nothing of its version.

    Raises:
      OtherVersion: config.json or run.json has another format.
    """
    for name in (CONFIG, RUN):
        document = None
        with contextlib.suppress(OSError, untrusted.Malformed):
            document = untrusted.read_json(folder / name, dict)
        if document is not None:
            check(document, folder)
