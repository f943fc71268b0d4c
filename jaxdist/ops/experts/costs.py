"""What a mixture of experts costs: FLOPs, what its exchange sends, what a layer holds.

Letters: `E` experts, `k` experts of a token, `D` model, `F` feed-forward, `n` devices
of the mesh axis `expert`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxdist.ops.costs import Cost, Crossing, Product, Share
from jaxdist.ops.experts.exchange import FROM_EXPERTS, TO_EXPERTS
from jaxdist.ops.experts.grouped_matmul import SHARE_SLACK
from jaxdist.ops.experts.mixture import SLACK, choose_exchange, even_trips
from jaxdist.parallel.axes import EXPERT_AXES
from jaxdist.parallel.remat import EXPERT_PRODUCTS
from jaxdist.parallel.sharding import Rules
from jaxdist.telemetry import flops

(AXIS,) = EXPERT_AXES
# A row goes to its expert and back, then x and its gradient go to it, and one back.
_FORWARD = 2
_BACKWARD = 3
_LANES = 128  # of a TPU's registers: narrower rows are padded
EVEN = "even load: all pairs of devices have about as many rows for one another"


def rounds(load: float, even: int = 1) -> int:
    """Counts how often devices go round for a load.

    Args:
      load: rows of the fullest pair of devices, relative to the mean.
      even: rounds of an even load, which have `SLACK` times its rows.
    """
    return max(1, math.ceil(even * load / SLACK - 1e-9))


@dataclass(frozen=True, kw_only=True)
class ExpertsCost(Cost):
    """Experts of which a token goes to some."""

    experts: int  # E
    chosen: int  # k
    width: int  # D

    section = "experts"
    moves = (TO_EXPERTS, FROM_EXPERTS)

    @property
    def active_share(self) -> float:
        return self.chosen / self.experts

    def spare_rows(self, platform: str) -> float:
        """Returns the share of rows that pad each expert's: on GPUs alone."""
        return SHARE_SLACK - 1 if platform == "gpu" else 0.0

    def form_name(self, rules: Rules) -> str:
        """Returns "rounds" or "gather"; "" where each device has all experts."""
        parts = rules.shape.sizes[AXIS]
        return choose_exchange("auto", parts, self.chosen)[0] if parts > 1 else ""

    def share(self, rules: Rules, itemsize: int) -> Share:
        """Returns a device's share of the exchange, with an even load.

        It sends (n - 1) / n of the rows of its tokens, or of a gather n - 1 rows a
        token.
        """
        parts = rules.shape.sizes[AXIS]
        form = self.form_name(rules)
        if not form:
            return Share()
        kind = "all-to-all"
        rows = self.chosen * SLACK * (parts - 1) / parts
        if form == "gather":
            kind = "all-gather"
            rows = float(parts - 1)
        sent = rows * self.width * itemsize
        crossing = Crossing(
            AXIS,
            kind,
            _FORWARD * sent,
            _BACKWARD * sent,
            again=False,
            follows_load=True,
        )
        return Share(crossings=(crossing,))

    @classmethod
    def report(
        cls, costs: Sequence[Any], rules: Rules, itemsize: int, load: float
    ) -> dict[str, Any]:
        first = costs[0]
        kind = first.form_name(rules)
        assumption = "nothing is exchanged"
        if kind:
            times = rounds(load)
            load_text = EVEN
            if load > 1:
                load_text = f"the fullest pair of devices has {load:g} x the mean rows"
            plural = "s" if times > 1 else ""
            assumption = (
                f"{load_text}; {times} round{plural} of {SLACK:g} x the even share"
            )
        return {
            "experts": first.experts,
            "chosen": first.chosen,
            "parts": rules.shape.sizes[AXIS],
            "exchange": kind or None,
            "load": load,
            "rounds": rounds(load) if kind else None,
            "assumption": assumption,
        }


def experts_cost(
    *,
    experts: int,
    chosen: int,
    width: int,
    hidden: int,
    gated: bool,
    layers: int,
) -> ExpertsCost:
    """Returns the cost of experts with their router.

    Args:
      hidden: width inside an expert.
    """
    inputs = Product(width, chosen * hidden, EXPERT_PRODUCTS, always_again=True)
    products = (
        Product(width, experts),
        *(inputs,) * (2 if gated else 1),
        Product(chosen * hidden, width, "mlp_out"),
    )
    return ExpertsCost(
        name="experts",
        layers=layers,
        products=products,
        experts=experts,
        chosen=chosen,
        width=width,
    )


