"""Rows of `scaling.py`: measurements of each count, efficiency, and prediction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import measuring
import numpy as np
from jax.experimental import multihost_utils
from turns import Measured

from jaxdist.parallel.mesh import resolve_mesh, slices_of
from jaxdist.planner.document import Plan
from jaxdist.telemetry import hlo
from jaxdist.telemetry.flops import hlo_flops
from jaxdist.trainer import compose
from jaxdist.trainer.run_config import RunConfig

EMULATED = "emulated: CPU devices share the cores of their machine, so their efficiency is not hardware's"

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Point:
    """One step to measure."""

    mode: str
    run: RunConfig
    devices: tuple[jax.Device, ...]

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def key(self) -> Key:
        """What it is measured by: both modes share the step of the smallest count."""
        return self.count, self.run.batch.global_size

    @property
    def name(self) -> str:
        return f"{devices_text(self.count)} x {self.run.batch.global_size}"

    @property
    def tokens(self) -> int:
        return self.run.batch.global_size * compose.targets_per_sample(self.run)


def devices_text(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


class Expected(NamedTuple):
    """What `plan` says of a point; seconds of a step."""

    step_s: float | None  # None on a CPU, of whose compute it says nothing
    program_flops: float = 0.0  # of the program, on all devices together
    exposed_communication_s: float = 0.0  # communication that compute does not hide
    hidden_communication_s: float = 0.0  # communication that it hides
    bubble_s: float | None = 0.0
    bubble_share: float = 0.0
    # collectives without a calibration, though there is a file
    not_measured: tuple[str, ...] = ()


def expected_of(plan: Plan) -> Expected:
    """Returns a plan's own estimate."""
    told = (
        plan.calibration.describe(plan.collectives)["not_measured"]
        if plan.calibration
        else ()
    )
    waterfall = plan.time.waterfall
    program = (
        hlo_flops(hlo.parse(plan.compiled.hlo))
        if plan.compiled and plan.compiled.hlo
        else 0.0
    )
    return Expected(
        plan.time.step_s,
        program * plan.target.num_devices,
        math.fsum(one.exposed_s for one in plan.collectives),
        math.fsum(one.hidden_s for one in plan.collectives),
        waterfall["bubble"] if waterfall else None,
        plan.pipeline.get("bubble", 0.0),
        tuple(told),
    )


def rows_of(
    points: Sequence[Point],
    found: Mapping[Key, Measured],
    reasons: Mapping[Key, str],
    expected: Mapping[Key, Sequence | str],
) -> list[dict[str, Any]]:
    """Returns a row for each mode and count."""
    rows = []
    processor = {key: _processor_s(one) for key, one in found.items()}
    for mode in dict.fromkeys(point.mode for point in points):
        own = [point for point in points if point.mode == mode]
        base = next((point for point in own if point.key in found), None)
        for point in own:
            row = _described(point) | {
                "fits": point.key in found,
                "reason": reasons.get(point.key),
            }
            if base is not None and point.key in found:
                row |= _measured(point, base, found, processor)
                row |= _compared(point, base, row, found, expected)
            rows.append(row)
    return rows


def _median_s(one: Measured) -> float:
    """Returns the seconds of a step."""
    return measuring.quartiles([t.wall_s / one.steps for t in one.times])["median"]


def _described(point: Point) -> dict[str, Any]:
    shape = resolve_mesh(
        point.run.mesh, point.count, slices_of(point.run.mesh, point.devices)
    )
    size = point.run.batch.global_size
    return {
        "mode": point.mode,
        "devices": point.count,
        "layout": str(shape),
        "mesh": dict(shape.sizes),
        "global_batch": size,
        "sequences_per_device": size / point.count,
        "tokens_per_step": point.tokens,
    }


def _processor_s(one: Measured) -> list[float]:
    """Returns the processor seconds of a step in each round, of all processes
    together.
    """
    own = np.array([t.processor_s / one.steps for t in one.times], np.float32)
    if jax.process_count() == 1:
        return own.tolist()
    return multihost_utils.process_allgather(own).sum(axis=0).tolist()


def _measured(
    point: Point,
    base: Point,
    found: Mapping[Key, Measured],
    processor: Mapping[Key, Sequence[float]],
) -> dict[str, Any]:
    """Returns what was measured of a point, and its efficiency over the smallest count
    that fits.
    """
    one, smallest = found[point.key], found[base.key]
    walls = [t.wall_s / one.steps for t in one.times]
    base_walls = [t.wall_s / smallest.steps for t in smallest.times]
    step_s, work = measuring.quartiles(walls), measuring.quartiles(processor[point.key])
    rate, base_rate = (
        p.tokens / _median_s(found[p.key]) / p.count for p in (point, base)
    )
    more = point.tokens / point.count / (base.tokens / base.count)
    by_rounds = [more * b / a for a, b in zip(walls, base_walls, strict=True)]
    emulated = None
    if jax.devices()[0].platform == "cpu":
        base_work = measuring.quartiles(processor[base.key])["median"]
        emulated = {
            "wall_efficiency": rate / base_rate * point.count / base.count,
            "processor_efficiency": base_work
            / base.tokens
            / (work["median"] / point.tokens),
        }
    return {
        "step_s": step_s | {"best": min(walls)},
        "processor_s": work,
        "tokens_per_s": rate * point.count,
        "tokens_per_s_per_device": rate,
        "efficiency": rate / base_rate,
        "efficiency_by_rounds": measuring.quartiles(by_rounds),
        "emulated": emulated,
        "data_wait_s": None,
        "steps_per_round": one.steps,
        "rounds": [
            {"wall_s": t.wall_s, "processor_s": t.processor_s} for t in one.times
        ],
        **one.numbers,
    }


