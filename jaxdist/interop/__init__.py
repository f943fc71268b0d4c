"""Hugging Face folders: import and export.

`families` are the tables (with `config_rules` and `expert_rules`, those of
config.json), read in both directions: by `hf_config` config.json <-> the transformer's
values, by `hf_reader` and `hf_writer` tensors <-> its parameters.
"""

from jaxdist.interop.families import FAMILIES
from jaxdist.interop.hf_config import (
    POSITIONS,
    TRAINING,
    canonical_values,
    derive,
    different,
    fields_of,
    read_config,
    settled,
)
from jaxdist.interop.hf_reader import Tensors, open_weights
from jaxdist.interop.hf_writer import (
    KEPT,
    CheckpointWeights,
    copy_own_tokenizer,
    copy_small_files,
    export,
    write_chat_files,
)

__all__ = [
    "FAMILIES",
    "KEPT",
    "POSITIONS",
    "TRAINING",
    "CheckpointWeights",
    "Tensors",
    "copy_own_tokenizer",
    "copy_small_files",
    "derive",
    "different",
    "export",
    "fields_of",
    "open_weights",
    "read_config",
    "settled",
    "canonical_values",
    "write_chat_files",
]
