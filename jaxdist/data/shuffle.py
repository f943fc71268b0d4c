"""The order of samples: a pure function of (seed, global sample index), so resuming
costs nothing. Nothing here knows of hosts, steps or batch sizes."""

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1, _MULTIPLY_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_ROUND_KEYS = tuple(np.uint64(_GOLDEN * number % 2**64) for number in range(1, 7))


def order_key(seed: int, name: str) -> int:
    """Returns the 64-bit key of a source's order; different names give unrelated
    orders.
    """
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little"
    )


def permute(
    index: np.ndarray, size: int | np.ndarray, key: int | np.ndarray
) -> np.ndarray:
    """Returns the sample in [0, size) that each running `index` takes: int64, shape of
    `index`.

    Epoch `index // size` visits every sample once, in its own pseudo-random order: a
    Feistel network on the mixed radix a x b (a = ceil(sqrt(size)), b = ceil(size / a);
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), walking the cycle
    for the fewer than `a` values past the end.

    Args:
      size, key: of the source; arrays like `index` (int64, uint64) where sources
      differ.
    """
    epoch, position = np.divmod(np.asarray(index, np.int64), size)
    keys = _mix(
        epoch.astype(np.uint64) * np.uint64(_GOLDEN) + np.asarray(key, np.uint64)
    )
    root = np.ceil(np.sqrt(size)).astype(np.int64)
    a, b = root.astype(np.uint64), (-(-size // root)).astype(np.uint64)
    end = np.asarray(size, np.uint64)
    value = _feistel(position.astype(np.uint64), keys, a, b)
    while np.any(outside := value >= end):
        value = np.where(outside, _feistel(value, keys, a, b), value)
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
    """Returns splitmix64's finaliser of uint64 `x`, in place."""
    x ^= x >> _SHIFT_1
    x *= _MULTIPLY_1
    x ^= x >> _SHIFT_2
    x *= _MULTIPLY_2
    x ^= x >> _SHIFT_3
    return x


class Mixture:
    """Which source each global sample index takes.

    The pattern repeats every `PERIOD` samples; within a period source k has `counts[k]`
    evenly spaced samples, so any run of samples holds the wanted proportions to within
    about one sample per source. Weights (finite, > 0) are therefore rounded to
    multiples of 1 / PERIOD, at least one.
    """

    PERIOD = 4096

    def __init__(self, weights: Sequence[float]):
        share = np.asarray(weights, np.float64)
        self.counts = _largest_remainder(share / share.sum(), self.PERIOD)
        source = np.repeat(np.arange(share.size), self.counts)
        rank = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((rank + 0.5) / self.counts[source], kind="stable")
        self._source, self._rank = source[order], rank[order]

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, running index within that source) of global sample indices,
        both [B].
        """
        period, slot = np.divmod(np.asarray(index, np.int64), self.PERIOD)
        source = self._source[slot]
        return source, period * self.counts[source] + self._rank[slot]


def _largest_remainder(share: np.ndarray, total: int) -> np.ndarray:
    """Returns integers near `share * total`, each at least 1, that sum to `total`."""
    counts = np.maximum(np.floor(share * total), 1).astype(np.int64)
    while (missing := total - counts.sum()) != 0:
        step = 1 if missing > 0 else -1
        able = np.flatnonzero((counts > 1) | (step > 0))
        want = (share * total - counts)[able] * step
        counts[able[np.argsort(-want, kind="stable")[: abs(missing)]]] += step
    return counts
