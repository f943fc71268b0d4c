"""The model of a teacher, whose options a command stores in the run's config.

So a run is composed, planned and resumed without the teacher's folder.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.config.annotations import TrainingOnly
from jaxdist.models import registry
from jaxdist.objectives.distill import distill_faults
from jaxdist.trainer.run_config import RunConfig, from_config, model_defaults

KEY = "objective.teacher"
MODEL_KEY = "objective.teacher_model"


def as_text(values: Mapping[str, Any]) -> str:
    """Writes values of `model.*` as the text that `objective.teacher_model` has."""
    return json.dumps(dict(values), sort_keys=True)


def teacher_config(config: RunConfig) -> RunConfig:
    """Replaces the model of a run by its teacher's.

    Options that change no logits, such as model.loss_chunk, are those of the run if
    both models have one class.

    Args:
      config: config of a run with `objective.teacher_model`.

    Raises:
      ConfigError: the text is invalid, or names a class that is neither the run's nor
        one of jaxdist.
    """
    own_target = config.model["target"]
    try:
        values = dict(json.loads(config.objective.teacher_model))
        target = values.get("target", registry.DEFAULT_TARGET)
        is_known = target == own_target or registry.is_installed(str(target))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{MODEL_KEY}={config.objective.teacher_model!r} is not valid: commands "
            f"write it; leave it out"
        ) from None
    if not is_known:
        # the text may come from a folder, whose code must not run
        raise ConfigError(
            f"{MODEL_KEY}: the teacher's class {target} is neither the run's nor one of "
            f"jaxdist; set {KEY} to another model"
        )
    if target == own_target:
        options = schema.schema_of(registry.options_class(config.model_class))
        values |= {
            name: config.model[name]
            for name, field in options.items()
            if name in config.model and field.mark(TrainingOnly)
        }
    model = model_defaults(target) | values
    return dataclasses.replace(config, model=from_config({"model": model}).model)


def teacher_faults(config: RunConfig) -> Iterator[str]:
    """Yields contradictions between a run and its teacher."""
    objective = config.objective
    if objective.name != "distill":
        return
    if not objective.teacher_model:
        if objective.teacher:
            yield (
                f"{MODEL_KEY} is empty: the commands train, plan and verify and "
                f"library.run fill it from {KEY}={objective.teacher}; start the run with "
                f"`jaxdist train`"
            )
        else:
            yield (
                f"objective.name=distill needs a teacher; set {KEY} to the folder of a "
                f"run or of a Hugging Face model"
            )
        return
    try:
        teacher = teacher_config(config)
    except ConfigError as error:
        yield from error.faults
        return
    yield from distill_faults(objective.top_k, config.vocab_size, teacher.vocab_size)
    longest = getattr(teacher.model_config, "max_length", None)
    length = config.batch.sequence_length
    if longest and longest < length:
        yield (
            f"batch.sequence_length={length} exceeds the teacher's longest sequence, "
            f"{longest}; shorten the sequence"
        )
