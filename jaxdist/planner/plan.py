"""Plans a run for a target, stage by stage: arithmetic, the compiler, advice.

Planning stops early where a stage says that the run cannot be laid out, or that no
compiler answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jaxdist.config import ConfigError
from jaxdist.planner import advice, memory, show, targets
from jaxdist.planner.calibration import Calibration
from jaxdist.planner.compiled_step import tokens_per_step, with_compiled
from jaxdist.planner.compiler import (
    CannotTell,
    CompileOptions,
    DoesNotFit,
    compile_run,
)
from jaxdist.planner.document import Edit, Plan
from jaxdist.planner.targets import Target
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import pipeline_report
from jaxdist.trainer.run_config import RunConfig

Say = Callable[[str], None]


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
    plan = replace(
        plan_by_arithmetic(run, target),
        expert_load=expert_load,
        calibration=calibration,
    )
    plan = _compiled(plan, options, say)
    if plan.fits is not False:
        return plan
    edits = _edits(plan)
    if check_edits:

        def edited_plan(edited: RunConfig) -> Plan:
            return _compiled(plan_by_arithmetic(edited, target), options, say)

        edits = advice.check(run, edits, edited_plan, check_edits)
    return replace(plan, advice=edits)


def plan_by_arithmetic(run: RunConfig, target: Target) -> Plan:
    """Plans by arithmetic alone.

    Raises:
      ConfigError: the run cannot be laid out on the target.
    """
    composition = targets.validate_for(run, target)
    return Plan(
        composition=composition,
        target=target,
        components=memory.components(composition, target),
        capacity_bytes=target.usable_bytes,
        pipeline=pipeline_report.describe(composition).get("pipeline", {}),
        tokens=run.train.steps * tokens_per_step(composition),
    )


def explain_shortage(run: RunConfig, devices: Sequence[jax.Device], error: str) -> str:
    """Explains a run that ran out of memory on its devices: components and advice;
    compiles nothing.
    """
    reason = error.splitlines()[0]
    try:
        plan = plan_by_arithmetic(run, targets.parse("here", devices))
    except ConfigError:  # devices that cannot be planned for
        return (
            f"{reason}\nraise mesh.fsdp or batch.accumulation, or set remat.policy=full"
        )
    plan = replace(plan, fits=False, exit_reason=reason, advice=_edits(plan))
    return show.as_text(plan.to_json())


def _compiled(plan: Plan, options: CompileOptions | None, say: Say) -> Plan:
    """Adds what the compiler says; no advice."""
    accounted = memory.accounted_peak(plan.components)
    say(f"by arithmetic {gib_text(accounted)} of a device's memory")
    try:
        return with_compiled(plan, compile_run(plan.run, plan.target, options, say=say))
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


def _edits(plan: Plan) -> list[Edit]:
    capacity = plan.capacity_bytes
    return advice.edits(
        plan.composition,
        plan.target,
        memory.accounted_peak(plan.components),
        # of a run that has failed: more than there is
        needed_bytes=plan.peak_bytes or capacity,
        capacity_bytes=capacity,
    )
