"""What attention costs: FLOPs, and what each form over a split sequence sends and holds.

`context_attention` has the forms. Bytes are of one layer, one sequence and one device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxdist.ops import context_attention
from jaxdist.ops.context_attention import (
    Form,
    copied_heads,
    form_under,
    heads_divide,
    indivisible,
    shards_of,
)
from jaxdist.ops.costs import Cost, Crossing, Product, Share
from jaxdist.parallel.context import AXIS, MOVED
from jaxdist.parallel.remat import PROJECTED
from jaxdist.parallel.sharding import Rules
from jaxdist.telemetry.flops import Convention

_GRADIENT = 4  # bytes of an element of a key's gradient while it travels around a ring


class Traffic(NamedTuple):
    """What a form asks of a device."""

    kind: str  # of collective
    forward: float  # bytes sent
    backward: float  # the forward pass is not computed again in it
    # bytes of keys and values, and with heads of queries and results, in the forward
    # pass
    holds: float
    # bytes of keys and values alone that it holds beyond a device's own part of them
    keys: float


@dataclass(frozen=True, kw_only=True)
class AttentionCost(Cost):
    """Causal attention over whole sequences, with its projections."""

    length: int  # S, tokens of a sequence
    heads: int  # of queries
    kv_heads: int
    head_size: int  # elements
    window: int = 0  # tokens that one sees; 0: all

    section = "context"
    moves = MOVED

    @property
    def sees_all(self) -> bool:
        return not 0 < self.window < self.length

    def fused_flops(self, convention: Convention) -> float:
        """Returns the FLOPs of scores and weighted values.

        12 H N span: the span is S ("full", masked or not), or what a causal mask
        leaves: S / 2, and W - W^2 / 2S with a window of W tokens.
        """
        span = float(self.length)
        if convention == "causal":
            seen = self.length if self.sees_all else self.window
            span = seen - seen * seen / (2 * self.length)
        return 12.0 * self.heads * self.head_size * span * self.layers

    @property
    def fused_width(self) -> int:
        return self.head_size

    def form(self, rules: Rules) -> Form:
        """Chooses how devices compute it together where arrays lie as rules say."""
        dims = (1, self.length, self.heads, self.head_size)
        return form_under(rules, dims, window=not self.sees_all)

    def form_name(self, rules: Rules) -> str:
        return self.form(rules).name

    def faults(self, rules: Rules) -> Iterator[str]:
        yield from context_attention.faults(rules, self.length, self.heads)

    def traffic(self, form: Form, itemsize: int) -> Traffic:
        """Computes the bytes that a form that splits the sequence sends and holds."""
        c = form.context
        part = self.length // c
        element = part * self.head_size * itemsize
        shards = shards_of(self.heads, form.head_shards)
        # A device's own part of them; with `heads` of the heads that it will have,
        # which may be copies.
        kv = 2 * self._kv_heads(shards) / shards * element
        queries = self.heads / shards * element
        if form.name == "heads":
            sent = (2 * queries + kv) * (c - 1)
            before = 2 * self._kv_heads(shards // c) * c / shards * element
            holds = (2 * queries + kv) * c
            return Traffic("all-to-all", sent, sent, holds, kv * c - before)
        if form.name == "ring":
            wide = _GRADIENT / itemsize
            # To where all have equal work, and around; back with gradients and a number
            # of each query and head, and where the forward pass was computed again
            # queries, keys and values are still there.
            inner = 4 * self.heads / shards * part
            forward = 2 * queries + kv * c
            backward = (2 * queries + inner + kv) + kv * (c - 1) + wide * kv * c
            return Traffic("collective-permute", forward, backward, 2 * kv, kv)
        hops = form.hops(part, None if self.sees_all else self.window)
        kind = "all-gather" if hops == c - 1 else "collective-permute"
        return Traffic(kind, kv * hops, kv * hops, kv * (hops + 1), kv * hops)

    def _kv_heads(self, shards: int) -> int:
        return copied_heads(self.kv_heads, self.heads, shards)

    def share(self, rules: Rules, itemsize: int) -> Share:
        form = self.form(rules)
        if not form.splits_sequence:
            return Share()
        traffic = self.traffic(form, itemsize)
        part = self.length // form.context
        crossing = Crossing(
            AXIS, traffic.kind, traffic.forward / part, traffic.backward / part
        )
        return Share(
            crossings=(crossing,),
            busiest=form.busiest if self.sees_all else 1.0,
            by_parts=form.parts > 1,
            held=int(traffic.keys),
        )

    def explain(self, rules: Rules, itemsize: int) -> list[str]:
        """Returns, in lines for users, which form is taken and why.

        The bytes are those of the forward pass, in a layer without a window; the
        backward pass sends about as much again, and what remat computes twice is sent
        twice.
        """
        own = replace(self, window=0)
        context = rules.shape.sizes[AXIS]
        tensor = rules.shape.sizes["tensor"]
        form = own.form(rules)
        if context == 1 or not form.splits_sequence:
            return []
        gather = own.traffic(Form("gather", context, tensor), itemsize)
        ring = own.traffic(Form("ring", context, tensor), itemsize)
        said = {
            "gather": f"gather sends {_mb(gather.forward)}, "
            f"holds all of {_mb(gather.holds)}",
            "ring": f"ring sends {_mb(ring.forward)}, holds parts of {_mb(ring.holds)}",
        }
        other = "gather"
        if heads_divide(rules, own.heads):
            heads = Form("heads", context, context * shards_of(own.heads, tensor))
            whole = own.traffic(heads, itemsize)
            said["heads"] = (
                f"heads sends {_mb(whole.forward)}, holds parts of {_mb(whole.holds)}"
            )
            if form.name == "gather":
                other = "heads"
        rest = [said[name] for name in dict.fromkeys((form.name, other))]
        first = f"context {context}: attention by {form.name}: {own._why(rules, form)}"
        return ["; ".join([first, *rest])]

    def _why(self, rules: Rules, form: Form) -> str:
        if rules.attention == form.name:
            return "set by context.attention"
        if rules.attention == "ring":
            return "a ring has no windows"
        if form.name == "heads":
            return f"{self.heads} heads divide by {form.head_shards}"
        return indivisible(rules, self.heads)

    @classmethod
    def report(
        cls, costs: Sequence[Any], rules: Rules, itemsize: int, load: float
    ) -> dict[str, Any]:
        parts = rules.shape.sizes[AXIS]
        if parts == 1:
            return {}
        layers = []
        for cost in costs:
            form = cost.form(rules)
            layer = {"form": form.name, "count": cost.layers, "window": cost.window}
            layers.append(layer | cost.traffic(form, itemsize)._asdict())
        return {
            "parts": parts,
            "why": costs[0].explain(rules, itemsize),
            "busiest": busiest(costs, rules, itemsize),
            "layers": layers,
        }


def attention_cost(
    *,
    width: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    length: int,
    window: int = 0,
    layers: int = 1,
    in_blocks: bool = True,
) -> AttentionCost:
    """Returns the cost of attention whose projections read rows of `width` elements."""
    inner = heads * head_size
    kv_inner = kv_heads * head_size
    products = (
        Product(width, inner, "query"),
        Product(width, kv_inner, "key"),
        Product(width, kv_inner, "value"),
        Product(inner, width, PROJECTED),
    )
    return AttentionCost(
        name="attention",
        layers=layers,
        products=products,
        in_blocks=in_blocks,
        length=length,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        window=window,
    )


def busiest(costs: Sequence[Cost], rules: Rules, itemsize: int) -> float:
    """Returns the work in fused kernels of the device with most of it, over the mean."""
    work = [cost.fused_flops("causal") for cost in costs]
    most = [
        flops * cost.share(rules, itemsize).busiest
        for cost, flops in zip(costs, work, strict=True)
    ]
    total = math.fsum(work)
    return math.fsum(most) / total if total else 1.0


def _mb(size: float) -> str:
    if size >= 1e6:
        return f"{size / 1e6:,.1f} MB"
    return f"{size / 1e6:.2g} MB"
