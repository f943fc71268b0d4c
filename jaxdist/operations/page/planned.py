"""The plan in a run's folder: whether it is of the run as it is now, and how long a
step should take.

`jaxdist plan --workdir RUN` writes it. It is data, maybe somebody else's; and it may be
of another layout or of other code than what runs: then it is not used, and says why. No
jax.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jaxdist.config import schema
from jaxdist.hardware import chips
from jaxdist.operations.page.summary import number
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.metrics import Row
from jaxdist.telemetry.units import time_text
from jaxdist.trainer import reproduce
from jaxdist.trainer.run_layout import Layout, layout_of_run

PLAN_FILE = "plan.json"
DATE = "date"  # in it: when it was made, as ISO 8601

_NOT_OF_THE_STEP = (  # patterns of keys that change neither its program nor its speed
    "seed",
    "train.steps",
    "train.max_minutes",
    "train.log_every",
    "train.eval_every",
    "train.patience",
    "train.loggers",
    "train.sample_*",
    "init.*",
    "checkpoint.*",
    "profile.*",
    "telemetry.*",
    "watchdog.*",
    "resilience.*",
    "health.*",
    "data.path",
    "data.cache_dir",
    "data.prefetch",
    "data.validation_*",
)
_MOST_FAULTS = 3  # that are told
_ROUNDING = 1e-3  # of a step, by which the sum of its parts may be off
_MIN_STEP_S = 1e-9
_MAX_BYTES = 4 << 20  # of plan.json; `status` is to answer at once


@dataclass(frozen=True)
class Planned:
    """What plan.json says of a step; seconds."""

    target: str = ""
    date: str = ""
    fault: str = ""  # why it is not used; then nothing below counts
    step_s: float = math.nan
    band_s: tuple[float, float] = (math.nan, math.nan)
    waterfall: Mapping[str, float] = field(default_factory=dict)  # parts of step_s

    def share(self, part: str) -> float:
        """Returns the share of a part in the planned step."""
        return self.waterfall.get(part, 0.0) / self.step_s

    @property
    def source(self) -> str:
        """Says who estimated it: "estimated by plan for v5p:4x4x4 on 2026-11-23"."""
        return f"estimated by plan for {self.target} on {self.date}"

    def document(self, measured_to_planned: float | None) -> dict[str, Any]:
        """Returns what `jaxdist status --json` prints of it.

        Args:
          measured_to_planned: step times; None before there is one to compare.
        """
        said = {"target": self.target, "date": self.date, "used": not self.fault}
        if self.fault:
            return said | {"reason": self.fault}
        low, high = self.band_s
        times = {"step_s": self.step_s, "low_s": low, "high_s": high}
        return said | {
            "reason": None,
            **times,
            "measured_to_planned": measured_to_planned,
        }


def as_line(document: Mapping[str, Any]) -> str:
    """Returns `Planned.document` for people."""
    if document["reason"] is not None:
        return f"{PLAN_FILE} is not used: {document['reason']}"
    low, high = document["low_s"], document["high_s"]
    expected = (
        f"{time_text(document['step_s'])} ({time_text(low)} to {time_text(high)})"
    )
    ratio = document["measured_to_planned"]
    said = f"a step of {expected}, estimated by plan for {document['target']} on {document['date']}"
    return said if ratio is None else f"{said}; it takes {ratio:.2f} x that"


def command(folder: Path, info: Mapping[str, Any]) -> str:
    """Returns the command that makes the plan of a run; "" where a plan says nothing of
    the time.

    Args:
      info: run.json.
    """
    kind = info.get("device_kind")
    chip = chips.chip_for(kind) if isinstance(kind, str) else None
    return (
        f"jaxdist plan --workdir {shlex.quote(str(folder))}"
        if chip and chip.family
        else ""
    )


def read_plan(
    folder: Path,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    events: Sequence[Row],
    row: Mapping[str, Any],
) -> Planned | None:
    """Returns what the plan in a run's folder says; None if there is none.

    Args:
      config: flat.
      info: run.json.
      row: the last of metrics.jsonl.
    """
    try:
        plan = untrusted.read_json(folder / PLAN_FILE, dict, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, untrusted.Malformed) as error:
        return Planned(fault=f"it cannot be read ({untrusted.named(error)})")
    if other := run_format.fault(plan, PLAN_FILE):
        return Planned(fault=other)
    named = Planned(f"{plan.get('target')!s:.60}", _date(plan.get(DATE)))
    faults = [
        *_faults(plan, config, info, layout_of_run(config, info)),
        *_of_row(events, row),
    ]
    if faults:
        more = (
            f"; and {len(faults) - _MOST_FAULTS} more"
            if len(faults) > _MOST_FAULTS
            else ""
        )
        return Planned(
            named.target, named.date, "; ".join(faults[:_MOST_FAULTS]) + more
        )
    return _timed(plan, named)


def _date(value: object) -> str:
    """Returns the day of a plan; "" if it is no time."""
    try:
        return f"{datetime.fromisoformat(str(value)):%Y-%m-%d}"
    except ValueError:
        return ""


def _faults(
    plan: Mapping[str, Any],
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    layout: Layout,
) -> Iterator[str]:
    """Yields in what a plan is not of a run: machine, code, layout, config."""
    planned, hardware = _fields(plan, "layout"), _fields(plan, "hardware")
    yield from _of_machine(hardware, info)
    codes = [_fields(each, reproduce.SOURCE).get("hash") for each in (plan, info)]
    if codes[0] is None or codes[0] != codes[1]:
        yield _differs("the source of jaxdist and the model", *codes)
    pairs = {
        "the mesh": (_sizes(planned.get("mesh")), _sizes(layout.mesh)),
        "mesh.zero": (planned.get("zero"), layout.zero),
        "batch.accumulation": (planned.get("accumulation"), layout.accumulation),
    }
    yield from (
        _differs(name, *both) for name, both in pairs.items() if both[0] != both[1]
    )
    own = (*_NOT_OF_THE_STEP, *pairs, *(f"mesh.{axis}" for axis in layout.mesh))
    for change in schema.diff(_fields(plan, "config"), config):
        if not any(fnmatch(change.path, pattern) for pattern in own):
            yield _differs(change.path, change.old, change.new)


def _of_machine(hardware: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[str]:
    """Yields in what the devices that a plan is of are others than a run's."""
    kind, topology = info.get("device_kind"), _fields(info, reproduce.TOPOLOGY)
    chip = chips.chip_for(kind) if isinstance(kind, str) else None
    own = chips.platform_of(str(info.get("platform"))), chip.name if chip else None
    if (hardware.get("platform"), hardware.get("chip")) != own:
        yield _differs(
            "the device", hardware.get("chip") or hardware.get("platform"), kind
        )
    if hardware.get("num_devices") != info.get("num_devices"):
        yield _differs(
            "the number of devices",
            hardware.get("num_devices"),
            info.get("num_devices"),
        )
    elif topology:
        there, here = ((hardware, "num_slices"), (topology, "slices"))
        joined = [
            [where.get("shape"), where.get(slices)] for where, slices in (there, here)
        ]
        if joined[0] != joined[1]:
            yield _differs("shape and number of slices", *joined)
    elif hardware.get("platform") == "gpu" and isinstance(
        hosts := info.get(reproduce.HOSTS), list
    ):
        machines = len(set(map(str, hosts)))
        if hardware.get("hosts") != machines:
            yield _differs("the number of machines", hardware.get("hosts"), machines)


