"""Back-of-envelope formulas of distributed training: bytes, seconds, fractions, each with its source.

Sizes are bytes (1 GB = 1e9), times seconds, bandwidths bytes per second in one direction. They answer before
anything is compiled, and say what to expect of the compiler's numbers; where the two differ, it is right.
The bubble of a pipeline is `jaxdist.pipeline.schedule.bubble_fraction`.
"""

from __future__ import annotations

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


def residual_bytes(
    batch: float, sequence: int, d_model: int, num_layers: int, dtype: str = "bfloat16"
) -> float:
    """Returns the activations that a layer hands to the next, two per layer: the least that is saved.

    The rule of thumb 2 * batch * sequence * hidden * layers * bytes; prop. to each of them.
    """
    return 2 * batch * sequence * d_model * num_layers * BYTES[dtype]


def saved_bytes(
    batch: float, sequence: int, d_model: int, d_ff: int, num_layers: int, tensor: int = 1
) -> float:
    """Returns bfloat16 activations saved without rematerialisation and with flash attention.

    Megatron-LM's theoretical_memory_usage.py: (18 + 4 d_ff / d_model) bytes for each element of the residual
    stream and layer, split over `tensor` with sequence parallelism.
    """
    return batch * sequence * d_model * num_layers * (18 + 4 * d_ff / d_model) / tensor


def logits_bytes(batch: float, sequence: int, vocab_size: int, dtype: str = "float32") -> float:
    """Returns the logits of a batch; their gradient takes as much again."""
    return batch * sequence * vocab_size * BYTES[dtype]


# --- Communication -------------------------------------------------------------------------------


def wire_bytes(kind: Collective, payload: float, members: int) -> float:
    """Returns what each member of a ring sends for one collective.

    `payload` is the whole array: an all-gather's result, the operand of the others. A ring passes N - 1 of
    its N chunks on, an all-reduce twice: reduce-scatter, then all-gather.
    """
    if kind == "collective-permute":
        return payload if members > 1 else 0.0
    return (2 if kind == "all-reduce" else 1) * payload * (members - 1) / members


def ring_time(
    kind: Collective, payload: float, members: int, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Returns seconds: the bandwidth term is nearly constant in the members, latency grows with them."""
    hops = {"all-reduce": 2 * (members - 1), "collective-permute": min(1, members - 1)}
    return wire_bytes(kind, payload, members) / bytes_per_s + hops.get(kind, members - 1) * latency_s


def data_parallel_bytes(num_parameters: float, replicas: int, dtype: str = "float32") -> float:
    """Returns what each replica sends per step to average gradients."""
    return wire_bytes("all-reduce", num_parameters * BYTES[dtype], replicas)


def tensor_parallel_payload(
    batch: float, sequence: int, d_model: int, num_layers: int, dtype: str = "bfloat16"
) -> float:
    """Returns the bytes all-reduced per step by tensor parallelism.

    Two all-reduces of the residual stream in a layer's forward pass, after attention and after the MLP, two
    in its backward pass (Shoeybi et al. 2019, Megatron-LM).
    """
    return 4 * num_layers * batch * sequence * d_model * BYTES[dtype]


def pipeline_bytes(microbatch: float, sequence: int, d_model: int, dtype: str = "bfloat16") -> float:
    """Returns what crosses one stage boundary for one microbatch, in one direction."""
    return microbatch * sequence * d_model * BYTES[dtype]


def fsdp_layer_bytes(layer_parameters: float, shards: int, dtype: str = "bfloat16") -> float:
    """Returns what each device sends to gather one layer's weights once.

    Per step a layer is gathered in the forward and in the backward pass, and its gradients reduce-scattered.
    """
    return wire_bytes("all-gather", layer_parameters * BYTES[dtype], shards)


# --- Schedule ------------------------------------------------------------------------------------


def microbatches_for_bubble(stages: int, bubble: float) -> int:
    """Returns the fewest microbatches with (p - 1) / (m + p - 1) <= bubble: 4 (p - 1) for 20 %."""
    return max(1, math.ceil((stages - 1) * (1 / bubble - 1) - 1e-9))
