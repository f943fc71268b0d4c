"""What an op needs, declared beside it: FLOPs, what crosses the mesh, what it holds.

A model's Config lists the `Cost`s of its ops in `costs(sequence_length)`. MFU, the dry
run, `plan` and its search sum these, and know no model: an op that mesh axes split
overrides the methods that say what that takes. What declares nothing is counted from
its program (`telemetry.flops.jaxpr_flops`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxdist.parallel.sharding import Rules
from jaxdist.telemetry.flops import Convention


@dataclass(frozen=True)
class Product:
    """A matmul of a token's row with a kernel."""

    contracted: int  # elements of the row
    size: int  # elements of the result
    makes: str = ""  # name of the result in `remat.policy`; "" without one
    # The backward pass computes it again, whatever the policy says.
    always_again: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of a token in the forward pass."""
        return 2.0 * self.contracted * self.size


@dataclass(frozen=True)
class Crossing:
    """What a device sends over a mesh axis in a layer, in bytes a token it has."""

    axis: str
    kind: str  # of collective
    forward: float
    backward: float  # but what a recomputed forward pass sends
    again: bool = True  # a recomputed forward pass sends as much again
    follows_load: bool = False  # an uneven load of experts sends more


@dataclass(frozen=True)
class Share:
    """What a device has of an op in a layer, where arrays lie as some rules say."""

    crossings: tuple[Crossing, ...] = ()
    # work of the device that has most of the fused kernels, relative to the mean
    busiest: float = 1.0
    # a fused kernel would have to see a part of the queries at a time
    by_parts: bool = False
    # bytes of a sequence that a layer holds besides the device's own part
    held: int = 0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An op in a number of layers. Sizes are of one layer and one token."""

    name: str
    layers: int = 1
    products: tuple[Product, ...] = ()
    in_blocks: bool = True  # of the stack that is scanned and pipelined
    # tokens of a device that are computed at a time; 0: all
    chunk: int = 0
    # (override of the config, what it costs) that make the op hold less
    edits: tuple[tuple[str, str], ...] = ()

    def product_flops(self) -> float:
        """Returns the FLOPs of its matmuls, forward and backward, in all layers."""
        contracted = (product.contracted * product.size for product in self.products)
        return 6.0 * self.layers * sum(contracted)

    def fused_flops(self, convention: Convention) -> float:
        """Returns the FLOPs in kernels that no matmul shows, as `product_flops`."""
        return 0.0

    @property
    def fused_width(self) -> int:
        """Elements of the rows that fused kernels multiply; 0 without such kernels."""
        return 0

    @property
    def active_share(self) -> float:
        """The share of parameters split by experts that a token uses."""
        return 1.0

    def spare_rows(self, platform: str) -> float:
        """Returns the rows that are computed for nothing, relative to those needed."""
        return 0.0

    def faults(self, rules: Rules) -> Iterator[str]:
        """Yields why the op cannot be laid out by these rules."""
        return iter(())

    def form_name(self, rules: Rules) -> str:
        """Names how devices compute the op together; "" where there is one way."""
        return ""

    def share(self, rules: Rules, itemsize: int) -> Share:
        """Returns a device's share of the op; `itemsize`: bytes of an activation."""
        return Share()

    def explain(self, rules: Rules, itemsize: int) -> list[str]:
        """Returns lines for users: how devices compute the op together, and why."""
        return []

    # the part of a plan's JSON that is about ops of this kind; "": none
    section = ""
    # what compiled programs call the values that the op sends
    moves: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def report(
        cls, costs: Sequence[Any], rules: Rules, itemsize: int, load: float
    ) -> dict[str, Any]:
        """Returns the section of a plan, as JSON, for all costs of the section.

        Classes of one section inherit this from one class: the first cost's is called.

        Args:
          load: rows of the fullest pair of devices, relative to the mean.
        """
        return {}


def model_flops(costs: Iterable[Cost], convention: Convention) -> float:
    """Returns model FLOPs a token, forward and backward."""
    flops = [cost.product_flops() + cost.fused_flops(convention) for cost in costs]
    return math.fsum(flops)


def reports(
    costs: Sequence[Cost], rules: Rules, itemsize: int, load: float
) -> Mapping[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Returns {section of a plan: (its JSON, what its ops call what they send)}."""
    sections: dict[str, list[Cost]] = {}
    for cost in costs:
        if cost.section:
            sections.setdefault(cost.section, []).append(cost)
    found = {}
    for section, own in sections.items():
        moves = dict.fromkeys(name for cost in own for name in cost.moves)
        found[section] = (own[0].report(own, rules, itemsize, load), tuple(moves))
    return found
