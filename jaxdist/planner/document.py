"""A plan as data: what is known of a run on a target, and its JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxdist.config import schema
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
from jaxdist.trainer.model_flops import active_parameters
from jaxdist.trainer.run_config import RunConfig

FITS = 0
DOES_NOT_FIT = 3
CANNOT_TELL = 4
_SIZES = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
_COMPILE = ("seconds", "cpu_seconds", "cached", "child_peak_bytes")


@dataclass(frozen=True)
class Edit:
    """A change of the config, or of the hardware."""

    # "a.b=value c.d=value", each to follow `--config.`; "" for other hardware
    override: str
    saves_bytes: int  # per device, by arithmetic
    cost_note: str
    # whether it fits then, by arithmetic; None: capacity not given
    enough: bool | None = None
    # whether the compiler says that it fits; None: not asked
    checked: bool | None = None
    peak_bytes: int | None = None  # the compiler's, if asked and it fits
    on: str = ""  # larger hardware, as `--on` takes it

    @property
    def fits(self) -> bool | None:
        """Whether the compiler says that it fits; None: not asked, or no answer."""
        return self.checked

    @property
    def words(self) -> str:
        """The edit as typed on the command line."""
        if self.on:
            return f"--on {self.on}"
        return " ".join(f"--config.{word}" for word in self.override.split())


@dataclass(frozen=True)
class Plan:
    """What is known of a run on a target; sizes are per device."""

    composition: Composition
    target: Target
    components: Mapping[str, int]  # bytes by our accounting, before compiling
    capacity_bytes: int | None  # that a step may use; None: unknown
    pipeline: Mapping[str, Any]  # {} without one
    tokens: int  # of the whole training
    price_per_chip_hour: float | None = None
    assumed: restarts.Assumptions = restarts.Assumptions()  # of the machine
    # rows of the fullest pair of devices, relative to the mean
    expert_load: float = 1.0
    calibration: Calibration | None = None  # None: collectives take what datasheets say
    fits: bool | None = None  # None: cannot tell
    exit_reason: str = "not compiled"
    # by the compiler; of a step that it refuses, what it would need
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
        return {True: FITS, False: DOES_NOT_FIT, None: CANNOT_TELL}[self.fits]

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON; docs/plan.md lists the keys that tools may
        rely on.
        """
        done = self.compiled
        chip = self.target.chip
        measured = self.calibration
        spec = self.composition.spec
        return {
            "fits": self.fits,
            "exit_reason": self.exit_reason,
            "target": self.target.text,
            "hardware": asdict(self.target) | {"chip": chip and chip.name},
            "layout": self._layout(),
            "parameters": spec.parameter_count,
            "active_parameters": active_parameters(self.run, spec),
            "memory": self._memory(),
            "time": asdict(self.time) | {"band_s": self.time.band_s},
            "cost": self._cost(),
            "restarts": asdict(self._restarts()),
            "collectives": [_collective(one) for one in self.collectives],
            "calibration": measured.describe(self.collectives) if measured else {},
            **self._models_own(),
            "pipeline": self.pipeline,
            "advice": [asdict(edit) | {"words": edit.words} for edit in self.advice],
            "warnings": list(self.warnings),
            "versions": versions(),  # a kept result of others is not found
            "compile": {n: getattr(done, n) for n in _COMPILE} if done else {},
            "config": schema.to_config_dict(self.run).to_dict(),
        }

    def _layout(self) -> dict[str, Any]:
        """Lists mesh sizes with the link of each axis, ZeRO stage, schedule and
        batch.
        """
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
            "unit": compose.unit(run),  # that speeds and costs count
            "global_size": run.batch.global_size,
            "sequence_length": run.batch.sequence_length,
            "remat": str(run.remat),
        }

    def _links(self) -> dict[str, dict[str, Any]]:
        """Lists the datasheet's link of each mesh axis, and as `calibrated` what was
        measured by kind.
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

    def _models_own(self) -> dict[str, Any]:
        """Lists what some models and layouts alone have."""
        sections: dict[str, Any] = {"experts": {}, "context": {}}
        found = reports(
            costs_of(self.run),
            self.composition.rules,
            itemsize_of(self.run),
            self.expert_load,
        )
        for name, (section, moves) in found.items():
            if section:
                section["exchanged"] = communication.summed(self.collectives, moves)
            sections[name] = section
        return sections

    def _memory(self) -> dict[str, Any]:
        done = self.compiled
        margin = None
        if self.capacity_bytes is not None and self.peak_bytes is not None:
            margin = self.capacity_bytes - self.peak_bytes
        return {
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.peak_bytes,
            "margin_bytes": margin,
            **{name: done and getattr(done, name) for name in _SIZES},
            "host_bytes": done and done.host_argument_bytes + done.host_temp_bytes,
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

    def _cost(self) -> dict[str, float]:
        """Counts days, chip hours and, at a price, money for the training's tokens; {}
        without times.
        """
        days = self.time.days(self.tokens)
        if not days:
            return {}
        hours = days * 24 * self.target.num_chips
        cost = {"tokens": self.tokens, "days": days, "chip_hours": hours}
        if self.price_per_chip_hour:
            money = hours * self.price_per_chip_hour
            cost |= {"money": money, "tokens_per_money": self.tokens / money}
        return cost


def _collective(one: Collective) -> dict[str, Any]:
    places = ("computation", "begins", "ends")  # in the program's text
    values = {name: value for name, value in asdict(one).items() if name not in places}
    # No time is a link that is not modelled.
    values |= {"wire_bytes": one.wire_bytes, "step_s": one.step_s or None}
    if one.step_s:
        values |= {"exposed_s": one.exposed_s}
    else:
        values |= {"hidden_s": None, "exposed_s": None}
    return values | {"link": one.link.name if one.link else None}
