"""The first state of a run that has not saved, with the models that it learns from.

Such models are a frozen reference or a teacher. A reference may also be needed once: its
log-probabilities of all answers are then computed before training.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jaxdist.data.dataset import Dataset
from jaxdist.trainer import (
    initial_weights,
    reference,
    reference_weights,
    teacher_weights,
)
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import UserInputs
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.run_metadata import InitialState
from jaxdist.trainer.weight_source import WeightSource


def check(
    config: RunConfig, folder: Path, weight_sources: Sequence[WeightSource]
) -> None:
    """Checks the folders of other models that a run learns from.

    Args:
      config: the run's config.
      folder: the workdir.
      weight_sources: sources of weights in addition to those of the core.

    Raises:
      ConfigError: a folder cannot be read, or its model or tokenizer does not fit.
    """
    reference_weights.check(config, folder, weight_sources)
    teacher_weights.check(config, folder, weight_sources)


def init(
    run: Run,
    dataset: Dataset,
    sources: Sequence[WeightSource],
    weight_sources: Sequence[WeightSource],
    inputs: UserInputs,
    *,
    on_batch: Callable[[], None],
) -> InitialState:
    """Makes the first state. Every process makes the call.

    Args:
      run: the run, with its step built.
      dataset: the run's data, which may receive the reference's log-probabilities.
      sources: the sources of the run's own weights; empty = random weights.
      weight_sources: sources of weights in addition to those of the core.
      inputs: the caller's model and initial values.
      on_batch: is called as each batch of a pass over the data starts.

    Raises:
      ConfigError: weights cannot be read, or belong to another model.
      CheckpointError: no checkpoint of init.from_run can be used.
    """
    config = run.config
    built = run.built
    compute = partial(
        reference.settle,
        config,
        run.folder,
        dataset,
        built,
        model_class=run.spec.model_class,
        say=run.say,
        on_batch=on_batch,
    )
    # Another model's state is gone before that of the run is made.
    has_another = bool(reference_weights.place_of(config))
    if has_another and reference.needed(config):
        compute(reference_weights.state(config, built, weight_sources))
    initial = initial_weights.init_from_sources(
        config,
        built,
        run.folder,
        sources,
        inputs.build,
        inputs.initial,
        reference_weights.module_values(config, built, weight_sources)
        | teacher_weights.module_values(config, built, weight_sources),
    )
    if not has_another:
        compute(initial.state)
    return initial


def attach(run: Run, dataset: Dataset) -> None:
    """Adds the reference's log-probabilities to the data of a run that resumes."""
    reference.attach_stored(run.config, run.folder, dataset)
