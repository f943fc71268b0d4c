"""The table of mesh axes.

The mesh, elastic restarts, the planner and verification read it. A new axis is a row
here, a field of `MeshConfig` and a field of `DcnConfig`. Rules of `sharding` or
`dim_names` say what it splits in a model. This file imports no jax, because `launch`
reads it, too.
"""

from dataclasses import dataclass
from typing import Literal

Splits = Literal["batch", "sequence", "layers", "experts", "parameters", "dims"]
Talks = Literal["step", "tick", "layer"]


@dataclass(frozen=True)
class Axis:
    """A mesh axis and its properties."""

    name: str
    # what it splits; parameters: as stored; dims: heads, feed-forward and vocabulary
    splits: tuple[Splits, ...]
    talks: Talks  # how often its devices exchange data
    crosses_slices: bool  # whether it may span slices, over DCN, without mesh.dcn.force
    # order in which axes keep their sizes on fewer devices, where they shrink by
    # divisors; 0: it takes the devices that the others leave
    keeps: int
    # the largest size that `plan` advises to save memory; 1: it does not advise it
    advised_up_to: int = 1
    advice: str = ""  # the cost of following that advice


# Outermost first, so that neighbouring devices are on the axis that talks most.
# `keeps`: to lose stages or tensor shards changes more of the program than to lose fsdp
# shards. `advised_up_to` of tensor: 8 GPUs share a node's NVLink.
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
# axes that `plan` varies for any model; EXPERT_AXES it varies for models with experts
SEARCHED = tuple(
    axis.name for axis in TABLE if not {"experts", "sequence"} & set(axis.splits)
)
EXPERT_AXES = tuple(axis.name for axis in TABLE if "experts" in axis.splits)
BATCH_AXES = tuple(axis.name for axis in TABLE if "batch" in axis.splits)
SEQUENCE_AXES = tuple(axis.name for axis in TABLE if "sequence" in axis.splits)
# axes that split stored parameters and their state; only the first one splits the
# kernels of experts
PARAMETER_SHARDS = tuple(
    axis.name for axis in TABLE if {"parameters", "experts"} & set(axis.splits)
)
(EXPERT,) = EXPERT_AXES  # the only axis that splits experts
(CONTEXT,) = SEQUENCE_AXES  # the only axis that splits sequences
STATE_AXES = tuple(
    axis.name for axis in TABLE if not set(axis.splits) <= {"batch", "sequence"}
)
# axes whose devices talk inside every layer
CHATTY_AXES = tuple(axis.name for axis in TABLE if not axis.crosses_slices)
# axes whose devices only sum gradients
STEP_AXES = tuple(axis.name for axis in TABLE if axis.talks == "step")
# axes that may cross slices; the one that talks least is the first
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
    """Lists the divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
