"""A plan as data, and its JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxdist.ops.costs import reports
from jaxdist.planner import communication, memory, restarts
from jaxdist.planner.calibration import Calibration
from jaxdist.planner.communication import Collective
from jaxdist.planner.compiler import Compiled, versions
from jaxdist.planner.state import checkpoint_bytes, held_bytes
from jaxdist.planner.targets import Target
from jaxdist.planner.timing import Time
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of, itemsize_of
from jaxdist.trainer.model_flops import active_parameters, total_parameters
from jaxdist.trainer.run_config import RunConfig, document_of

FITS = 0
DOES_NOT_FIT = 3
CANNOT_TELL = 4
_SIZES = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
_COMPILE = ("seconds", "cpu_seconds", "cached", "child_peak_bytes")


@dataclass(frozen=True)
class Edit:
    """A change of the config or of the hardware that saves memory."""

    # overrides "a.b=value c.d=value", without `--config.`; "" for other hardware
    override: str
    saves_bytes: int  # bytes saved per device, by arithmetic
    cost_note: str  # the cost of the edit
    # whether the run then fits, by arithmetic; None if the capacity is unknown
    enough: bool | None = None
    # whether the compiler says that the run fits; None if it was not compiled
    checked: bool | None = None
    peak_bytes: int | None = None  # the compiler's peak, if the run fits
    on: str = ""  # larger hardware as text for `--on`

    @property
    def fits(self) -> bool | None:
        """True if the run fits by the compiler; None without an answer."""
        return self.checked

    @property
    def words(self) -> str:
        """The edit as typed on the command line."""
        if self.on:
            return f"--on {self.on}"
        return " ".join(f"--config.{word}" for word in self.override.split())


@dataclass(frozen=True)
class Plan:
    """The plan of a run on a target; sizes are per device."""

    composition: Composition
    target: Target
    components: Mapping[str, int]  # bytes by component, by arithmetic
    capacity_bytes: int | None  # bytes that a step may use; None if unknown
    pipeline: Mapping[str, Any]  # description of the pipeline; {} without one
    tokens: int  # tokens (or samples) of the whole training
    price_per_chip_hour: float | None = None
    assumed: restarts.Assumptions = restarts.Assumptions()  # facts about the machine
    # rows that the busiest pair of devices exchanges for experts, relative to the mean
    expert_load: float = 1.0
    calibration: Calibration | None = None  # None: collectives have datasheet rates
    fits: bool | None = None  # None if the compiler gave no answer
    exit_reason: str = "not compiled"
    # the compiler's peak; for a step that it refuses, the bytes needed
    peak_bytes: int | None = None
    compiled: Compiled | None = None
    time: Time = field(
        default_factory=lambda: Time("unknown: the step was not compiled")
    )
    collectives: Sequence[Collective] = ()
    advice: Sequence[Edit] = ()
    warnings: Sequence[str] = ()

    @property
    def run(self) -> RunConfig:
        """The config that is planned."""
        return self.composition.config

    @property
    def exit_code(self) -> int:
        """The exit code of `plan`."""
        return {True: FITS, False: DOES_NOT_FIT, None: CANNOT_TELL}[self.fits]

    def to_json(self) -> dict[str, Any]:
        """Converts the plan to JSON; docs/reference/plan-json.md has the stable keys."""
        compiled = self.compiled
        chip = self.target.chip
        measured = self.calibration
        spec = self.composition.spec
        return {
            "fits": self.fits,
            "exit_reason": self.exit_reason,
            "target": self.target.text,
            "hardware": asdict(self.target) | {"chip": chip and chip.name},
            "layout": self._layout(),
            "parameters": total_parameters(self.run, spec),
            "active_parameters": active_parameters(self.run, spec),
            "memory": self._memory(),
            "time": asdict(self.time) | {"band_s": self.time.band_s},
            "cost": self._cost(),
            "pass_before_training": self._pass_before_training(),
            "restarts": asdict(self._restarts()),
            "collectives": [_collective_json(c) for c in self.collectives],
            "calibration": measured.describe(self.collectives) if measured else {},
            **self._op_sections(),
            "pipeline": self.pipeline,
            "advice": [asdict(edit) | {"words": edit.words} for edit in self.advice],
            "warnings": list(self.warnings),
            "versions": versions(),  # a cached result has the same ones
            "compile": {n: getattr(compiled, n) for n in _COMPILE} if compiled else {},
            "config": document_of(self.run),
        }

    def _layout(self) -> dict[str, Any]:
        """Describes mesh sizes, links, ZeRO stage, schedule and batch as JSON."""
        run = self.run
        shape = self.composition.shape
        staged = shape.sizes["pipeline"] > 1
        return {
            "text": str(shape),
            "mesh": dict(shape.sizes),
            "dcn": dict(shape.dcn),
            "zero": run.mesh.zero,
            "links": self._links(),
            "schedule": run.pipeline.schedule if staged else None,
            "microbatches": self.composition.microbatches,
            "accumulation": run.batch.accumulation,
            "unit": compose.unit(run),  # the unit of speeds and costs
            "global_size": run.batch.global_size,
            "sequence_length": run.batch.sequence_length,
            "remat": str(run.remat),
        }

    def _links(self) -> dict[str, dict[str, Any]]:
        """Describes the link of each mesh axis as JSON.

        It is the datasheet's link. Measured rates by kind are in `calibrated`.
        """
        shape = self.composition.shape
        measured = self.calibration
        links: dict[str, dict[str, Any]] = {}
        for axis, size in shape.sizes.items():
            if size > 1:
                link = self.target.axis_link(shape, axis)
                rate = link.bytes_per_s if math.isfinite(link.bytes_per_s) else None
                calibrated = measured.of_axis(axis, size, link) if measured else {}
                row = {"bytes_per_s": rate, "calibrated": calibrated}
                links[axis] = asdict(link) | row
        return links

    def _op_sections(self) -> dict[str, Any]:
        """Builds the sections of ops that only some models and layouts have."""
        sections: dict[str, Any] = {"experts": {}, "context": {}}
        op_reports = reports(
            costs_of(self.run),
            self.composition.rules,
            itemsize_of(self.run),
            self.expert_load,
        )
        for name, (section, moves) in op_reports.items():
            if section:
                section["exchanged"] = communication.summed(self.collectives, moves)
            sections[name] = section
        return sections

    def _memory(self) -> dict[str, Any]:
        """Describes the sizes by arithmetic and by the compiler as JSON."""
        compiled = self.compiled
        margin = None
        if self.capacity_bytes is not None and self.peak_bytes is not None:
            margin = self.capacity_bytes - self.peak_bytes
        return {
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.peak_bytes,
            "margin_bytes": margin,
            **{name: compiled and getattr(compiled, name) for name in _SIZES},
            "host_bytes": compiled
            and compiled.host_argument_bytes + compiled.host_temp_bytes,
            "accounted_bytes": memory.accounted_peak(self.components),
            "components": self.components,
        }

    def _restarts(self) -> restarts.Restarts:
        return restarts.estimate(
            self.composition,
            self.target,
            checkpoint_bytes(self.composition),
            held_bytes(self.components),
            assumed=self.assumed,
            step_s=self.time.step_s,
            compile_s=self.compiled.cpu_seconds if self.compiled else 0.0,
        )

    def _pass_before_training(self) -> dict[str, Any]:
        """Describes the forward pass over the data that some objectives need once.

        It computes fields of the data (`Objective.data_fields`), on the first start.
        Its time is a third of that of training steps on as many rows, because a
        backward pass has twice the FLOPs of a forward pass; {} without a pass.
        """
        objective = compose.objective_of(self.run)
        if objective is None or not objective.data_fields:
            return {}
        step_s = self.time.step_s
        rows = self.run.batch.global_size
        return {
            "fields": list(objective.data_fields),
            "seconds_per_row": step_s / 3 / rows if step_s else None,
        }

    def _cost(self) -> dict[str, float]:
        """Computes days, chip hours and money of the whole training; {} without times."""
        days = self.time.days(self.tokens)
        if not days:
            return {}
        hours = days * 24 * self.target.num_chips
        cost = {"tokens": self.tokens, "days": days, "chip_hours": hours}
        if self.price_per_chip_hour:
            money = hours * self.price_per_chip_hour
            cost |= {"money": money, "tokens_per_money": self.tokens / money}
        return cost


def _collective_json(collective: Collective) -> dict[str, Any]:
    """Converts a collective to JSON; its times are null if its link is not modelled."""
    values = asdict(collective)
    for position in ("computation", "begins", "ends"):  # in the program's text
        del values[position]
    values["wire_bytes"] = collective.wire_bytes
    values["step_s"] = collective.step_s or None
    values["exposed_s"] = collective.exposed_s
    if not collective.step_s:
        values["hidden_s"] = None
        values["exposed_s"] = None
    values["link"] = collective.link.name if collective.link else None
    return values
