"""What a mixture of experts adds to a plan: sizes, memory, what its exchange sends,
when to share it out.

Letters: `E` experts, `k` of a token, `D` model, `F` feed-forward, `n` devices of the
mesh axis `expert`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxdist.ops.experts.exchange import FROM_EXPERTS, TO_EXPERTS
from jaxdist.ops.experts.mixture import SLACK, choose_exchange, even_trips
from jaxdist.parallel.axes import AXES, EXPERT_AXES, REST_AXIS, divisors
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner import formulas
from jaxdist.planner.blocks import LANES, ExpertCall
from jaxdist.planner.communication import Collective
from jaxdist.planner.exchanges import summed
from jaxdist.planner.targets import Target
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.telemetry import hlo
from jaxdist.trainer.run_config import RunConfig

(AXIS,) = EXPERT_AXES
EXCHANGES = (
    # times that a row crosses the network: to its expert and back, then x and gradient
    # to, and back
    5
)
SLOW_LINKS = ("DCN", "PCIe", "network")  # an exchange in every layer waits for them
EVEN = "even load: all pairs of devices have about as many rows for one another"
TO, FROM = (scope.replace("_", " ") for scope in (TO_EXPERTS, FROM_EXPERTS))


@dataclass(frozen=True)
class Mixture:
    """The experts of a model."""

    experts: int  # E
    chosen: int  # k
    width: int  # D
    layers: int  # that have them
    kernels: int  # elements of all experts' kernels in one layer
    computed: int  # bytes of a row's element

    def exchange(self, parts: int) -> str:
        """Returns how rows reach experts on so many devices: rounds, gather, or ""
        where each has all.
        """
        return choose_exchange("auto", parts, self.chosen)[0] if parts > 1 else ""

    def exchanged_bytes(self, parts: int) -> tuple[str, float]:
        """Returns the kind of collective, and its payload a token and layer, forward
        and backward.

        What a device sends of it is (n - 1) / n: 5 k slack (n - 1) / n rows, or 5 (n -
        1) of gathers.
        """
        row = EXCHANGES * self.width * self.computed
        if self.exchange(parts) == "gather":
            return "all-gather", row * parts
        return "all-to-all", row * self.chosen * SLACK * (parts > 1)


def mixture_of(run: RunConfig, spec: ModelSpec) -> Mixture | None:
    """Returns the experts of a run's model; None of a dense one."""
    named = spec.named_parameters().items()
    # no adapters
    kernels = {
        path: v for path, v in named if {"experts", "d_model", "d_ff"} <= set(v[1])
    }
    if not kernels:
        return None
    x, names = next(iter(kernels.values()))
    # stack dims have no name
    dims = dict(zip(names[::-1], x.shape[::-1], strict=False))
    stacked = sum(math.prod(x.shape[: -len(names)]) for x, names in kernels.values())
    layers = stacked // len({path.rpartition("/")[2] for path in kernels})
    return Mixture(
        experts=dims["experts"],
        chosen=run.model.get("experts_per_token") or 1,
        width=dims["d_model"],
        layers=layers,
        kernels=sum(math.prod(x.shape) for x, _ in kernels.values()) // layers,
        computed=jnp.dtype(run.precision.compute).itemsize,
    )


class Moment(NamedTuple):
    """What the backward pass of a layer's experts holds at some moment, in bytes of a
    device.
    """

    gathered: int  # kernels
    gradients: int  # of kernels, whole
    rows: int  # of tokens, here and in the exchange


