"""Costs of attention: FLOPs, and the traffic and memory of each form.

`context_attention` describes the forms, which split the sequence. Bytes are per layer,
per sequence and per device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxdist.ops import context_attention
from jaxdist.ops.attention_backends import has_kernel
from jaxdist.ops.attention_reference import score_blocks
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

# bytes of an element of a key's gradient that travels around a ring
_GRADIENT = 4


class Traffic(NamedTuple):
    """Traffic and memory of a form on a device."""

    kind: str  # collective
    forward: float  # bytes sent in the forward pass
    backward: (
        float  # bytes sent in the backward pass, without a recomputed forward pass
    )
    # bytes held in the forward pass: keys and values; with heads, queries and results
    # too
    holds: float
    # bytes of keys and values that the device holds besides its own part of them
    keys: float


@dataclass(frozen=True, kw_only=True)
class AttentionCost(Cost):
    """Cost of causal attention over whole sequences, with its projections."""

    length: int  # S: tokens of a sequence
    heads: int  # H: query heads
    kv_heads: int  # K
    head_size: int  # N
    window: int = 0  # tokens that a token sees, itself included; 0 = all

    section = "context"
    moves = MOVED

    @property
    def sees_all(self) -> bool:
        """Whether the window leaves no token out."""
        return not 0 < self.window < self.length

    def fused_flops(self, convention: Convention) -> float:
        """Counts the FLOPs of scores and weighted values.

        They are 12 H N span per token and layer. The span is the mean number of keys:
        S by the convention "full". By "causal" it is S / 2, or W - W^2 / 2S with a
        window of W tokens.

        Packed documents do not shorten the span, although a token sees its own document
        only: their lengths differ from batch to batch. MFU is then too high by a share
        of at most these FLOPs (docs/how-to/slow-runs.md).
        """
        span = float(self.length)
        if convention == "causal":
            seen = self.length if self.sees_all else self.window
            span = seen - seen * seen / (2 * self.length)
        return 12.0 * self.heads * self.head_size * span * self.layers

    @property
    def fused_width(self) -> int:
        """Elements of a head."""
        return self.head_size

    def form(self, rules: Rules) -> Form:
        """Chooses the form for a layout."""
        dims = (1, self.length, self.heads, self.head_size)
        return form_under(rules, dims, window=not self.sees_all)

    def form_name(self, rules: Rules) -> str:
        """Names the form for a layout."""
        return self.form(rules).name

    def faults(self, rules: Rules) -> Iterator[str]:
        """Yields the errors of context.attention, as texts for users."""
        yield from context_attention.faults(rules, self.length, self.heads)

    def traffic(self, form: Form, itemsize: int) -> Traffic:
        """Computes the bytes that a form sends and holds, if it splits the sequence."""
        c = form.context
        part = self.length // c
        element = part * self.head_size * itemsize
        shards = shards_of(self.heads, form.head_shards)
        # A device's own part of keys and values. The kv heads may be repeated, to split
        # like the query heads.
        kv = 2 * self._kv_heads(shards) / shards * element
        queries = self.heads / shards * element
        if form.name == "heads":
            sent = (2 * queries + kv) * (c - 1)
            kv_before = 2 * self._kv_heads(shards // c) * c / shards * element
            return Traffic(
                kind="all-to-all",
                forward=sent,
                backward=sent,
                holds=(2 * queries + kv) * c,
                keys=kv * c - kv_before,
            )
        if form.name == "ring":
            wide = _GRADIENT / itemsize
            inner = 4 * self.heads / shards * part  # a float32 of each query and head
            # Forward: queries, keys, values and results are exchanged for equal work,
            # and keys and values travel around. Backward: the gradients of all four are
            # exchanged, and keys and values travel again, with their gradients.
            # Queries, keys and values have been exchanged by the recomputed forward
            # pass.
            return Traffic(
                kind="collective-permute",
                forward=2 * queries + kv * c,
                backward=(2 * queries + inner + kv) + kv * (c - 1) + wide * kv * c,
                holds=2 * kv,
                keys=kv,
            )
        hops = form.hops(part, None if self.sees_all else self.window)
        return Traffic(
            kind="all-gather" if hops == c - 1 else "collective-permute",
            forward=kv * hops,
            backward=kv * hops,
            holds=kv * (hops + 1),
            keys=kv * hops,
        )

    def _kv_heads(self, shards: int) -> int:
        return copied_heads(self.kv_heads, self.heads, shards)

    def share(self, rules: Rules, itemsize: int) -> Share:
        """Computes a device's share of attention."""
        form = self.form(rules)
        if not form.splits_sequence:
            return Share()
        traffic = self.traffic(form, itemsize)
        part = self.length // form.context
        crossing = Crossing(
            axis=AXIS,
            kind=traffic.kind,
            forward=traffic.forward / part,
            backward=traffic.backward / part,
        )
        return Share(
            crossings=(crossing,),
            busiest=form.busiest if self.sees_all else 1.0,
            by_parts=form.parts > 1,
            held=int(traffic.keys),
        )

    def explain(self, rules: Rules, itemsize: int) -> list[str]:
        """Explains to users which form is chosen, next to an alternative.

        The bytes are those of the forward pass, in a layer without a window. The
        backward pass sends about as many again. A recomputed forward pass sends its
        bytes twice.
        """
        unwindowed = replace(self, window=0)
        context = rules.shape.sizes[AXIS]
        tensor = rules.shape.sizes["tensor"]
        form = unwindowed.form(rules)
        if context == 1 or not form.splits_sequence:
            return []
        gather = unwindowed.traffic(Form("gather", context, tensor), itemsize)
        ring = unwindowed.traffic(Form("ring", context, tensor), itemsize)
        texts = {
            "gather": f"gather sends {_mb(gather.forward)}, "
            f"holds all of {_mb(gather.holds)}",
            "ring": f"ring sends {_mb(ring.forward)}, holds parts of {_mb(ring.holds)}",
        }
        alternative = "gather"
        if heads_divide(rules, unwindowed.heads):
            head_shards = context * shards_of(unwindowed.heads, tensor)
            heads = unwindowed.traffic(Form("heads", context, head_shards), itemsize)
            texts["heads"] = (
                f"heads sends {_mb(heads.forward)}, holds parts of {_mb(heads.holds)}"
            )
            if form.name == "gather":
                alternative = "heads"
        names = dict.fromkeys((form.name, alternative))
        reason = unwindowed._reason(rules, form)
        first = f"context {context}: attention by {form.name}: {reason}"
        return ["; ".join([first, *(texts[name] for name in names)])]

    def score_bytes(self, rules: Rules, dtype: str, platform: str) -> int:
        """Counts the bytes of a sequence's scores; 0 if a kernel computes them.

        XLA starts the blocks of queries together, so the float32 scores of all blocks
        exist at once. So do the gradients of the largest block.
        """
        form = self.form(rules)
        kernel = has_kernel(platform, dtype, self.length, self.head_size)
        if kernel and form.parts == 1:
            return 0
        blocks = score_blocks(self.length, self.window)
        heads = self.heads // form.head_shards
        return 4 * heads * (sum(blocks) + max(blocks)) // form.parts

    def _reason(self, rules: Rules, form: Form) -> str:
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
        """Builds the section "context" of a plan, as JSON; see `Cost.report`."""
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
    """Computes the cost of attention with its projections.

    Args:
      width: width of the model.
      heads: query heads.
      kv_heads: heads of keys and values.
      head_size: elements of a head.
      length: tokens of a sequence.
      window: tokens that a token sees, itself included; 0: all.
      layers: number of layers.
      in_blocks: whether it is in the blocks that are scanned and pipelined.
    """
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
    """Computes the busiest device's work in fused kernels, relative to the mean."""
    work = [cost.fused_flops("causal") for cost in costs]
    busiest_work = [
        flops * cost.share(rules, itemsize).busiest
        for cost, flops in zip(costs, work, strict=True)
    ]
    total = math.fsum(work)
    return math.fsum(busiest_work) / total if total else 1.0


def _mb(size: float) -> str:
    if size >= 1e6:
        return f"{size / 1e6:,.1f} MB"
    return f"{size / 1e6:.2g} MB"
