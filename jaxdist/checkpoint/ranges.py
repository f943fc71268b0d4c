"""Planner of reads: which bytes of which files fill a part of an array.

The files of a step hold an array in boxes, as its sharding was when it was saved. A
restore on another mesh, or with another number of processes, needs other boxes. The
planner cuts each wanted box into blocks of rows that are contiguous in a file. Small
runs of bytes are read together with what is between them.

The functions are pure: they read no file, and know no process or device.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxdist.checkpoint.folders import ArrayInfo, CheckpointError
from jaxdist.checkpoint.memory_file import Box, itemsize, read_into

# Runs of fewer bytes are read together, with the bytes between them.
SMALL_BYTES = 1 << 16
# Most bytes of a block that holds more than what is wanted.
BLOCK_BYTES = 1 << 24


class Missing(CheckpointError):
    """Error of a part of an array that no file holds. `boxes` has the parts."""

    def __init__(self, name: str, boxes: Sequence[Box]) -> None:
        self.boxes = tuple(boxes)
        count = sum(box.size for box in boxes)
        first = boxes[0]
        super().__init__(
            f"no file holds {count:,} elements of {name}, such as those from "
            f"{list(first.start)} to {list(first.stop)}"
        )


class StoredPiece(NamedTuple):
    """A box of an array in a file."""

    owner: int  # file
    box: Box
    offset: int  # first byte in the file


class Read(NamedTuple):
    """A block of a file, and the part of it that is wanted."""

    owner: int  # file
    offset: int  # first byte of the block in the file
    shape: tuple[int, ...]  # shape of the block, which is contiguous in the file
    source: tuple[slice, ...]  # wanted part of the block
    target: tuple[slice, ...]  # place of that part in the wanted box


@dataclass
class StoredArray:
    """An array in the files of a step."""

    name: str
    info: ArrayInfo
    pieces: list[StoredPiece] = field(default_factory=list)
    _by_box: dict[Box, StoredPiece] = field(default_factory=dict)

    def add(self, piece: StoredPiece) -> None:
        """Adds a piece. The first of equal boxes counts."""
        if piece.box not in self._by_box:
            self._by_box[piece.box] = piece
            self.pieces.append(piece)

    def candidates(self, wanted: Box) -> Iterable[StoredPiece]:
        """Yields the pieces that may overlap a box; only one if it equals the box."""
        equal = self._by_box.get(wanted)
        return self.pieces if equal is None else (equal,)


def plan(stored: StoredArray, wanted: Box) -> list[Read]:
    """Plans the reads that fill a box of an array. Each element is read once.

    Args:
      stored: the array in files.
      wanted: the box to fill.

    Raises:
      Missing: the files do not hold all of the box.
      ValueError: the box is not inside of the array.
    """
    _check_inside(wanted, stored)
    if not wanted.size:
        return []
    size = itemsize(stored.info)
    reads: list[Read] = []
    missing = [wanted]
    for piece in stored.candidates(wanted):
        left: list[Box] = []
        for box in missing:
            overlap = intersection(box, piece.box)
            if overlap is None:
                left.append(box)
                continue
            reads += _reads(piece, overlap, wanted, size)
            left += without(box, overlap)
        missing = left
        if not missing:
            return reads
    raise Missing(stored.name, missing)


def _check_inside(wanted: Box, stored: StoredArray) -> None:
    shape = stored.info.shape
    has_dims = len(wanted.start) == len(wanted.stop) == len(shape)
    if not has_dims or not all(
        0 <= first <= last <= size
        for first, last, size in zip(wanted.start, wanted.stop, shape, strict=True)
    ):
        raise ValueError(f"{stored.name}: {wanted} is not inside of {shape}")


def intersection(one: Box, other: Box) -> Box | None:
    """Computes the elements that two boxes share; None if they share none."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    if any(first >= last for first, last in zip(start, stop, strict=True)):
        return None
    return Box(start, stop)


def without(box: Box, part: Box) -> list[Box]:
    """Cuts a part out of a box, and returns the rest as boxes that do not overlap.

    Args:
      box: the box.
      part: a box inside of it.
    """
    rest = []
    start = list(box.start)
    stop = list(box.stop)
    for dim in range(len(start)):
        if start[dim] < part.start[dim]:
            before = [*stop[:dim], part.start[dim], *stop[dim + 1 :]]
            rest.append(Box(tuple(start), tuple(before)))
        if part.stop[dim] < stop[dim]:
            after = [*start[:dim], part.stop[dim], *start[dim + 1 :]]
            rest.append(Box(tuple(after), tuple(stop)))
        start[dim] = part.start[dim]
        stop[dim] = part.stop[dim]
    return rest


