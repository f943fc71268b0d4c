"""Costs of a mixture of experts: FLOPs, bytes of its exchange, memory of a layer.

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
from jaxdist.parallel.axes import EXPERT
from jaxdist.parallel.remat import EXPERT_PRODUCTS
from jaxdist.parallel.sharding import Rules
from jaxdist.telemetry import flops

# Number of times that a row crosses the mesh. Forward: to its expert and back.
# Backward: x and its gradient to the expert, the gradient of x back.
_FORWARD = 2
_BACKWARD = 3
_LANES = 128  # of a TPU's registers: narrower rows are padded
EVEN = "even load: all pairs of devices have about as many rows for one another"


def rounds(load: float, even: int = 1) -> int:
    """Computes the number of rounds of exchange for a load.

    Args:
      load: rows of the fullest pair of devices, relative to the mean.
      even: rounds of an even load; together they have room for `SLACK` times its rows.
    """
    return max(1, math.ceil(even * load / SLACK - 1e-9))


@dataclass(frozen=True, kw_only=True)
class ExpertsCost(Cost):
    """Cost of experts, of which each token uses a few."""

    experts: int  # E
    chosen: int  # k
    width: int  # D

    section = "experts"
    moves = (TO_EXPERTS, FROM_EXPERTS)

    @property
    def active_share(self) -> float:
        """Share of the experts' parameters that a token uses."""
        return self.chosen / self.experts

    def spare_rows(self, platform: str) -> float:
        """Computes the padding rows, relative to the needed rows: 0 except on GPUs."""
        return SHARE_SLACK - 1 if platform == "gpu" else 0.0

    def form_name(self, rules: Rules) -> str:
        """Names the exchange: rounds, gather, or "" if each device has all experts."""
        parts = rules.shape.sizes[EXPERT]
        return choose_exchange("auto", parts, self.chosen)[0] if parts > 1 else ""

    def share(self, rules: Rules, itemsize: int) -> Share:
        """Computes a device's share of the exchange, with an even load.

        With rounds, a device sends (n - 1) / n of the rows of its tokens. With a
        gather, it sends n - 1 rows for each token.
        """
        parts = rules.shape.sizes[EXPERT]
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
            axis=EXPERT,
            kind=kind,
            forward=_FORWARD * sent,
            backward=_BACKWARD * sent,
            again=False,
            follows_load=True,
        )
        return Share(crossings=(crossing,))

    @classmethod
    def report(
        cls, costs: Sequence[Any], rules: Rules, itemsize: int, load: float
    ) -> dict[str, Any]:
        """Builds the section "experts" of a plan, as JSON.

        Args:
          costs: costs of the section; the first one is reported.
          rules: rules of the layout.
          itemsize: bytes of an activation.
          load: rows of the fullest pair of devices, relative to the mean.
        """
        first = costs[0]
        kind = first.form_name(rules)
        num_rounds = rounds(load)
        assumption = "nothing is exchanged"
        if kind:
            load_text = EVEN
            if load > 1:
                load_text = f"the fullest pair of devices has {load:g} x the mean rows"
            plural = "s" if num_rounds > 1 else ""
            assumption = (
                f"{load_text}; {num_rounds} round{plural} of {SLACK:g} x the even share"
            )
        return {
            "experts": first.experts,
            "chosen": first.chosen,
            "parts": rules.shape.sizes[EXPERT],
            "exchange": kind or None,
            "load": load,
            "rounds": num_rounds if kind else None,
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
    """Computes the cost of experts with their router.

    Args:
      experts: number of experts.
      chosen: experts of a token.
      width: width of the model.
      hidden: width inside an expert.
      gated: whether experts have a gate.
      layers: number of layers with experts.
    """
    inputs = Product(width, chosen * hidden, EXPERT_PRODUCTS, always_again=True)
    router = Product(width, experts)
    down = Product(chosen * hidden, width, "mlp_out")
    products = (router, inputs, inputs, down) if gated else (router, inputs, down)
    return ExpertsCost(
        name="experts",
        layers=layers,
        products=products,
        experts=experts,
        chosen=chosen,
        width=width,
    )


class Moment(NamedTuple):
    """Memory of the backward pass of a layer's experts at a moment, in bytes."""

    gathered: int  # gathered kernels
    gradients: int  # whole gradients of kernels, before they are summed over devices
    rows: int  # rows of tokens, the exchange's included


@dataclass(frozen=True)
class ExpertCall:
    """Call of `experts` in a program."""

    experts: int  # E: experts of all devices
    chosen: int  # k: experts of a token
    width: int  # D: width of the model
    hidden: int  # F: a device's part of the width inside an expert
    inputs: int  # number of kernels before the activation: gate and up, or up
    choices: int  # assignments of all tokens

    @property
    def flops(self) -> float:
        """Forward FLOPs of the chosen experts.

        A program cannot tell them, because its loops have no fixed length.
        """
        return 2.0 * self.choices * (self.inputs + 1) * self.width * self.hidden

    def kept(
        self, rules: Rules, tokens: int, itemsize: int, platform: str
    ) -> dict[str, int]:
        """Counts the bytes that a remat policy can keep of a device, by name.

        These are the products of rows, which are kept on CPUs without an exchange only.

        Args:
          rules: rules of the layout.
          tokens: tokens of a device.
          itemsize: bytes of a row's element.
          platform: "cpu", "gpu" or "tpu".
        """
        rows = tokens * self.chosen
        if platform != "cpu" or rules.shape.sizes[EXPERT] > 1:
            rows = 0
        return {EXPERT_PRODUCTS: rows * self.inputs * self.hidden * itemsize}

    def moments(
        self,
        rules: Rules,
        tokens: int,
        itemsize: int,
        platform: str,
        *,
        holds_gradients: bool,
    ) -> Iterator[Moment]:
        """Yields the moments of the backward pass that may be a layer's memory peak.

        The load fills no more than the rounds of an even load. Kernels are gathered and
        hidden rows are computed again. The gradients of kernels are computed one after
        another. With an exchange, they are summed in float32, like the gradients of
        tokens.

        Args:
          rules: rules of the layout.
          tokens: tokens of a device.
          itemsize: bytes of a row's element.
          platform: "cpu", "gpu" or "tpu".
          holds_gradients: whether the compiler holds the whole gradients of all kernels
            until the last one is computed. It counts without an exchange.
        """
        D = self.width
        F = self.hidden
        kernels = self.inputs + 1
        parts = rules.shape.sizes[EXPERT]
        kind = choose_exchange("auto", parts, self.chosen)[0] if parts > 1 else ""
        kernel_size = self.experts // parts * D * F
        gathered = itemsize * kernels * kernel_size
        totals = 0
        rows = tokens * self.chosen
        group_tokens = tokens
        fixed = 0
        if kind:
            trips = even_trips(SLACK * rows, self.experts // parts)
            rows = int(SLACK * rows / trips)
            if kind == "gather":  # a device has x and the gradients of these tokens
                group_tokens *= parts
            totals = 4 * kernels * kernel_size
            fixed = group_tokens * D * (4 + 2 * itemsize)
        fixed += 2 * rows * D * itemsize  # rows of x and of its gradient
        hidden_array_bytes = rows * F * itemsize
        # gradients of the products, and the weighted hidden rows
        hidden = kernels * hidden_array_bytes

        # The gradients of hidden rows are computed. A TPU's kernel writes them over its
        # inputs; the weights' gradients fill its lanes.
        extra = 4 * _LANES * rows if platform == "tpu" else hidden_array_bytes
        yield Moment(gathered, totals, fixed + hidden + extra)

        # The gradients of x are computed, one for each product. A loop of rounds holds
        # its kernels to its end. Without a loop, kernels are free as soon as their rows
        # are done, and one gradient is held while another is summed over devices.
        gathered_in_loop = gathered if kind else 0
        gradients_in_sum = 0 if kind else 2 * 4 * kernel_size
        x_gradients = self.inputs * rows * D * itemsize
        yield Moment(gathered_in_loop, totals, fixed + hidden + x_gradients)

        # Each token gathers a row for each of its choices. Without an exchange, these
        # rows are held in float32 next to the rows that they are gathered from.
        choice_itemsize = itemsize if kind else itemsize + 4
        choices = self.chosen * group_tokens * D * choice_itemsize
        yield Moment(gathered_in_loop, totals, fixed + hidden + choices)

        # The gradients of kernels are computed; one hidden row array is free by then.
        yield Moment(
            gathered_in_loop,
            totals + gradients_in_sum,
            fixed + hidden - hidden_array_bytes,
        )
        if holds_gradients and not kind:
            # The last gradient needs only the rows of x and one array of hidden rows.
            last_rows = rows * D * itemsize + hidden_array_bytes
            yield Moment(0, 4 * kernels * kernel_size, last_rows)
        if platform == "gpu" and rules.shape.sizes["fsdp"] > 1 and rules.zero >= 2:
            # XLA scatters a layer's gradients during the next layer. It scatters
            # copies, which are held besides the buffers of the loop.
            copies = 2 * 4 * kernels * kernel_size
            yield Moment(gathered_in_loop, totals + copies, fixed + hidden)


def _call(arguments: Sequence[Any]) -> ExpertCall:
    """Describes a call of `jaxdist_experts` by its abstract arguments."""
    ids = arguments[1]
    # Kernels have three dims. The arguments between weights and kernels are masks,
    # which have two.
    kernels = [array for array in arguments[3:] if array.ndim == 3]
    E, D, F = kernels[0].shape
    return ExpertCall(
        experts=E,
        chosen=ids.shape[-1],
        width=D,
        hidden=F,
        inputs=len(kernels) - 1,
        choices=ids.size,
    )


flops.CALLS["jaxdist_experts"] = _call