def moments(
    call: ExpertCall,
    tokens: int,
    parts: int,
    computed: int,
    *,
    platform: str,
    scattered: bool = False,
) -> Iterator[Moment]:
    """Yields the moments of which one is a layer's peak, with a load that fills no more
    than a round.

    Kernels are gathered, hidden rows computed again, and gradients made one kernel
    after another; where there may be several rounds they add up in float32, as do those
    of the tokens.

    Args:
      tokens: of a device.
      parts: devices that share the experts out.
      computed: bytes of a row's element.
      scattered: kernels' gradients are reduce-scattered over devices.
    """
    D, F, kind = (
        call.width,
        call.hidden,
        choose_exchange("auto", parts, call.chosen)[0] if parts > 1 else "",
    )
    kernel = call.experts // parts * D * F
    gathered, totals = computed * (call.inputs + 1) * kernel, 0
    rows, group, fixed = tokens * call.chosen, tokens, 0
    if kind:
        rows = int(SLACK * rows / even_trips(SLACK * rows, call.experts // parts))
        # tokens whose x and gradients are there
        group *= parts if kind == "gather" else 1
        totals, fixed = 4 * (call.inputs + 1) * kernel, group * D * (4 + 2 * computed)
    fixed += 2 * rows * D * computed  # rows of x and of its gradient
    # the products' gradients, and the weighted hidden rows
    hidden = (call.inputs + 1) * rows * F * computed
    # A TPU's kernel puts them in the place of what they are made of; weights' gradients
    # fill its lanes.
    more = 4 * LANES * rows if platform == "tpu" else rows * F * computed
    yield Moment(gathered, totals, fixed + hidden + more)
    # In a loop of rounds kernels stay to its end; else they are free when their rows
    # are done.
    # one while another is summed over devices
    left, made = (gathered, 0) if kind else (0, 2 * 4 * kernel)
    yield Moment(
        left, totals, fixed + hidden + call.inputs * rows * D * computed
    )  # gradients of x, by product
    # Of each token a row by choice; where none are exchanged in float32, beside those
    # they are taken from.
    choices = call.chosen * group * D * (computed if kind else computed + 4)
    yield Moment(left, totals, fixed + hidden + choices)
    yield Moment(left, totals + made, fixed + hidden - rows * F * computed)
    if platform == "gpu" and scattered:
        # XLA scatters a layer's while the next is computed: out of copies, beside the
        # loop's own buffers.
        yield Moment(left, totals + 2 * 4 * (call.inputs + 1) * kernel, fixed + hidden)


def rounds(load: float, even: int = 1) -> int:
    """Returns how often devices go round if the fullest pair has `load` times the mean
    rows.

    Args:
      even: rounds of an even load, which have `SLACK` times its rows.
    """
    return max(1, math.ceil(even * load / SLACK - 1e-9))


def tokens_worth(mixture: Mixture) -> float:
    """Returns the tokens a device and part of a step below which experts send less than
    fsdp does.

    Fsdp gathers a layer's kernels twice in the compute dtype and reduces float32
    gradients; sharing out all experts sends each token's rows instead. 24 E D F bytes
    against 8.75 k slack D a token with n = 8.
    """
    moved = mixture.kernels * (2 * mixture.computed + 4)
    return moved / (
        EXCHANGES * mixture.chosen * SLACK * mixture.width * mixture.computed
    )


# Scope of loops that an even load leaves after so many rounds.
_ROUNDS = re.compile(r"\beven_load_trips_([1-9])\b")


def with_load(module: hlo.Module, load: float) -> hlo.Module:
    """Returns a program whose loops of rounds go round as often as a load needs."""

    def with_trips(step: hlo.Instruction) -> hlo.Instruction:
        even = _ROUNDS.search(step.op_name) if step.opcode == "while" else None
        if even is None:
            return step
        trips = rounds(load, int(even[1]))
        return hlo.Instruction(
            step.name,
            f'{step.text}, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
        )

    computations = {
        name: {step.name: with_trips(step) for step in steps.values()}
        for name, steps in module.computations.items()
    }
    return replace(module, computations=computations)


def describe(
    mixture: Mixture | None,
    shape: MeshShape,
    load: float,
    collectives: Sequence[Collective],
) -> dict[str, Any]:
    """Returns, as JSON, what a plan says of experts: how they exchange rows, what was
    assumed, what moves.
    """
    if mixture is None:
        return {}
    parts, times = shape.sizes[AXIS], rounds(load)
    kind = mixture.exchange(parts)
    assumed = (
        EVEN
        if load <= 1
        else f"the fullest pair of devices has {load:g} x the mean rows"
    )
    times_text = f"{times} round{'s' * (times > 1)} of {SLACK:g} x the even share"
    return {
        "experts": mixture.experts,
        "chosen": mixture.chosen,
        "parts": parts,
        "exchange": kind or None,
        "load": load,
        "rounds": times if kind else None,
        "assumption": f"{assumed}; {times_text}" if kind else "nothing is exchanged",
        "exchanged": summed(collectives, (TO, FROM)),
    }


def best_size(mixture: Mixture, target: Target, inside: int, tokens: float) -> int:
    """Returns the n of `expert` with the least time on the wire beside fsdp, both
    inside a slice or node.

    Args:
      inside: devices that fast links join, of which n is a divisor.
      tokens: of a device in a part of a step.
    """

    def seconds(n: int) -> float:
        shape = _inside(target, inside, n)
        links = {axis: target.axis_link(shape, axis) for axis in (AXIS, "fsdp")}
        kind, payload = mixture.exchanged_bytes(n)
        sent = formulas.wire_bytes(kind, payload * tokens, n)
        kept = formulas.wire_bytes("all-gather", mixture.kernels / n, inside // n) * (
            2 * mixture.computed + 4
        )
        return links[AXIS].seconds(kind, sent) + links["fsdp"].seconds(
            "all-gather", kept
        )

    sizes = [n for n in divisors(inside) if mixture.experts % n == 0]
    return min(sizes, key=lambda n: (seconds(n), n))


def _inside(target: Target, devices: int, n: int) -> MeshShape:
    ones = dict.fromkeys(AXES, 1)
    replicas = target.num_devices // devices
    sizes = {**ones, REST_AXIS: replicas, "fsdp": devices // n, AXIS: n}
    return MeshShape(sizes, {**ones, REST_AXIS: target.num_slices})
