"""The mesh axes: one table that the mesh, elastic restarts, the planner and
verification read.

A new axis is a row here and a field of `MeshConfig` and `DcnConfig`; what it splits in
a model is a rule of `sharding` or `param_names`. No jax: `launch` reads it, too.
"""

from dataclasses import dataclass
from typing import Literal

Splits = Literal["batch", "sequence", "layers", "experts", "parameters", "dims"]
Talks = Literal["step", "tick", "layer"]


@dataclass(frozen=True)
class Axis:
    """What is known of a mesh axis."""

    name: str
    # parameters: as stored; dims: heads, feed-forward and vocabulary
    splits: tuple[Splits, ...]
    talks: Talks  # how often its devices exchange data
    crosses_slices: bool  # whether it may span slices, over DCN, without mesh.dcn.force
    # rank in which its size is kept on fewer devices, shrinking by divisors; 0: it
    # takes the rest
    keeps: int
    # the largest size that `plan` advises to save memory; 1: none
    advised_up_to: int = 1
    advice: str = ""  # and what that costs


# Outermost first, so that neighbouring devices are on the axis that talks most. Losing
# stages or tensor shards changes more of the program than losing fsdp shards. 8 GPUs
# share a node's NVLink.
TABLE = (
    Axis(
        "pipeline",
        ("layers",),
        "tick",
        crosses_slices=True,
        keeps=1,
        advised_up_to=16,
        advice="same losses; a bubble of (p - 1) / (microbatches + p - 1)",
    ),
    Axis("data", ("batch",), "step", crosses_slices=True, keeps=0),
    Axis("fsdp", ("batch", "parameters"), "layer", crosses_slices=True, keeps=5),
    Axis("expert", ("batch", "experts"), "layer", crosses_slices=False, keeps=4),
    Axis("context", ("sequence", "parameters"), "layer", crosses_slices=False, keeps=3),
    Axis(
        "tensor",
        ("dims",),
        "layer",
        crosses_slices=False,
        keeps=2,
        advised_up_to=8,
        advice="same losses; two sums of activations a layer, so within fast links only",
    ),
)

AXES = tuple(axis.name for axis in TABLE)
# Those that `plan` varies for any model; and for one with experts besides.
SEARCHED = tuple(
    axis.name for axis in TABLE if not {"experts", "sequence"} & set(axis.splits)
)
EXPERT_AXES = tuple(axis.name for axis in TABLE if "experts" in axis.splits)
BATCH_AXES = tuple(axis.name for axis in TABLE if "batch" in axis.splits)
SEQUENCE_AXES = tuple(axis.name for axis in TABLE if "sequence" in axis.splits)
# Those that share out parameters with their state, as stored: of experts' own kernels
# the first alone.
PARAMETER_SHARDS = tuple(
    axis.name for axis in TABLE if {"parameters", "experts"} & set(axis.splits)
)
STATE_AXES = tuple(
    axis.name for axis in TABLE if not set(axis.splits) <= {"batch", "sequence"}
)
# they talk inside every layer
CHATTY_AXES = tuple(axis.name for axis in TABLE if not axis.crosses_slices)
# they add up gradients
STEP_AXES = tuple(axis.name for axis in TABLE if axis.talks == "step")
# Those that may cross slices, the one that talks least first.
CROSSING_AXES = tuple(
    axis.name
    for axis in sorted(
        TABLE, key=lambda axis: ("step", "tick", "layer").index(axis.talks)
    )
    if axis.crosses_slices
)
REST_AXIS = next(axis.name for axis in TABLE if not axis.keeps)
KEPT_AXES = tuple(
    axis.name for axis in sorted(TABLE, key=lambda axis: axis.keeps) if axis.keeps
)


def divisors(number: int) -> list[int]:
    """Returns the sizes that divide a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
