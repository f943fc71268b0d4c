"""Schedules as tables: what they are, generators, files and the checker.

`table[tick, stage, slot]` is `microbatch * chunks + chunk`, or -1 for none; slot 0 is a
forward, slot 1 a backward, done after it in the same tick. Chunk c of stage s is
*place* c * stages + s of the chain of layers, so that every hop goes to the next stage
of a ring. What is read across stages arrives one tick later; the last place may do F
and B of a microbatch in one tick.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.storage.untrusted import Malformed, read_json

FORWARD = 0
BACKWARD = 1
FORMAT = "jaxdist.schedule"

_Op = tuple[int, int, int]  # slot, microbatch, place
_WORDS = ("forward", "backward")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """When each stage does what: `table` is int32 [ticks, stages, 2], see the head of
    this file.
    """

    stages: int
    microbatches: int
    chunks: int
    table: np.ndarray
    name: str = ""

    def labels(self, tick: int, stage: int) -> tuple[str, str]:
        """Returns "microbatch" or "microbatch.chunk" of the forward and the backward,
        or "".
        """
        ops = (divmod(int(entry), self.chunks) for entry in self.table[tick, stage])
        texts = [f"{i}.{chunk}" if self.chunks > 1 else f"{i}" for i, chunk in ops]
        forward, backward = np.where(self.table[tick, stage] >= 0, texts, "").tolist()
        return forward, backward


# Generators: a row here is a schedule.
# ------------------------------------------------------------


def _gpipe(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """Returns all forwards, then all backwards; every input of a step lives at once."""
    index = np.arange(microbatches)
    half = microbatches + stages - 1
    table = np.full((2 * half, stages, 2), -1, np.int32)
    for stage in range(stages):
        table[stage + index, stage, FORWARD] = index
        table[half + stages - 1 - stage + index, stage, BACKWARD] = index
    return table


def _interleaved(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """Returns fused 1F1B over `chunks` places a stage; with one chunk it is plain fused
    1F1B.

    The order is Megatron's: groups of `stages` microbatches pass through chunk 0, 1,
    ...; the last place does F and B of a microbatch in one tick, so a stage holds no input longer than needed.
    """
    index = np.arange(microbatches * chunks)
    microbatch = index // (stages * chunks) * stages + index % stages
    chunk = index // stages % chunks
    # the tick in which the last place meets the first microbatch
    turn = chunks * stages - 1
    table = np.full((len(index) + turn + stages - 1, stages, 2), -1, np.int32)
    for stage in range(stages):
        table[stage + index, stage, FORWARD] = microbatch * chunks + chunk
        start = turn + stages - 1 - stage
        table[start + index, stage, BACKWARD] = microbatch * chunks + chunks - 1 - chunk
    return table


class Generator(NamedTuple):
    """How a named schedule is made, and whether it takes chunks (then in whole
    groups).
    """

    build: Callable[[int, int, int], np.ndarray]
    chunked: bool


SCHEDULES = {
    "gpipe": Generator(_gpipe, chunked=False),
    "1f1b": Generator(_interleaved, chunked=False),
    "interleaved": Generator(_interleaved, chunked=True),
}


def build_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1
) -> Schedule:
    """Returns a valid schedule: a name of `SCHEDULES`, or the path of a file
    (`*.json`).

    Raises:
      ConfigError: all that the numbers or the file violate, in the words of the config
        keys.
    """
    if name.endswith(".json"):
        sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
        return _read_schedule(Path(name), sizes)
    sizes = {"mesh.pipeline": stages, "microbatches": microbatches, "chunks": chunks}
    faults = [
        f"{key} is {n}; at least 1 is required" for key, n in sizes.items() if n < 1
    ]
    kind = SCHEDULES.get(name)
    if kind is None:
        known = ", ".join(SCHEDULES)
        faults.append(
            f"pipeline.schedule is {name!r}; required: {known} or a path that ends .json"
        )
    elif not faults and chunks > 1 and not kind.chunked:
        faults.append(
            f"pipeline.chunks is {chunks} and {name} has one chunk a stage; "
            "set pipeline.chunks=1 or pipeline.schedule=interleaved"
        )
    elif not faults and kind.chunked and microbatches % stages:
        below = microbatches // stages * stages
        near = f"{below} or {below + stages}" if below else f"{stages}"
        faults.append(
            f"pipeline.microbatches is {microbatches} and interleaved works in groups of "
            f"{stages}, one microbatch a stage; set it to {near}, or pipeline.schedule=1f1b"
        )
    if faults or kind is None:
        raise ConfigError(faults)
    table = kind.build(stages, microbatches, chunks)
    return Schedule(stages, microbatches, chunks, table, name)


# Files: {"format", "version": 1, "name", "stages", "microbatches", "chunks", "ticks"},
# where ticks is a list of ticks, a tick a list of one cell a stage, and a cell "F3.1
# B0.0" (microbatch.chunk), either half or both absent; ".chunk" may be left out where
# there is one chunk. -------------------

_CELL = re.compile(r"(?:F(\d+)(?:\.(\d+))?)?\s*(?:B(\d+)(?:\.(\d+))?)?", re.ASCII)


def _read_schedule(path: Path, sizes: dict[str, int]) -> Schedule:
    """Returns the schedule of a file; `sizes` are the stages, microbatches and chunks
    of the configuration.

    Raises:
      ConfigError: the file cannot be read or is for other sizes, or what is wrong with
        its cells.
    """
    data = _read_head(path, sizes)
    stages, microbatches, chunks = sizes.values()
    entries = []
    faults = []
    if microbatches * chunks > len(data["ticks"]):
        work = f"{microbatches} microbatches x {chunks} chunks"
        faults.append(
            f"{path}: {len(data['ticks'])} ticks cannot hold {work}, one forward a tick"
        )
    for t, row in enumerate(data["ticks"]):
        if len(row) != stages:
            faults.append(
                f"{path}: tick {t} has {len(row)} cells; {stages} are required"
            )
        parsed = [_parse_cell(cell, microbatches, chunks) for cell in row]
        entries.append([cell or (-1, -1) for cell in parsed])
        faults += [
            f"{path}: tick {t}, stage {s}: {row[s]!r:.40} is no cell such as "
            f"{'F3.1 B0.0' if chunks > 1 else 'F3 B0'!r}, microbatch < {microbatches}, "
            f"chunk < {chunks}"
            for s, cell in enumerate(parsed)
            if cell is None
        ]
    if not faults:
        schedule = Schedule(
            **sizes,
            table=np.array(entries, np.int32),
            name=str(data.get("name") or path.stem),
        )
        faults = [f"{path}: {fault}" for fault in check(schedule)]
    if faults:
        raise ConfigError(faults)
    return schedule


def _read_head(path: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Returns the file's object once it has these sizes, and its ticks are lists."""
    try:
        data = read_json(path, dict)
    except (FileNotFoundError, Malformed) as error:
        raise ConfigError(f"{path} cannot be read as a schedule: {error}") from None
    if (data.get("format"), data.get("version")) != (FORMAT, 1):
        raise ConfigError(f'{path}: "format": "{FORMAT}", "version": 1 are required')
    faults = [
        f"{path} is for {data.get(key)!r:.40} {key}, the configuration has {size}"
        for key, size in sizes.items()
        if data.get(key) != size
    ]
    ticks = data.get("ticks")
    if not isinstance(ticks, list) or not all(isinstance(row, list) for row in ticks):
        faults.append(
            f"{path}: ticks must be a list of ticks, each a list of one cell a stage"
        )
    if faults:
        raise ConfigError(faults)
    return data


