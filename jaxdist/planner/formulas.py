"""Back-of-envelope formulas of distributed training.

Sizes are bytes (1 GB = 1e9), times are seconds, and bandwidths are bytes per second in
one direction. The formulas need no compiler; where its numbers differ, the compiler is
right. The bubble of a pipeline is in
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
    """Bytes per parameter of the state of a training."""

    weights: float  # the weights that the forward pass reads
    gradients: float
    optimizer: float  # moments, and a float32 copy of the weights if there is one


def state_bytes(
    num_parameters: float, policy: Policy, *, shards: int = 1, zero: int = 3
) -> float:
    """Counts a device's bytes of weights, gradients and optimizer state under ZeRO.

    Stage 0 shards nothing, stage 1 the optimizer state, stage 2 gradients as well, and
    stage 3 weights as well (Rajbhandari et al. 2020, ZeRO). With 16 bytes per parameter
    and many shards, stage 1 takes 4x less memory and stage 2 8x less. The saving of
    stage 3 is linear in the number of shards.

    Args:
      num_parameters: number of parameters.
      policy: bytes of a parameter.
      shards: number of devices that share the state.
      zero: the ZeRO stage.
    """
    optimizer = policy.optimizer / (shards if zero >= 1 else 1)
    gradients = policy.gradients / (shards if zero >= 2 else 1)
    weights = policy.weights / (shards if zero >= 3 else 1)
    return num_parameters * (weights + gradients + optimizer)


def wire_bytes(kind: str, payload: float, members: int) -> float:
    """Counts the bytes that each member of a ring sends for one collective.

    Each member passes on N - 1 of the array's N chunks. An all-reduce does so twice: as
    a reduce-scatter, then as an all-gather. Latency is not modelled.

    Args:
      kind: one of `KINDS`.
      payload: bytes of the whole array: an all-gather's result, others' operand.
      members: number of devices.
    """
    if kind == "collective-permute":
        return float(payload) if members > 1 else 0.0
    return (2 if kind == "all-reduce" else 1) * payload * (members - 1) / members


def lost_share(
    interval_s: float, save_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Estimates the share of wall time lost to saves and failures; at most 1.

    A save stops training once per interval. A failure costs a restart and, on average,
    half an interval. The estimate is of first order.

    Args:
      interval_s: time between saves.
      save_s: time that training stops for a save.
      restart_s: time from a failure until training continues.
      mtbf_s: mean time between failures.
    """
    saves = save_s / (interval_s + save_s)
    failures = (interval_s / 2 + restart_s) / mtbf_s
    return min(1.0, saves + failures)
