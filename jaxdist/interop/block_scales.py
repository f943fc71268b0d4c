"""Weights in 8-bit floats with a scale for each block (fp8), read as float32.

This is the form of DeepSeek-V3's folders. A weight [out, in] has codes in
float8_e4m3fn. `<its name>_scale_inv` has a scale for each block of 128 x 128 codes, the
last ones of a row or column being smaller. A value is code x scale, computed in
float32, as transformers does.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

SCALES = "_scale_inv"  # end of the name of the scales of a weight
CODES = "F8_E4M3"  # safetensors' dtype of the codes
_SCALE_DTYPES = ("F32", "BF16")
# Fields of quantization_config with supported values; other fields, such as the list of
# modules that are not quantised, change no value of a weight.
_SUPPORTED: dict[str, tuple[Any, ...]] = {"quant_method": ("fp8",), "fmt": ("e4m3",)}
_BLOCK = "weight_block_size"


def is_fp8(quantization: Any) -> TypeGuard[Mapping[str, Any]]:
    """Checks whether a quantization_config is one of 8-bit floats."""
    return isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"


def config_faults(quantization: Mapping[str, Any]) -> list[str]:
    """Lists what is not supported of a quantization_config of 8-bit floats."""
    faults = []
    for key, supported in _SUPPORTED.items():
        value = quantization.get(key, supported[0])
        if value not in supported:
            faults.append(
                f"quantization_config.{key}={value!r}: not supported; "
                f"required {supported[0]!r}"
            )
    block: Any = quantization.get(_BLOCK)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        faults.append(
            f"quantization_config.{_BLOCK}={block!r}: two whole numbers > 0 are required"
        )
    return faults


class BlockScaled:
    """A weight of codes and scales, with the methods of a safetensors slice.

    A part of it is computed from its codes and from the scales of their blocks alone.

    Args:
      codes: slice of the codes, [out, in].
      scales: slice of the scales, a row and a column for each block.
      block: rows and columns of a block.
    """

    def __init__(self, codes: Any, scales: Any, block: tuple[int, int]) -> None:
        self._codes = codes
        self._scales = scales
        self._block = block

    def get_shape(self) -> list[int]:
        """Looks up the shape of the weight."""
        return list(self._codes.get_shape())

    def get_dtype(self) -> str:
        """The dtype of the values that are read."""
        return "F32"

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Computes a part of the weight, float32.

        Args:
          index: the ranges of rows and columns, with their ends.
        """
        values: np.ndarray = self._codes[index].astype(np.float32)
        rows, columns = index
        height, width = self._block
        used = (_blocks(rows, height), _blocks(columns, width))
        scales = self._scales[used].astype(np.float32)
        # of each column, for the blocks of all rows
        column_block = np.arange(columns.start, columns.stop) // width - used[1].start
        # A band of rows at a time: no second array has the size of the part.
        for band in range(used[0].start, used[0].stop):
            first = max(band * height, rows.start) - rows.start
            last = min((band + 1) * height, rows.stop) - rows.start
            values[first:last] *= scales[band - used[0].start, column_block]
        return values


def _blocks(values: slice, size: int) -> slice:
    """Finds the blocks that hold a range of rows or columns."""
    return slice(values.start // size, -(-values.stop // size))


def joined(
    slices: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Joins the codes of each weight with its scales.

    Args:
      slices: the slices of a folder's tensors by name.
      quantization: the folder's quantization_config; None: no tensor has codes.

    Returns:
      The slices of weights by name, and the faults of codes and scales. Scales without
      codes remain, as tensors that nobody expects.
    """
    if not is_fp8(quantization):
        return dict(slices), []
    height, width = quantization[_BLOCK]
    weights = dict(slices)
    faults = []
    coded = [name for name, x in slices.items() if x.get_dtype() == CODES]
    for name in sorted(coded):
        shape = tuple(slices[name].get_shape())
        if len(shape) != 2:
            faults.append(f"{name} is {CODES} of shape {shape}; required two dims")
            continue
        scales = slices.get(name + SCALES)
        if scales is None:
            faults.append(
                f"{name} is {CODES}, and its scales are missing: {name}{SCALES}"
            )
            continue
        expected = (-(-shape[0] // height), -(-shape[1] // width))
        found = tuple(scales.get_shape())
        if found != expected:
            faults.append(
                f"{name}{SCALES} has shape {found}; "
                f"blocks of {height} x {width} of {shape} need {expected}"
            )
        elif scales.get_dtype() not in _SCALE_DTYPES:
            faults.append(
                f"{name}{SCALES} is {scales.get_dtype()}; required {_SCALE_DTYPES[0]}"
            )
        else:
            del weights[name + SCALES]
            weights[name] = BlockScaled(slices[name], scales, (height, width))
    return weights, faults
