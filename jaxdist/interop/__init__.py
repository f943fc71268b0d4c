"""Hugging Face folders: import and export.

`WEIGHT_SOURCES` let a run start from such folders. `families` are the tables (with `config_rules` and `expert_rules`, those of
config.json), read in both directions: by `hf_config` config.json <-> the transformer's
values, by `hf_reader` and `hf_writer` tensors <-> its parameters.
"""

from jaxdist.interop.families import FAMILIES
from jaxdist.interop.hf_config import (
    canonical_values,
    derive,
    fields_of,
    read_config,
)
from jaxdist.interop.hf_reader import Tensors, open_weights
from jaxdist.interop.hf_writer import (
    KEPT,
    CheckpointWeights,
    copy_own_tokenizer,
    export,
    write_chat_files,
)
from jaxdist.interop.initial_weights import WEIGHT_SOURCES

__all__ = [
    "FAMILIES",
    "KEPT",
    "WEIGHT_SOURCES",
    "CheckpointWeights",
    "Tensors",
    "canonical_values",
    "copy_own_tokenizer",
    "derive",
    "export",
    "fields_of",
    "open_weights",
    "read_config",
    "write_chat_files",
]
