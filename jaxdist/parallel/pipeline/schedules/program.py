"""What the executor reads: buffer slots, rows and runs, compiled from a schedule's
table.

The order of things in a tick, all stages in lockstep; a step is left out where nobody
needs it:

  1. gradient hop   dx of the tick before goes to the stage before, into gradient slot
     `rg`
  2. E   embed microbatch `e_mb`; the first stage keeps it in input slot `e_x`
  3. F   y = chunk `f_chunk` of the stage, on input slot `f_x`
  4. H   score microbatch `h_mb` on the last stage's y; the last stage keeps dh in slot
     `h_g`
  5. hop y goes to the next stage, to be kept in input slot `rx` AFTER step 6
  6. B   dx, dw = vjp of chunk `b_chunk` at input slot `b_x`, with gradient slot `b_g`
  7. EB  embedding gradient of microbatch `eb_mb` from the first stage's dx

So y is used one tick later at the earliest, dx too, and dh in the same tick. What a
tick does is uniform over stages: a stage without an op computes on the trash slot and
the result is masked.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.parallel.pipeline.schedules.table import Schedule, check, ticks_of


class ScheduleRows(NamedTuple):
    """What a stage does in a tick: int32 [ticks, stages]; no op: `_mb` -1, chunk 0,
    slot trash.
    """

    # gradient slot for dx of the next stage that arrives at the START of this tick
    rg: np.ndarray
    e_x: np.ndarray  # input slot for the embedding; not trash on the first stage only
    f_mb: np.ndarray
    f_chunk: np.ndarray
    f_x: np.ndarray  # input slot that F reads (= e_x where this tick embeds for it)
    h_g: np.ndarray  # gradient slot for dh; not trash on the last stage only
    b_mb: np.ndarray
    b_chunk: np.ndarray
    b_x: np.ndarray  # input slot that B reads; free after B
    b_g: np.ndarray  # gradient slot that B reads; free after B
    # input slot for y of the stage before that arrives at the END of this tick
    rx: np.ndarray


class Ticks(NamedTuple):
    """What is the same on all stages in a tick: int32 or bool [ticks]; -1 for no
    microbatch.
    """

    e_mb: np.ndarray
    h_mb: np.ndarray
    eb_mb: np.ndarray
    any_embed: np.ndarray
    any_forward: np.ndarray
    any_head: np.ndarray
    any_backward: np.ndarray
    any_embed_backward: np.ndarray
    any_hop: np.ndarray  # some rx is not trash
    any_gradient_hop: np.ndarray  # some rg is not trash


KINDS = tuple(
    name.removeprefix("any_") for name in Ticks._fields if name.startswith("any_")
)


class TickRun(NamedTuple):
    """Ticks [start, start + length) of one kind: names of KINDS done in some, and in
    all, ticks.

    Not in `some`: leave the code out. In `every`: no predicate. Otherwise: a predicate
    that depends on the tick alone (or for a hop none: what arrives for nobody goes to
    trash).
    """

    start: int
    length: int
    some: frozenset[str]
    every: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled schedule; buffers have one slot more than `num_`, the last, which is
    trash.
    """

    schedule: Schedule
    rows: ScheduleRows
    ticks: Ticks
    runs: tuple[TickRun, ...]
    num_inputs: int
    num_gradients: int
    live_inputs: tuple[int, ...]  # input slots in use at the peak, by stage


