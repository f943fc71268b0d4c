"""Rules of thumb for a layout, as teaching texts give them: shown beside the search's
winner, never a limit.

On GPUs the five steps: does it fit, tensor parallelism inside NVLink, stages of at
least four layers, enough microbatches, and data parallelism with the rest; its table is
experience, not arithmetic. On TPUs one rule from the roofline, because ICI joins a
whole slice: shard over all of it while each device has the tokens to hide the gathers.
Nothing here was measured by us.
"""

import math
from dataclasses import dataclass

from jaxdist.parallel.axes import EXPERT_AXES, SEARCHED, divisors
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.pipeline.schedules.balance import bubble_fraction
from jaxdist.planner import experts, formulas
from jaxdist.planner.experts import Mixture
from jaxdist.planner.targets import Target

# Billions of parameters up to which a row holds, GPUs in a tensor group, stages.
TABLE = ((7, 1, 1), (13, 8, 1), (70, 8, 4), (175, 8, 8), (1000, 8, 16))
# of a device's memory that state may take: activations and workspace need the rest
FOR_STATE = 0.6
MIN_LAYERS = 4  # of a stage: fewer leave nothing to balance


@dataclass(frozen=True)
class Suggestion:
    """A layout by rule, with what each step said."""

    mesh: MeshConfig
    microbatches: int
    reasons: tuple[str, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The layout as on a command line."""
        named = (
            *SEARCHED,
            *(axis for axis in EXPERT_AXES if getattr(self.mesh, axis) > 1),
            "zero",
        )
        mesh = tuple(f"mesh.{name}={getattr(self.mesh, name)}" for name in named)
        return mesh + (f"pipeline.microbatches={self.microbatches}",) * (
            self.mesh.pipeline > 1
        )


def devices_needed(num_parameters: float, memory_bytes: float) -> int:
    """Returns the fewest devices that hold bfloat16 weights and gradients with Adam, 12
    bytes a parameter.
    """
    return math.ceil(
        formulas.state_bytes(num_parameters, formulas.BFLOAT16) / memory_bytes
    )


def rule_of_thumb(
    num_parameters: float,
    target: Target,
    num_layers: int,
    tokens_per_device: float | None = None,
    mixture: Mixture | None = None,
    *,
    active: float | None = None,
) -> Suggestion:
    """Returns the layout that the rules give, for models of the transformer kind.

    Args:
      tokens_per_device: of one step; decides on TPU whether gathering weights can hide
        behind compute, and with experts whether they are shared out.
      active: parameters that a token uses, by which the table counts models with
        experts.
    """
    if target.platform == "tpu":
        return _torus(target, tokens_per_device, mixture)
    return _five_steps(
        num_parameters, target, num_layers, tokens_per_device, mixture, active
    )


def _expert_size(
    target: Target,
    inside: int,
    tokens: float | None,
    mixture: Mixture | None,
    say: list,
) -> int:
    """Returns the size of the axis `expert` among devices with fast links; adds why."""
    if mixture is None:
        return 1
    size = experts.best_size(mixture, target, inside, tokens) if tokens else 1
    worth = f"below {experts.tokens_worth(mixture):.0f} tokens a device rows are fewer bytes than kernels"
    say.append(
        f"expert {size}: {worth}, and an exchange needs links of one slice or node"
    )
    return size


def _five_steps(
    num_parameters: float,
    target: Target,
    num_layers: int,
    tokens: float | None,
    mixture: Mixture | None,
    active: float | None,
) -> Suggestion:
    total = target.num_devices
    rows = (row[1:] for row in TABLE if (active or num_parameters) / 1e9 <= row[0])
    most_tensor, most_stages = next(rows, TABLE[-1][1:])
    state = formulas.state_bytes(num_parameters, formulas.BFLOAT16)
    held = (
        f", {target.chip.capacity_bytes / 1e9:.0f} GB a device" if target.chip else ""
    )
    say = [f"fit: {state / 1e9:.0f} GB of state at 12 bytes{held}"]

    node = target.shape[1] if target.platform == "gpu" else total
    # Experts' kernels are split by experts first, and tensor takes what that leaves of
    # a node.
    expert = _expert_size(target, node, tokens, mixture, say)
    tensor = max(n for n in divisors(node // expert) if n <= most_tensor)
    say.append(f"tensor {tensor}: the table has {most_tensor}, a node {node} devices")

    most = max(1, min(most_stages, num_layers // MIN_LAYERS))
    pipeline = max(p for p in divisors(total // tensor // expert) if p <= most)
    say.append(
        f"pipeline {pipeline}: the table has {most_stages}; {num_layers / pipeline:.3g} layers a stage"
    )

    microbatches = max(1, 4 * (pipeline - 1))
    if pipeline > 1:
        bubble = bubble_fraction(pipeline, microbatches)
        under = formulas.microbatches_for_bubble(pipeline, 0.1)
        say.append(
            f"microbatches {microbatches}: 4 (p - 1) leave a bubble of {bubble:.0%}, 10 % needs {under}"
        )

    rest = total // tensor // pipeline
    share = num_parameters / (tensor * pipeline)
    zero = next((z for z in range(4) if rest > 1 and _fits(share, target, rest, z)), 3)
    what = ("nothing", "optimizer state", "gradients, too", "weights, too")[zero]
    left = f"data {rest // expert}" + f" x expert {expert}" * (expert > 1)
    say.append(
        f"{left}: the rest; ZeRO {zero} shards {what}"
        if rest > 1
        else "data 1: nothing is left"
    )
    if not _fits(share, target, rest, zero):
        needed = devices_needed(num_parameters, FOR_STATE * _memory(target))
        say.append(f"does not fit: at 12 bytes a parameter it takes {needed} devices")
    sharded = rest // expert if zero else 1
    data = rest // expert // sharded
    # over expert alone, whose devices need no copies of the rest
    zero = zero or 3 * (expert > 1)
    mesh = MeshConfig(
        pipeline=pipeline,
        data=data,
        fsdp=sharded,
        expert=expert,
        tensor=tensor,
        zero=zero,
    )
    return Suggestion(mesh, microbatches, tuple(say))


def _torus(
    target: Target, tokens_per_device: float | None, mixture: Mixture | None
) -> Suggestion:
    assert target.chip is not None
    inside = target.num_devices // target.num_slices
    say, tensor = list[str](), 1
    peak, link = target.chip.peak("bfloat16"), target.group_link(range(inside))
    if peak and math.isfinite(link.bytes_per_s):
        # A layer's products take 2 tokens x parameters / peak, gathering it 2
        # parameters / bandwidth.
        needed = peak / link.bytes_per_s
        say.append(
            f"gathers hide behind compute from {needed:.0f} tokens a device on (peak / ICI)"
        )
        while (
            tokens_per_device
            and tokens_per_device * tensor < needed
            and tensor < 8
            and inside > tensor
        ):
            tensor *= 2
        if tensor > 1:
            say.append(
                f"tensor {tensor}: {tokens_per_device:.0f} tokens are fewer, weights stay split"
            )
    if target.num_slices > 1:
        say.append(
            f"data {target.num_slices}: one replica a slice, only gradients cross DCN"
        )
    expert = (
        _expert_size(target, inside, tokens_per_device, mixture, say)
        if tensor == 1
        else 1
    )
    split = f"fsdp {inside // expert}" + f" x expert {expert}" * (expert > 1)
    say.insert(0, f"{split}: the whole slice, ICI reaches all of it; ZeRO 3")
    fsdp = inside // tensor // expert
    mesh = MeshConfig(data=target.num_slices, fsdp=fsdp, expert=expert, tensor=tensor)
    return Suggestion(mesh, 1, tuple(say))


def _fits(num_parameters: float, target: Target, shards: int, zero: int) -> bool:
    state = formulas.state_bytes(
        num_parameters, formulas.FLOAT32, shards=shards, zero=zero
    )
    return state <= FOR_STATE * _memory(target)


def _memory(target: Target) -> float:
    return target.chip.capacity_bytes if target.chip else math.inf
