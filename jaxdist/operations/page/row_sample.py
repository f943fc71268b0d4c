"""Sample of rows by step, within a number of bytes."""

import math
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxdist.telemetry.metrics import Row

# Bytes of the lines whose rows are kept: 16,000 rows of 1 kB. As Python's values they
# take about four times as much memory.
MAX_BYTES = 1 << 24


class _Kept(NamedTuple):
    row: Row
    num_bytes: int  # bytes of its line


class RowSample:
    """Rows by step: all of a short file, and an even sample of a long one.

    `stride` steps share a bucket. A bucket keeps its first row and its highest one, so
    that peaks remain. If the rows have too many bytes, the stride doubles. The row of the
    highest step is always kept.
    """

    def __init__(
        self,
        height: Callable[[Row], float] = lambda row: 0.0,
        *,
        max_bytes: int | None = None,
    ) -> None:
        """Begins without rows.

        Args:
          height: height of a row; NaN counts as infinite.
          max_bytes: bytes of the lines whose rows are kept; default: MAX_BYTES.
        """
        self.num_added = 0
        self._height = height
        self._max_bytes = max_bytes or MAX_BYTES
        self._stride = 1
        self._buckets: dict[int, list[_Kept]] = {}
        self._num_bytes = 0  # of the lines in the buckets
        self._newest: Row | None = None  # row of the highest step

    @property
    def is_whole(self) -> bool:
        """Checks if the sample has the last row of each step."""
        return self._stride == 1

    def add(self, row: Row, num_bytes: int) -> None:
        """Adds a row, which replaces an earlier one of its step.

        Args:
          row: the row, with an integer `step`.
          num_bytes: bytes of its line.
        """
        self.num_added += 1
        # each row of a file has texts of its own as keys
        row = {sys.intern(name): value for name, value in row.items()}
        if self._newest is None or row["step"] >= self._newest["step"]:
            self._newest = row
        index = row["step"] // self._stride
        others = [
            kept
            for kept in self._buckets.get(index, ())
            if kept.row["step"] != row["step"]
        ]
        self._set_bucket(index, [*others, _Kept(row, num_bytes)])
        if self._num_bytes > self._max_bytes:
            self._thin()

    def drop_after(
        self, step: int, is_dropped: Callable[[Row], bool] = lambda row: True
    ) -> None:
        """Drops the rows of all steps after this one.

        Args:
          step: the last step whose rows stay.
          is_dropped: tests a row of a later step, which stays if this is False.
        """
        if self._newest is None or self._newest["step"] <= step:
            return
        for index in [n for n in self._buckets if (n + 1) * self._stride > step + 1]:
            kept = [
                kept
                for kept in self._buckets[index]
                if kept.row["step"] <= step or not is_dropped(kept.row)
            ]
            self._set_bucket(index, kept)
        self._newest = None
        self._newest = max(self.rows(), key=_step_of, default=None)

    def rows(self) -> list[Row]:
        """Lists the kept rows, sorted by step."""
        rows = [kept.row for bucket in self._buckets.values() for kept in bucket]
        if self._newest is not None and not any(row is self._newest for row in rows):
            rows.append(self._newest)
        return sorted(rows, key=_step_of)

    def _set_bucket(self, index: int, kept: list[_Kept]) -> None:
        self._num_bytes -= _num_bytes(self._buckets.pop(index, ()))
        if not kept:
            return
        if len(kept) > 1:
            first = min(kept, key=lambda kept: _step_of(kept.row))
            peak = max(kept, key=lambda kept: self._height_of(kept.row))
            kept = [first] if peak is first else [first, peak]
        self._buckets[index] = kept
        self._num_bytes += _num_bytes(kept)

    def _height_of(self, row: Row) -> float:
        height = self._height(row)
        return math.inf if math.isnan(height) else height

    def _thin(self) -> None:
        """Doubles the stride until half of the bytes remain."""
        while self._num_bytes > self._max_bytes / 2 and len(self._buckets) > 1:
            self._stride *= 2
            merged: dict[int, list[_Kept]] = {}
            for index, bucket in self._buckets.items():
                merged.setdefault(index // 2, []).extend(bucket)
            self._buckets = {}
            self._num_bytes = 0
            for index, bucket in merged.items():
                self._set_bucket(index, bucket)


def _num_bytes(kept: Iterable[_Kept]) -> int:
    return sum(item.num_bytes for item in kept)


def _step_of(row: Row) -> int:
    step: int = row["step"]
    return step
