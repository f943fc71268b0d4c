"""Costs of ops: FLOPs, bytes that cross the mesh, memory.

Each op declares its costs next to its code. A model's Config lists them in
`costs(sequence_length)`. MFU, the dry run, `plan` and its search sum these costs, and
depend on no model. An op that mesh axes split overrides the methods that describe its
traffic and memory. An op without costs is counted from its program
(`telemetry.flops.jaxpr_flops`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxdist.parallel.sharding import Rules
from jaxdist.telemetry.flops import Convention


@dataclass(frozen=True)
class Product:
    """Matmul of a token's row with a kernel."""

    contracted: int  # elements of the row
    size: int  # elements of the result
    makes: str = ""  # name of the result in `remat.policy`; "" = none
    # whether the backward pass computes it again under every policy
    always_again: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of one token in the forward pass."""
        return 2.0 * self.contracted * self.size


@dataclass(frozen=True)
class Crossing:
    """Bytes that a device sends over a mesh axis, per layer and per token it has."""

    axis: str
    kind: str  # collective
    forward: float
    backward: float  # without the bytes of a recomputed forward pass
    again: bool = True  # whether a recomputed forward pass sends the bytes again
    follows_load: bool = False  # whether an uneven load of experts sends more


@dataclass(frozen=True)
class Share:
    """Share of a device in an op of one layer, for some layout."""

    crossings: tuple[Crossing, ...] = ()
    # work of the busiest device in fused kernels, relative to the mean
    busiest: float = 1.0
    # whether a fused kernel gets a part of the queries at a time
    by_parts: bool = False
    # bytes per sequence that a layer holds besides the device's own part
    held: int = 0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of an op in a number of layers. Sizes are of one layer and one token."""

    name: str
    layers: int = 1
    products: tuple[Product, ...] = ()
    in_blocks: bool = True  # whether it is in the blocks that are scanned and pipelined
    # tokens of a device that are computed at a time; 0 = all
    chunk: int = 0
    # overrides of the config that reduce the op's memory, each with its drawback
    edits: tuple[tuple[str, str], ...] = ()

    def product_flops(self) -> float:
        """Counts the FLOPs of the matmuls, forward and backward, in all layers."""
        sizes = (product.contracted * product.size for product in self.products)
        return 6.0 * self.layers * sum(sizes)

    def fused_flops(self, convention: Convention) -> float:
        """Counts the FLOPs of fused kernels, forward and backward, in all layers."""
        return 0.0

    @property
    def fused_width(self) -> int:
        """Elements of the rows that fused kernels multiply; 0 = no fused kernels."""
        return 0

    @property
    def active_share(self) -> float:
        """Share of the experts' parameters that a token uses."""
        return 1.0

    def spare_rows(self, platform: str) -> float:
        """Computes the padding rows, relative to the needed rows."""
        return 0.0

    def faults(self, rules: Rules) -> Iterator[str]:
        """Yields the reasons, for users, why the op does not support a layout."""
        return iter(())

    def form_name(self, rules: Rules) -> str:
        """Names the form in which devices compute the op; "" if it has one form."""
        return ""

    def share(self, rules: Rules, itemsize: int) -> Share:
        """Computes a device's share of the op.

        Args:
          rules: rules of the layout.
          itemsize: bytes of an activation.
        """
        return Share()

    def score_bytes(self, rules: Rules, dtype: str, platform: str) -> int:
        """Counts the bytes of a sequence's attention scores in a layer's backward pass.

        Args:
          rules: rules of the layout.
          dtype: compute dtype.
          platform: tpu, gpu or cpu.
        """
        return 0

    def explain(self, rules: Rules, itemsize: int) -> list[str]:
        """Explains to users, in lines, the form in which devices compute the op."""
        return []

    # section of a plan's JSON about ops of this kind; "" = none
    section = ""
    # names of the values that the op sends, in compiled programs
    moves: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def report(
        cls, costs: Sequence[Any], rules: Rules, itemsize: int, load: float
    ) -> dict[str, Any]:
        """Builds the section of a plan, as JSON, for all its costs.

        The method of the first cost is called: classes of a section inherit one method.

        Args:
          costs: costs of the section.
          rules: rules of the layout.
          itemsize: bytes of an activation.
          load: rows of the fullest pair of devices, relative to the mean.
        """
        return {}


def model_flops(costs: Iterable[Cost], convention: Convention) -> float:
    """Computes the model FLOPs of a token, forward and backward."""
    flops = [cost.product_flops() + cost.fused_flops(convention) for cost in costs]
    return math.fsum(flops)


def reports(
    costs: Sequence[Cost], rules: Rules, itemsize: int, load: float
) -> Mapping[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Collects the sections of a plan.

    Args:
      costs: costs of the model.
      rules: rules of the layout.
      itemsize: bytes of an activation.
      load: rows of the fullest pair of devices, relative to the mean.

    Returns:
      By section: its JSON, and the names of the values that its ops send.
    """
    sections: dict[str, list[Cost]] = {}
    for cost in costs:
        if cost.section:
            sections.setdefault(cost.section, []).append(cost)
    found = {}
    for section, members in sections.items():
        moves = dict.fromkeys(name for cost in members for name in cost.moves)
        report = members[0].report(members, rules, itemsize, load)
        found[section] = (report, tuple(moves))
    return found
