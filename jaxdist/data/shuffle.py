"""Order of samples: a pure function of (seed, global sample index).

A resumed run therefore continues the order at no cost. The order does not depend on
hosts, steps or batch sizes. But the position in it does: the batch of step s begins at
index s x G, so a run keeps its global batch size G.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_ROUND_KEYS = tuple(np.uint64(_GOLDEN * number % 2**64) for number in range(1, 7))


def order_key(seed: int, name: str) -> int:
    """Hashes a seed and a source's name to the 64-bit key of the source's order.

    Different names give unrelated orders.
    """
    hashed = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(hashed[:8], "little")


def permute(
    index: np.ndarray, size: int | np.ndarray, key: int | np.ndarray
) -> np.ndarray:
    """Chooses the sample in [0, size) for each running `index`.

    Epoch `index // size` visits every sample once, in a pseudo-random order of its own.
    The order is a Feistel network on the mixed radix a x b, with a = ceil(sqrt(size))
    and b = ceil(size / a). Fewer than `a` values are past the end; they walk along
    their cycle until they are inside. See Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002.

    Args:
      index: running indices within a source, int64.
      size: samples of the source. An array of the shape of `index` if sources differ.
      key: key of the source's order, uint64; may be such an array, too.

    Returns:
      Numbers of samples, int64, in the shape of `index`.
    """
    epoch, position = np.divmod(np.asarray(index, np.int64), size)
    keys = _mix(
        epoch.astype(np.uint64) * np.uint64(_GOLDEN) + np.asarray(key, np.uint64)
    )
    root = np.ceil(np.sqrt(size)).astype(np.int64)
    a = root.astype(np.uint64)
    b = (-(-size // root)).astype(np.uint64)
    end = np.asarray(size, np.uint64)
    value = _feistel(position.astype(np.uint64), keys, a=a, b=b)
    while np.any(value >= end):
        value = np.where(value >= end, _feistel(value, keys, a=a, b=b), value)
    return value.astype(np.int64)


def _feistel(
    value: np.ndarray, keys: np.ndarray, *, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Permutes values in [0, a b) by a Feistel network, with one key per value."""
    left, right = np.divmod(value, b)
    for number, constant in enumerate(_ROUND_KEYS):
        if number % 2 == 0:
            left = (left + _mix((right ^ constant) + keys) % a) % a
        else:
            right = (right + _mix((left ^ constant) + keys) % b) % b
    permuted: np.ndarray = left * b + right
    return permuted


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finaliser to uint64 `x`, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class Mixture:
    """Choice of a source for each global sample index.

    The pattern repeats every `PERIOD` samples. Within a period, source k has
    `counts[k]` evenly spaced samples. Any run of samples therefore has the wanted
    proportions, to within about one sample per source. Weights are finite and > 0. They
    are rounded to multiples of 1 / PERIOD, at least one.
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
        """Finds the source of each sample, and the sample's running index in it.

        Args:
          index: global sample indices [B].

        Returns:
          Sources [B] and running indices [B].
        """
        period, slot = np.divmod(np.asarray(index, np.int64), self.PERIOD)
        source = self._source[slot]
        return source, period * self.counts[source] + self._rank[slot]


def _largest_remainder(share: np.ndarray, total: int) -> np.ndarray:
    """Rounds `share * total` to integers, each at least 1, that sum to `total`."""
    counts: np.ndarray = np.maximum(np.floor(share * total), 1).astype(np.int64)
    while counts.sum() != total:
        missing = total - counts.sum()
        step = np.sign(missing)
        adjustable = np.flatnonzero((counts > 1) | (step > 0))
        remainder = (share * total - counts)[adjustable] * step
        largest_first = adjustable[np.argsort(-remainder, kind="stable")]
        counts[largest_first[: abs(missing)]] += step
    return counts
