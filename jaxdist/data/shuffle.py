"""The order of samples: a pure function of (seed, global sample index), so resuming
costs nothing. Nothing here knows of hosts, steps or batch sizes."""

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_ROUND_KEYS = tuple(np.uint64(_GOLDEN * number % 2**64) for number in range(1, 7))


def order_key(seed: int, name: str) -> int:
    """Hashes to the 64-bit key of a source's order; different names give unrelated
    orders.
    """
    hashed = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(hashed[:8], "little")


def permute(
    index: np.ndarray, size: int | np.ndarray, key: int | np.ndarray
) -> np.ndarray:
    """Chooses the sample in [0, size) that each running `index` takes.

    Epoch `index // size` visits every sample once, in its own pseudo-random order: a
    Feistel network on the mixed radix a x b (a = ceil(sqrt(size)), b = ceil(size / a);
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), walking the cycle
    for the fewer than `a` values past the end.

    Args:
      size: of the source; an array like `index` (int64) where sources differ.
      key: of the source, too (uint64).

    Returns:
      int64, in the shape of `index`.
    """
    epoch, position = np.divmod(np.asarray(index, np.int64), size)
    keys = _mix(
        epoch.astype(np.uint64) * np.uint64(_GOLDEN) + np.asarray(key, np.uint64)
    )
    root = np.ceil(np.sqrt(size)).astype(np.int64)
    a = root.astype(np.uint64)
    b = (-(-size // root)).astype(np.uint64)
    end = np.asarray(size, np.uint64)
    value = _feistel(position.astype(np.uint64), keys, a, b)
    while np.any(value >= end):
        value = np.where(value >= end, _feistel(value, keys, a, b), value)
    return value.astype(np.int64)


def _feistel(
    value: np.ndarray, keys: np.ndarray, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    left, right = np.divmod(value, b)
    for number, constant in enumerate(_ROUND_KEYS):
        if number % 2 == 0:
            left = (left + _mix((right ^ constant) + keys) % a) % a
        else:
            right = (right + _mix((left ^ constant) + keys) % b) % b
    return left * b + right


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finaliser to uint64 `x`, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class Mixture:
    """Which source each global sample index takes.

    The pattern repeats every `PERIOD` samples; within a period source k has `counts[k]`
    evenly spaced samples, so any run of samples holds the wanted proportions to within
    about one sample per source. Weights (finite, > 0) are therefore rounded to
    multiples of 1 / PERIOD, at least one.
    """

    PERIOD = 4096

    def __init__(self, weights: Sequence[float]) -> None:
        share = np.asarray(weights, np.float64)
        self.counts = _largest_remainder(share / share.sum(), self.PERIOD)
        source = np.repeat(np.arange(share.size), self.counts)
        rank = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((rank + 0.5) / self.counts[source], kind="stable")
        self._source = source[order]
        self._rank = rank[order]

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the source of global sample indices [B], and the running index within
        that source, both [B].
        """
        period, slot = np.divmod(np.asarray(index, np.int64), self.PERIOD)
        source = self._source[slot]
        return source, period * self.counts[source] + self._rank[slot]


def _largest_remainder(share: np.ndarray, total: int) -> np.ndarray:
    """Rounds `share * total` to integers, each at least 1, that sum to `total`."""
    counts = np.maximum(np.floor(share * total), 1).astype(np.int64)
    while counts.sum() != total:
        missing = total - counts.sum()
        step = np.sign(missing)
        able = np.flatnonzero((counts > 1) | (step > 0))
        want = (share * total - counts)[able] * step
        counts[able[np.argsort(-want, kind="stable")[: abs(missing)]]] += step
    return counts
