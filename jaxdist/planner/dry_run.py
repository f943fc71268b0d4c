"""The dry run: batch arithmetic, shardings, flags and memory; nothing is allocated."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig, build_mesh
from jaxdist.parallel.placement import explain
from jaxdist.planner import memory
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import build, pipeline_report, validation
from jaxdist.trainer.run_config import RunConfig

Say = Callable[[str], None]


def dry_run(run: RunConfig, devices: Sequence[jax.Device], say: Say = print) -> None:
    """Says what a run on these devices would do and need; compiles its step, allocates nothing.

    Raises:
      ConfigError: every fault of the run except those of `data.*`, which are only said.
    """
    shape, rules, spec = validation.validate(run, devices, with_data=False)
    platform = devices[0].platform
    say(f"mesh: {shape} ({len(devices)} x {devices[0].device_kind})")
    say(build.counts(run, spec))
    say(build.batch_arithmetic(run, shape))
    for line in pipeline_report.lines(run, spec, rules):
        say(line)
    for fault in schema.faults(run.data, "data."):
        say(f"data, before training: {fault}")
    say("\n" + explain(build.placements(run, spec, rules)))
    say("\n" + platform_flags.flag_table(chips.platform_of(platform)))
    built = build.build_step(run, spec, build_mesh(run.mesh, devices), rules)
    say("\nmemory per device, by arithmetic:")
    components = memory.components(run, spec, rules, devices[0])
    together = memory.accounted_peak(components)
    for name, size in (components | {"together": together}).items():
        say(f"  {name:<28} {size:>18,} bytes")
    say(_against_capacity(together, devices[0]))
    say(f"\ncompiling the step for {platform} ...")
    began = time.monotonic()
    compiled = compile_step(run, built)
    say(f"memory per device, by the compiler ({time.monotonic() - began:.0f} s):")
    for line in _compiler_lines(compiled, platform):
        say("  " + line)


# --- by arithmetic --------------------------------------------------------------------------------


def _against_capacity(size: int, device: jax.Device) -> str:
    chip = chips.chip_for(device.device_kind)
    if chip is None:
        return f"  {device.device_kind}: memory unknown, so not compared"
    capacity = chip.compiler_hbm_bytes or chip.hbm_bytes
    return f"  {size / capacity:.0%} of a {chip.name}'s {capacity:,} bytes"


# --- by the compiler ------------------------------------------------------------------------------


def compile_step(run: RunConfig, built: TrainStep) -> jax.stages.Compiled:
    """Returns the very step that training would run, compiled from abstract arguments.

    Raises:
      ConfigError: the compiler refuses it, as a device's memory does not hold it.
    """
    batch = built.abstract_batch(build.batch_shapes(run, run.batch.global_size))
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
    found = compiled.memory_analysis()
    if found is None:
        return [f"{platform} does not say"]
    rows = {
        "arguments": found.argument_size_in_bytes,
        "given back": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "peak, at most": found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes,
    }
    lines = [f"{name:<16} {size:>18,} bytes" for name, size in rows.items()]
    if platform == "cpu":
        lines.append("temporaries are this CPU compiler's: an accelerator has other kernels")
    return lines


# --- devices that are not there -------------------------------------------------------------------


def missing_devices(mesh: MeshConfig, environ: dict[str, str] | Any) -> int | None:
    """Returns how many CPU devices a dry run should emulate, or None to take what there is.

    Only where the platform is the CPU and the user has not said a number in XLA_FLAGS.
    """
    if platform_flags.detect_platform(environ) != "cpu":
        return None
    if "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", ""):
        return None
    needed = math.prod(max(getattr(mesh, axis), 1) for axis in AXES)
    return needed if needed > 1 else None
