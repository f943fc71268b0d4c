"""What each form of attention over a split sequence sends and holds, and the lines that
say which is taken.

`context_attention` has the forms. All bytes are of one sequence and one device.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxdist.ops.context_attention import (
    Form,
    copied_heads,
    form_under,
    heads_divide,
    indivisible,
    shards_of,
)
from jaxdist.parallel.context import AXIS
from jaxdist.parallel.sharding import Rules

_GRADIENT = 4  # bytes of an element of a key's gradient while it travels around a ring


@dataclass(frozen=True)
class Sizes:
    """Attention of a layer."""

    length: int  # S, tokens of a sequence
    heads: int  # of queries
    kv_heads: int
    head_size: int  # elements
    itemsize: int  # bytes of one
    window: int = 0  # tokens that one sees; 0: all

    def form(self, rules: Rules) -> Form:
        """Returns how it is computed where arrays are laid out by these rules."""
        dims = (1, self.length, self.heads, self.head_size)
        return form_under(rules, dims, window=0 < self.window < self.length)


class Cost(NamedTuple):
    """What a form asks of a device."""

    kind: str  # of collective
    forward: float  # bytes sent
    backward: float  # the forward pass is not computed again in it
    # bytes of keys and values, and with heads of queries and results, in the forward
    # pass
    holds: float
    # bytes of keys and values alone that it holds beyond a device's own part of them
    keys: float


def cost(form: Form, sizes: Sizes) -> Cost:
    """Returns what a form that splits the sequence sends and holds."""
    c, part = form.context, sizes.length // form.context
    element, shards = (
        part * sizes.head_size * sizes.itemsize,
        shards_of(sizes.heads, form.head_shards),
    )
    # A device's own part of them; with `heads` of the heads that it will have, which
    # may be copies.
    kv = 2 * copied_heads(sizes.kv_heads, sizes.heads, shards) / shards * element
    queries = sizes.heads / shards * element
    if form.name == "heads":
        sent = (2 * queries + kv) * (c - 1)
        before = (
            2
            * copied_heads(sizes.kv_heads, sizes.heads, shards // c)
            * c
            / shards
            * element
        )
        return Cost("all-to-all", sent, sent, (2 * queries + kv) * c, kv * c - before)
    if form.name == "ring":
        wide = _GRADIENT / sizes.itemsize
        # To where all have equal work, and around; back with gradients and a number of
        # each query and head, and where the forward pass was computed again queries,
        # keys and values are still there.
        inner = 4 * sizes.heads / shards * part
        backward = (2 * queries + inner + kv) + kv * (c - 1) + wide * kv * c
        return Cost("collective-permute", 2 * queries + kv * c, backward, 2 * kv, kv)
    hops = form.hops(part, sizes.window if 0 < sizes.window < sizes.length else None)
    kind = "all-gather" if hops == c - 1 else "collective-permute"
    return Cost(kind, kv * hops, kv * hops, kv * (hops + 1), kv * hops)


def explain(rules: Rules, sizes: Sizes) -> list[str]:
    """Returns, in lines for users, which form is taken and why: bytes of a layer, a
    sequence and a device.

    They are those of the forward pass; the backward pass sends about as much again, and
    what remat computes twice is sent twice.
    """
    c, tensor = rules.shape.sizes[AXIS], rules.shape.sizes["tensor"]
    form = sizes.form(rules)
    if c == 1 or not form.splits_sequence:
        return []
    heads = Form("heads", c, c * shards_of(sizes.heads, tensor))
    costs = {
        name: cost(replace(heads, name=name, head_shards=tensor), sizes)
        for name in ("gather", "ring")
    }
    said = {name: f"{name} sends {_mb(one.forward)}" for name, one in costs.items()}
    said["gather"] += f", holds all of {_mb(costs['gather'].holds)}"
    said["ring"] += f", holds parts of {_mb(costs['ring'].holds)}"
    if divide := heads_divide(rules, sizes.heads):
        whole = cost(heads, sizes)
        said["heads"] = (
            f"heads sends {_mb(whole.forward)}, holds parts of {_mb(whole.holds)}"
        )
    why, other = (
        _why(rules, sizes, form),
        "heads" if form.name == "gather" and divide else "gather",
    )
    rest = [said[name] for name in dict.fromkeys((form.name, other))]
    return ["; ".join([f"context {c}: attention by {form.name}: {why}", *rest])]


def _why(rules: Rules, sizes: Sizes, form: Form) -> str:
    if rules.attention == form.name:
        return "set by context.attention"
    if rules.attention == "ring":
        return "a ring has no windows"
    if form.name == "heads":
        return f"{sizes.heads} heads divide by {form.head_shards}"
    return indivisible(rules, sizes.heads)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e6:.2g} MB"
