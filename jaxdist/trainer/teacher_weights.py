"""The weights of a teacher: `objective.teacher`.

The folder is read by the sources of initial weights, as if a run of the teacher's model
started from it. Only the first start reads it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdist.checkpoint.folders import CheckpointError, has_steps
from jaxdist.config import ConfigError, schema, trees
from jaxdist.data import tokenizer
from jaxdist.models.model_values import for_logits
from jaxdist.objectives.distill import TEACHER
from jaxdist.step.first_state import MODULES
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, initial_weights, model_folder, workdir
from jaxdist.trainer.module_models import describe_module
from jaxdist.trainer.run_config import RunConfig, default_config
from jaxdist.trainer.teacher_model import KEY, MODEL_KEY, as_text, teacher_config
from jaxdist.trainer.weight_source import ImpliedConfig, WeightSource, named_place


def is_needed(config: ConfigDict) -> bool:
    """Checks whether a config, not validated yet, names a teacher and learns from it."""
    name = named_place(config, "objective.name")
    return name == "distill" and bool(named_place(config, KEY))


def apply_config(
    config: ConfigDict,
    weight_sources: Sequence[WeightSource],
    before: RunConfig | None = None,
) -> None:
    """Sets objective.teacher_model of a config to the model of its teacher.

    Args:
      config: the config to change.
      weight_sources: sources in addition to those of the core.
      before: the config of the run to resume. If it has the same teacher, its folder is
        not read again. Default: the run is new.

    Raises:
      ConfigError: the teacher cannot be read, and the config does not know its model.
    """
    place = named_place(config, KEY)
    if not is_needed(config):
        return
    if before is not None and before.objective.teacher == place:
        config.objective.teacher_model = before.objective.teacher_model
        return
    scratch = default_config(config.model.get("target"))
    with scratch.unlocked(), scratch.ignore_type():
        scratch.data.update(config.data)
        for key, value in vars(model_folder.init_from(place)).items():
            scratch.init[key] = value
    try:
        implied = _implied(place, scratch, ("data.tokenizer",), weight_sources)
    except (ConfigError, CheckpointError) as error:
        if config.objective.teacher_model:
            return  # a start that needs the weights fails; others need the model alone
        if isinstance(error, CheckpointError):
            raise ConfigError(f"{KEY}={place}: {error}") from error
        raise
    config.objective.teacher_model = as_text(for_logits(implied.model))


def completed(
    config: RunConfig, folder: Path, weight_sources: Sequence[WeightSource]
) -> RunConfig:
    """Fills in objective.teacher_model of a run that has a teacher, if it is empty.

    Args:
      config: the run's config.
      folder: the workdir. If it holds the run, its config knows the teacher's model.
      weight_sources: sources in addition to those of the core.

    Raises:
      ConfigError: the teacher cannot be read.
    """
    if not _place_of(config) or config.objective.teacher_model:
        return config
    before = None
    if (folder / workdir.CONFIG).is_file():
        named = config.model["target"]
        before = workdir.read_config(folder, named=named)
    values = schema.to_config_dict(config)
    apply_config(values, weight_sources, before)
    model = values.objective.teacher_model
    return compose.with_overrides(config, {MODEL_KEY: model})


def check(
    config: RunConfig, folder: Path, weight_sources: Sequence[WeightSource]
) -> None:
    """Checks that a run's teacher has the tokenizer of the run.

    A run that has saved no longer reads the teacher.

    Args:
      config: the run's config.
      folder: the workdir.
      weight_sources: sources in addition to those of the core.

    Raises:
      ConfigError: it has another one, or it cannot be read.
    """
    place = _place_of(config)
    if not place or has_steps(workdir.checkpoints_folder(folder, config)):
        return
    source_config = _source_config(config)
    # without a tokenizer of its own, a teacher is taken to have that of the run
    set_keys: tuple[str, ...] = ()
    is_run = bool(source_config.init.from_run)
    has_file = (Path(place).expanduser() / tokenizer.TOKENIZER_FILE).is_file()
    if not is_run and not has_file:
        set_keys = ("data.tokenizer",)
    implied = _implied(
        place, schema.to_config_dict(source_config), set_keys, weight_sources
    )
    if not model_folder.is_same_tokenizer(config, implied.tokenizer):
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}, there {implied.tokenizer} "
            f"({KEY}={place}): other tokens; set {KEY} to a model with the run's tokenizer"
        )


def module_values(
    config: RunConfig, built: TrainStep, weight_sources: Sequence[WeightSource]
) -> dict[str, Any]:
    """Reads the weights of the teacher, by `modules/teacher/PATH`; {} without one."""
    if not _place_of(config):
        return {}
    abstract = built.views.abstract
    parameters = trees.flatten_names(abstract.modules[TEACHER])
    spec = describe_module(config, TEACHER)
    states = trees.flatten_names(spec.model_state)
    model_state = {path: parameters.pop(path) for path in states}
    arrays = abstract._replace(
        trainable={},
        frozen=trees.unflatten_names(parameters),
        model_state=trees.unflatten_names(model_state),
    )
    source_config = _source_config(config)
    values = model_folder.load(source_config, arrays, weight_sources, KEY)
    return {f"{MODULES}/{TEACHER}/{path}": x for path, x in values.items()}


def _place_of(config: RunConfig) -> str:
    """Finds the folder of a run's teacher; "" if the run has none."""
    return config.objective.teacher if config.objective.name == "distill" else ""


def _source_config(config: RunConfig) -> RunConfig:
    """Makes the config of a run that starts from the teacher's weights."""
    return model_folder.source_config(teacher_config(config), config.objective.teacher)


def _implied(
    place: str,
    config: ConfigDict,
    set_keys: Sequence[str],
    weight_sources: Sequence[WeightSource],
) -> ImpliedConfig:
    """Reads the config that a teacher's weights imply.

    Args:
      place: the folder.
      config: config of a run that starts from it.
      set_keys: keys whose values stay.
      weight_sources: sources in addition to those of the core.

    Raises:
      ConfigError: the folder cannot be read, or its model is not supported.
    """
    (source,) = initial_weights.chosen_sources(config, weight_sources)
    try:
        implied = source.config_of(config, set_keys)
    except ConfigError as error:
        raise ConfigError(
            fault.replace(source.key, KEY) for fault in error.faults
        ) from error
    if not implied.model:
        raise ConfigError(
            f"{KEY}={place}: its model is neither of the run's class nor of one of "
            f"jaxdist; set {KEY} to another model"
        )
    return implied
