"""How devices share out sequences over the mesh axis `context`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxdist.config.annotations import Searched

AXIS = "context"
# Scopes that the planner reads off programs: what moves.
TO_HEADS = "sequences_to_heads"
FROM_HEADS = "heads_to_sequences"
KEYS = "keys_and_values"
CHUNKS = "chunks_to_devices"
MOVED = (TO_HEADS, FROM_HEADS, KEYS, CHUNKS)
AttentionForm = Literal["auto", "heads", "gather", "ring"]


@dataclass(frozen=True)
class ContextConfig:
    """What attention does where mesh.context splits the sequence."""

    # heads: a device gets whole sequences of some heads; gather: all keys and values
    # for its own queries; ring: those of one device after another; auto: heads if they
    # divide by context x tensor, else gather
    attention: Annotated[AttentionForm, Searched()] = "auto"
