"""Interfaces of number formats.

A `Format` is the dtype of activations and matmuls (`precision.compute`). A `Recipe`
multiplies large kernels in other numbers (`precision.matmul`). `Units` are the parts of
a chip that multiply these numbers. Each object declares its requirements for hardware,
for the step, and for the comparison of layouts. `parallel.precision` has the tables of
all formats. No other module knows a format by its name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.hardware.chips import Chip
from jaxdist.protocols.dim_names import Names


@dataclass(frozen=True)
class Band:
    """Tolerances of a comparison: the largest errors of a layout against one device."""

    loss: float  # |d loss| / |loss|
    gradient: float  # max |d| / max |reference| of the worst leaf
    parameter: float  # |d|_2 / |reference|_2 of the worst leaf, after one update
    update: float  # |d|_2 / |reference - start|_2 of the worst leaf


@dataclass(frozen=True)
class Format:
    """Numbers of activations and matmuls."""

    name: str  # in the config
    dtype: str  # of activations, and of gradients between matmuls
    band: Band  # tolerances of a comparison in this format
    # gradients can leave its range, so the loss is scaled (`step.loss_scale`)
    scales_loss: bool = False

    @property
    def peak(self) -> str:
        """The dtype of `Chip.peak` that MFU refers to."""
        return self.dtype

    def device_faults(self, device: jax.Device) -> Iterator[str]:
        """Yields why a device must not compute in this format, each with its fix."""
        yield from ()

    def advice(self, device: jax.Device) -> Iterator[str]:
        """Yields advice for a device that computes in this format."""
        yield from ()


@dataclass(frozen=True)
class Units:
    """Units of chips that multiply numbers of one kind."""

    numbers: str  # in words, "8-bit floats"
    peak: str  # the dtype of `Chip.peak`
    # share of the peak that their matmuls reach, relative to that of bfloat16
    reached: float
    counted_at: str  # explanation of the time that `plan` assumes for their matmuls
    # chip -> cycles of a matmul with conversion of both operands, relative to bfloat16
    cycles: Mapping[str, float] = field(default_factory=dict, hash=False)

    def gain(self, chip: Chip) -> bool:
        """Checks if a chip is known to multiply these numbers faster."""
        raise NotImplementedError

    def why_not(self, platform: str, device_kind: str) -> str:
        """Explains why a device gains nothing; "" if it may gain.

        Args:
          platform: see `jax.Device.platform`.
          device_kind: see `jax.Device.device_kind`.
        """
        raise NotImplementedError

    def in_jaxpr(self, equation: Any) -> bool:
        """Checks if an equation of a jaxpr multiplies these numbers."""
        raise NotImplementedError

    def in_hlo(self, operand_dtypes: Sequence[str], attributes: str) -> bool:
        """Checks if an instruction of HLO multiplies these numbers.

        Args:
          operand_dtypes: of both operands, in HLO's names.
          attributes: text of the instruction after its operands.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Recipe(Format):
    """A conversion of the operands of matmuls with large kernels.

    The code of a recipe is in `ops`. `ops.matmul` finds it by the recipe's class.
    `dtype` is the compute dtype that the recipe requires.
    """

    units: Units
    gathered_bytes: int  # bytes per weight when fsdp shards are gathered
    takes_small: bool = False  # also multiplies kernels that are too small to gain

    @property
    def peak(self) -> str:
        """The dtype of `Chip.peak` that MFU refers to."""
        return self.units.peak

    @property
    def matmuls(self) -> int:
        """The number of a kernel's three matmuls that use these numbers.

        The three compute y, the gradient of x and the gradient of W.
        """
        return 3

    def why_not(self, names: Names, dims: Sequence[int], contract: int) -> str:
        """Explains why the recipe does not multiply a kernel; "" if it does.

        Args:
          names: logical names of the kernel; () if it has none.
          dims: [*K, *N], the inputs and outputs of the kernel.
          contract: number of dims in K.
        """
        raise NotImplementedError
