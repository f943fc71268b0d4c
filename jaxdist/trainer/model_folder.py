"""The folder of another model that a run reads: a reference, or a teacher.

It is read by the sources of initial weights, as if a run started from it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.data import tokenizer
from jaxdist.models.lora import LoraConfig
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.step.state import State
from jaxdist.storage.untrusted import Malformed, read_json
from jaxdist.trainer import compose, initial_weights
from jaxdist.trainer.run_config import InitConfig, RunConfig
from jaxdist.trainer.weight_source import Target, WeightSource


def load(
    config: RunConfig,
    arrays: State,
    weight_sources: Sequence[WeightSource],
    key: str,
) -> dict[str, Any]:
    """Reads the weights that a config starts from, into arrays with shardings.

    Args:
      config: config of a run that starts from the weights.
      arrays: the arrays with flat layers, as ShapeDtypeStructs.
      weight_sources: sources in addition to those of the core.
      key: the key that names the weights, for errors.
    """
    (source,) = initial_weights.chosen_sources(config, weight_sources)
    try:
        return source.open(Target(config, arrays)).load().values
    except ConfigError as error:
        place = config.init.from_run or config.init.from_huggingface
        raise with_key(error, source, place, key) from error


def source_config(config: RunConfig, place: str) -> RunConfig:
    """Makes the config of a run that trains all weights, starting from a folder.

    Args:
      config: config of a run with the folder's model.
      place: folder of a Hugging Face model or of a run.
    """
    changes = {
        "init": init_from(place),
        "lora": LoraConfig(),
        "objective": ObjectiveConfig(),
    }
    return compose.with_overrides(config, changes)


def init_from(place: str) -> InitConfig:
    """Makes the settings of a start from the folder of a Hugging Face model or a run."""
    if is_huggingface(place):
        return InitConfig(from_huggingface=place)
    return InitConfig(from_run=place)


def is_huggingface(place: str) -> bool:
    """Checks whether a place is the folder of a Hugging Face model, not of a run."""
    try:
        document = read_json(Path(place).expanduser() / "config.json", dict)
    except (OSError, Malformed):
        return False
    return "model_type" in document


def with_key(
    error: ConfigError, source: WeightSource, place: str, key: str
) -> ConfigError:
    """Makes an error of a source speak of another key."""
    faults = [fault.replace(source.key, key) for fault in error.faults]
    if not Path(place.partition("@")[0]).expanduser().exists():
        faults = [
            f"{key}={place}: there is no such folder; give the folder of a run, or of a "
            f"Hugging Face model (`hf download OWNER/MODEL --local-dir FOLDER` makes one)"
        ]
    return ConfigError(faults)


def is_same_tokenizer(config: RunConfig, other: str) -> bool:
    """Checks whether a run's tokenizer and another one have the same tokens."""
    name = config.data.tokenizer
    if name == other:
        return True
    if tokenizer.bpe_size(name) or tokenizer.bpe_size(other):
        return False
    cache = config.data.cache_folder()
    loaded = [tokenizer.load_tokenizer(x, cache=cache) for x in (name, other)]
    return loaded[0].fingerprint == loaded[1].fingerprint