class Moment(NamedTuple):
    """What the backward pass of a layer's experts holds at some moment, in bytes of a
    device.
    """

    gathered: int  # kernels
    gradients: int  # of kernels, whole
    rows: int  # of tokens, here and in the exchange


@dataclass(frozen=True)
class ExpertCall:
    """A call of `experts` in a program."""

    experts: int  # E, of all devices
    chosen: int  # k
    width: int  # D
    hidden: int  # F, a device's part
    inputs: int  # kernels of the first products: gate and up, or up
    choices: int  # of all tokens

    @property
    def flops(self) -> float:
        """Forward FLOPs of the chosen experts: no program says how long its loops
        are.
        """
        return 2.0 * self.choices * (self.inputs + 1) * self.width * self.hidden

    def kept(
        self, rules: Rules, tokens: int, itemsize: int, platform: str
    ) -> dict[str, int]:
        """Returns the bytes that policies keep of a device's tokens, by name.

        The products of rows that are not exchanged, on CPUs.
        """
        rows = tokens * self.chosen
        if platform != "cpu" or rules.shape.sizes[AXIS] > 1:
            rows = 0
        return {EXPERT_PRODUCTS: rows * self.inputs * self.hidden * itemsize}

    def moments(
        self, rules: Rules, tokens: int, itemsize: int, platform: str
    ) -> Iterator[Moment]:
        """Yields the moments of which one is a layer's peak, with a load that fills no
        more than a round.

        Kernels are gathered, hidden rows computed again, and gradients made one kernel
        after another; where there may be several rounds they add up in float32, as do
        those of the tokens.

        Args:
          tokens: of a device.
          itemsize: bytes of a row's element.
        """
        D = self.width
        F = self.hidden
        kernels = self.inputs + 1
        parts = rules.shape.sizes[AXIS]
        kind = choose_exchange("auto", parts, self.chosen)[0] if parts > 1 else ""
        kernel = self.experts // parts * D * F
        gathered = itemsize * kernels * kernel
        totals = 0
        rows = tokens * self.chosen
        group = tokens
        fixed = 0
        if kind:
            trips = even_trips(SLACK * rows, self.experts // parts)
            rows = int(SLACK * rows / trips)
            if kind == "gather":  # tokens whose x and gradients are there
                group *= parts
            totals = 4 * kernels * kernel
            fixed = group * D * (4 + 2 * itemsize)
        fixed += 2 * rows * D * itemsize  # rows of x and of its gradient
        # the products' gradients, and the weighted hidden rows
        hidden = kernels * rows * F * itemsize
        # A TPU's kernel puts them in the place of what they are made of; weights'
        # gradients fill its lanes.
        more = rows * F * itemsize
        if platform == "tpu":
            more = 4 * _LANES * rows
        yield Moment(gathered, totals, fixed + hidden + more)
        # In a loop of rounds kernels stay to its end; else they are free when their
        # rows are done, and one is there while another is summed over devices.
        left = 0
        made = 2 * 4 * kernel
        if kind:
            left = gathered
            made = 0
        # gradients of x, by product
        of_products = self.inputs * rows * D * itemsize
        yield Moment(left, totals, fixed + hidden + of_products)
        # Of each token a row by choice; where none are exchanged in float32, beside
        # those they are taken from.
        choice = itemsize if kind else itemsize + 4
        choices = self.chosen * group * D * choice
        yield Moment(left, totals, fixed + hidden + choices)
        yield Moment(left, totals + made, fixed + hidden - rows * F * itemsize)
        if platform == "gpu" and rules.shape.sizes["fsdp"] > 1 and rules.zero >= 2:
            # XLA scatters a layer's while the next is computed: out of copies, beside
            # the loop's own buffers.
            copies = 2 * 4 * kernels * kernel
            yield Moment(left, totals + copies, fixed + hidden)


def _call(arguments: Sequence[Any]) -> ExpertCall:
    """Returns the call of `jaxdist_experts` with these abstract arguments."""
    ids = arguments[1]
    # masks have two dims
    kernels = [a for a in arguments[3:] if a.ndim == 3]
    E, D, F = kernels[0].shape
    return ExpertCall(E, ids.shape[-1], D, F, len(kernels) - 1, ids.size)


flops.CALLS["jaxdist_experts"] = _call
