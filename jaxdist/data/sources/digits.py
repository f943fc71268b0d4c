"""scikit-learn's 1,797 handwritten digits (`data.source=digits`), which come with the
package; load this with `extras.load`.
"""

import numpy as np
from sklearn.datasets import load_digits

from jaxdist.storage.digest import digest


def read(path: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads the digits, and gives a stamp of them.

    Args:
      path: not used.

    Returns:
      image [1797, 8, 8, 1] float32 in [0, 1] and label [1797] int32; the stamp.
    """
    digits = load_digits()
    arrays = {
        "image": (digits.images[..., None] / 16).astype(np.float32),
        "label": digits.target.astype(np.int32),
    }
    return arrays, digest(*(values.tobytes().hex() for values in arrays.values()))
