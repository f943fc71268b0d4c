"""What a command does with a config whose initial weights come from a source."""

from collections.abc import Collection, Sequence

from ml_collections import ConfigDict

from jaxdist import interop, train
from jaxdist.trainer import cli, initial_weights, teacher_weights
from jaxdist.trainer.run_config import RunConfig


def apply_weight_source(config: ConfigDict, set_keys: Collection[str] = ()) -> None:
    """Sets model.* and data.tokenizer to those of the config's initial weights.

    It also sets the model of a teacher.
    """
    sources = initial_weights.chosen_sources(config, interop.WEIGHT_SOURCES)
    initial_weights.apply_config(config, sources, set_keys)
    teacher_weights.apply_config(config, interop.WEIGHT_SOURCES)


def parsed(arguments: Sequence[str]) -> RunConfig:
    """Parses the words of a `train` command, as the command does."""
    sources = interop.WEIGHT_SOURCES
    return cli.parse(train._parser(), arguments, weight_sources=sources)[1]
