"""The dry run: batch arithmetic, shardings, flags and memory; nothing is allocated."""

import math
import time
from collections.abc import Mapping, Sequence

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.placement import explain
from jaxdist.planner import memory, targets
from jaxdist.planner.compiler import Say, compiler_sizes, most_bytes
from jaxdist.telemetry.units import bytes_text
from jaxdist.trainer import (
    compose,
    pipeline_report,
    step_lines,
    validation,
)
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import undeclared_lines
from jaxdist.trainer.run_config import RunConfig

_SAVE_MEMORY = "raise mesh.fsdp or batch.accumulation, or set remat.policy=full"
MOST_EMULATED = 2**14  # most emulated devices; each takes threads and memory


def dry_run(run: RunConfig, devices: Sequence[jax.Device], say: Say = print) -> None:
    """Reports what a run on these devices would do and how much memory it needs.

    Its step is compiled, but nothing is allocated.

    Args:
      run: the config.
      devices: the devices of the run.
      say: called with each line of the report.

    Raises:
      ConfigError: the run has faults. Faults of `data.*` are only reported.
    """
    composition = validation.validate(run, devices, with_data=False)
    platform = devices[0].platform
    say(f"mesh: {composition.shape} ({len(devices)} x {devices[0].device_kind})")
    for line in (
        step_lines.counts(composition),
        *step_lines.step_lines(composition, composition.build_step(devices)),
        *pipeline_report.lines(composition),
        *undeclared_lines(run),
    ):
        say(line)
    for fault in schema.faults(run.data, "data."):
        say(f"data, before training: {fault}")
    say("\n" + explain(composition.placements()))
    chip = chips.chip_for(devices[0].device_kind)
    family = chip.family if chip else ""
    say("\n" + platform_flags.flag_table(chips.platform_of(platform), family))
    say("\nmemory per device, by arithmetic:")
    components = memory.components(composition, devices[0])
    total = memory.accounted_peak(components)
    for name, size in (components | {"together": total}).items():
        say(f"  {name:<28} {bytes_text(size):>12}")
    for line in memory.offload_lines(components):
        say(f"  {line}")
    say(f"  {_verdict(total, devices)}")
    say(f"\ncompiling the step for {platform} ...")
    began = time.monotonic()
    compiled = compile_step(composition, devices)
    say(f"memory per device, by the compiler ({time.monotonic() - began:.0f} s):")
    for line in _compiler_lines(compiled, platform):
        say("  " + line)


def _verdict(total: int, devices: Sequence[jax.Device]) -> str:
    """Compares the memory that a device needs by arithmetic with what it has."""
    try:
        target = targets.parse("here", devices)
    except ConfigError as error:  # the planner does not know these devices
        return f"not compared with the memory of a device: {error}"
    usable = target.usable_bytes
    if usable is None:
        return f"not compared: the memory of {target.device_kind} is unknown"
    what = f"a step may use {bytes_text(usable)} on a {target.device_kind}"
    if target.platform == "cpu":
        what = f"each of {len(devices)} devices has {bytes_text(usable)} of this machine's memory"
    if total <= usable:
        return f"{total / usable:.0%} of what there is: {what}"
    return (
        f"DOES NOT FIT: a device needs {bytes_text(total)}, and {what}. {_SAVE_MEMORY}; "
        f"`jaxdist plan --fix` looks for a change that is enough"
    )


def compile_step(
    composition: Composition, devices: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """Compiles the step that training would run, from abstract arguments.

    Raises:
      ConfigError: the step needs more memory than a device has.
    """
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(composition.config))
    lowered = built.step.lower(built.abstract_state, batch)
    try:
        compiled: jax.stages.Compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the step does not fit: {str(error).splitlines()[0]}; {_SAVE_MEMORY}"
        ) from error
    return compiled


def _compiler_lines(compiled: jax.stages.Compiled, platform: str) -> list[str]:
    """Formats the compiler's sizes of a step."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return [f"the compiler for {platform} does not report it"]
    sizes = compiler_sizes(analysis)
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