def compile_schedule(schedule: Schedule, *, max_runs: int = 8) -> Program:
    """Returns rows, slots and runs. Runs are split by all kinds if that gives
    `max_runs` at most, else by forward and backward alone: each run is one more loop
    body to compile.

    Raises:
      ConfigError: what `check` says.
    """
    faults = check(schedule)
    if faults:
        raise ConfigError(faults)
    p = schedule.stages
    v = schedule.chunks
    at = np.zeros((2, schedule.microbatches, p * v), np.int64)  # the tick of each op
    for op, (tick,) in ticks_of(schedule).items():
        at[op] = tick
    f, b = at
    # Inputs live from arrival to B. A hop arrives after B of the tick before: it counts
    # from `f+1`.
    x_from = np.concatenate([f[:, :1], f[:, :-1] + 1], axis=1)
    g_from = np.concatenate([b[:, 1:] + 1, f[:, -1:]], axis=1)
    x, live_x = _colour(x_from, b, p)
    g, live_g = _colour(g_from, b, p)
    nx = max(live_x)
    ng = max(live_g)
    i, k = (np.asarray(index) for index in np.indices(f.shape))
    chunk_of, stage_of = np.divmod(k, p)

    def row(
        value: np.ndarray, empty: int, tick: np.ndarray, places: slice
    ) -> np.ndarray:
        out = np.full(schedule.table.shape[:2], empty, np.int32)
        out[tick[:, places], stage_of[:, places]] = value[:, places]
        return out

    every = slice(None)
    first = slice(0, 1)
    last = slice(-1, None)
    rows = ScheduleRows(
        rg=row(g, ng, g_from, slice(-1)),
        e_x=row(x, nx, f, first),
        f_mb=row(i, -1, f, every),
        f_chunk=row(chunk_of, 0, f, every),
        f_x=row(x, nx, f, every),
        h_g=row(g, ng, f, last),
        b_mb=row(i, -1, b, every),
        b_chunk=row(chunk_of, 0, b, every),
        b_x=row(x, nx, b, every),
        b_g=row(g, ng, b, every),
        rx=row(x, nx, x_from - 1, slice(1, None)),
    )
    edges = [row(i, -1, f, first), row(i, -1, f, last), row(i, -1, b, first)]
    ticks = _ticks(rows, *(edge.max(axis=1) for edge in edges), trash=(nx, ng))
    runs = _runs(ticks, KINDS[:5])
    if len(runs) > max_runs:
        runs = _runs(ticks, ("forward", "backward"))
    return Program(schedule, rows, ticks, runs, nx, ng, live_x)


def _ticks(
    rows: ScheduleRows,
    e_mb: np.ndarray,
    h_mb: np.ndarray,
    eb_mb: np.ndarray,
    *,
    trash: tuple[int, int],
) -> Ticks:
    return Ticks(
        e_mb=e_mb,
        h_mb=h_mb,
        eb_mb=eb_mb,
        any_embed=e_mb >= 0,
        any_forward=np.any(rows.f_mb >= 0, axis=1),
        any_head=h_mb >= 0,
        any_backward=np.any(rows.b_mb >= 0, axis=1),
        any_embed_backward=eb_mb >= 0,
        any_hop=np.any(rows.rx != trash[0], axis=1),
        any_gradient_hop=np.any(rows.rg != trash[1], axis=1),
    )


def _colour(
    start: np.ndarray, end: np.ndarray, stages: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns a slot for each interval [start, end] of ticks, [M, places], and slots by
    stage.

    Greedy by start, lowest free slot first, on each stage alone: optimal for intervals.
    """
    slots = np.zeros(start.shape, np.int64)
    used = [0] * stages
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (end, slot)
        own = [(i, k) for i, k in np.ndindex(start.shape) if k % stages == stage]
        for i, k in sorted(own, key=lambda at: start[at]):
            while busy and busy[0][0] < start[i, k]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            slots[i, k] = heapq.heappop(free) if free else len(busy)
            used[stage] = max(used[stage], int(slots[i, k]) + 1)
            heapq.heappush(busy, (int(end[i, k]), int(slots[i, k])))
    return slots, tuple(used)


def _runs(ticks: Ticks, split_by: Sequence[str]) -> tuple[TickRun, ...]:
    flags = {kind: getattr(ticks, f"any_{kind}") for kind in KINDS}
    key = np.stack([flags[kind] for kind in split_by])
    starts = [0, *(np.flatnonzero((key[:, 1:] != key[:, :-1]).any(0)) + 1).tolist()]
    ends = [*starts[1:], key.shape[1]]
    return tuple(
        TickRun(
            start,
            end - start,
            frozenset(kind for kind in KINDS if flags[kind][start:end].any()),
            frozenset(kind for kind in KINDS if flags[kind][start:end].all()),
        )
        for start, end in zip(starts, ends, strict=True)
    )
