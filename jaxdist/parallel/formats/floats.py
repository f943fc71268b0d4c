"""The floats of `precision.compute`: float32, bfloat16 and float16."""

from collections.abc import Iterator

import jax

from jaxdist.hardware.chips import chip_for, platform_of
from jaxdist.parallel.formats.format import Band, Format

NO_BFLOAT16 = (
    "has no units for bfloat16, matmuls would be in float32; set precision.compute=float16, which has "
    "a loss scale by default"
)
_AMPERE = 8  # first compute capability of NVIDIA with bfloat16
# Cycles of a float16 matmul over those of a bfloat16 matmul, compiled ahead of time
# (libtpu 0.0.42.1).
_FLOAT16_CYCLES = {"TPU v5e": 1.02, "TPU v5p": 1.02, "TPU v6e": 1.14, "TPU 7x": 1.33}


def lacks_bfloat16(device: jax.Device) -> bool:
    """Checks if a device multiplies float16, but not bfloat16: GPUs before Ampere."""
    if platform_of(device.platform) != "gpu":
        return False
    chip = chip_for(device.device_kind)
    if chip is not None:
        return chip.peak("bfloat16") is None and chip.peak("float16") is not None
    # NVIDIA's compute capability, "7.5"
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return capability.isdecimal() and int(capability) < _AMPERE


class Bfloat16(Format):
    """bfloat16: the range of float32 with 8 bits of precision."""

    def advice(self, device: jax.Device) -> Iterator[str]:
        """Yields a warning for GPUs before Ampere, which lack bfloat16."""
        if lacks_bfloat16(device):
            yield f"precision.compute=bfloat16: {device.device_kind} {NO_BFLOAT16}"


class Float16(Format):
    """float16, for GPUs without bfloat16.

    Its range is so narrow that gradients need a loss scale.
    """

    def device_faults(self, device: jax.Device) -> Iterator[str]:
        """Yields a fault for TPUs, which gain nothing from float16."""
        if platform_of(device.platform) != "tpu":
            return
        slower = ""
        chip = chip_for(device.device_kind)
        if chip is not None and chip.name in _FLOAT16_CYCLES:
            cycles = _FLOAT16_CYCLES[chip.name]
            slower = f": a float16 matmul takes {cycles:g} times as many cycles there"
        yield (
            f"precision.compute=float16: {device.device_kind} multiplies bfloat16, which needs no loss "
            f"scale{slower}; set precision.compute=bfloat16"
        )


# Update errors in bands: without a step the error is 1, with a wrong direction 1.4.
# Measured errors are 5e-5 in float32 and 0.02 in bfloat16.
FLOAT32 = Format(
    "float32",
    dtype="float32",
    band=Band(loss=1e-6, gradient=1e-5, parameter=1e-6, update=1e-3),
)
BFLOAT16 = Bfloat16(
    "bfloat16",
    dtype="bfloat16",
    band=Band(loss=1e-3, gradient=2e-2, parameter=2e-2, update=0.1),
)
FLOAT16 = Float16(
    "float16",
    dtype="float16",
    # float16 has 3 more bits of precision than bfloat16
    band=Band(loss=2.5e-4, gradient=5e-3, parameter=5e-3, update=2.5e-2),
    scales_loss=True,
)
