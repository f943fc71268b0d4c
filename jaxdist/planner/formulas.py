"""Back-of-envelope formulas of distributed training: bytes, seconds, fractions, each with its source.

Sizes are bytes (1 GB = 1e9), times seconds, bandwidths bytes per second in one direction. They answer before
anything is compiled, and say what to expect of the compiler's numbers; where the two differ, it is right.
The bubble of a pipeline is `jaxdist.parallel.pipeline.schedules.balance.bubble_fraction`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BYTES: Mapping[str, float] = {
    "float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


# --- Memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """Bytes per parameter of what training with Adam keeps."""

    weights: float  # that the forward pass reads
    gradients: float
    master: float  # float32 copy that the optimizer updates; 0: it updates the weights
    moments: float  # m and v
    why: str

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments


# One model, five honest answers: what differs is which copies are float32.
POLICIES: Mapping[str, Policy] = {
    "bfloat16": Policy(2, 2, 0, 8, "12: bfloat16 weights and gradients, float32 moments, no master copy"),
    "float32 gradients": Policy(2, 4, 0, 8, "14: the same, with gradients accumulated in float32"),
    "float32": Policy(4, 4, 0, 8, "16: everything float32; what jaxdist keeps, casting for each product"),
    "mixed": Policy(2, 2, 4, 8, "16: bfloat16 for the passes, float32 master copy (ZeRO, DeepSpeed)"),
    "megatron": Policy(2, 4, 4, 8, "18: the same, with gradients accumulated in float32 (Megatron-LM)"),
}


def state_bytes(num_parameters: float, policy: Policy, *, shards: int = 1, zero: int = 3) -> float:
    """Returns one device's weights, gradients and optimizer state under ZeRO.

    Stage 0 shards nothing, 1 what only the optimizer uses, 2 gradients as well, 3 weights as well. At 16
    bytes and many shards: 4x less, 8x less, and linear in their number (Rajbhandari et al. 2020, ZeRO).
    """
    optimizer = (policy.master + policy.moments) / (shards if zero >= 1 else 1)
    gradients = policy.gradients / (shards if zero >= 2 else 1)
    weights = policy.weights / (shards if zero >= 3 else 1)
    return num_parameters * (weights + gradients + optimizer)


# --- Communication -------------------------------------------------------------------------------


def wire_bytes(kind: str, payload: float, members: int) -> float:
    """Returns what each member of a ring sends for one collective.

    `payload` is the whole array: an all-gather's result, the operand of the others. A ring passes N - 1 of
    its N chunks on, an all-reduce twice: reduce-scatter, then all-gather.
    """
    if kind == "collective-permute":
        return float(payload) if members > 1 else 0.0
    return (2 if kind == "all-reduce" else 1) * payload * (members - 1) / members


def ring_time(
    kind: Collective, payload: float, members: int, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Returns seconds: the bandwidth term is nearly constant in the members, latency grows with them."""
    hops = {"all-reduce": 2 * (members - 1), "collective-permute": min(1, members - 1)}
    return wire_bytes(kind, payload, members) / bytes_per_s + hops.get(kind, members - 1) * latency_s


# --- Schedule ------------------------------------------------------------------------------------


def microbatches_for_bubble(stages: int, bubble: float) -> int:
    """Returns the fewest microbatches with (p - 1) / (m + p - 1) <= bubble: 4 (p - 1) for 20 %."""
    return max(1, math.ceil((stages - 1) * (1 / bubble - 1) - 1e-9))
