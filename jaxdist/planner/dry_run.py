"""The dry run: batch arithmetic, shardings, flags and memory; nothing is allocated."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.placement import explain
from jaxdist.planner import memory, targets
from jaxdist.planner.compiler import Say, compiler_sizes, most_bytes
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.flops import is_uncounted, jaxpr_flops
from jaxdist.telemetry.units import bytes_text, count_text
from jaxdist.trainer import (
    compose,
    pipeline_report,
    step_lines,
    validation,
)
from jaxdist.trainer.compose import Composition, UserInputs
from jaxdist.trainer.costs import undeclared_lines
from jaxdist.trainer.run_config import RunConfig

_SAVE_MEMORY = "raise mesh.fsdp or batch.accumulation, or set remat.policy=full"
MOST_EMULATED = 2**14  # most emulated devices; each takes threads and memory


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run. Sizes are bytes of one device at the step's peak."""

    # whether a step fits: by arithmetic, and the compiler has not refused it; None =
    # the memory of these devices is unknown
    fits: bool | None
    needed_bytes: int  # by arithmetic
    available_bytes: int | None  # memory that a step may use; None = unknown
    compiled_bytes: int | None  # by the compiler, at most; None = it does not report it
    # FLOPs of a step on all devices together; None = parts of it cannot be counted
    step_flops: float | None
    refusal: str  # the compiler's refusal of a step that is too large; "" = none
    text: str = field(repr=False)  # the report

    def __str__(self) -> str:
        return self.text


def dry_run(
    run: RunConfig,
    devices: Sequence[jax.Device],
    say: Say = print,
    inputs: UserInputs | None = None,
) -> DryRun:
    """Reports what a run on these devices would do and how much memory it needs.

    Its step is compiled, but nothing is allocated.

    Args:
      run: the config.
      devices: the devices of the run.
      say: called with each line of the report.
      inputs: the caller's model, data and optimizer, in place of those of the config.

    Raises:
      ConfigError: the run has faults. Faults of `data.*` are only reported.
    """
    inputs = inputs or UserInputs()
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        say(line)

    composition = validation.validate(run, devices, with_data=False, build=inputs.build)
    built = composition.build_step(devices, optimizer=inputs.optimizer)
    _describe(composition, built, devices, note)
    if inputs.dataset is None:
        for fault in schema.faults(run.data, "data."):
            note(f"data, before training: {fault}")
    note("\n" + explain(composition.placements()))
    platform = devices[0].platform
    chip = chips.chip_for(devices[0].device_kind)
    family = chip.family if chip else ""
    note("\n" + platform_flags.flag_table(chips.platform_of(platform), family))
    note("\nmemory per device, by arithmetic:")
    components = memory.components(composition, devices[0], inputs.optimizer)
    total = memory.accounted_peak(components)
    for name, size in (components | {"together": total}).items():
        note(f"  {name:<28} {bytes_text(size):>12}")
    for line in memory.offload_lines(components):
        note(f"  {line}")
    available, reason = _available_bytes(devices)
    note(f"  {_verdict(total, available, reason)}")
    note(f"\ncompiling the step for {platform} ...")
    began = time.monotonic()
    refusal = ""
    sizes = None
    try:
        sizes = _compiled_sizes(compile_step(composition, devices, built))
        note(f"memory per device, by the compiler ({time.monotonic() - began:.0f} s):")
        for line in _compiler_lines(sizes, platform):
            note("  " + line)
    except StepTooLarge as error:
        refusal = str(error)
        note(refusal)
    flops = _step_flops(composition, built)
    if flops is not None:
        note(f"\nFLOPs of a step, on all devices: {count_text(flops)}")
    compiled = most_bytes(sizes) if sizes else None
    fits = None if available is None else total <= available
    if available is not None and not fits and memory.may_fit(total, available):
        # The arithmetic may be too high.
        fits = compiled is not None and compiled <= available
    if refusal:
        fits = False
    return DryRun(
        fits=fits,
        needed_bytes=total,
        available_bytes=available,
        compiled_bytes=compiled,
        step_flops=flops,
        refusal=refusal,
        text="\n".join(lines),
    )


def _describe(
    composition: Composition,
    built: TrainStep,
    devices: Sequence[jax.Device],
    say: Say,
) -> None:
    """Reports the mesh, the sizes of the model, the batch and the choices of a step."""
    say(f"mesh: {composition.shape} ({len(devices)} x {devices[0].device_kind})")
    for line in (
        step_lines.counts(composition),
        *step_lines.step_lines(composition, built),
        *pipeline_report.lines(composition),
        *undeclared_lines(composition.config, composition.spec.model_class.__name__),
    ):
        say(line)


