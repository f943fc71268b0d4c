"""The plan of a run on a target: arithmetic, then the compiler, then advice.

Planning stops early if the layout is illegal or if the compiler gives no answer.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxdist.config import ConfigError
from jaxdist.parallel import placement, precision
from jaxdist.planner import advice, memory, on_target, show, targets
from jaxdist.planner.calibration import Calibration
from jaxdist.planner.compiled_step import tokens_per_step, with_compiled
from jaxdist.planner.compiler import (
    CannotTell,
    CompileOptions,
    DoesNotFit,
    Say,
    compile_run,
)
from jaxdist.planner.document import Edit, Plan
from jaxdist.planner.targets import Target
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import pipeline_report
from jaxdist.trainer.run_config import RunConfig


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
    """Plans a run on a target.

    A run that does not fit gets advice: edits of its config that save memory.

    Args:
      run: the config to plan.
      target: the hardware.
      options: compiler flags and limits of the compiler's process.
      check_edits: number of edits to compile, the best first; 0 compiles none.
      expert_load: rows that the busiest pair of devices exchanges for experts, relative
        to the mean; 1 is an even load.
      calibration: measured times of collectives, used instead of datasheet rates.
      say: called with each stage of the work as it begins.

    Raises:
      ConfigError: the run cannot be laid out on the target.
      MissingExtra: the target's compiler is not installed.
    """
    plan = replace(
        plan_by_arithmetic(run, target),
        expert_load=expert_load,
        calibration=calibration,
    )
    for line in plan.warnings:
        say(f"warning: {line}")
    plan = _with_compiler(plan, options, say)
    if plan.fits is not False:
        return plan
    edits = _edits(plan)
    if check_edits:

        def edited_plan(edited: RunConfig) -> Plan:
            return _with_compiler(plan_by_arithmetic(edited, target), options, say)

        edits = advice.check(run, edits, edited_plan, check_edits)
    return replace(plan, advice=edits)


def plan_by_arithmetic(run: RunConfig, target: Target) -> Plan:
    """Plans a run by arithmetic alone; nothing is compiled.

    Raises:
      ConfigError: the run cannot be laid out on the target.
    """
    composition = on_target.validate_for(run, target)
    return Plan(
        composition=composition,
        target=target,
        components=memory.components(composition, target),
        capacity_bytes=target.usable_bytes,
        pipeline=pipeline_report.describe(composition).get("pipeline", {}),
        tokens=run.train.steps * tokens_per_step(composition),
        warnings=[
            *placement.warnings(composition.placements(), composition.rules),
            *precision.advice(run.precision, target.stand_ins()[0]),
        ],
    )


def explain_shortage(run: RunConfig, devices: Sequence[jax.Device], error: str) -> str:
    """Explains why a run ran out of memory, and advises edits; compiles nothing.

    Args:
      run: the run that failed.
      devices: the devices that it ran on.
      error: the text of the failure.

    Returns:
      The plan by arithmetic as text, with the memory of each component.
    """
    reason = error.splitlines()[0]
    try:
        plan = plan_by_arithmetic(run, targets.parse("here", devices))
    except ConfigError:  # the planner does not know these devices
        return (
            f"{reason}\nraise mesh.fsdp or batch.accumulation, or set remat.policy=full"
        )
    plan = replace(plan, fits=False, exit_reason=reason, advice=_edits(plan))
    return show.as_text(plan.to_json())


def _with_compiler(plan: Plan, options: CompileOptions | None, say: Say) -> Plan:
    """Compiles a plan's step and adds the results, or why there are none."""
    accounted = memory.accounted_peak(plan.components)
    say(f"by arithmetic {gib_text(accounted)} of a device's memory")
    try:
        compiled = compile_run(plan.run, plan.target, options, say=say)
        return with_compiled(plan, compiled)
    except DoesNotFit as refusal:
        needed, capacity = refusal.args
        reason = f"the compiler rejects it: {gib_text(needed)} needed, {gib_text(capacity)} available"
        return replace(
            plan,
            fits=False,
            peak_bytes=needed,
            capacity_bytes=capacity,
            exit_reason=reason,
        )
    except CannotTell as failure:
        return replace(plan, exit_reason=str(failure))


def _edits(plan: Plan) -> list[Edit]:
    capacity = plan.capacity_bytes
    return advice.edits(
        plan.composition,
        plan.target,
        memory.accounted_peak(plan.components),
        # A run that failed on its devices has no peak: it needed more than they have.
        needed_bytes=plan.peak_bytes or capacity,
        capacity_bytes=capacity,
    )
