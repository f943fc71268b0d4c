"""State of a user's iterator as JSON, to be kept in checkpoints.

The content of a checkpoint is never executed or unpickled.
"""

import base64
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxdist.storage.untrusted import Malformed, of_kind

_NUMBERS = "biufc"  # kinds of dtypes that can be stored


def encode(value: Any) -> Any:
    """Converts a state to JSON. Types that JSON lacks become an object with one tag.

    Raises:
      TypeError: the state holds something else than numbers, texts, bytes, arrays, and
        containers of them.
    """
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy"):
        return {"torch": encode(value.numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.str, list(np.shape(value)), content]}
    raise TypeError(
        f"{type(value).__name__} cannot be stored in the state of an iterator"
    )


def decode(value: Any) -> Any:
    """Converts the JSON of `encode` back to a state.

    Raises:
      Malformed: `encode` has not written the JSON.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((tag, item),) = value.items()
        return _DECODERS[tag](item)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Malformed(f"no state of an iterator: {error!r}") from None


def _decode_array(parts: Any) -> np.ndarray:
    dtype, dims, content = parts
    if np.dtype(dtype).kind not in _NUMBERS:
        raise ValueError(dtype)
    values = np.frombuffer(base64.b64decode(content), dtype)
    return values.reshape(of_kind(dims, list)).copy()


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "tuple": lambda items: tuple(decode(item) for item in items),
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "array": _decode_array,
    "torch": lambda item: sys.modules["torch"].from_numpy(decode(item)),
}
