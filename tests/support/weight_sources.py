"""What a command does with a config whose initial weights come from a source."""

from collections.abc import Collection

from ml_collections import ConfigDict

from jaxdist import interop
from jaxdist.trainer import initial_weights


def apply_weight_source(config: ConfigDict, set_keys: Collection[str] = ()) -> None:
    """Sets model.* and data.tokenizer to those of the config's initial weights."""
    sources = initial_weights.chosen_sources(config, interop.WEIGHT_SOURCES)
    initial_weights.apply_config(config, sources, set_keys)