def _reads(piece: StoredPiece, overlap: Box, wanted: Box, size: int) -> Iterator[Read]:
    """Yields the blocks of a piece that hold an overlap of it.

    Args:
      piece: the piece.
      overlap: the part of it that is wanted, in positions of the array.
      wanted: the box to fill.
      size: bytes of an element.
    """
    shape = piece.box.shape
    if not shape:
        yield Read(piece.owner, piece.offset, (), (), ())
        return
    low = _minus(overlap.start, piece.box.start)
    high = _minus(overlap.stop, piece.box.start)
    dim = _dim_of_rows(shape, low, high, size)
    rows_at_once = high[dim] - low[dim]
    if _minus(high[dim + 1 :], low[dim + 1 :]) != shape[dim + 1 :]:
        row_bytes = size * math.prod(shape[dim + 1 :])
        rows_at_once = max(1, BLOCK_BYTES // row_bytes)
    for outer in itertools.product(*map(range, low[:dim], high[:dim])):
        for first in range(low[dim], high[dim], rows_at_once):
            last = min(first + rows_at_once, high[dim])
            start = (*outer, first, *low[dim + 1 :])
            stop = (*(index + 1 for index in outer), last, *high[dim + 1 :])
            yield _read_of_rows(piece, Box(start, stop), wanted, dim, size)


def _read_of_rows(
    piece: StoredPiece, part: Box, wanted: Box, dim: int, size: int
) -> Read:
    """Makes the read of whole rows of a dim, which hold a part of a piece.

    Args:
      piece: the piece.
      part: the part, in positions of the piece. It is one row in dims before `dim`.
      wanted: the box to fill.
      dim: the dim of the rows.
      size: bytes of an element.
    """
    shape = piece.box.shape
    row = _row_number(part.start[: dim + 1], shape)
    row_bytes = size * math.prod(shape[dim + 1 :])
    place = _minus(wanted.start, piece.box.start)  # of the wanted box in the piece
    return Read(
        owner=piece.owner,
        offset=piece.offset + row * row_bytes,
        shape=(*part.shape[: dim + 1], *shape[dim + 1 :]),
        source=_slices((*[0] * (dim + 1), *part.start[dim + 1 :]), part.shape),
        target=_slices(_minus(part.start, place), part.shape),
    )


def _slices(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + size) for first, size in zip(start, sizes, strict=True)
    )


def _dim_of_rows(
    shape: Sequence[int], low: Sequence[int], high: Sequence[int], size: int
) -> int:
    """Chooses the dim whose rows are read together.

    Rows of the innermost dim that is not wanted whole are contiguous. If these are few
    bytes, the rows of a dim further outside are read.
    """
    dim = len(shape) - 1
    run_bytes = size * (high[dim] - low[dim])
    while dim and (run_bytes < SMALL_BYTES or high[dim] - low[dim] == shape[dim]):
        dim -= 1
        run_bytes = size * (high[dim] - low[dim]) * math.prod(shape[dim + 1 :])
    return dim


def _row_number(index: Sequence[int], shape: Sequence[int]) -> int:
    """Computes the number of the row with an index of the first dims."""
    number = 0
    for position, length in zip(index, shape, strict=False):
        number = number * length + position
    return number


def _minus(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def fill(out: np.ndarray, reads: Iterable[Read], files: Mapping[int, BinaryIO]) -> int:
    """Fills an array with the result of reads, and returns the bytes that were read.

    Args:
      out: the array, contiguous, with the type of the stored one.
      reads: the plan for it.
      files: the open file of each owner.

    Raises:
      CheckpointError: a file ends early.
      OSError: a file cannot be read.
    """
    total = 0
    for read in reads:
        index: Any = (*read.target, ...)  # with "...", a view even of a scalar
        place = out[index]
        is_whole = place.shape == read.shape and place.flags.c_contiguous
        block = place if is_whole else np.empty(read.shape, out.dtype)
        raw = block.reshape(-1).view(np.uint8).data
        _read_exactly(files[read.owner], read.offset, raw)
        if not is_whole:
            place[...] = block[read.source]
        total += len(raw)
    return total


def _read_exactly(file: BinaryIO, offset: int, raw: memoryview) -> None:
    """Reads bytes from an offset of a file until a view is full."""
    file.seek(offset)
    done = 0
    while done < len(raw):
        count = read_into(file, raw[done:])
        if not count:
            raise CheckpointError(f"a file ends {len(raw) - done:,} bytes early")
        done += count
