"""The weights of a reference that is another model: `objective.reference_from`.

The folder is read by the sources of initial weights, as if the run started from it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.checkpoint.folders import has_steps
from jaxdist.config import ConfigError, schema
from jaxdist.data import tokenizer
from jaxdist.models.lora import LoraConfig
from jaxdist.models.model_values import differing_values
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.objectives.pairs import REFERENCE
from jaxdist.step.first_state import MODULES
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.storage.untrusted import Malformed, read_json
from jaxdist.trainer import compose, initial_weights, workdir
from jaxdist.trainer.run_config import InitConfig, RunConfig
from jaxdist.trainer.weight_source import Target, WeightSource

KEY = "objective.reference_from"


def check(
    config: RunConfig, folder: Path, weight_sources: Sequence[WeightSource]
) -> None:
    """Checks that a run's reference has the model and the tokenizer of the run.

    A run that has saved no longer reads it.

    Args:
      config: the run's config.
      folder: the workdir.
      weight_sources: sources in addition to those of the core.

    Raises:
      ConfigError: it does not, or it cannot be read. The error lists all differences.
    """
    place = config.objective.reference_from
    if not place or has_steps(workdir.checkpoints_folder(folder, config)):
        return
    source_run = _config_of(config)
    (source,) = initial_weights.chosen_sources(source_run, weight_sources)
    set_keys: tuple[str, ...] = ()
    tokenizer_file = Path(place).expanduser() / tokenizer.TOKENIZER_FILE
    if is_huggingface(place) and not tokenizer_file.is_file():
        # without a tokenizer of its own, it is taken to have that of the run
        set_keys = ("data.tokenizer",)
    try:
        implied = source.config_of(schema.to_config_dict(source_run), set_keys)
    except ConfigError as error:
        raise _with_key(error, source, place) from error
    faults = [
        f"{fault} ({KEY}={place}): answers are compared token by token; give a reference "
        f"with the run's model"
        for fault in differing_values(config.model_options, implied.model)
    ]
    if not is_same_tokenizer(config, implied.tokenizer):
        faults.append(
            f"data.tokenizer={config.data.tokenizer}, there {implied.tokenizer} "
            f"({KEY}={place}): other tokens; give a reference with the run's tokenizer"
        )
    if implied.trained_with.get("lora.rank"):
        faults.append(
            f"{KEY}={place}: it has adapters; merge them first: jaxdist convert --from "
            f"{place.partition('@')[0]} --to FOLDER --format huggingface, and give FOLDER"
        )
    if faults:
        raise ConfigError(faults)


def module_values(
    config: RunConfig, built: TrainStep, weight_sources: Sequence[WeightSource]
) -> dict[str, Any]:
    """Reads the weights of a frozen reference, by `modules/reference/PATH`.

    The result is {} if the run's reference is no module, or has the first weights.
    """
    if not config.objective.reference_from or not built.abstract_state.modules:
        return {}
    abstract = built.views.abstract
    arrays = abstract._replace(trainable={}, frozen=abstract.modules[REFERENCE])
    values = load(_config_of(config), arrays, weight_sources)
    return {f"{MODULES}/{REFERENCE}/{path}": x for path, x in values.items()}


def state(
    config: RunConfig, built: TrainStep, weight_sources: Sequence[WeightSource]
) -> State:
    """Makes a state with the weights of the reference, and new adapters."""
    arrays = built.views.abstract
    new_adapters = dataclasses.replace(config.lora, from_peft="")
    source_run = compose.with_overrides(_config_of(config), {"lora": new_adapters})
    made: State = built.init(load(source_run, arrays, weight_sources))
    return made


def load(
    config: RunConfig,
    arrays: State,
    weight_sources: Sequence[WeightSource],
    key: str = KEY,
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
        raise _with_key(error, source, place, key) from error


def _config_of(config: RunConfig) -> RunConfig:
    """Makes the config of a run that starts from the reference's weights."""
    return source_config(config, config.objective.reference_from)


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


def _with_key(
    error: ConfigError, source: WeightSource, place: str, key: str = KEY
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
