"""Number formats: an object for each says what it needs of hardware, of the step, and
of the comparison of layouts.

A `Format` is the dtype of activations and matmuls (`precision.compute`). A `Recipe`
multiplies large kernels in other numbers (`precision.matmul`), on the `Units` of a chip
that multiply these. `parallel.precision` has the table of each kind, and everything
else asks these objects: no other module knows a format by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.hardware.chips import Chip
from jaxdist.protocols.param_names import Names


@dataclass(frozen=True)
class Band:
    """The largest errors of a layout against one device that still count as equal."""

    loss: float  # |d loss| / |loss|
    gradient: float  # worst leaf's max |d| / max |reference|
    parameter: float  # worst leaf's |d|_2 / |reference|_2 after one update
    update: float  # worst leaf's |d|_2 / |reference - start|_2


@dataclass(frozen=True)
class Format:
    """Numbers that activations are kept in and matmuls computed in."""

    name: str  # in the config
    dtype: str  # of activations, and of gradients between matmuls
    band: Band
    scales_loss: bool = False  # gradients leave its range: `step.loss_scale`

    @property
    def peak(self) -> str:
        """Names the dtype of `Chip.peak` that MFU is a share of."""
        return self.dtype

    def device_faults(self, device: jax.Device) -> Iterator[str]:
        """Yields why a device is not to compute in this format, each with its fix."""
        yield from ()

    def advice(self, device: jax.Device) -> Iterator[str]:
        """Yields what to know before a device computes in this format."""
        yield from ()


@dataclass(frozen=True)
class Units:
    """The units of a chip that multiply numbers of one kind."""

    numbers: str  # in words, "8-bit floats"
    peak: str  # the dtype of `Chip.peak`
    # share of their peak that matmuls reach, over the share of bfloat16's
    reached: float
    counted_at: str  # how `plan` counts the time of their matmuls
    # by chip: cycles of a matmul, both operands converted, over those of bfloat16
    cycles: Mapping[str, float] = field(default_factory=dict, hash=False)

    def gain(self, chip: Chip) -> bool:
        """Checks if a chip is known to multiply these numbers faster."""
        raise NotImplementedError

    def why_not(self, platform: str, device_kind: str) -> str:
        """Says why a device gains nothing; "" if it may gain.

        Args:
          platform: as `jax.Device.platform`.
          device_kind: as `jax.Device.device_kind`.
        """
        raise NotImplementedError

    def in_jaxpr(self, equation: Any) -> bool:
        """Checks if an equation of a jaxpr multiplies these numbers."""
        raise NotImplementedError

    def in_hlo(self, operand_dtypes: Sequence[str], attributes: str) -> bool:
        """Checks if an instruction of HLO multiplies these numbers.

        Args:
          operand_dtypes: of both sides, in HLO's names.
          attributes: the instruction's text after its operands.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Recipe(Format):
    """How matmuls with large kernels convert their operands.

    The code of a recipe stands in `ops`, and `ops.matmul` has its function by the
    recipe's class. `dtype` is the compute dtype that it needs.
    """

    units: Units
    gathered_bytes: int  # of a weight, as its fsdp shards are gathered
    takes_small: bool = False  # kernels too small to gain, too

    @property
    def peak(self) -> str:
        return self.units.peak

    @property
    def matmuls(self) -> int:
        """Counts a kernel's matmuls in these numbers, of three: y, and the gradients
        of x and W.
        """
        return 3

    def why_not(self, names: Names, dims: Sequence[int], contract: int) -> str:
        """Says why a kernel is multiplied in the compute dtype; "" if the recipe
        multiplies it.

        Args:
          names: its logical names; () if it has none.
          dims: [*K, *N], the inputs and outputs of the kernel.
          contract: number of dims in K.
        """
        raise NotImplementedError
