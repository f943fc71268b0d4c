"""The file reference.npz: the reference's log-probabilities of answers.

Letter: P pieces (halves of pairs).
"""

import io
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.storage import atomic, run_format
from jaxdist.storage.untrusted import Malformed, open_regular, parse_json

NAME = "reference.npz"
# of a piece: number of its side, file, first token, number of predictions
PLACE_COLUMNS = 4


class Stored(NamedTuple):
    """The contents of reference.npz."""

    key: str  # hash of the weights, the data and the dtype
    data: str  # fingerprint of the data
    places: np.ndarray  # [P, 4] int64: which piece each value is of
    values: np.ndarray  # [P] float32; NaN = not computed yet


def read(file: Path) -> Stored | None:
    """Reads a stored file; None if it is absent, damaged, or of another version."""
    try:
        with open_regular(file) as stream, np.load(stream, allow_pickle=False) as kept:
            header = parse_json(str(kept["header"]), dict)
            header = run_format.unmarked(header, file)
            places = np.asarray(kept["places"])
            values = np.asarray(kept["values"])
    except (Malformed, run_format.OtherVersion):
        return None
    except Exception:  # numpy and zipfile raise many types for damaged files
        return None
    is_right = (
        places.ndim == 2
        and places.shape[1] == PLACE_COLUMNS
        and places.dtype == np.int64
        and values.shape == places.shape[:1]
        and values.dtype == np.float32
        and isinstance(header.get("key"), str)
        and isinstance(header.get("data"), str)
    )
    if not is_right:
        return None
    return Stored(header["key"], header["data"], places, values)


def write(file: Path, stored: Stored) -> None:
    """Writes a file, as a whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    header = json.dumps(run_format.marked({"key": stored.key, "data": stored.data}))
    content = io.BytesIO()
    np.savez(
        content,
        header=np.array(header),
        places=stored.places,
        values=stored.values,
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(file, content.getvalue(), durable=True)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror or error}); free or fix its disk"
        ) from error
