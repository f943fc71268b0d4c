"""A plan: what a run needs on a target and how fast it will be there, stage by stage, stopping early."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.sharding import Rules
from jaxdist.planner import advice, communication, memory, show, targets, timing
from jaxdist.planner.advice import Edit
from jaxdist.planner.communication import Collective
from jaxdist.planner.compiler import CannotTell, Compiled, CompileOptions, DoesNotFit, compile_run, versions
from jaxdist.planner.targets import Target
from jaxdist.planner.timing import Time
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.telemetry import hlo
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import build, pipeline_report
from jaxdist.trainer.run_config import RunConfig

FITS, DOES_NOT_FIT, CANNOT_TELL = 0, 3, 4
# Of a GPU's memory: its compiler never refuses a step, and libraries and fragments need the rest.
GPU_USABLE_SHARE = 0.92
_COMPILE = ("seconds", "cpu_seconds", "cached", "child_peak_bytes")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is known of a run on a target; sizes are per device."""

    run: RunConfig
    target: Target
    shape: MeshShape
    parameters: int
    components: dict[str, int]  # bytes by our accounting, before compiling
    capacity_bytes: int | None  # that a step may use; None: unknown
    pipeline: dict[str, Any]  # {} without one
    tokens: int  # of the whole training
    price_per_chip_hour: float | None = None
    fits: bool | None = None  # None: cannot tell
    exit_reason: str = "not compiled"
    peak_bytes: int | None = None  # by the compiler; of a step that it refuses, what it would need
    compiled: Compiled | None = None
    time: Time = field(default_factory=lambda: Time("unknown: the step was not compiled"))
    collectives: Sequence[Collective] = ()
    advice: Sequence[Edit] = ()
    warnings: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return {True: FITS, False: DOES_NOT_FIT, None: CANNOT_TELL}[self.fits]

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON; docs/plan.md lists the keys that tools may rely on."""
        done = self.compiled
        return {
            "fits": self.fits,
            "exit_reason": self.exit_reason,
            "target": self.target.text,
            "hardware": asdict(self.target) | {"chip": self.target.chip and self.target.chip.name},
            "layout": _layout(self.run, self.shape, self.target),
            "parameters": self.parameters,
            "memory": self._memory(),
            "time": asdict(self.time) | {"band_s": self.time.band_s},
            "cost": self._cost(),
            "collectives": [_collective(one) for one in self.collectives],
            "pipeline": self.pipeline,
            "advice": [asdict(edit) | {"words": edit.words} for edit in self.advice],
            "warnings": list(self.warnings),
            "versions": dict(done.versions) if done else versions(),
            "compile": {n: getattr(done, n) for n in _COMPILE} if done else {},
            "config": schema.to_config_dict(self.run).to_dict(),
        }

    def _memory(self) -> dict[str, Any]:
        done, known, peak = self.compiled, self.capacity_bytes, self.peak_bytes
        names = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
        return {
            "capacity_bytes": known,
            "peak_bytes": peak,
            "margin_bytes": None if known is None or peak is None else known - peak,
            **{name: getattr(done, name) if done else None for name in names},
            "host_bytes": done.host_argument_bytes + done.host_temp_bytes if done else None,
            "accounted_bytes": memory.accounted_peak(self.components),
            "components": self.components,
        }

    def _cost(self) -> dict[str, float]:
        """Returns days, chip hours and, at a price, money for the training's tokens; {} without times."""
        if not (days := self.time.days(self.tokens)):
            return {}
        hours = days * 24 * self.target.num_chips
        found = {"tokens": self.tokens, "days": days, "chip_hours": hours}
        if self.price_per_chip_hour:
            money = hours * self.price_per_chip_hour
            found |= {"money": money, "tokens_per_money": self.tokens / money}
        return found


def make_plan(
    run: RunConfig,
    target: Target,
    *,
    options: CompileOptions | None = None,
    check_edits: int = 0,
    tokens: int = 0,
    price_per_chip_hour: float | None = None,
    say: Say = lambda line: None,
) -> Plan:
    """Returns the plan of a run on a target.

    Args:
      check_edits: at most so many of the edits that should make it fit are compiled, the best first.
      tokens: of the whole training; 0 = as the config has it.

    Raises:
      ConfigError: the run cannot be laid out on the target.
      MissingExtra: the target's compiler is not installed.
    """
    plan, rules, spec = plan_by_arithmetic(run, target)
    plan = replace(plan, tokens=tokens or plan.tokens, price_per_chip_hour=price_per_chip_hour)
    say(f"by arithmetic {gib_text(memory.accounted_peak(plan.components))} of a device's memory")
    try:
        compiled = compile_run(run, target, options, say=say)
        plan = _with_compiled(plan, compiled, rules, spec)
    except DoesNotFit as refusal:
        needed, known = refusal.needed_bytes, refusal.capacity_bytes
        reason = f"the compiler refuses it: {gib_text(needed)} needed, {gib_text(known)} to be had"
        plan = replace(plan, fits=False, peak_bytes=needed, capacity_bytes=known, exit_reason=reason)
    except CannotTell as silence:
        tail = f"; the end of its log:\n{silence.tail}" if silence.tail else ""
        return replace(plan, exit_reason=f"{silence.reason}{tail}")
    if plan.fits:
        return plan
    edits = _edits(plan, spec, rules)
    if check_edits:
        edits = advice.check(run, edits, lambda r: _peak_if_held(r, target, options, say), check_edits)
    return replace(plan, advice=edits)


