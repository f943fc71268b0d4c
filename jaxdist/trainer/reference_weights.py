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
from jaxdist.models.model_values import differing_values
from jaxdist.objectives.pairs import REFERENCE
from jaxdist.step.first_state import MODULES
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, initial_weights, model_folder, workdir
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.weight_source import WeightSource

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
    place = place_of(config)
    if not place or has_steps(workdir.checkpoints_folder(folder, config)):
        return
    source_run = _config_of(config)
    (source,) = initial_weights.chosen_sources(source_run, weight_sources)
    set_keys: tuple[str, ...] = ()
    tokenizer_file = Path(place).expanduser() / tokenizer.TOKENIZER_FILE
    if model_folder.is_huggingface(place) and not tokenizer_file.is_file():
        # without a tokenizer of its own, it is taken to have that of the run
        set_keys = ("data.tokenizer",)
    try:
        implied = source.config_of(schema.to_config_dict(source_run), set_keys)
    except ConfigError as error:
        raise model_folder.with_key(error, source, place, KEY) from error
    faults = [
        f"{fault} ({KEY}={place}): answers are compared token by token; give a reference "
        f"with the run's model"
        for fault in differing_values(config.model_options, implied.model)
    ]
    if not model_folder.is_same_tokenizer(config, implied.tokenizer):
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
    if not place_of(config) or REFERENCE not in built.abstract_state.modules:
        return {}
    abstract = built.views.abstract
    arrays = abstract._replace(trainable={}, frozen=abstract.modules[REFERENCE])
    values = model_folder.load(_config_of(config), arrays, weight_sources, KEY)
    return {f"{MODULES}/{REFERENCE}/{path}": x for path, x in values.items()}


def state(
    config: RunConfig, built: TrainStep, weight_sources: Sequence[WeightSource]
) -> State:
    """Makes a state with the weights of the reference, and new adapters."""
    arrays = built.views.abstract
    new_adapters = dataclasses.replace(config.lora, from_peft="")
    source_run = compose.with_overrides(_config_of(config), {"lora": new_adapters})
    values = model_folder.load(source_run, arrays, weight_sources, KEY)
    made: State = built.init(values)
    return made


def place_of(config: RunConfig) -> str:
    """Finds the folder of another model that is the reference; "" if there is none."""
    return config.objective.reference_from if config.objective.name == "dpo" else ""


def _config_of(config: RunConfig) -> RunConfig:
    """Makes the config of a run that starts from the reference's weights."""
    return model_folder.source_config(config, config.objective.reference_from)
