"""Back-of-envelope formulas of distributed training: bytes, seconds, fractions, each
with its source.

Sizes are bytes (1 GB = 1e9), times seconds, bandwidths bytes per second in one
direction. They answer before anything is compiled, and say what to expect of the
compiler's numbers; where the two differ, it is right. The bubble of a pipeline is
`jaxdist.parallel.pipeline.schedules.balance.bubble_fraction`.
"""

from typing import NamedTuple

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
)


class Policy(NamedTuple):
    """Bytes per parameter of what training with Adam keeps."""

    weights: float  # that the forward pass reads
    gradients: float
    optimizer: float  # m and v, and a float32 copy of the weights where there is one


def state_bytes(
    num_parameters: float, policy: Policy, *, shards: int = 1, zero: int = 3
) -> float:
    """Returns one device's weights, gradients and optimizer state under ZeRO.

    Stage 0 shards nothing, 1 what only the optimizer uses, 2 gradients as well, 3
    weights as well. At 16 bytes and many shards: 4x less, 8x less, and linear in their
    number (Rajbhandari et al. 2020, ZeRO).
    """
    optimizer = policy.optimizer / (shards if zero >= 1 else 1)
    gradients = policy.gradients / (shards if zero >= 2 else 1)
    weights = policy.weights / (shards if zero >= 3 else 1)
    return num_parameters * (weights + gradients + optimizer)


def wire_bytes(kind: str, payload: float, members: int) -> float:
    """Returns what each member of a ring sends for one collective; over its bandwidth
    that is its time.

    `payload` is the whole array: an all-gather's result, the operand of the others. A
    ring passes N - 1 of its N chunks on, an all-reduce twice: reduce-scatter, then
    all-gather. Latency is left out.
    """
    if kind == "collective-permute":
        return float(payload) if members > 1 else 0.0
    return (2 if kind == "all-reduce" else 1) * payload * (members - 1) / members


def lost_share(
    interval_s: float, save_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Returns the share of the wall time that saves and failures take, to first order;
    at most 1.

    A save stops training once an interval; a failure costs the restart and, on average,
    half an interval.
    """
    return min(
        1.0, save_s / (interval_s + save_s) + (interval_s / 2 + restart_s) / mtbf_s
    )