def plan_by_arithmetic(run: RunConfig, target: Target) -> tuple[Plan, Rules, ModelSpec]:
    """Returns what arithmetic alone says, with the run's rules and spec.

    Raises:
      ConfigError: the run cannot be laid out on the target.
    """
    shape, rules, spec = targets.validate_for(run, target)
    plan = Plan(
        run,
        target,
        shape,
        spec.parameter_count,
        memory.components(run, spec, rules, target),
        capacity(target),
        pipeline_report.describe(run, spec, rules).get("pipeline", {}),
        run.train.steps * run.batch.global_size * build.targets_per_sample(run),
    )
    return plan, rules, spec


def capacity(target: Target) -> int | None:
    """Returns the bytes that a step may use on a device; None where that is not known.

    A TPU compiler's own limit; of a GPU's memory a share; of this machine's memory for emulated
    CPU devices an equal part each.
    """
    if target.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // target.num_devices
    if target.chip is None:
        return None
    return int(target.chip.capacity_bytes * (GPU_USABLE_SHARE if target.platform == "gpu" else 1))


def is_held(compiled: Compiled, target: Target) -> bool:
    """Returns whether a device's memory holds a compiled step; a TPU's compiler has said so itself."""
    known = None if target.platform == "tpu" else capacity(target)
    return known is None or compiled.peak_bytes <= known


def explain_shortage(run: RunConfig, devices: Sequence[jax.Device], error: str) -> str:
    """Returns components and advice for a run that ran out of memory on its devices; compiles nothing."""
    reason = error.splitlines()[0]
    try:
        plan, rules, spec = plan_by_arithmetic(run, targets.parse("here", devices))
    except ConfigError:  # devices that cannot be planned for
        return f"{reason}\nraise mesh.fsdp or batch.accumulation, or set remat.policy=full"
    plan = replace(plan, fits=False, exit_reason=reason)
    edits = _edits(replace(plan, peak_bytes=plan.capacity_bytes), spec, rules)  # it needs more than that
    return show.as_text(replace(plan, advice=edits).to_json())


# --- stages ---------------------------------------------------------------------------------------


def _with_compiled(plan: Plan, compiled: Compiled, rules: Rules, spec: ModelSpec) -> Plan:
    """Returns the plan with what the compiled step shows: fit, collectives, time."""
    peak, known, notes = compiled.peak_bytes, plan.capacity_bytes, list(compiled.notes)
    reason = f"peak {gib_text(peak)} of {gib_text(known) if known else 'unknown'} that a step may use"
    plan = replace(
        plan, compiled=compiled, peak_bytes=peak, fits=is_held(compiled, plan.target), exit_reason=reason
    )
    if compiled.alias_bytes < 0.99 * (compiled.argument_bytes - _batch_bytes(plan)):
        notes.append("the state is not wholly donated: old and new are held at once")
    if not compiled.hlo:
        notes.append("these versions cannot print the program: no communication, no time")
        return replace(plan, warnings=notes)
    module = hlo.parse(compiled.hlo)
    found = communication.collectives(module, plan.shape, plan.target, compiled.mesh_ids)
    again = timing.forwards_per_backward(timing.attention_kernels(module))
    notes += communication.warnings(
        found, compute=plan.run.precision.compute, forwards_per_backward=again, log=compiled.log
    )
    time = timing.estimate(plan.run, spec, rules, plan.target, module, found)
    return replace(plan, collectives=found, warnings=notes, time=time)


def _batch_bytes(plan: Plan) -> int:
    """Returns the bytes of a device's part of the batch, which is not given back."""
    batch = build.batch_shapes(plan.run, plan.run.batch.global_size)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch))
    return whole // plan.shape.batch_shards


def _edits(plan: Plan, spec: ModelSpec, rules: Rules) -> list[Edit]:
    return advice.edits(
        plan.run,
        spec,
        rules,
        plan.target,
        plan.components,
        needed_bytes=plan.peak_bytes,
        capacity_bytes=plan.capacity_bytes,
    )


def _peak_if_held(run: RunConfig, target: Target, options: CompileOptions | None, say: Say) -> int | None:
    try:
        found = compile_run(run, target, options, say=say)
    except DoesNotFit:
        return None
    except CannotTell as silence:
        say(f"no answer: {silence}")
        raise
    return found.peak_bytes if is_held(found, target) else None


def _layout(run: RunConfig, shape: MeshShape, target: Target) -> dict[str, Any]:
    """Returns mesh sizes with the link of each axis, ZeRO stage, schedule and batch of a run."""
    links = {axis: target.axis_link(shape, axis) for axis, size in shape.sizes.items() if size > 1}
    speeds = {axis: x.bytes_per_s if math.isfinite(x.bytes_per_s) else None for axis, x in links.items()}
    staged = shape.sizes["pipeline"] > 1
    return {
        "text": str(shape),
        "mesh": dict(shape.sizes),
        "dcn": dict(shape.dcn),
        "zero": run.mesh.zero,
        "links": {axis: {"name": x.name, "bytes_per_s": speeds[axis]} for axis, x in links.items()},
        "schedule": run.pipeline.schedule if staged else None,
        "microbatches": build.num_microbatches(run, shape),
        "accumulation": run.batch.accumulation,
        "global_size": run.batch.global_size,
        "sequence_length": run.batch.sequence_length,
        "remat": run.remat.policy,
    }


def _collective(one: Collective) -> dict[str, Any]:
    places = ("group", "computation", "begins", "ends")  # in the program's text
    values = {name: value for name, value in asdict(one).items() if name not in places}
    # No time is a link that is not modelled.
    values |= {"wire_bytes": one.wire_bytes, "step_s": one.step_s or None}
    return values | {"link": one.link.name if one.link else None}