def _compared(
    point: Point,
    base: Point,
    row: Mapping[str, Any],
    found: Mapping[Key, Measured],
    expected: Mapping[Key, Sequence | str],
) -> dict[str, Any]:
    """Returns what `plan` says of a point, and the prediction beside its row; why there
    is none, else.
    """
    none: dict[str, Any] = {"planned": None, "predicted": None}
    said, base_said = expected[point.key], expected[base.key]
    if isinstance(said, str):
        return none | {"not_predicted": said}
    own, least = (
        Expected(*said),
        None if isinstance(base_said, str) else Expected(*base_said),
    )
    planned = {"planned": own._asdict()}
    step_s, base_s = own.step_s, least.step_s if least else None
    if step_s is None:
        base_s = _median_s(found[base.key])
        why = base_said if isinstance(base_said, str) else ""
        if point.key == base.key:
            why = "its compute is what the larger counts are predicted from"
        elif least and not least.program_flops:
            why = "the compiled program cannot be read"
        if why or least is None:
            return none | planned | {"not_predicted": why}
        compute = max(base_s - least.exposed_communication_s, 0.0)
        step_s = (
            compute * own.program_flops / least.program_flops
            + own.exposed_communication_s
        )
    rate = point.tokens / step_s / point.count
    efficiency = rate / (base.tokens / base_s / base.count) if base_s else None
    work = (
        least
        and own.program_flops
        and least.program_flops / base.tokens * point.tokens / own.program_flops
    )
    predicted = {
        "step_s": step_s,
        "tokens_per_s_per_device": rate,
        "efficiency": efficiency,
        "wall_efficiency": efficiency and efficiency * point.count / base.count
        if row["emulated"]
        else None,
        "processor_efficiency": work if row["emulated"] else None,
        "measured_over_predicted": row["step_s"]["median"] / step_s,
        "efficiency_over_predicted": efficiency and row["efficiency"] / efficiency,
    }
    return planned | {"predicted": predicted, "not_predicted": None}


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the efficiency of the largest count of each mode."""
    for mode in dict.fromkeys(row["mode"] for row in rows):
        fitting = [row for row in rows if row["mode"] == mode and row["fits"]]
        if fitting:
            least, most = fitting[0]["devices"], fitting[-1]
            told = most["predicted"]
            said = f", predicted {_share(told['efficiency'])}" if told else ""
            kind = ", emulated" if most["emulated"] else ""
            yield f"{mode} {least} to {most['devices']}: efficiency {most['efficiency']:.1%}{said}{kind}"


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields what a person wants to read of the rows."""
    yield ""
    yield " " * 79 + "predicted"
    yield (
        "mode   devices   batch   best ms  median ms    tokens/s  a device  efficiency  |  step ms  "
        "efficiency  exposed ms  bubble  off by"
    )
    for row in rows:
        yield f"{row['mode']:7}{row['devices']:7d} {row['global_batch']:7d} {_cells(row)}"
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["fits"] and row["not_predicted"]:
            reasons.setdefault(row["not_predicted"], []).append(
                f"{row['mode']} {row['devices']}"
            )
    for why, places in reasons.items():
        yield f"not predicted: {', '.join(places)}: {why}"
    yield from _emulated_lines(rows)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _cells(row: Mapping[str, Any]) -> str:
    """Returns what was measured and predicted of a row; why it was not, else."""
    if not row["fits"]:
        return row["reason"]
    took, told, planned = row["step_s"], row["predicted"], row["planned"]
    measured = (
        f"{1e3 * took['best']:9.1f} {1e3 * took['median']:10.1f} {row['tokens_per_s']:11,.0f} "
        f"{row['tokens_per_s_per_device']:9,.0f} {row['efficiency']:11.1%}  |"
    )
    if not told:
        return measured
    return (
        f"{measured} {1e3 * told['step_s']:8.1f} {_share(told['efficiency']):>11} "
        f"{1e3 * planned['exposed_communication_s']:11.2f} {planned['bubble_share']:7.1%} "
        f"{told['measured_over_predicted'] - 1:+7.0%}"
    )


def _emulated_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shared = [row for row in rows if row["fits"] and row["emulated"]]
    if shared:
        yield f"{EMULATED}. Of the shared cores, tokens per second and per processor second:"
    for row in shared:
        wall, work = (
            row["emulated"]["wall_efficiency"],
            row["emulated"]["processor_efficiency"],
        )
        spent, told = 1e3 * row["processor_s"]["median"], row["predicted"]
        by_wall, by_work = (
            f" (predicted {_share(told[name])})" if told else ""
            for name in ("wall_efficiency", "processor_efficiency")
        )
        yield (
            f"emulated: {row['mode']:7}{row['devices']:3d}: {wall:.1%} by wall time{by_wall}, "
            f"{work:.1%} by processor time{by_work}, {spent:.1f} ms a step"
        )