def _available_bytes(devices: Sequence[jax.Device]) -> tuple[int | None, str]:
    """Finds the memory of a device that a step may use.

    Returns:
      The bytes, and a text that says them; or None, and the reason.
    """
    try:
        target = targets.parse("here", devices)
    except ConfigError as error:  # the planner does not know these devices
        return None, f"not compared with the memory of a device: {error}"
    usable = target.usable_bytes
    if usable is None:
        return None, f"not compared: the memory of {target.device_kind} is unknown"
    what = f"a step may use {bytes_text(usable)} on a {target.device_kind}"
    if target.platform == "cpu":
        what = f"each of {len(devices)} devices has {bytes_text(usable)} of this machine's memory"
    return usable, what


def _verdict(total: int, available: int | None, what: str) -> str:
    """Compares the memory that a device needs by arithmetic with what it has.

    Args:
      total: bytes that a device needs.
      available: bytes that a step may use; None = unknown.
      what: a text that says `available`, or why it is unknown.
    """
    if available is None:
        return what
    if total <= available:
        return f"{total / available:.0%} of what there is: {what}"
    if memory.may_fit(total, available):
        return (
            f"a device needs {bytes_text(total)}, and {what}. The arithmetic may be too "
            f"high, so the compiler decides"
        )
    return (
        f"DOES NOT FIT: a device needs {bytes_text(total)}, and {what}. {_SAVE_MEMORY}; "
        f"`jaxdist plan --fix` looks for a change that is enough"
    )


class StepTooLarge(ConfigError):
    """The compiler's refusal of a step that needs more memory than a device has."""


def compile_step(
    composition: Composition,
    devices: Sequence[jax.Device],
    built: TrainStep | None = None,
) -> jax.stages.Compiled:
    """Compiles the step that training would run, from abstract arguments.

    Args:
      composition: the run on its mesh.
      devices: the devices of the run.
      built: the run's step; default: that of the config.

    Raises:
      StepTooLarge: the step needs more memory than a device has.
    """
    built = built or composition.build_step(devices)
    lowered = _traced_step(composition, built).lower()
    try:
        compiled: jax.stages.Compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise StepTooLarge(
            f"the step does not fit: {str(error).splitlines()[0]}; {_SAVE_MEMORY}"
        ) from error
    return compiled


def _traced_step(composition: Composition, built: TrainStep) -> Any:
    """Traces a step; jax keeps the trace of a step for further calls."""
    batch = built.abstract_batch(compose.batch_shapes(composition.config))
    return built.step.trace(built.abstract_state, batch)


def _step_flops(composition: Composition, built: TrainStep) -> float | None:
    """Counts a step's FLOPs on all devices together; None if parts are uncountable."""
    jaxpr = _traced_step(composition, built).jaxpr
    return None if is_uncounted(jaxpr) else jaxpr_flops(jaxpr)


def _compiled_sizes(compiled: jax.stages.Compiled) -> dict[str, int] | None:
    """Reads the compiler's sizes of a step; None if it does not report them."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else compiler_sizes(analysis)


def _compiler_lines(sizes: Mapping[str, int] | None, platform: str) -> list[str]:
    """Formats the compiler's sizes of a step."""
    if sizes is None:
        return [f"the compiler for {platform} does not report it"]
    rows = {
        "arguments": sizes["argument_bytes"],
        "donated": sizes["alias_bytes"],
        "temporaries": sizes["temp_bytes"],
        "peak, at most": most_bytes(sizes),
    }
    lines = [f"{name:<16} {bytes_text(size):>12}" for name, size in rows.items()]
    if platform == "cpu":
        lines.append(
            "temporaries are those of the CPU's kernels; an accelerator has other kernels"
        )
    return lines


def missing_devices(mesh: MeshConfig, environ: Mapping[str, str]) -> int | None:
    """Counts the CPU devices that a dry run should emulate; None for those that exist.

    Devices are emulated only on the CPU, and only if XLA_FLAGS sets no number.

    Args:
      mesh: the run's mesh.
      environ: the environment variables.

    Raises:
      ConfigError: a machine cannot emulate so many devices.
    """
    is_set = "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", "")
    if is_set or platform_flags.detect_platform(environ) != "cpu":
        return None
    needed = math.prod(max(getattr(mesh, axis), 1) for axis in AXES)
    if needed > MOST_EMULATED:
        raise ConfigError(
            f"mesh: --dry-run would emulate {needed} devices, but at most {MOST_EMULATED} are possible; make the "
            f"mesh smaller, or run `jaxdist plan --on` with a real target"
        )
    return needed if needed > 1 else None
