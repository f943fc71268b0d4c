"""Schedules as tables: their meaning, generators, files and the checker.

`table[tick, stage, slot]` is `microbatch * chunks + chunk`, or -1 for no op. Slot 0 is a
forward. Slot 1 is a backward, which runs after the forward in the same tick. Chunk c of
stage s is *place* c * stages + s of the chain of layers. So every hop goes to the next
stage of a ring. Values from another stage arrive one tick later. The last place may run
forward and backward of a microbatch in one tick.
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
    """The ops of each stage in each tick."""

    stages: int
    microbatches: int
    chunks: int
    table: np.ndarray  # int32 [ticks, stages, 2], see the head of this file
    name: str = ""

    def labels(self, tick: int, stage: int) -> tuple[str, str]:
        """Labels the forward and the backward of a stage in a tick.

        Returns:
          "microbatch" or "microbatch.chunk" of each; "" for no op.
        """
        forward, backward = self.table[tick, stage].tolist()
        return self._label(forward), self._label(backward)

    def _label(self, entry: int) -> str:
        if entry < 0:
            return ""
        microbatch, chunk = divmod(entry, self.chunks)
        return f"{microbatch}.{chunk}" if self.chunks > 1 else f"{microbatch}"


# --- Generators -----------------------------------------------------------------------


def _gpipe(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """Builds all forwards, then all backwards; all inputs of a step live at once."""
    index = np.arange(microbatches)
    half = microbatches + stages - 1
    table = np.full((2 * half, stages, 2), -1, np.int32)
    for stage in range(stages):
        table[stage + index, stage, FORWARD] = index
        table[half + stages - 1 - stage + index, stage, BACKWARD] = index
    return table


def _interleaved(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """Builds fused 1F1B with several chunks on a stage, or with one.

    The order is that of Megatron: groups of `stages` microbatches pass through chunk 0,
    1, ... The last place runs forward and backward of a microbatch in one tick, so a
    stage keeps no input longer than needed.
    """
    index = np.arange(microbatches * chunks)
    microbatch = index // (stages * chunks) * stages + index % stages
    chunk = index // stages % chunks
    # the tick in which the first microbatch reaches the last place
    first_backward = chunks * stages - 1
    ticks = len(index) + first_backward + stages - 1
    table = np.full((ticks, stages, 2), -1, np.int32)
    for stage in range(stages):
        table[stage + index, stage, FORWARD] = microbatch * chunks + chunk
        start = first_backward + stages - 1 - stage
        table[start + index, stage, BACKWARD] = microbatch * chunks + chunks - 1 - chunk
    return table


class Generator(NamedTuple):
    """The generator of a named schedule."""

    build: Callable[[int, int, int], np.ndarray]  # (stages, microbatches, chunks)
    # whether it takes chunks; it then needs whole groups of `stages` microbatches
    chunked: bool


SCHEDULES = {
    "gpipe": Generator(_gpipe, chunked=False),
    "1f1b": Generator(_interleaved, chunked=False),
    "interleaved": Generator(_interleaved, chunked=True),
}


def build_schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1
) -> Schedule:
    """Builds a valid schedule.

    Args:
      name: key of `SCHEDULES`, or path of a file (`*.json`).
      stages: number of stages of the pipeline.
      microbatches: number of microbatches of an accumulation step.
      chunks: number of chunks of each stage.

    Raises:
      ConfigError: all faults of the numbers, by their config keys, or of the file.
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


# --- Files ----------------------------------------------------------------------------
# {"format", "version": 1, "name", "stages", "microbatches", "chunks", "ticks"}. "ticks"
# is a list of ticks, and a tick is a list with a cell for each stage. A cell is "F3.1
# B0.0" (microbatch.chunk); either half may be absent. ".chunk" may be absent in a
# schedule of one chunk.

_CELL = re.compile(r"(?:F(\d+)(?:\.(\d+))?)?\s*(?:B(\d+)(?:\.(\d+))?)?", re.ASCII)


def _read_schedule(path: Path, sizes: dict[str, int]) -> Schedule:
    """Reads a schedule from a file.

    Args:
      path: path of the file.
      sizes: stages, microbatches and chunks of the configuration.

    Raises:
      ConfigError: the file cannot be read, is for other sizes, or has invalid cells.
    """
    data = _read_head(path, sizes)
    stages = sizes["stages"]
    microbatches = sizes["microbatches"]
    chunks = sizes["chunks"]
    example = "F3.1 B0.0" if chunks > 1 else "F3 B0"
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
            f"{example!r}, microbatch < {microbatches}, chunk < {chunks}"
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
    """Reads the object of a file, and checks its format, its sizes and its ticks."""
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
    """Parses a cell into the entries of both slots.

    Returns:
      The entries; None if the cell is malformed or out of range.
    """
    if not isinstance(cell, str) or len(cell) >= 64:
        return None
    match = _CELL.fullmatch(cell.strip())
    if match is None:
        return None
    entries = []
    for microbatch, chunk in (match.group(1, 2), match.group(3, 4)):
        if microbatch is None:
            entries.append(-1)
            continue
        if chunk is None and chunks > 1:
            return None
        i = int(microbatch)
        c = int(chunk or 0)
        if i >= microbatches or c >= chunks:
            return None
        entries.append(i * chunks + c)
    return entries[0], entries[1]


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Writes a file that `build_schedule` reads.

    Raises:
      FileExistsError: the file exists.
    """
    rows = []
    for tick in range(len(schedule.table)):
        labels = [schedule.labels(tick, stage) for stage in range(schedule.stages)]
        rows.append(json.dumps([_cell(*label) for label in labels]))
    head = {
        "format": FORMAT,
        "version": 1,
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
    }
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


# --- The checker ----------------------------------------------------------------------


def check(schedule: Schedule) -> list[str]:
    """Lists the faults of a table, with their ticks and stages; [] if it is valid.

    In a valid table every forward and backward occurs exactly once, and late enough for
    its inputs: a hop takes one tick. So no stage waits for another, and a table cannot
    deadlock.
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
            where = "is missing"
            if ticks:
                where = f"stands in ticks {', '.join(map(str, ticks))}"
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
    """Lists the ticks of each op; entries out of range are ignored."""
    ticks: dict[_Op, list[int]] = {}
    table = schedule.table
    entries = schedule.microbatches * schedule.chunks
    for tick, stage, slot in np.argwhere((table >= 0) & (table < entries)).tolist():
        microbatch, chunk = divmod(int(table[tick, stage, slot]), schedule.chunks)
        op = (slot, microbatch, chunk * schedule.stages + stage)
        ticks.setdefault(op, []).append(tick)
    return ticks


def _describe(op: _Op, stages: int) -> str:
    slot, microbatch, place = op
    chunk, stage = divmod(place, stages)
    return f"{_WORDS[slot]} of microbatch {microbatch}, chunk {chunk} on stage {stage}"


def _needs(op: _Op, places: int) -> list[tuple[_Op, int]]:
    """Lists the ops whose results `op` reads, each with its delay in ticks."""
    slot, microbatch, place = op
    needs: list[tuple[_Op, int]] = []
    if slot == FORWARD:
        if place > 0:
            needs.append(((FORWARD, microbatch, place - 1), 1))
        return needs
    needs.append(((FORWARD, microbatch, place), 0))
    if place < places - 1:
        needs.append(((BACKWARD, microbatch, place + 1), 1))
    return needs
