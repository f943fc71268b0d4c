"""scikit-learn's handwritten digits, which come with it; load this with
`extras.load`.
"""

import numpy as np
from sklearn.datasets import load_digits


def read() -> dict[str, np.ndarray]:
    """Returns image [1797, 8, 8, 1] float32 in [0, 1] and label [1797] int32."""
    digits = load_digits()
    return {
        "image": (digits.images[..., None] / 16).astype(np.float32),
        "label": digits.target.astype(np.int32),
    }
