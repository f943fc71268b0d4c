"""The dry run: batch arithmetic, shardings, flags and memory; nothing is allocated."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.placement import explain
from jaxdist.planner import memory
from jaxdist.planner.compiler import compiler_sizes, most_bytes
from jaxdist.trainer import (
    compose,
    pipeline_report,
    step_lines,
    validation,
)
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import undeclared_lines
from jaxdist.trainer.run_config import RunConfig

MOST_EMULATED = 2**14  # devices; each takes threads and memory


def dry_run(
    run: RunConfig, devices: Sequence[jax.Device], say: Callable[[str], None] = print
) -> None:
    """Says what a run on these devices would do and need; compiles its step, allocates
    nothing.

    Raises:
      ConfigError: every fault of the run except those of `data.*`, which are only said.
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
    say(
        "\n"
        + platform_flags.flag_table(
            chips.platform_of(platform), chip.family if chip else ""
        )
    )
    say("\nmemory per device, by arithmetic:")
    components = memory.components(composition, devices[0])
    together = memory.accounted_peak(components)
    for name, size in (components | {"together": together}).items():
        say(f"  {name:<28} {size:>18,} bytes")
    for line in memory.offload_lines(components):
        say(f"  {line}")
    if chip:
        share = together / chip.capacity_bytes
        say(f"  {share:.0%} of a {chip.name}'s {chip.capacity_bytes:,} bytes")
    else:
        say(f"  {devices[0].device_kind}: memory unknown, so not compared")
    say(f"\ncompiling the step for {platform} ...")
    began = time.monotonic()
    compiled = compile_step(composition, devices)
    say(f"memory per device, by the compiler ({time.monotonic() - began:.0f} s):")
    for line in _compiler_lines(compiled, platform):
        say("  " + line)


def compile_step(
    composition: Composition, devices: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """Compiles the very step that training would run, from abstract arguments.

    Raises:
      ConfigError: the compiler refuses it, as a device's memory does not hold it.
    """
    built = composition.build_step(devices)
    batch = built.abstract_batch(compose.batch_shapes(composition.config))
    lowered = built.step.lower(built.abstract_state, batch)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the step does not fit: {str(error).splitlines()[0]}; "
            f"raise mesh.fsdp or batch.accumulation, or set remat.policy=full"
        ) from error


def _compiler_lines(compiled: jax.stages.Compiled, platform: str) -> list[str]:
    sizes = compiled.memory_analysis()
    if sizes is None:
        return [f"{platform} does not say"]
    found = compiler_sizes(sizes)
    rows = {
        "arguments": found["argument_bytes"],
        "given back": found["alias_bytes"],
        "temporaries": found["temp_bytes"],
        "peak, at most": most_bytes(found),
    }
    lines = [f"{name:<16} {size:>18,} bytes" for name, size in rows.items()]
    if platform == "cpu":
        lines.append(
            "temporaries are this CPU compiler's: an accelerator has other kernels"
        )
    return lines


def missing_devices(mesh: MeshConfig, environ: Mapping[str, str]) -> int | None:
    """Returns how many CPU devices a dry run should emulate, or None to take what there
    is.

    Only where the platform is the CPU and the user has not said a number in XLA_FLAGS.

    Raises:
      ConfigError: they are more than a machine emulates.
    """
    said = "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", "")
    if said or platform_flags.detect_platform(environ) != "cpu":
        return None
    needed = math.prod(max(getattr(mesh, axis), 1) for axis in AXES)
    if needed > MOST_EMULATED:
        raise ConfigError(
            f"mesh: --dry-run would emulate {needed} devices, at most {MOST_EMULATED}; make it smaller, or "
            f"ask `jaxdist plan --on` a real target"
        )
    return needed if needed > 1 else None
