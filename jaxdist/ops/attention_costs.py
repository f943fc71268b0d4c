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
    head_size: int  # N of queries and keys
    value_size: int  # V: elements of a head of values
    window: int = 0  # tokens that a token sees, itself included; 0 = all

    section = "context"
    moves = MOVED

    @property
    def sees_all(self) -> bool:
        """Whether the window leaves no token out."""
        return not 0 < self.window < self.length

    def fused_flops(self, convention: Convention) -> float:
        """Counts the FLOPs of scores and weighted values.

        They are 6 H (N + V) span per token and layer. The span is the mean number of keys:
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
        sizes = self.head_size + self.value_size
        return 6.0 * self.heads * sizes * span * self.layers

    @property
    def fused_width(self) -> int:
        """Elements of a head, the mean of keys and values."""
        return (self.head_size + self.value_size) // 2

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
        # bytes of a key and a value, which are those of a query and a result, too
        both = part * (self.head_size + self.value_size) * itemsize
        shards = shards_of(self.heads, form.head_shards)
        # A device's own part of keys and values. The kv heads may be repeated, to split
        # like the query heads.
        kv = self._kv_heads(shards) / shards * both
        queries = self.heads / shards * both  # and results
        if form.name == "heads":
            sent = (queries + kv) * (c - 1)
            kv_before = self._kv_heads(shards // c) * c / shards * both
            return Traffic(
                kind="all-to-all",
                forward=sent,
                backward=sent,
                holds=(queries + kv) * c,
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
                forward=queries + kv * c,
                backward=(queries + inner + kv) + kv * (c - 1) + wide * kv * c,
                holds=2 * kv,
                keys=kv,
            )
        hops = form.hops(part, None if self.sees_all else self.window)
        return Traffic(
            kind="all-gather" if hops == c - 1 else "collective-permute",
            forward=self._gathered(kv, part, itemsize) * hops,
            backward=self._gathered(kv, part, itemsize) * hops,
            holds=kv * (hops + 1),
            keys=kv * hops,
        )

    def _gathered(self, kv: float, part: int, itemsize: int) -> float:
        """Counts the bytes that a device sends to another one that gathers.

        Args:
          kv: bytes of the device's part of keys and values.
          part: tokens of this part.
          itemsize: bytes of an activation.
        """
        return kv

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
            busiest=self._busiest(form),
            by_parts=form.parts > 1,
            held=int(traffic.keys),
        )

    def _busiest(self, form: Form) -> float:
        """Computes the work of the busiest device in kernels, relative to the mean."""
        return form.busiest if self.sees_all else 1.0

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
        sizes = (self.head_size, self.value_size)
        kernel = has_kernel(platform, dtype, self.length, sizes)
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
        value_size=head_size,
        window=window,
    )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionCost(AttentionCost):
    """Cost of attention whose keys and values follow from a latent and one key."""

    latent_size: int  # elements of the latent
    rope_size: int  # elements of the key that all heads share

    def _gathered(self, kv: float, part: int, itemsize: int) -> float:
        return float(part * (self.latent_size + self.rope_size) * itemsize)

    def _busiest(self, form: Form) -> float:
        """Adds the keys and values that a device expands for other devices' tokens.

        They are counted like the work of kernels, although matmuls take less time.
        """
        busiest = super()._busiest(form)
        if form.name != "gather":
            return busiest
        expanded = self.head_size - self.rope_size + self.value_size
        again = 6.0 * self.latent_size * self.heads * expanded * (form.context - 1)
        return busiest + again * self.layers / self.fused_flops("causal")


def latent_attention_cost(
    *,
    width: int,
    heads: int,
    query_rank: int,
    kv_rank: int,
    nope_size: int,
    rope_size: int,
    value_size: int,
    length: int,
    layers: int = 1,
) -> LatentAttentionCost:
    """Computes the cost of latent attention with its projections.

    Args:
      width: width of the model.
      heads: number of heads.
      query_rank: size of the latent of queries; 0: none.
      kv_rank: size of the latent of keys and values.
      nope_size: elements of a head of queries and keys that are not rotated.
      rope_size: elements of a head of queries that are rotated, and of the shared key.
      value_size: elements of a head of values.
      length: tokens of a sequence.
      layers: number of layers.
    """
    head_size = nope_size + rope_size
    queries = heads * head_size
    products = [Product(width, queries, "query")]
    if query_rank:
        products = [
            Product(width, query_rank, "query_down"),
            Product(query_rank, queries, "query"),
        ]
    products += [
        Product(width, kv_rank + rope_size, "latent"),
        Product(kv_rank, heads * nope_size, "key"),
        Product(kv_rank, heads * value_size, "value"),
        Product(heads * value_size, width, PROJECTED),
    ]
    return LatentAttentionCost(
        name="attention",
        layers=layers,
        products=tuple(products),
        length=length,
        heads=heads,
        kv_heads=heads,
        head_size=head_size,
        value_size=value_size,
        latent_size=kv_rank,
        rope_size=rope_size,
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
