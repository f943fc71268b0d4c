"""Plan in a run's folder, with its estimate of the step time.

`jaxdist plan --workdir RUN` writes the plan. It is used only if it describes the run:
its layout and code may differ, and anybody may have written the file. A plan that is
not used has a reason. Needs no jax.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxdist.config import schema
from jaxdist.hardware import chips
from jaxdist.operations.page.run_files import RunFiles, fields, number
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.units import time_text
from jaxdist.trainer import reproduce
from jaxdist.trainer.run_layout import layout_of_run

PLAN_FILE = "plan.json"
DATE = "date"  # its field with the time when it was made, as ISO 8601
# its field with the keys of `config` that change neither the step nor its speed
OUTSIDE_STEP = "outside_step"

_MAX_FAULTS = 3  # faults that are reported
_ROUNDING = 1e-3  # largest error of the sum of a step's parts, as share of the step
_MIN_STEP_S = 1e-9
_MAX_BYTES = 4 << 20  # bytes of the largest plan.json: `status` must answer at once


@dataclass(frozen=True)
class Planned:
    """Step that plan.json describes."""

    target: str = ""  # hardware, such as v5p:4x4x4
    date: str = ""
    # reason for which the plan is not used, "": it is used; with a reason, the fields
    # below are meaningless
    fault: str = ""
    step_s: float = math.nan
    band_s: tuple[float, float] = (math.nan, math.nan)  # lowest and highest step_s
    waterfall: Mapping[str, float] = field(default_factory=dict)  # seconds of parts

    def share(self, part: str) -> float:
        """Computes the share of a part in the planned step."""
        return self.waterfall.get(part, 0.0) / self.step_s

    @property
    def source(self) -> str:
        """The source of the plan, "estimated by plan for v5p:4x4x4 on 2026-11-23"."""
        return f"estimated by plan for {self.target} on {self.date}"

    def document(self, measured_to_planned: float | None) -> dict[str, Any]:
        """Builds its document in `jaxdist status --json`.

        Args:
          measured_to_planned: ratio of step times; None = nothing was measured yet.
        """
        document: dict[str, Any] = {
            "target": self.target,
            "date": self.date,
            "used": not self.fault,
            "reason": self.fault or None,
        }
        if not self.fault:
            document["step_s"] = self.step_s
            document["low_s"], document["high_s"] = self.band_s
            document["measured_to_planned"] = measured_to_planned
        return document


def as_line(document: Mapping[str, Any]) -> str:
    """Formats a `Planned.document` as a line."""
    if document["reason"] is not None:
        return f"{PLAN_FILE} is not used: {document['reason']}"
    low = time_text(document["low_s"])
    high = time_text(document["high_s"])
    text = (
        f"a step of {time_text(document['step_s'])} ({low} to {high}), "
        f"estimated by plan for {document['target']} on {document['date']}"
    )
    ratio = document["measured_to_planned"]
    if ratio is not None:
        text += f"; it takes {ratio:.2f} x that"
    return text


def command(folder: Path, info: Mapping[str, Any]) -> str:
    """Formats the command that plans a run; "" if a plan would have no step time.

    Args:
      folder: folder of the run.
      info: content of run.json.
    """
    chip = _chip_of(info)
    if chip is None or not chip.family:
        return ""
    return f"jaxdist plan --workdir {shlex.quote(str(folder))}"


def read_plan(run: RunFiles) -> Planned | None:
    """Reads the plan in a run's folder; None if there is none."""
    try:
        plan = untrusted.read_json(run.folder / PLAN_FILE, dict, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return None
    except untrusted.Malformed as error:
        return Planned(fault=f"it cannot be read ({error})")
    other_version = run_format.fault(plan, PLAN_FILE)
    if other_version:
        return Planned(fault=other_version)
    target = f"{plan.get('target')!s:.60}"
    date = _date(plan.get(DATE))
    faults = list(_faults(plan, run))
    fault = "; ".join(faults[:_MAX_FAULTS])
    if len(faults) > _MAX_FAULTS:
        fault += f"; and {len(faults) - _MAX_FAULTS} more"
    fault = fault or _time_fault(plan)
    if fault:
        return Planned(target, date, fault)
    time = plan["time"]
    low, high = time["band_s"]
    return Planned(
        target=target,
        date=date,
        step_s=time["step_s"],
        band_s=(low, high),
        waterfall=time["waterfall"],
    )


def _date(value: object) -> str:
    """Formats the day of a time in ISO 8601; "" if the value is no time."""
    try:
        return f"{datetime.fromisoformat(str(value)):%Y-%m-%d}"
    except ValueError:
        return ""


def _faults(plan: Mapping[str, Any], run: RunFiles) -> Iterator[str]:
    """Yields the differences of a plan from its run."""
    facts = (*_machine_facts(plan, run.info), *_step_facts(plan, run))
    for name, planned, actual in facts:
        if planned != actual:
            yield (
                f"{name:.60}: planned with {_shown(planned)}, "
                f"the run has {_shown(actual)}"
            )
    if _is_of_earlier_start(run):
        yield "the last row is of an earlier start"


Facts = Iterator[tuple[str, object, object]]  # (name, value in plan, value in run)


def _machine_facts(plan: Mapping[str, Any], info: Mapping[str, Any]) -> Facts:
    """Yields facts about the devices of a plan and of its run."""
    hardware = fields(plan, "hardware")
    chip = _chip_of(info)
    platform = chips.platform_of(str(info.get("platform")))
    planned = hardware.get("chip") or hardware.get("platform")
    yield "the device", planned, chip.name if chip else platform
    devices = info.get("num_devices")
    yield "the number of devices", hardware.get("num_devices"), devices
    topology = fields(info, reproduce.TOPOLOGY)
    hosts = info.get(reproduce.HOSTS)
    if topology:
        yield (
            "shape and number of slices",
            [hardware.get("shape"), hardware.get("num_slices")],
            [topology.get("shape"), topology.get("slices")],
        )
    elif hardware.get("platform") == "gpu" and isinstance(hosts, list):
        machines = len(set(map(str, hosts)))
        yield "the number of machines", hardware.get("hosts"), machines


def _step_facts(plan: Mapping[str, Any], run: RunFiles) -> Facts:
    """Yields facts about the code, the layout and the config of a plan and its run."""
    source = fields(plan, reproduce.SOURCE).get("hash")
    # two unknown hashes must differ
    run_source = fields(run.info, reproduce.SOURCE).get("hash") or schema.MISSING
    yield "the source of jaxdist and the model", source, run_source
    layout = layout_of_run(run.config, run.info)
    planned = fields(plan, "layout")
    yield "the mesh", _mesh_text(planned.get("mesh")), _mesh_text(layout.mesh)
    yield "mesh.zero", planned.get("zero"), layout.zero
    yield "batch.accumulation", planned.get("accumulation"), layout.accumulation
    ignored = ["mesh.zero", "batch.accumulation"]
    ignored += [f"mesh.{axis}" for axis in layout.mesh]
    outside_step = plan.get(OUTSIDE_STEP)
    if isinstance(outside_step, list):
        ignored += outside_step
    for change in schema.diff(fields(plan, "config"), run.config):
        if change.path not in ignored:
            yield change.path, change.old, change.new


def _chip_of(info: Mapping[str, Any]) -> chips.Chip | None:
    return chips.chip_for(info.get("device_kind", ""))


def _is_of_earlier_start(run: RunFiles) -> bool:
    """Checks if the last row is older than the last start."""
    written = number(run.last_row.get("time"))
    start = run.events.last_of("start")
    if written is None or start is None:
        return False
    start_time: float = start["time"]
    return written < start_time


def _time_fault(plan: Mapping[str, Any]) -> str:
    """Finds the reason why a plan has no usable times; "" if they are usable."""
    time = fields(plan, "time")
    step_s = time.get("step_s")
    if step_s is None:
        reason = time.get("sure") if plan.get("fits") else plan.get("exit_reason")
        return f"it says nothing of the time ({reason!s:.200})"
    unsound = "its times are no parts of a step"
    band_s = time.get("band_s")
    if not isinstance(band_s, list) or len(band_s) != 2:
        return unsound
    parts = fields(time, "waterfall").values()
    if not all(
        untrusted.is_amount(time_s, 1e9) for time_s in (step_s, *band_s, *parts)
    ):
        return unsound
    if min(step_s, *band_s) <= _MIN_STEP_S:
        return unsound
    if abs(sum(parts) - step_s) > _ROUNDING * step_s:
        return unsound
    return ""


def _mesh_text(mesh: object) -> str:
    """Formats the mesh axes larger than 1."""
    if not isinstance(mesh, Mapping):
        mesh = {}
    sizes = sorted(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
    return " x ".join(sizes) or "one device"


def _shown(value: object) -> str:
    if value is schema.MISSING:
        return "(absent)"
    return f"{value!s:.60}"
