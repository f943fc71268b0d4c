"""Options and scope names of context parallelism, the mesh axis `context`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxdist.config.annotations import Searched

AXIS = "context"
# Named scopes of the transfers, which the planner reads from programs.
TO_HEADS = "sequences_to_heads"
FROM_HEADS = "heads_to_sequences"
KEYS = "keys_and_values"
CHUNKS = "chunks_to_devices"
MOVED = (TO_HEADS, FROM_HEADS, KEYS, CHUNKS)
AttentionForm = Literal["auto", "heads", "gather", "ring"]


@dataclass(frozen=True)
class ContextConfig:
    """Options of attention if mesh.context splits the sequence."""

    # data that moves between devices. heads = whole sequences of some heads; gather =
    # all keys and values; ring = the keys and values of one device after another.
    # auto = heads if context x tensor divides them, otherwise gather
    attention: Annotated[AttentionForm, Searched()] = "auto"
