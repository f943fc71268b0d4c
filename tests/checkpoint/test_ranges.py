"""The planner of reads, against numpy: random arrays, cut up in two random ways."""

import io
import math
import random

import ml_dtypes
import numpy as np
import pytest

from jaxdist.checkpoint import ranges
from jaxdist.checkpoint.folders import ArrayInfo, CheckpointError
from jaxdist.checkpoint.memory_file import Box
from jaxdist.checkpoint.ranges import Missing, StoredArray, StoredPiece

DTYPES = [np.dtype(x) for x in (np.float32, np.int8, np.float64, ml_dtypes.bfloat16)]


def split(rng: random.Random, box: Box) -> list[Box]:
    """Cut a box into boxes, as no sharding would."""
    sizes = box.shape
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or rng.random() < 0.3:
        return [box]
    dim = rng.choice(dims)
    middle = rng.randrange(box.start[dim] + 1, box.stop[dim])
    stop = (*box.stop[:dim], middle, *box.stop[dim + 1 :])
    start = (*box.start[:dim], middle, *box.start[dim + 1 :])
    return split(rng, Box(box.start, stop)) + split(rng, Box(start, box.stop))


def some_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def at(box: Box) -> tuple:
    return (*map(slice, *box), ...)


def stored(rng: random.Random, array: np.ndarray, boxes: list[Box], owners: int):
    """Return the array in files, {owner: file}, with junk between its pieces."""
    data = {owner: bytearray(rng.randbytes(3)) for owner in range(owners)}
    known = StoredArray("x", ArrayInfo(array.shape, str(array.dtype)))
    for box in boxes:
        owner = rng.randrange(owners)
        known.add(StoredPiece(owner, box, len(data[owner])))
        data[owner] += np.ascontiguousarray(array[at(box)]).tobytes()
        data[owner] += rng.randbytes(rng.randrange(5))
    return known, {owner: io.BytesIO(x) for owner, x in data.items()}


def make(rng: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    dtype = rng.choice(DTYPES)
    values = np.frombuffer(rng.randbytes(math.prod(shape)), np.int8)
    return values.reshape(shape).astype(dtype)


@pytest.mark.parametrize("small", [1, 64, 1 << 16])
@pytest.mark.parametrize("seed", range(8))
def test_any_box_is_filled_from_any_cut(seed, small, monkeypatch):
    monkeypatch.setattr(ranges, "SMALL_BYTES", small)
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 8 * small)
    rng = random.Random(seed)
    for _ in range(60):
        shape = tuple(rng.randrange(0, 9) for _ in range(rng.randrange(5)))
        array = make(rng, shape)
        whole = Box((0,) * len(shape), shape)
        boxes = split(rng, whole)
        rng.shuffle(boxes)
        known, files = stored(rng, array, boxes, rng.randrange(1, 4))
        for wanted in [whole, some_box(rng, shape), *split(rng, whole)[:4]]:
            plan = ranges.plan(known, wanted)
            # each element is written once
            count = np.zeros(wanted.shape, int)
            for read in plan:
                count[(*read.target, ...)] += 1
            assert (count == 1).all()
            out = np.empty(wanted.shape, array.dtype)
            ranges.fill(out, plan, files)
            assert out.tobytes() == array[at(wanted)].tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_what_no_file_holds_is_named(seed):
    rng = random.Random(seed)
    for _ in range(50):
        shape = tuple(rng.randrange(2, 7) for _ in range(rng.randrange(1, 4)))
        array = make(rng, shape)
        whole = Box((0,) * len(shape), shape)
        boxes = split(rng, whole)
        kept = [box for box in boxes if rng.random() < 0.7]
        known, files = stored(rng, array, kept, 2)
        wanted = some_box(rng, shape)
        held = np.zeros(shape, bool)
        for box in kept:
            held[at(box)] = True
        try:
            plan = ranges.plan(known, wanted)
        except Missing as error:
            absent = np.zeros(shape, int)
            for box in error.boxes:
                absent[at(box)] += 1
            want = np.zeros(shape, int)
            want[at(wanted)] = ~held[at(wanted)]
            np.testing.assert_array_equal(absent, want)
            assert f"{want.sum():,} elements of x" in str(error)
        else:
            assert held[at(wanted)].all()
            out = np.empty(wanted.shape, array.dtype)
            ranges.fill(out, plan, files)
            assert out.tobytes() == array[at(wanted)].tobytes()


def test_pieces_that_overlap_are_read_once():
    array = np.arange(20, dtype=np.int32)
    boxes = [Box((0,), (12,)), Box((0,), (12,)), Box((8,), (20,))]
    known, files = stored(random.Random(0), array, boxes, 1)
    plan = ranges.plan(known, Box((0,), (20,)))
    out = np.empty(20, np.int32)
    assert ranges.fill(out, plan, files) == array.nbytes
    np.testing.assert_array_equal(out, array)


def test_an_unchanged_sharding_reads_each_piece_in_one_go():
    pieces = [Box((0, 64 * n), (512, 64 * n + 64)) for n in range(8)]
    known = StoredArray("x", ArrayInfo((512, 512), "float32"))
    for number, box in enumerate(pieces):
        known.add(StoredPiece(number, box, 128))
    for number, box in enumerate(pieces):
        (read,) = ranges.plan(known, box)
        assert (read.owner, read.offset, read.shape) == (number, 128, (512, 64))


def test_long_rows_are_read_alone_and_short_ones_together():
    info = ArrayInfo((4, 1 << 16), "float32")
    known = StoredArray("x", info, [StoredPiece(0, Box((0, 0), info.shape), 0)])
    half = ranges.plan(known, Box((0, 0), (4, 1 << 15)))
    assert [read.offset for read in half] == [n << 18 for n in range(4)]
    assert sum(math.prod(read.shape) for read in half) == 4 << 15  # nothing else
    short = ranges.plan(known, Box((0, 0), (4, 100)))
    assert len(short) == 1


def test_a_file_that_ends_early_is_an_error():
    array = np.arange(20, dtype=np.int32)
    whole = Box((0,), (20,))
    known, files = stored(random.Random(0), array, [whole], 1)
    cut = {0: io.BytesIO(files[0].getvalue()[:40])}
    with pytest.raises(CheckpointError, match="ends"):
        ranges.fill(np.empty(20, np.int32), ranges.plan(known, whole), cut)


def test_a_box_outside_of_the_array_is_an_error():
    known = StoredArray("x", ArrayInfo((4,), "int8"))
    for box in (Box((0,), (5,)), Box((-1,), (2,)), Box((), ())):
        with pytest.raises(ValueError, match="inside"):
            ranges.plan(known, box)
