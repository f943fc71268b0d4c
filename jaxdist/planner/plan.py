"""A plan: what a run needs on a target and how fast it will be there, stage by stage,
stopping early.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.ops.costs import reports
from jaxdist.ops.experts.costs import rounds
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.precision import UNITS
from jaxdist.parallel.sharding import Rules
from jaxdist.planner import (
    advice,
    communication,
    memory,
    restarts,
    show,
    targets,
    timing,
)
from jaxdist.planner.advice import Edit
from jaxdist.planner.calibration import Calibration
from jaxdist.planner.communication import Collective
from jaxdist.planner.compiler import (
    CannotTell,
    Compiled,
    CompileOptions,
    DoesNotFit,
    compile_run,
    versions,
)
from jaxdist.planner.targets import Target
from jaxdist.planner.timing import Time
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.telemetry import flops, hlo
from jaxdist.telemetry.units import gib_text, percent_text
from jaxdist.trainer import compose, pipeline_report, step_lines
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of, itemsize_of, undeclared_lines
from jaxdist.trainer.model_flops import active_parameters, model_flops
from jaxdist.trainer.run_config import RunConfig

FITS, DOES_NOT_FIT, CANNOT_TELL = 0, 3, 4
_COMPILE = ("seconds", "cpu_seconds", "cached", "child_peak_bytes")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is known of a run on a target; sizes are per device."""

    run: RunConfig
    target: Target
    spec: ModelSpec
    rules: Rules
    components: dict[str, int]  # bytes by our accounting, before compiling
    capacity_bytes: int | None  # that a step may use; None: unknown
    pipeline: dict[str, Any]  # {} without one
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
    def exit_code(self) -> int:
        return {True: FITS, False: DOES_NOT_FIT, None: CANNOT_TELL}[self.fits]

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON; docs/plan.md lists the keys that tools may
        rely on.
        """
        done = self.compiled
        return {
            "fits": self.fits,
            "exit_reason": self.exit_reason,
            "target": self.target.text,
            "hardware": asdict(self.target)
            | {"chip": self.target.chip and self.target.chip.name},
            "layout": _layout(
                self.run, self.rules.shape, self.target, self.calibration
            ),
            "parameters": self.spec.parameter_count,
            "active_parameters": active_parameters(self.run, self.spec),
            "memory": self._memory(),
            "time": asdict(self.time) | {"band_s": self.time.band_s},
            "cost": self._cost(),
            "restarts": asdict(self._restarts()),
            "collectives": [_collective(one) for one in self.collectives],
            "calibration": self.calibration.describe(self.collectives)
            if self.calibration
            else {},
            **self._models_own(),
            "pipeline": self.pipeline,
            "advice": [asdict(edit) | {"words": edit.words} for edit in self.advice],
            "warnings": list(self.warnings),
            "versions": versions(),  # a kept result of others is not found
            "compile": {n: getattr(done, n) for n in _COMPILE} if done else {},
            "config": schema.to_config_dict(self.run).to_dict(),
        }

    def _models_own(self) -> dict[str, Any]:
        """Returns what some models and layouts alone have."""
        sections: dict[str, Any] = {"experts": {}, "context": {}}
        declared = costs_of(self.run)
        itemsize = itemsize_of(self.run)
        found = reports(declared, self.rules, itemsize, self.expert_load)
        for name, (section, moves) in found.items():
            if section:
                section["exchanged"] = communication.summed(self.collectives, moves)
            sections[name] = section
        return sections

    def _memory(self) -> dict[str, Any]:
        done, capacity, peak = self.compiled, self.capacity_bytes, self.peak_bytes
        names = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
        return {
            "capacity_bytes": capacity,
            "peak_bytes": peak,
            "margin_bytes": None
            if capacity is None or peak is None
            else capacity - peak,
            **{name: done and getattr(done, name) for name in names},
            "host_bytes": done and done.host_argument_bytes + done.host_temp_bytes,
            "accounted_bytes": memory.accounted_peak(self.components),
            "components": self.components,
        }

    def _restarts(self) -> restarts.Restarts:
        return restarts.estimate(
            self.run,
            self.rules.shape,
            self.target,
            memory.checkpoint_bytes(self.run, self.spec),
            sum(self.components.get(name, 0) for name in memory.STATE),
            assumed=self.assumed,
            step_s=self.time.step_s,
            compile_s=self.compiled.cpu_seconds if self.compiled else 0.0,
        )

    def _cost(self) -> dict[str, float]:
        """Returns days, chip hours and, at a price, money for the training's tokens; {}
        without times.
        """
        if not (days := self.time.days(self.tokens)):
            return {}
        hours = days * 24 * self.target.num_chips
        cost = {"tokens": self.tokens, "days": days, "chip_hours": hours}
        if self.price_per_chip_hour:
            money = hours * self.price_per_chip_hour
            cost |= {"money": money, "tokens_per_money": self.tokens / money}
        return cost


def make_plan(
    run: RunConfig,
    target: Target,
    *,
    options: CompileOptions | None = None,
    check_edits: int = 0,
    expert_load: float = 1.0,
    calibration: Calibration | None = None,
    say: Say = lambda line: None,
) -> Plan:
    """Returns the plan of a run on a target.

    Args:
      check_edits: at most so many of the edits that should make it fit are compiled,
        the best first.
      expert_load: rows of the fullest pair of devices that exchange experts' rows,
        relative to the mean.
      calibration: measured times of collectives, of the plan itself; edits are chosen
        by memory.

    Raises:
      ConfigError: the run cannot be laid out on the target.
      MissingExtra: the target's compiler is not installed.
    """
    plan = _compiled_plan(run, target, options, say, expert_load, calibration)
    if plan.fits is not False:
        return plan
    edits = _edits(plan)
    if check_edits:
        edits = advice.check(
            run, edits, lambda r: _compiled_plan(r, target, options, say), check_edits
        )
    return replace(plan, advice=edits)


def plan_by_arithmetic(run: RunConfig, target: Target) -> Plan:
    """Returns what arithmetic alone says.

    Raises:
      ConfigError: the run cannot be laid out on the target.
    """
    composition = targets.validate_for(run, target)
    rules = composition.rules
    spec = composition.spec
    components = memory.components(run, spec, rules, target)
    pipeline = pipeline_report.describe(composition).get("pipeline", {})
    tokens = run.train.steps * _tokens_per_step(run)
    return Plan(
        run, target, spec, rules, components, target.usable_bytes, pipeline, tokens
    )


def _tokens_per_step(run: RunConfig) -> int:
    return run.batch.global_size * compose.targets_per_sample(run)


def explain_shortage(run: RunConfig, devices: Sequence[jax.Device], error: str) -> str:
    """Returns components and advice for a run that ran out of memory on its devices;
    compiles nothing.
    """
    reason = error.splitlines()[0]
    try:
        plan = plan_by_arithmetic(run, targets.parse("here", devices))
    except ConfigError:  # devices that cannot be planned for
        return (
            f"{reason}\nraise mesh.fsdp or batch.accumulation, or set remat.policy=full"
        )
    return show.as_text(
        replace(plan, fits=False, exit_reason=reason, advice=_edits(plan)).to_json()
    )


def _compiled_plan(
    run: RunConfig,
    target: Target,
    options: CompileOptions | None,
    say: Say,
    expert_load: float = 1.0,
    calibration: Calibration | None = None,
) -> Plan:
    """Returns the plan without advice."""
    plan = replace(
        plan_by_arithmetic(run, target),
        expert_load=expert_load,
        calibration=calibration,
    )
    say(
        f"by arithmetic {gib_text(memory.accounted_peak(plan.components))} of a device's memory"
    )
    try:
        return _with_compiled(plan, compile_run(run, target, options, say=say))
    except DoesNotFit as refusal:
        needed, capacity = refusal.args
        reason = f"the compiler refuses it: {gib_text(needed)} needed, {gib_text(capacity)} to be had"
        return replace(
            plan,
            fits=False,
            peak_bytes=needed,
            capacity_bytes=capacity,
            exit_reason=reason,
        )
    except CannotTell as silence:
        return replace(plan, exit_reason=str(silence))


def _with_compiled(plan: Plan, compiled: Compiled) -> Plan:
    """Returns the plan with what the compiled step shows: fit, collectives, time."""
    run, target, peak, notes = (
        plan.run,
        plan.target,
        compiled.peak_bytes,
        list(compiled.notes),
    )
    capacity = plan.capacity_bytes
    # A TPU's compiler has said so itself.
    fits = target.platform == "tpu" or capacity is None or peak <= capacity
    reason = f"peak {gib_text(peak)} of {gib_text(capacity) if capacity else 'unknown'} that a step may use"
    plan = replace(
        plan, compiled=compiled, peak_bytes=peak, fits=fits, exit_reason=reason
    )
    batch = plan.components.get("batch", 0)  # which is not given back
    if compiled.alias_bytes < 0.99 * (compiled.argument_bytes - batch):
        notes.append("the state is not wholly donated: old and new are held at once")
    composition = Composition(run, plan.rules, plan.spec)
    notes += step_lines.reduction_lines(composition, forced=True)
    notes += memory.offload_lines(plan.components)
    notes += undeclared_lines(run)
    if not compiled.hlo:
        notes.append(
            "these versions cannot print the program: no communication, no time"
        )
        return replace(plan, warnings=notes)
    module = timing.with_load(hlo.parse(compiled.hlo), plan.expert_load)
    collectives = communication.collectives(
        module, plan.rules.shape, target, compiled.mesh_ids
    )
    if plan.calibration:
        collectives = plan.calibration.applied(collectives)
    compute, kernels = run.precision.compute, timing.kernels(module)
    collectives = timing.overlap(module, collectives, kernels, target, compute=compute)
    time = timing.estimate(
        module,
        collectives,
        kernels,
        target,
        tokens=_tokens_per_step(run),
        flops_per_token=model_flops(run, plan.spec),
        compute=compute,
        peak=run.precision.peak,
        bubble=plan.pipeline.get("bubble", 0.0),
    )
    notes += communication.warnings(
        collectives,
        compute=compute,
        forwards_per_backward=timing.forwards_per_backward(kernels),
        log=compiled.log,
        chip=target.chip,
        step_s=time.step_s,
    )
    notes += _unit_lines(module)
    sure = time.sure + _other_compiler(time.sure, target.platform, versions())
    even = rounds(plan.expert_load) == 1
    told = tuple(
        note for note in time.notes if even or not note.startswith(timing.EVEN_LOAD)
    )
    time = replace(time, sure=sure, notes=told)
    return replace(plan, collectives=collectives, warnings=notes, time=time)


def _unit_lines(module: hlo.Module) -> list[str]:
    """Returns the lines that say how products of other units are counted; none without
    them.
    """
    lines = []
    for units in UNITS:
        counted = flops.hlo_flops(module, only=units.in_hlo)
        if counted:
            share = percent_text(counted / flops.hlo_flops(module))
            lines.append(
                f"{share} of the program's FLOPs are in {units.numbers}, {units.counted_at}"
            )
    return lines


def _other_compiler(sure: str, platform: str, versions: Mapping[str, str]) -> str:
    """Returns "; this plan is ..." where another compiler made the plan than the
    figures in `sure`.
    """
    names = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}.get(
        platform, ()
    )
    used = next((f"{name} {versions[name]}" for name in names if name in versions), "")
    return (
        f"; this plan is compiled by {used}, of which nothing was compared"
        if used not in sure
        else ""
    )


def _edits(plan: Plan) -> list[Edit]:
    peak, capacity = memory.accounted_peak(plan.components), plan.capacity_bytes
    needed = plan.peak_bytes or capacity  # of a run that has failed: more than there is
    return advice.edits(
        plan.run,
        plan.rules.shape,
        plan.target,
        peak,
        needed_bytes=needed,
        capacity_bytes=capacity,
    )


def _links(
    shape: MeshShape, target: Target, measured: Calibration | None
) -> dict[str, dict[str, Any]]:
    """Returns the datasheet's link of each mesh axis, and as `calibrated` what was
    measured by kind.
    """
    links: dict[str, dict[str, Any]] = {}
    for axis, size in shape.sizes.items():
        if size > 1:
            link = target.axis_link(shape, axis)
            rate = link.bytes_per_s if math.isfinite(link.bytes_per_s) else None
            calibrated = measured.of_axis(axis, size, link) if measured else {}
            links[axis] = asdict(link) | {"bytes_per_s": rate, "calibrated": calibrated}
    return links


def _layout(
    run: RunConfig, shape: MeshShape, target: Target, measured: Calibration | None
) -> dict[str, Any]:
    """Returns mesh sizes with the link of each axis, ZeRO stage, schedule and batch of
    a run.
    """
    staged = shape.sizes["pipeline"] > 1
    return {
        "text": str(shape),
        "mesh": dict(shape.sizes),
        "dcn": dict(shape.dcn),
        "zero": run.mesh.zero,
        "links": _links(shape, target, measured),
        "schedule": run.pipeline.schedule if staged else None,
        "microbatches": run.pipeline.microbatches_for(shape.sizes["pipeline"]),
        "accumulation": run.batch.accumulation,
        "unit": compose.unit(run),  # that speeds and costs count
        "global_size": run.batch.global_size,
        "sequence_length": run.batch.sequence_length,
        "remat": str(run.remat),
    }


def _collective(one: Collective) -> dict[str, Any]:
    places = ("computation", "begins", "ends")  # in the program's text
    values = {name: value for name, value in asdict(one).items() if name not in places}
    # No time is a link that is not modelled.
    values |= {"wire_bytes": one.wire_bytes, "step_s": one.step_s or None}
    values |= (
        {"exposed_s": one.exposed_s}
        if one.step_s
        else {"hidden_s": None, "exposed_s": None}
    )
    return values | {"link": one.link.name if one.link else None}
