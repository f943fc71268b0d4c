"""Compiled schedules, which the executor reads: buffer slots, rows and runs.

A chunk is a group of consecutive layers on a stage, and a place is a chunk of a stage.
Place k of the model's depth is chunk k // stages of stage k % stages. In names, `x` is
the input of a chunk, `y` its output, `g` the gradient of its output, `mb` a microbatch,
and `rx`, `rg` the slots that receive a hop.

All stages run a tick in lockstep. Its ops have this order; an op that no stage needs is
left out:

  1. gradient hop   dx of the previous tick goes to the previous stage, into gradient
     slot `rg`
  2. E   embed microbatch `e_mb`; the first stage stores it in input slot `e_x`
  3. F   y = chunk `f_chunk` of the stage, on input slot `f_x`
  4. H   score microbatch `h_mb` on the last stage's y; the last stage stores the
     gradient of y in gradient slot `h_g`
  5. hop y goes to the next stage, which stores it in input slot `rx` AFTER op 6
  6. B   dx, dw = vjp of chunk `b_chunk` at input slot `b_x`, with gradient slot `b_g`
  7. EB  embedding gradient of microbatch `eb_mb` from the first stage's dx

So another stage can use y and dx in the next tick at the earliest. The last stage can
use the gradient of y in the same tick. All stages run the same ops in a tick. A stage
that needs no op computes on the trash slot, and its result is masked.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.parallel.pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    Schedule,
    check,
    ticks_of,
)

# arrays of numpy in a program, scalars on the device in a tick
Values = TypeVar("Values")


class ScheduleRows(NamedTuple, Generic[Values]):
    """The ops of each stage in each tick, int32 [ticks, stages].

    Without an op, the microbatch (`_mb`) is -1, the chunk 0, and the slot trash.
    """

    # gradient slot for dx of the next stage, which arrives at the START of this tick
    rg: Values
    e_x: Values  # input slot for the embedding; always trash but on the first stage
    f_mb: Values
    f_chunk: Values
    f_x: Values  # input slot that F reads (= e_x if this tick embeds for it)
    # gradient slot for the gradient of y; always trash but on the last stage
    h_g: Values
    b_mb: Values
    b_chunk: Values
    b_x: Values  # input slot that B reads; free after B
    b_g: Values  # gradient slot that B reads; free after B
    # input slot for y of the previous stage, which arrives at the END of this tick
    rx: Values


class Ticks(NamedTuple, Generic[Values]):
    """The ops that are the same on all stages, int32 or bool [ticks].

    Without an op, the microbatch (`_mb`) is -1.
    """

    e_mb: Values
    h_mb: Values
    eb_mb: Values
    any_embed: Values
    any_forward: Values
    any_head: Values
    any_backward: Values
    any_embed_backward: Values
    any_hop: Values  # some rx is not trash
    any_gradient_hop: Values  # some rg is not trash


# Kinds of ops, and then of hops, in the order of their fields.
KINDS = tuple(
    name.removeprefix("any_") for name in Ticks._fields if name.startswith("any_")
)
_OPS = KINDS[:5]


class TickRun(NamedTuple):
    """Ticks [start, start + length) with the same code.

    An op in `every` needs no predicate. Other ops in `some` need a predicate that
    depends only on the tick. Hops never need one: values that no stage needs go to the
    trash slot. The code of all other ops is left out.
    """

    start: int
    length: int
    some: frozenset[str]  # names of KINDS that run in at least one tick
    every: frozenset[str]  # names of KINDS that run in all ticks


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled schedule; each buffer has one more slot, the last one, for trash."""

    schedule: Schedule
    rows: ScheduleRows[np.ndarray]
    ticks: Ticks[np.ndarray]
    runs: tuple[TickRun, ...]
    num_inputs: int  # input slots without trash
    num_gradients: int  # gradient slots without trash
    live_inputs: tuple[int, ...]  # each stage's input slots in use at the peak


def compile_schedule(schedule: Schedule, *, max_runs: int = 8) -> Program:
    """Compiles a schedule into rows, slots and runs.

    Args:
      schedule: the schedule, whose table is checked.
      max_runs: runs are split wherever the set of ops changes, if that gives at most
        this number. Otherwise they are split by forward and backward only, because
        each run is a loop body to compile.

    Raises:
      ConfigError: the faults that `check` finds.
    """
    faults = check(schedule)
    if faults:
        raise ConfigError(faults)
    forward, backward = _op_ticks(schedule)
    slots = _assign_all_slots(forward, backward, schedule.stages)
    rows = _build_rows(schedule, forward, backward, slots)
    ticks = _build_ticks(rows, schedule.chunks, slots)
    runs = _split_runs(ticks, _OPS)
    if len(runs) > max_runs:
        runs = _split_runs(ticks, ("forward", "backward"))
    return Program(
        schedule=schedule,
        rows=rows,
        ticks=ticks,
        runs=runs,
        num_inputs=slots.num_inputs,
        num_gradients=slots.num_gradients,
        live_inputs=slots.live_inputs,
    )


