"""A ledger that writes a life without a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxdist.operations.ledger.ledger import Ledger


@contextlib.contextmanager
def published(ledger: Ledger, folder: Path) -> Iterator[None]:
    """Writes the life to a folder's ledger until the body ends."""
    ledger._open(folder)
    try:
        yield
    except BaseException as error:
        ledger._close(error)
        raise
    ledger._close(None)
