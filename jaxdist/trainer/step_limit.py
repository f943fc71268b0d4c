"""What limits the speed of a run's step: its chip's compute or its memory."""

from collections.abc import Iterator

import jax
from jax.stages import Compiled

from jaxdist.hardware import published
from jaxdist.hardware.chips import chip_for
from jaxdist.telemetry import traffic
from jaxdist.telemetry.traffic import Roofline
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.model_flops import active_parameters, total_parameters


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
    except ValueError:  # this backend prints no program
        return None
    flops = step_flops / composition.shape.num_devices
    return traffic.roofline(flops, moved, chip, composition.config.precision.peak)


def lines(
    composition: Composition, device: jax.Device, found: Roofline | None
) -> Iterator[str]:
    """Yields what limits the step, and the published MFU of such runs.

    Args:
      composition: the run.
      device: a device of the run.
      found: the roofline of the step; None if it is unknown.
    """
    if found is not None:
        yield f"the step is {found.text()}"
    config = composition.config
    total = total_parameters(config, composition.spec)
    is_dense = active_parameters(config, composition.spec) == total
    if config.lora.rank or not is_dense:
        return
    chip = chip_for(device.device_kind)
    band = published.band_for(chip, total, config.precision.peak)
    if band is not None:
        yield f"published MFU: {band.text()}"
