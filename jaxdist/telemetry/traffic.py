"""Bytes that a compiled program reads from memory and writes to it.

The instructions of a program's text are counted, each with its operands and its result.
Values that stay in registers within a fusion do not count, and caches are ignored. With
the FLOPs of a program, its bytes tell which of the two limits it (`Roofline`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.hardware.chips import Chip
from jaxdist.telemetry import hlo
from jaxdist.telemetry.units import bytes_text

# opcodes that read or write only a slice of their first operand
_SLICES = ("dynamic-slice", "slice", "gather", "dynamic-update-slice")
# opcodes that take time
WORKS = (
    "fusion",
    "dot",
    "convolution",
    "custom-call",
    "copy",
    "transpose",
    "reduce",
    "sort",
    "scatter",
    "gather",
    "concatenate",
    "dynamic-slice",
    "dynamic-update-slice",
    "convert",
    "broadcast",
    "select",
    "add",
)

_Instructions = Mapping[str, hlo.Instruction]  # of a computation, by name


def instruction_bytes(
    computation: _Instructions, instruction: hlo.Instruction, fused: _Instructions
) -> int:
    """Counts the bytes that an instruction reads and writes.

    A fusion that slices a stacked array reads or writes only the slice.

    Args:
      computation: the instructions around it.
      instruction: the instruction.
      fused: the instructions of a fusion; {} for other instructions.
    """
    reads = [computation[name].stored_bytes for name in instruction.operands]
    writes = instruction.stored_bytes
    for inner in fused.values():
        uses = []
        if inner.opcode == "parameter":
            uses = list(hlo.uses(fused, inner.name))
        only_sliced = all(
            use.opcode in _SLICES and use.operands[0] == name for name, use in uses
        )
        if uses and only_sliced:
            read = reads[inner.parameter_number]
            sliced = sum(
                hlo.num_bytes(use.types)
                for _, use in uses
                if use.opcode != "dynamic-update-slice"
            )
            reads[inner.parameter_number] = sliced if read else 0
        elif inner.opcode == "dynamic-update-slice":  # written in place
            update = fused[inner.operands[1]]
            writes -= hlo.num_bytes(inner.types) - hlo.num_bytes(update.types)
    return max(writes, 0) + sum(reads)


def program_bytes(program: str | hlo.Module) -> int:
    """Counts the bytes that a run of a program reads and writes on ONE device.

    A loop counts its trip count x body, once if the count is unknown.

    Args:
      program: the text `compiled.as_text()`, or its parsed module.

    Raises:
      ValueError: the text is no HLO module.
    """
    module = hlo.parse(program) if isinstance(program, str) else program
    total = 0
    for run in module.runs():
        instructions = module.computations[run.computation]
        for instruction in instructions.values():
            if instruction.opcode in WORKS:
                fused = ""
                if instruction.opcode == "fusion":
                    fused = instruction.called("calls")[0]
                inside = module.computations.get(fused, {})
                total += run.times * instruction_bytes(
                    instructions, instruction, inside
                )
    return total


@dataclass(frozen=True)
class Roofline:
    """Work and memory traffic of a step on one device, beside what its chip can do."""

    flops: float  # of matmuls and attention
    bytes: float
    peak_flops_per_s: float
    bytes_per_s: float

    @property
    def intensity(self) -> float:
        """The step's arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def threshold(self) -> float:
        """The intensity in FLOPs per byte at which both limits take the same time."""
        return self.peak_flops_per_s / self.bytes_per_s

    @property
    def bound(self) -> str:
        """What limits the step: "compute" or "memory"."""
        return "compute" if self.intensity >= self.threshold else "memory"

    def text(self) -> str:
        """Formats the verdict as one line."""
        return (
            f"{self.bound}-bound: {self.intensity:.0f} FLOPs per byte of memory traffic "
            f"({self.flops:.3g} FLOPs and {bytes_text(self.bytes)} a step and device); "
            f"from {self.threshold:.0f} on, compute is the limit"
        )

    def to_json(self) -> dict[str, float | str]:
        """Converts the roofline to JSON."""
        return {
            "bound": self.bound,
            "flops": self.flops,
            "bytes": self.bytes,
            "intensity": self.intensity,
            "threshold": self.threshold,
        }


def roofline(
    flops: float | None, num_bytes: float, chip: Chip | None, dtype: str
) -> Roofline | None:
    """Compares a step with its chip; None if a number is unknown.

    Args:
      flops: FLOPs of a step on one device; None if they cannot be counted.
      num_bytes: bytes of a step on one device.
      chip: the chip; None if it is unknown.
      dtype: dtype of matmuls.
    """
    peak = chip.peak(dtype) if chip else None
    if chip is None or peak is None or not flops or not num_bytes:
        return None
    numbers = (flops, num_bytes, peak, chip.hbm_bytes_per_s)
    return Roofline(*numbers) if all(map(math.isfinite, numbers)) else None
