"""Files of tensors (safetensors), opened and checked before their values are used."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxdist.storage.untrusted import Malformed, open_regular

_CHECKED = 1 << 16  # values checked at a time; they stay in the processor's cache
_FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn}  # dtypes that numpy has no name for
_LENGTH_BYTES = 8  # of a file's header, which stand before it


def open_tensors(file: Path) -> Any:
    """Opens a safetensors file and checks its header.

    Raises:
      Malformed: there is no such file, or its header, sizes or offsets are invalid.
    """
    try:
        open_regular(file).close()
        return safe_open(file, "np")
    except (OSError, SafetensorError) as error:
        raise Malformed(str(error)) from error


class MappedSlice:
    """A tensor of a memory-mapped file, with the methods of a safetensors slice.

    Args:
      dtype: safetensors' name of the dtype.
      values: the tensor in the mapped file.
    """

    def __init__(self, dtype: str, values: np.ndarray) -> None:
        self._dtype = dtype
        self._values = values

    def get_shape(self) -> list[int]:
        """Looks up the shape."""
        return list(self._values.shape)

    def get_dtype(self) -> str:
        """Looks up safetensors' name of the dtype."""
        return self._dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part."""
        return np.array(self._values[index])


def slices_of(file: Path) -> dict[str, Any]:
    """Opens the tensors of a safetensors file by name, without reading values.

    safetensors reads no 8-bit floats into numpy arrays, so these are memory-mapped.

    Raises:
      Malformed: as in `open_tensors`.
    """
    opened = open_tensors(file)
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    float8 = [name for name, x in slices.items() if x.get_dtype() in _FLOAT8]
    if not float8:
        return slices
    data = np.memmap(file, np.uint8, "r")
    # safetensors has checked the header and its offsets.
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    header = json.loads(data[_LENGTH_BYTES:start].tobytes())
    for name in float8:
        first, last = header[name]["data_offsets"]
        dtype = slices[name].get_dtype()
        values = data[start + first : start + last].view(_FLOAT8[dtype])
        slices[name] = MappedSlice(dtype, values.reshape(slices[name].get_shape()))
    return slices


def all_finite(values: np.ndarray) -> bool:
    """Checks that no float is NaN or infinite.

    Such floats have all bits of the exponent set. numpy's isfinite takes six times as
    long for bfloat16, and memory for as many booleans.
    """
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    exponent = np.array(np.inf, values.dtype).view(bits.dtype)
    parts = (bits[start : start + _CHECKED] for start in range(0, bits.size, _CHECKED))
    return not any(((part & exponent) == exponent).any() for part in parts)
