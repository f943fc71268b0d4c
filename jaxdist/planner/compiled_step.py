"""What a compiled step shows of a plan: whether it fits, what it sends, how long it
takes.
"""

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
    """Adds to a plan what the compiled step shows: fit, collectives, time."""
    run = plan.run
    notes = [
        *compiled.notes,
        *_donation_lines(plan, compiled),
        *step_lines.reduction_lines(plan.composition, forced=True),
        *memory.offload_lines(plan.components),
        *undeclared_lines(run),
        *step_lines.expert_lines(plan.composition),
    ]
    plan = _with_fit(plan, compiled)
    if not compiled.hlo:
        notes.append(
            "these versions cannot print the program: no communication, no time"
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
    """Counts the targets of a step."""
    run = composition.config
    return run.batch.global_size * compose.targets_per_sample(run)


def _with_fit(plan: Plan, compiled: Compiled) -> Plan:
    peak = compiled.peak_bytes
    capacity = plan.capacity_bytes
    # A TPU's compiler has said so itself.
    fits = plan.target.platform == "tpu" or capacity is None or peak <= capacity
    usable = gib_text(capacity) if capacity else "unknown"
    reason = f"peak {gib_text(peak)} of {usable} that a step may use"
    return replace(
        plan, compiled=compiled, peak_bytes=peak, fits=fits, exit_reason=reason
    )


def _donation_lines(plan: Plan, compiled: Compiled) -> list[str]:
    batch = plan.components.get("batch", 0)  # which is not given back
    if compiled.alias_bytes >= 0.99 * (compiled.argument_bytes - batch):
        return []
    return ["the state is not wholly donated: old and new are held at once"]


def other_compiler(sure: str, platform: str, versions: Mapping[str, str]) -> str:
    """Returns "; this plan is ..." where another compiler made the plan than the
    figures in `sure`.
    """
    names = _PACKAGES.get(platform, ())
    used = next((f"{name} {versions[name]}" for name in names if name in versions), "")
    if used in sure:
        return ""
    return f"; this plan is compiled by {used}, of which nothing was compared"
