"""Typed configuration without jax: errors, schemas, config files and overrides."""

from jaxdist.config.errors import EXIT_CONFIG, EXIT_NO_CHECKPOINT, ConfigError, Parser, suggest
from jaxdist.config.files import apply_overrides, help_text, load, packaged_folders
from jaxdist.config.schema import (
    MISSING,
    Change,
    Field,
    Schema,
    diff,
    fingerprint,
    flatten,
    from_config_dict,
    parse_value,
    resolve,
    schema_of,
    to_config_dict,
    unflatten,
)

__all__ = [
    "EXIT_CONFIG",
    "EXIT_NO_CHECKPOINT",
    "MISSING",
    "Change",
    "ConfigError",
    "Field",
    "Parser",
    "Schema",
    "apply_overrides",
    "diff",
    "fingerprint",
    "flatten",
    "from_config_dict",
    "help_text",
    "load",
    "packaged_folders",
    "parse_value",
    "resolve",
    "schema_of",
    "suggest",
    "to_config_dict",
    "unflatten",
]
