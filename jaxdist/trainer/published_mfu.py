"""The published MFU of runs of a model's size on a run's chip."""

from collections.abc import Iterator

import jax

from jaxdist.hardware import published
from jaxdist.hardware.chips import chip_for
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.model_flops import active_parameters, total_parameters


def lines(composition: Composition, device: jax.Device) -> Iterator[str]:
    """Yields the published MFU of such runs, if any is known.

    Args:
      composition: the run. Adapters and experts have no published numbers here.
      device: a device of the run.
    """
    config = composition.config
    total = total_parameters(config, composition.spec)
    is_dense = active_parameters(config, composition.spec) == total
    if config.lora.rank or not is_dense:
        return
    chip = chip_for(device.device_kind)
    band = published.band_for(chip, total, config.precision.peak)
    if band is not None:
        yield f"published MFU: {band.text()}"
