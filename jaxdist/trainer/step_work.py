"""The compiled step of a run: its work, and what limits its speed."""

from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxdist.distributed import initialize
from jaxdist.hardware.chips import chip_for
from jaxdist.telemetry import traffic
from jaxdist.telemetry.flops import is_uncounted, jaxpr_flops
from jaxdist.telemetry.traffic import Roofline
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import Composition, batch_shapes


class StepWork(NamedTuple):
    """The work of a compiled step."""

    # FLOPs on all devices together; None = parts of it cannot be counted
    flops: float | None
    roofline: Roofline | None  # what limits the step; None = unknown


def compile_step(run: Run) -> StepWork:
    """Compiles the train step for the run's batches and counts its work.

    The compiled program stays in jax's cache, where the step's first call finds it.
    Calling the compiled object itself costs the host a fifth more time per step.
    """
    built = run.built
    batch = built.abstract_batch(batch_shapes(run.config))
    traced = built.step.trace(built.abstract_state, batch)
    lowered = traced.lower()
    with initialize.lead_first("step"):
        compiled = lowered.compile()
    flops = None if is_uncounted(traced.jaxpr) else jaxpr_flops(traced.jaxpr)
    limit = roofline(run.composition, run.devices[0], flops, compiled)
    return StepWork(flops, limit)


def roofline(
    composition: Composition,
    device: jax.Device,
    step_flops: float | None,
    compiled: Compiled,
) -> Roofline | None:
    """Compares a compiled step with its chip; None if a number is unknown.

    Args:
      composition: the run.
      device: a device of the run.
      step_flops: FLOPs of a step on all devices together; None if they cannot be
        counted.
      compiled: the step.
    """
    chip = chip_for(device.device_kind)
    if chip is None or step_flops is None:
        return None  # nobody waits for the text of the program
    try:
        moved = traffic.program_bytes(compiled.as_text() or "")
    # This backend prints no program, or in a form of its own. That ends no run.
    except (ValueError, LookupError):
        return None
    flops = step_flops / composition.shape.num_devices
    return traffic.roofline(flops, moved, chip, composition.config.precision.peak)
