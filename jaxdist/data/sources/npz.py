"""Files of named arrays (`data.source=arrays`), which `numpy.savez` writes.

The files are not trusted. Nothing is unpickled, and the sizes in a header are checked
before memory is allocated.
"""

import math
import os
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import samples
from jaxdist.data.reading import READ_ERRORS, expanded, one_line, reading
from jaxdist.data.sources.source import SampleShapes
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import open_regular

_HEADER_READERS = {
    1: np.lib.format.read_array_header_1_0,
    2: np.lib.format.read_array_header_2_0,
}
# Largest number of bytes that one byte of a compressed entry can become.
_MAX_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}


class StoredHeader(NamedTuple):
    """Shape and dtype of a stored array."""

    shape: tuple[int, ...]  # [N, ...]
    dtype: np.dtype


def shapes(path: str) -> SampleShapes:
    """Reads the shapes of one sample from the file's headers.

    Raises:
      ConfigError: the file is invalid, with all faults.
    """
    headers, _ = _read_headers(path, "data.path")
    return samples.shapes_of(headers)


def read(path: str, key: str = "data.path") -> tuple[dict[str, np.ndarray], str]:
    """Reads the arrays, and a stamp: the checksums in the archive.

    Args:
      path: the file.
      key: config key that names the file, for errors.

    Raises:
      ConfigError: the file is invalid, with all faults.
    """
    headers, stamp = _read_headers(path, key)
    with (
        reading(f"{key}={one_line(path)}"),
        open_regular(expanded(path)) as content,
        zipfile.ZipFile(content) as file,
    ):
        arrays = {name: _read_values(file, name) for name in headers}
    too_wide = samples.beyond_int32(arrays)
    if too_wide:
        raise ConfigError(
            f"{key}={path}: {', '.join(too_wide)} has values beyond int32, "
            "which batches hold"
        )
    return arrays, stamp


def _read_headers(path: str, key: str) -> tuple[dict[str, StoredHeader], str]:
    """Reads the headers of all arrays, and a stamp.

    Raises:
      ConfigError: the file is invalid, with all faults of the headers.
    """
    shown = f"{key}={one_line(path)}"
    headers = {}
    try:
        with open_regular(expanded(path)) as content, zipfile.ZipFile(content) as file:
            entries = file.infolist()
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                headers[name] = _read_header(file, entry)
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file (looked from {Path.cwd()})") from None
    except READ_ERRORS as error:
        raise _not_arrays(shown, one_line(error)) from None
    if len(headers) < len(entries):
        raise _not_arrays(shown, "two arrays of one name")
    faults = samples.faults_of(headers)
    if faults:
        raise ConfigError(f"{shown}: {fault}" for fault in faults)
    stamps = [(entry.filename, entry.CRC, entry.file_size) for entry in entries]
    return headers, digest(*stamps)


def _not_arrays(shown: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{shown}: not a file of arrays ({reason}); "
        "write one with numpy.savez(FILE, image=...)"
    )


def _read_header(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> StoredHeader:
    """Reads the header of an array.

    Raises:
      ValueError: the header is invalid, or the entry cannot hold the values that it
        claims.
    """
    with file.open(entry) as array:
        major, _ = np.lib.format.read_magic(array)
        if major not in _HEADER_READERS:
            raise ValueError(f"{entry.filename} has format {major}")
        shape, _, dtype = _HEADER_READERS[major](array)
        num_bytes = entry.file_size - array.tell()
    claimed = math.prod(shape) * dtype.itemsize
    compressed = min(entry.compress_size, os.path.getsize(str(file.filename)))
    max_bytes = _MAX_RATIO.get(entry.compress_type, 0) * compressed
    is_sound = (
        min(shape, default=0) >= 0
        and claimed == num_bytes
        and entry.file_size <= max_bytes
    )
    if dtype.kind in "biuf" and not is_sound:
        raise ValueError(
            f"{entry.filename} says {dtype} {list(shape)}, "
            f"and has not the {claimed} bytes of it"
        )
    return StoredHeader(shape, dtype)


def _read_values(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """Reads an array whose header was checked.

    Raises:
      BadZipFile: the checksum does not fit.
    """
    entry = name if name in file.NameToInfo else f"{name}.npy"
    with file.open(entry) as array:
        values = np.lib.format.read_array(array, allow_pickle=False)
        array.read(1)  # zipfile compares the checksum at the end
    return values
