"""Logical names of the dims of parameters, and the mesh axes that split these dims."""

Names = tuple[str | None, ...]

EXPERTS = "experts"  # dim of kernels, one element per expert

# name -> mesh axis that computes with shards of this dim
PARAMETER_AXES = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "d_ff": "tensor",
    EXPERTS: "expert",
}

# names of stack dims; "" is one without a name
STACKS = ("chunks", "stages", "layers", "")

# modules of a staged model whose parameters have a stack dim
STACKED = ("first_blocks", "blocks")

FSDP_NAME = "d_model"  # the dim that fsdp prefers to shard

# dims that are outputs of the whole model, last in the kernel of a head
OUTPUTS = ("vocab", "score")

DIM_NAMES = (
    *PARAMETER_AXES,
    FSDP_NAME,
    "head_dim",
    "latent",
    "layers",
    "positions",
    "score",
)


def has_experts(names: Names) -> bool:
    """Checks whether a parameter has a dim of experts."""
    return EXPERTS in names


def unknown_names(names: Names) -> list[str]:
    """Lists the names that no mesh axis and no op knows, each once."""
    known = {*DIM_NAMES, *STACKS, None}
    return [str(name) for name in dict.fromkeys(names) if name not in known]


def in_stack(path: str) -> bool:
    """Checks whether a path, "blocks/mlp/up", is in a stack of a staged model."""
    return path.partition("/")[0] in STACKED