def _of_row(events: Sequence[Row], row: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a row cannot be held against the plan of the last start."""
    began = next(
        (event["time"] for event in reversed(events) if event["event"] == "start"), None
    )
    written = number(row.get("time"))
    if began is not None and written is not None and written < began:
        yield "the last row is of an earlier start"


def _timed(plan: Mapping[str, Any], named: Planned) -> Planned:
    """Returns a plan with its times, or with why it has none."""
    time = _fields(plan, "time")
    step_s, band, parts = (
        time.get("step_s"),
        time.get("band_s"),
        _fields(time, "waterfall"),
    )
    if step_s is None:
        why = time.get("sure") if plan.get("fits") else plan.get("exit_reason")
        return Planned(
            named.target, named.date, f"it says nothing of the time ({why!s:.200})"
        )
    seconds = [step_s, *(band if isinstance(band, list) and len(band) == 2 else [None])]
    sound = all(_is_seconds(s) and s > _MIN_STEP_S for s in seconds) and all(
        map(_is_seconds, parts.values())
    )
    if not sound or abs(sum(parts.values()) - step_s) > _ROUNDING * step_s:
        return Planned(named.target, named.date, "its times are no parts of a step")
    return Planned(
        named.target, named.date, "", step_s, (seconds[1], seconds[2]), parts
    )


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9  # type: ignore[operator]


def _fields(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _sizes(mesh: object) -> str:
    """Returns the mesh axes larger than 1 as text."""
    sizes = mesh.items() if isinstance(mesh, Mapping) else ()
    return (
        " x ".join(sorted(f"{axis} {size}" for axis, size in sizes if size != 1))
        or "one device"
    )


def _differs(name: str, planned: object, own: object) -> str:
    texts = (
        f"{x if x is not schema.MISSING else '(absent)'!s:.60}" for x in (planned, own)
    )
    return "{:.60}: planned with {}, the run has {}".format(name, *texts)
