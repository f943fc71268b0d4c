"""scikit-learn's 1,797 handwritten digits (`data.source=digits`).

The digits come with the package. Load this module with `extras.load`.
"""

import numpy as np
from sklearn.datasets import load_digits

from jaxdist.storage.digest import digest


def read(path: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads the digits, and a stamp of their contents.

    Args:
      path: ignored.

    Returns:
      image [1797, 8, 8, 1] float32 in [0, 1] and label [1797] int32, by name; the
      stamp.
    """
    digits = load_digits()
    arrays = {
        "image": (digits.images[..., None] / 16).astype(np.float32),
        "label": digits.target.astype(np.int32),
    }
    return arrays, digest(*(values.tobytes().hex() for values in arrays.values()))
