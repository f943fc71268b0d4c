"""Samples that are rows of named arrays: images, or inputs of a user's model.

Row i of the arrays [N, ...] is sample i. A batch has the same names and [B, ...]:
floats as float32, integers as int32, and an `image` of uint8 as float32 in [0, 1]. The
arrays stay in memory.
"""

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from jaxdist.data.sources.source import SampleShape, SampleShapes

INDEX = "sample"  # batch entry that jaxdist adds: the global sample index
_INT32 = np.iinfo(np.int32)

Arrays = Mapping[str, np.ndarray]  # [N, ...] by name


class ArrayHeader(Protocol):
    """Shape and dtype of an array that may not have been read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, ...], as it is stored."""

    @property
    def dtype(self) -> np.dtype:
        """Element type, as it is stored."""


class SampleRows:
    """Some rows of arrays as samples. Each counts as one target."""

    def __init__(self, arrays: Arrays, rows: np.ndarray) -> None:
        self._arrays = arrays
        self._rows = rows
        self.num_rows = len(rows)
        self.num_targets = len(rows)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the samples [B] into new arrays."""
        chosen = self._rows[rows]
        return {
            name: to_batch_values(name, values[chosen])
            for name, values in self._arrays.items()
        }


def all_rows(arrays: Arrays) -> SampleRows:
    """Makes a sample of every row."""
    return SampleRows(arrays, np.arange(count_samples(arrays)))


def count_samples(arrays: Arrays) -> int:
    """Counts the samples of arrays [N, ...]."""
    for values in arrays.values():
        return len(values)
    return 0


# --- Shapes ---------------------------------------------------------------------------


def shapes_of(arrays: Mapping[str, ArrayHeader]) -> SampleShapes:
    """Derives shape and dtype of each entry of one sample, as batches have it."""
    return {
        name: SampleShape(array.shape[1:], _batch_dtype(name, array.dtype))
        for name, array in arrays.items()
    }


def describe_samples(arrays: Arrays) -> str:
    """Formats the shapes of one sample: "image=float32[8,8,1] label=int32[]"."""
    words = []
    for name, shape in shapes_of(arrays).items():
        dims = ",".join(map(str, shape.dims))
        words.append(f"{name}={shape.dtype}[{dims}]")
    return " ".join(words)


def parse_shapes(text: str) -> SampleShapes:
    """Parses the text of `describe_samples`."""
    shapes = {}
    for name, dtype, dims in re.findall(r"(\S+)=(\w+)\[([\d,]*)\]", text):
        sizes = [int(size) for size in dims.split(",") if size]
        shapes[name] = SampleShape(tuple(sizes), dtype)
    return shapes


def _batch_dtype(name: str, dtype: np.dtype) -> str:
    if dtype.kind == "f" or _is_image_of_bytes(name, dtype):
        return "float32"
    return "int32"


def _is_image_of_bytes(name: str, dtype: np.dtype) -> bool:
    return name == "image" and dtype == np.uint8


def to_batch_values(name: str, values: np.ndarray) -> np.ndarray:
    """Converts values to float32 or int32. Bytes of `image` become 0 to 1."""
    converted = values.astype(_batch_dtype(name, values.dtype))
    if _is_image_of_bytes(name, values.dtype):
        return converted / np.float32(255)
    return converted


# --- Faults ---------------------------------------------------------------------------


def faults_of(arrays: Mapping[str, ArrayHeader]) -> list[str]:
    """Lists the reasons why arrays of such shapes and dtypes cannot be samples."""
    faults = []
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            faults.append(
                f"{name} has dtype {array.dtype}; "
                "give numbers (floats, integers or booleans)"
            )
    if INDEX in arrays:
        faults.append(
            f"{INDEX!r} is the global sample index, which every batch has; "
            "rename the array"
        )
    counts = {
        name: array.shape[0] if array.shape else 0 for name, array in arrays.items()
    }
    if len(set(counts.values())) != 1 or min(counts.values()) < 1:
        faults.append(
            f"arrays must be [N, ...] with one N >= 1, the samples; there are {counts}"
        )
    return faults


def beyond_int32(arrays: Arrays) -> list[str]:
    """Names the integer arrays with values that do not fit int32."""
    names = []
    for name, values in arrays.items():
        is_wide = values.dtype.kind in "iu" and values.dtype.itemsize >= 4
        if not is_wide or not values.size:
            continue
        if values.min() < _INT32.min or values.max() > _INT32.max:
            names.append(name)
    return names
