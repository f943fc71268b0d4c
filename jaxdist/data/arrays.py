"""Samples that are rows of arrays: images and their labels, or whatever a model of
one's own reads.

`data.source=arrays` reads `data.path=FILE.npz`, any named arrays [N, ...] whose row i
is sample i; `data.source=digits` has scikit-learn's 1797 scans of 8x8 pixels (extra
vision). A batch has the same names and [B, ...]: floats as float32, integers as int32,
an `image` of uint8 as float32 in [0, 1]. The arrays are held in memory. What is held
out is chosen by sample number, whatever the seed.
"""

import math
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError, extras
from jaxdist.data.packing import Batch
from jaxdist.data.shuffle import order_key, permute
from jaxdist.data.sources import READ_ERRORS, DataConfig, expanded, one_line, reading
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import open_regular

INDEX = "sample"  # the batch entry that is made here: the global sample index


class ArrayHeader(NamedTuple):
    """What one array holds, as it is stored."""

    shape: tuple[int, ...]  # [N, ...]
    dtype: np.dtype


class ArrayRows:
    """Some rows of arrays as samples; each counts as one target."""

    def __init__(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray):
        self._arrays, self._rows = arrays, rows
        self.num_rows = self.num_targets = len(rows)

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the samples [B], new arrays."""
        chosen = self._rows[rows]
        return {
            name: converted(name, values[chosen])
            for name, values in self._arrays.items()
        }


def sample_shapes(config: DataConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns dims and dtype of one sample of a source that is not text, by batch
    entry; reads no values.

    Raises:
      ConfigError: the file is not what it must be, all faults at once.
    """
    if config.source == "given":
        shapes = re.findall(r"(\S+)=(\w+)\[([\d,]*)\]", config.path)
        return {
            name: (tuple(map(int, filter(None, dims.split(",")))), dtype)
            for name, dtype, dims in shapes
        }
    if config.source == "digits":
        kinds = {"image": ArrayHeader((1797, 8, 8, 1), np.dtype("float32"))}
        kinds["label"] = ArrayHeader((1797,), np.dtype("int32"))
    else:
        kinds, _ = _checked(config.path)
    return {
        name: (kind.shape[1:], _batch_dtype(name, kind.dtype))
        for name, kind in kinds.items()
    }


def describe_samples(batch: Mapping[str, np.ndarray]) -> str:
    """Returns what `sample_shapes` reads: "image=float32[8,8,1] label=int32[]"."""
    shapes = (
        (name, x.dtype, ",".join(map(str, x.shape[1:]))) for name, x in batch.items()
    )
    return " ".join(
        f"{name}={_batch_dtype(name, dtype)}[{dims}]" for name, dtype, dims in shapes
    )


def open_arrays(config: DataConfig) -> tuple[str, str, ArrayRows, ArrayRows]:
    """Returns name, fingerprint, training samples and held-out samples of a config.

    Raises:
      ConfigError: the file is not what it must be, all faults at once.
      ImportError: naming the extra that `digits` needs.
    """
    if config.source == "digits":
        name, arrays = (
            "digits",
            extras.load("jaxdist.data.digits").read(),
        )
        stamp = digest(*(values.tobytes().hex() for values in arrays.values()))
    else:
        name, (arrays, stamp) = config.name, _read(config.path)
    number, fingerprint = (
        np.arange(count_of(arrays)),
        digest(stamp, config.validation_share),
    )
    if config.validation_path:
        others, other_stamp = _read(config.validation_path)
        ours, theirs = (
            {n: list(x.shape[1:]) for n, x in file.items()} for file in (arrays, others)
        )
        if ours != theirs:
            path = f"data.validation_path={config.validation_path}"
            raise ConfigError(f"{path}: a sample has {theirs}, in data.path {ours}")
        held, train = np.arange(count_of(others)), number
        fingerprint = digest(stamp, other_stamp)
    else:
        others, shuffled = (
            arrays,
            permute(number, len(number), order_key(0, "held out")),
        )
        count = math.ceil(len(number) * config.validation_share / 256)
        held, train = np.sort(shuffled[:count]), np.sort(shuffled[count:])
    if not len(train):
        raise ConfigError(
            f"data source {name}: all {len(number)} samples are held out; give more of them"
        )
    held = held[: config.validation_tokens] if config.validation_tokens else held
    return name, fingerprint, ArrayRows(arrays, train), ArrayRows(others, held)


