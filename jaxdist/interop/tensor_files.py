"""Files of tensors (safetensors), opened and checked before their values are used."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxdist.storage.untrusted import Malformed, open_regular

_CHECKED = 1 << 16  # values checked at a time; they stay in the processor's cache


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


def all_finite(values: np.ndarray) -> bool:
    """Checks that no float is NaN or infinite.

    Such floats have all bits of the exponent set. numpy's isfinite takes six times as
    long for bfloat16, and memory for as many booleans.
    """
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    exponent = np.array(np.inf, values.dtype).view(bits.dtype)
    parts = (bits[start : start + _CHECKED] for start in range(0, bits.size, _CHECKED))
    return not any(((part & exponent) == exponent).any() for part in parts)