def _parse_cell(cell: object, microbatches: int, chunks: int) -> tuple[int, int] | None:
    """Returns the entries of both slots, or None if the cell is malformed or out of
    range.
    """
    match = (
        _CELL.fullmatch(cell.strip())
        if isinstance(cell, str) and len(cell) < 64
        else None
    )
    if match is None:
        return None
    entries = []
    for microbatch, chunk in (match.group(1, 2), match.group(3, 4)):
        i = int(microbatch or 0)
        c = int(chunk or 0)
        if (
            i >= microbatches
            or c >= chunks
            or (microbatch and not chunk and chunks > 1)
        ):
            return None
        entries.append(i * chunks + c if microbatch else -1)
    return entries[0], entries[1]


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Writes the file that `build_schedule` reads; an existing file raises
    FileExistsError.
    """
    rows = [
        json.dumps(
            [_cell(*schedule.labels(tick, stage)) for stage in range(schedule.stages)]
        )
        for tick in range(len(schedule.table))
    ]
    head = {
        "format": FORMAT,
        "version": 1,
        "name": schedule.name,
        "stages": schedule.stages,
    }
    head |= {"microbatches": schedule.microbatches, "chunks": schedule.chunks}
    body = json.dumps(head)[:-1] + ', "ticks": [\n' + ",\n".join(rows) + "\n]}\n"
    with path.open("x") as file:
        file.write(body)


def _cell(forward: str, backward: str) -> str:
    words = []
    if forward:
        words.append("F" + forward)
    if backward:
        words.append("B" + backward)
    return " ".join(words)


# The checker
# --------------------------------------------------------------------------------------


def check(schedule: Schedule) -> list[str]:
    """Returns all that makes a table invalid, one line each with tick and stage; [] if
    it is valid.

    Valid: every forward and backward stands exactly once; each comes late enough for
    what it reads (a hop takes one tick, dh none). So no stage waits for another: a
    table cannot deadlock.
    """
    p = schedule.stages
    m = schedule.microbatches
    v = schedule.chunks
    table = schedule.table
    if min(p, m, v) < 1 or table.ndim != 3 or table.shape[1:] != (p, 2):
        return [
            f"the table is {table.shape} for {p} stages; [ticks, stages, 2] is required"
        ]
    if not np.issubdtype(table.dtype, np.integer):
        return [f"the table is {table.dtype}; integers are required"]
    faults = [
        f"tick {t}, stage {s}: {_WORDS[slot]} entry {table[t, s, slot]} is outside -1..{m * v - 1}"
        for t, s, slot in np.argwhere((table < -1) | (table >= m * v)).tolist()
    ]
    ops = ticks_of(schedule)
    for op in itertools.product((FORWARD, BACKWARD), range(m), range(p * v)):
        ticks = ops.get(op, [])
        if len(ticks) != 1:
            where = (
                f"stands in ticks {', '.join(map(str, ticks))}"
                if ticks
                else "is missing"
            )
            faults.append(f"{_describe(op, p)} {where}; exactly once is required")
    once = {op: ticks[0] for op, ticks in ops.items()}
    late = [
        f"tick {once[op]}: {_describe(op, p)} needs {_describe(need, p)} in tick "
        f"{once[op] - delay} or before; it is in tick {once[need]}"
        for op in sorted(once, key=lambda op: once[op])
        for need, delay in _needs(op, p * v)
        if need in once and once[need] + delay > once[op]
    ]
    return faults + late


def ticks_of(schedule: Schedule) -> dict[_Op, list[int]]:
    """Returns the ticks in which each op stands; entries out of range are left out."""
    ticks: dict[_Op, list[int]] = {}
    table = schedule.table
    entries = schedule.microbatches * schedule.chunks
    for tick, stage, slot in np.argwhere((table >= 0) & (table < entries)).tolist():
        microbatch, chunk = divmod(int(table[tick, stage, slot]), schedule.chunks)
        ticks.setdefault(
            (slot, microbatch, chunk * schedule.stages + stage), []
        ).append(tick)
    return ticks


def _describe(op: _Op, stages: int) -> str:
    slot, microbatch, place = op
    chunk, stage = divmod(place, stages)
    return f"{_WORDS[slot]} of microbatch {microbatch}, chunk {chunk} on stage {stage}"


def _needs(op: _Op, places: int) -> list[tuple[_Op, int]]:
    """Returns the ops that `op` reads from, each with the ticks that must lie
    between.
    """
    slot, microbatch, place = op
    if slot == FORWARD:
        return [((FORWARD, microbatch, place - 1), 1)] if place else []
    forward: list[tuple[_Op, int]] = [((FORWARD, microbatch, place), 0)]
    return forward + (
        [((BACKWARD, microbatch, place + 1), 1)] if place < places - 1 else []
    )