def count_of(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns how many samples arrays [N, ...] hold."""
    return len(next(iter(arrays.values()))) if arrays else 0


# --- .npz files -----------------------------------------------------------------------


def read_file(path: str, key: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file; raises ConfigError if it is not what it must be.

    Args:
      key: what named the file, for errors.
    """
    return _read(path, key)[0]


def _read(path: str, key: str = "data.path") -> tuple[dict[str, np.ndarray], str]:
    """Returns the arrays of a file, and a stamp of its contents (the archive's own
    checksums).
    """
    kinds, stamp = _checked(path, key)
    with (
        reading(f"{key}={one_line(path)}"),
        open_regular(expanded(path)) as content,
        zipfile.ZipFile(content) as file,
    ):
        arrays = {name: _values(file, name) for name in kinds}
    if wide := beyond_int32(arrays):
        raise ConfigError(
            f"{key}={path}: {', '.join(wide)} has values beyond int32, which batches hold"
        )
    return arrays, stamp


def beyond_int32(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the names of the integer arrays with values that do not fit into int32,
    which batches hold.
    """
    integers = {
        name: x
        for name, x in arrays.items()
        if x.dtype.kind in "iu" and x.dtype.itemsize >= 4
    }
    limits = np.iinfo(np.int32)
    return [
        n
        for n, x in integers.items()
        if x.size and not limits.min <= x.min() <= x.max() <= limits.max
    ]


def _checked(path: str, key: str = "data.path") -> tuple[dict[str, ArrayHeader], str]:
    """Returns what the file's headers say and a stamp of it; raises every fault of
    them.
    """
    shown = f"{key}={one_line(path)}"
    try:
        with open_regular(expanded(path)) as content, zipfile.ZipFile(content) as file:
            kinds = {
                e.filename.removesuffix(".npy"): _header(file, e)
                for e in file.infolist()
            }
            if len(kinds) < len(file.infolist()):
                raise ValueError("two arrays of one name")
            stamp = digest(*((e.filename, e.CRC, e.file_size) for e in file.infolist()))
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file (looked from {Path.cwd()})") from None
    except READ_ERRORS as error:
        reason = f"not a file of arrays ({one_line(error)})"
        raise ConfigError(
            f"{shown}: {reason}; write one with numpy.savez(FILE, image=...)"
        ) from None
    if faults := faults_of(kinds):
        raise ConfigError(f"{shown}: {fault}" for fault in faults)
    return kinds, stamp


def _header(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> ArrayHeader:
    with file.open(entry) as array:
        read = {
            1: np.lib.format.read_array_header_1_0,
            2: np.lib.format.read_array_header_2_0,
        }
        major, _ = np.lib.format.read_magic(array)
        if major not in read:
            raise ValueError(f"{entry.filename} has format {major}")
        shape, _, dtype = read[major](array)
        there = entry.file_size - array.tell()
    # Nothing is allocated on a header's word: the array must be as large as its entry,
    # and that no larger than what its bytes can hold (deflate makes at most 1,032 of
    # one).
    packed = min(entry.compress_size, os.path.getsize(str(file.filename)))
    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}.get(
        entry.compress_type, 0
    )
    says = math.prod(shape) * dtype.itemsize
    sound = (
        min(shape, default=0) >= 0
        and says == there
        and entry.file_size <= ratio * packed
    )
    if dtype.kind in "biuf" and not sound:
        raise ValueError(
            f"{entry.filename} says {dtype} {list(shape)}, and has not the {says} bytes of it"
        )
    return ArrayHeader(shape, dtype)


def _values(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns an array whose header was checked; raises BadZipFile where its checksum
    is another.
    """
    with file.open(name if name in file.NameToInfo else f"{name}.npy") as array:
        values = np.lib.format.read_array(array, allow_pickle=False)
        array.read(1)  # at the end the checksum is compared
    return values


def faults_of(kinds: Mapping[str, ArrayHeader | np.ndarray]) -> list[str]:
    """Returns what is wrong with arrays of such kinds as samples."""
    faults = [
        f"{name} has dtype {kind.dtype}; give numbers (floats, integers or booleans)"
        for name, kind in kinds.items()
        if kind.dtype.kind not in "biuf"
    ]
    if INDEX in kinds:
        faults.append(
            f"{INDEX!r} is the global sample index, which every batch has; rename the array"
        )
    counts = {name: kind.shape[0] if kind.shape else 0 for name, kind in kinds.items()}
    if not kinds or min(counts.values()) < 1 or len(set(counts.values())) > 1:
        faults.append(
            f"arrays must be [N, ...] with one N >= 1, the samples; there are {counts}"
        )
    return faults


def _batch_dtype(name: str, dtype: np.dtype) -> str:
    return (
        "float32"
        if dtype.kind == "f" or (name, dtype) == ("image", np.uint8)
        else "int32"
    )


def converted(name: str, values: np.ndarray) -> np.ndarray:
    """Returns values as batches hold them: float32 or int32; bytes of `image` become
    0..1.
    """
    new = values.astype(_batch_dtype(name, values.dtype))
    return new / np.float32(255) if (name, values.dtype) == ("image", np.uint8) else new
