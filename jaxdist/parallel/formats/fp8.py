"""Recipes of 8-bit floats, as in torchao.float8 0.18. `ops.fp8` computes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxdist.hardware.chips import Chip, chip_for, platform_of
from jaxdist.parallel.formats.format import Band, Recipe, Units
from jaxdist.protocols.dim_names import Names

E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
_MULTIPLE = 16  # K and N of tensor cores are multiples of it
_T = 1e12
# "row": a scale for each vector that a matmul sums over; "tensor": one for the array
Scales = Literal["row", "tensor"]


class Fp8Units(Units):
    """Units for both kinds of 8-bit floats."""

    def gain(self, chip: Chip) -> bool:
        """Checks if a GPU's peak in 8-bit floats is above that in bfloat16."""
        half = chip.peak("bfloat16")
        byte = chip.peak(self.peak)
        if chip.link == "ICI" or half is None or byte is None:
            return False
        return byte > half

    def why_not(self, platform: str, device_kind: str) -> str:
        """Explains why a device gains nothing; "" if it may gain."""
        is_tpu = platform_of(platform) == "tpu"
        chip = chip_for(device_kind)
        if chip is None:
            return _unmeasured(device_kind) if is_tpu else ""
        if self.gain(chip) and not is_tpu:
            return ""
        if chip.name in self.cycles:
            return (
                f"on {chip.name} a matmul of 8-bit floats takes {self.cycles[chip.name]:g} times bfloat16's "
                f"cycles, with the conversion of both operands"
            )
        if is_tpu:
            return _unmeasured(chip.name)
        text = f"{chip.name} has no units for 8-bit floats"
        half = chip.peak("bfloat16") or chip.peak("float16")
        if half:
            text += f": its peak is {half / _T:g} TFLOP/s in 16 bits, and would be no higher"
        return text

    def in_jaxpr(self, equation: Any) -> bool:
        """Checks if both operands of an equation take one byte."""
        return all(operand.aval.dtype.itemsize == 1 for operand in equation.invars[:2])

    def in_hlo(self, operand_dtypes: Sequence[str], attributes: str) -> bool:
        """Checks if both operands of an instruction are 8-bit floats."""
        return all(dtype.startswith("f8") for dtype in operand_dtypes)


def _unmeasured(name: str) -> str:
    return f"on {name} nobody has measured matmuls of 8-bit floats"


# Sources. H100 at 500 W, 8192^3 and 65536 x 8192 x 7168, scales by row: 0.96 and 0.94
# (FBGEMM, pull request 2546: 1125 and 585, 1083 and 575 TFLOP/s). B200, 4096^3: 0.98
# (OpenXLA, matmul_interpolator_data.h: 2765 and 1417 TFLOP/s; its 2424 for H100 is
# above the peak, and not used).
_REACHED = 0.95
# Cycles of e4m3, 8192 x 4096 x 14336, as the compiler counts them (libtpu 0.0.42.1).
FP8 = Fp8Units(
    "8-bit floats",
    peak="float8",
    reached=_REACHED,
    counted_at=(
        f"8-bit matmuls are assumed to reach {100 * _REACHED:g} % of the utilization of bfloat16 matmuls; the gain "
        f"over bfloat16 was compared with one published pair of steps: 1.26 here, 1.12 there (torchtitan, 8B "
        f"on 8 H100)"
    ),
    cycles={"TPU v5e": 1.58, "TPU v5p": 1.14, "TPU v6e": 1.77},
)
# Layouts round sums differently, and codes have 4 bits. So a value can get the next
# code, an error of the recipe and not of the layout. On one device, gradients differ
# from float32 by 0.08 to 0.17 of a leaf's largest value with fp8_rowwise. In bfloat16
# they differ by 0.006 to 0.02, and the band of bfloat16 is as large as that.
_BAND = Band(loss=1e-3, gradient=0.1, parameter=2e-2, update=0.2)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe(Recipe):
    """A recipe of 8-bit floats; a scale follows from the largest value it scales."""

    dtype: str = "bfloat16"
    band: Band = _BAND
    units: Units = FP8
    gathered_bytes: int = 1
    scales: Scales
    kernel_scales_backward: Scales  # of the kernel, in the gradient of x
    gradient_codes: str = E4M3  # dtype of the codes of y's gradients
    # whether gradients of kernels use 8-bit floats, or the compute dtype
    has_kernel_gradients: bool = True

    @property
    def matmuls(self) -> int:
        """The number of a kernel's three matmuls that use 8-bit floats."""
        return 3 if self.has_kernel_gradients else 2

    def why_not(self, names: Names, dims: Sequence[int], contract: int) -> str:
        """Explains why the recipe does not multiply a kernel; "" if it does."""
        if "vocab" in names:
            return "scores of the vocabulary"
        if names and None in names:
            return "adapter, router, patches or classes"
        K = math.prod(dims[:contract])
        N = math.prod(dims[contract:])
        if K % _MULTIPLE or N % _MULTIPLE:
            return f"{K} x {N}: not multiples of {_MULTIPLE}"
        if self._is_small(K, N) and not self.takes_small:
            return f"{K} x {N}: too small to gain"
        return ""

    def _is_small(self, K: int, N: int) -> bool:
        """Checks if computing the scales costs more than the matmuls save.

        The limits are those of torchao's filters for H100 (`_auto_filter_for_recipe`).
        """
        if self.scales == "tensor":
            return K <= 4096 and N <= 1024
        return N <= 2048 or K <= 1024 or (N <= 4096 and K <= 2048)


ROWWISE = Fp8Recipe(name="fp8_rowwise", scales="row", kernel_scales_backward="row")
ROWWISE_WGRAD_BF16 = Fp8Recipe(
    name="fp8_rowwise_wgrad_bf16",
    scales="row",
    kernel_scales_backward="tensor",
    has_kernel_gradients=False,
)
TENSORWISE = Fp8Recipe(
    name="fp8_tensorwise",
    scales="tensor",
    kernel_scales_backward="tensor",
    gradient_codes=E5M2,
)
