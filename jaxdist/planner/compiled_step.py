"""The part of a plan that a compiled step shows: fit, collectives and time."""

from collections.abc import Mapping
from dataclasses import replace

from jaxdist.planner import communication, memory, timing
from jaxdist.planner.compiler import Compiled, versions
from jaxdist.planner.document import Plan
from jaxdist.telemetry import hlo
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import compose, step_lines
from jaxdist.trainer.costs import undeclared_lines
from jaxdist.trainer.model_flops import model_flops

_PACKAGES = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
}


def with_compiled(plan: Plan, compiled: Compiled) -> Plan:
    """Adds the fit, the collectives and the time of a compiled step to a plan."""
    run = plan.run
    notes = [
        *plan.warnings,
        *compiled.notes,
        *_donation_lines(plan, compiled),
        *step_lines.reduction_lines(plan.composition, forced=True),
        *memory.offload_lines(plan.components, plan.target),
        *undeclared_lines(run),
        *step_lines.expert_lines(plan.composition),
    ]
    plan = _with_fit(plan, compiled)
    if not compiled.hlo:
        notes.append(
            "these versions of the compiler cannot print the program, so communication and time are unknown"
        )
        return replace(plan, warnings=notes)
    target = plan.target
    compute = run.precision.compute
    module = timing.with_load(hlo.parse(compiled.hlo), plan.expert_load)
    kernels = timing.kernels(module)
    collectives = communication.collectives(
        module, plan.composition.shape, target, compiled.mesh_ids
    )
    if plan.calibration:
        collectives = plan.calibration.applied(collectives)
    collectives = timing.overlap(module, collectives, kernels, target, compute=compute)
    time = timing.estimate(
        module,
        collectives,
        kernels,
        target,
        tokens=tokens_per_step(plan.composition),
        flops_per_token=model_flops(run, plan.composition.spec),
        compute=compute,
        peak=run.precision.peak,
        bubble=plan.pipeline.get("bubble", 0.0),
        expert_load=plan.expert_load,
    )
    notes += communication.warnings(
        collectives,
        compute=compute,
        forwards_per_backward=timing.forwards_per_backward(kernels),
        log=compiled.log,
        chip=target.chip,
        step_s=time.step_s,
    )
    notes += timing.unit_lines(module)
    sure = time.sure + other_compiler(time.sure, target.platform, versions())
    time = replace(time, sure=sure)
    return replace(plan, collectives=collectives, warnings=notes, time=time)


def tokens_per_step(composition: compose.Composition) -> int:
    """Counts the targets of a step: tokens, or samples for other data."""
    run = composition.config
    return run.batch.global_size * compose.targets_per_sample(run)


def _with_fit(plan: Plan, compiled: Compiled) -> Plan:
    """Adds the peak and whether it fits."""
    peak = compiled.peak_bytes
    capacity = plan.capacity_bytes
    # A TPU's compiler refuses steps that do not fit.
    fits = plan.target.platform == "tpu" or capacity is None or peak <= capacity
    usable = gib_text(capacity) if capacity else "unknown"
    reason = f"peak {gib_text(peak)} of {usable} that a step may use"
    return replace(
        plan, compiled=compiled, peak_bytes=peak, fits=fits, exit_reason=reason
    )


def _donation_lines(plan: Plan, compiled: Compiled) -> list[str]:
    """Warns if a part of the state is not updated in place."""
    batch = plan.components.get("batch", 0)  # the batch is not donated
    if compiled.alias_bytes >= 0.99 * (compiled.argument_bytes - batch):
        return []
    return ["a part of the state is not donated: old and new values exist at once"]


def other_compiler(sure: str, platform: str, versions: Mapping[str, str]) -> str:
    """Remarks that another compiler made the plan than the comparisons in `sure`.

    Returns:
      "; this plan is compiled by ...", or "".
    """
    names = _PACKAGES.get(platform, ())
    used = next((f"{name} {versions[name]}" for name in names if name in versions), "")
    if used in sure:
        return ""
    return f"; this plan is compiled by {used}, which was not compared"