def _op_ticks(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Looks up the ticks of forwards and of backwards, [microbatches, places] each."""
    places = schedule.stages * schedule.chunks
    ticks = np.zeros((2, schedule.microbatches, places), np.int64)
    for op, (tick,) in ticks_of(schedule).items():
        ticks[op] = tick
    return ticks[FORWARD], ticks[BACKWARD]


class _Slots(NamedTuple):
    """The buffer slots of all inputs (x) and gradients (g), [microbatches, places].

    A slot holds its value from the tick `x_from` or `g_from` until B of its place.
    """

    x_from: np.ndarray  # tick in which the input is in its slot for the first time
    x_slot: np.ndarray
    g_from: np.ndarray  # tick in which the gradient is in its slot for the first time
    g_slot: np.ndarray
    num_inputs: int  # input slots without trash, which is also the number of trash
    num_gradients: int  # gradient slots without trash, also the number of trash
    live_inputs: tuple[int, ...]  # each stage's input slots in use at the peak


def _assign_all_slots(forward: np.ndarray, backward: np.ndarray, stages: int) -> _Slots:
    """Assigns buffer slots to the inputs and the output gradients of all places.

    Args:
      forward: tick of each forward, [microbatches, places].
      backward: tick of each backward.
      stages: number of stages of the pipeline.
    """
    # Inputs live from their arrival to B. A hop arrives after B of its tick, so it
    # counts from the next tick. The first place embeds its input in the tick of F, and
    # the last place has its gradient from H in the tick of F.
    x_from = np.concatenate([forward[:, :1], forward[:, :-1] + 1], axis=1)
    g_from = np.concatenate([backward[:, 1:] + 1, forward[:, -1:]], axis=1)
    x_slot, live_inputs = _assign_slots(x_from, backward, stages)
    g_slot, live_gradients = _assign_slots(g_from, backward, stages)
    return _Slots(
        x_from=x_from,
        x_slot=x_slot,
        g_from=g_from,
        g_slot=g_slot,
        num_inputs=max(live_inputs),
        num_gradients=max(live_gradients),
        live_inputs=live_inputs,
    )


def _build_rows(
    schedule: Schedule, forward: np.ndarray, backward: np.ndarray, slots: _Slots
) -> ScheduleRows[np.ndarray]:
    """Builds the ops of each stage in each tick.

    Args:
      schedule: the schedule.
      forward: tick of each forward, [microbatches, places].
      backward: tick of each backward.
      slots: slots of all inputs and gradients.
    """
    indices = np.indices(forward.shape)
    microbatch = np.asarray(indices[0])
    place = np.asarray(indices[1])
    chunk_of, stage_of = np.divmod(place, schedule.stages)
    no_input = slots.num_inputs  # the trash slots
    no_gradient = slots.num_gradients

    def row(
        value: np.ndarray, empty: int, tick: np.ndarray, places: slice
    ) -> np.ndarray:
        """Writes values of some places at their ticks and stages, `empty` elsewhere."""
        out = np.full(schedule.table.shape[:2], empty, np.int32)
        out[tick[:, places], stage_of[:, places]] = value[:, places]
        return out

    every = slice(None)
    first = slice(0, 1)
    last = slice(-1, None)
    return ScheduleRows(
        rg=row(slots.g_slot, no_gradient, slots.g_from, slice(-1)),
        e_x=row(slots.x_slot, no_input, forward, first),
        f_mb=row(microbatch, -1, forward, every),
        f_chunk=row(chunk_of, 0, forward, every),
        f_x=row(slots.x_slot, no_input, forward, every),
        h_g=row(slots.g_slot, no_gradient, forward, last),
        b_mb=row(microbatch, -1, backward, every),
        b_chunk=row(chunk_of, 0, backward, every),
        b_x=row(slots.x_slot, no_input, backward, every),
        b_g=row(slots.g_slot, no_gradient, backward, every),
        rx=row(slots.x_slot, no_input, slots.x_from - 1, slice(1, None)),
    )


def _build_ticks(
    rows: ScheduleRows[np.ndarray], chunks: int, slots: _Slots
) -> Ticks[np.ndarray]:
    """Builds the ops that are the same on all stages.

    E and EB belong to chunk 0 of the first stage, H to the last chunk of the last stage.

    Args:
      rows: the ops of each stage.
      chunks: number of chunks of each stage.
      slots: slots of all inputs and gradients.
    """
    e_mb = np.where(rows.f_chunk[:, 0] == 0, rows.f_mb[:, 0], -1)
    h_mb = np.where(rows.f_chunk[:, -1] == chunks - 1, rows.f_mb[:, -1], -1)
    eb_mb = np.where(rows.b_chunk[:, 0] == 0, rows.b_mb[:, 0], -1)
    return Ticks(
        e_mb=e_mb,
        h_mb=h_mb,
        eb_mb=eb_mb,
        any_embed=e_mb >= 0,
        any_forward=np.any(rows.f_mb >= 0, axis=1),
        any_head=h_mb >= 0,
        any_backward=np.any(rows.b_mb >= 0, axis=1),
        any_embed_backward=eb_mb >= 0,
        any_hop=np.any(rows.rx != slots.num_inputs, axis=1),
        any_gradient_hop=np.any(rows.rg != slots.num_gradients, axis=1),
    )


def _assign_slots(
    start: np.ndarray, end: np.ndarray, stages: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Assigns buffer slots to values, so that two live ones never share a slot.

    It is greedy on each stage: by start, the lowest free slot first. For intervals this
    uses the fewest slots.

    Args:
      start: first tick of each value, [microbatches, places].
      end: last tick of each value.
      stages: number of stages of the pipeline.

    Returns:
      The slot of each value, and the number of slots on each stage.
    """
    microbatches, places = start.shape
    slots = np.zeros(start.shape, np.int64)
    used = [0] * stages
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (end, slot)
        on_stage = itertools.product(range(microbatches), range(stage, places, stages))
        for i, k in sorted(on_stage, key=lambda index: start[index]):
            while busy and busy[0][0] < start[i, k]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            slots[i, k] = heapq.heappop(free) if free else len(busy)
            used[stage] = max(used[stage], int(slots[i, k]) + 1)
            heapq.heappush(busy, (int(end[i, k]), int(slots[i, k])))
    return slots, tuple(used)


def _split_runs(
    ticks: Ticks[np.ndarray], split_by: Sequence[str]
) -> tuple[TickRun, ...]:
    """Splits the ticks into runs in which these kinds of ops do not change."""
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
