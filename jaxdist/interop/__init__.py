"""Hugging Face folders: import and export.

`WEIGHT_SOURCES` let a run start from such folders. `families` holds the tables of tensors
and the rules of config.json (from `config_rules`, `expert_rules`, `rotary_rules`). Both
work in both directions: `hf_config` converts config.json, `hf_reader` and `hf_writer`
convert tensors.
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
    export,
)
from jaxdist.interop.initial_weights import WEIGHT_SOURCES

__all__ = [
    "FAMILIES",
    "KEPT",
    "WEIGHT_SOURCES",
    "CheckpointWeights",
    "Tensors",
    "canonical_values",
    "derive",
    "export",
    "fields_of",
    "open_weights",
    "read_config",
]
