"""The result of `jaxdist.fit`: the trained model, its metrics and methods."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.data.dataset import Dataset
from jaxdist.data.user_batches import UserDataset, open_held_out
from jaxdist.inference.decoding import Generation, SamplingConfig, text_generator
from jaxdist.step.state import NO_OPT_STATE
from jaxdist.telemetry.display import print_safe
from jaxdist.telemetry.metrics import MetricRows, read_rows
from jaxdist.trainer import preemption, save_weights
from jaxdist.trainer.callbacks import TrainResult
from jaxdist.trainer.held_out import HeldOut, held_out

# `Fitted.stopped` of a run that has done all its steps
FINISHED = "finished"


@dataclass(frozen=True, eq=False)
class Fitted:
    """A model that `jaxdist.fit` has trained, and its run."""

    folder: Path
    step: int  # number of finished updates
    # "finished", or why the run ended before its last step:
    # docs/how-to/library-runs.md lists the values
    stopped: str
    # its state has flat layers, the weights (their average, if one is kept) and no
    # optimizer state
    outcome: TrainResult
    dataset: UserDataset
    # removes the folder when this object is deleted; None = the folder stays
    _temporary: TemporaryDirectory[str] | None

    @classmethod
    def of(
        cls,
        outcome: TrainResult,
        dataset: UserDataset,
        folder: Path,
        temporary: TemporaryDirectory[str] | None,
    ) -> Fitted:
        """Takes the trained model out of a run that has ended.

        Args:
          outcome: the ended run.
          dataset: the data that the caller passed to `fit`.
          folder: the run's folder.
          temporary: removes the folder with its last reference; None: it stays.

        Raises:
          Preempted: a signal asked the process to end.
        """
        if outcome.stopped and preemption.PROCESS.must_leave:
            raise preemption.Preempted(outcome.stopped)
        state = outcome.built.views.flat(outcome.state)
        trained = state._replace(
            trainable=state.model_arrays[0], opt_state=NO_OPT_STATE, ema=None
        )
        step = int(state.step)
        position = f"step {step} of {outcome.composition.config.train.steps}"
        stopped = FINISHED
        if outcome.stopped:
            next_call = f"saved in {folder}: the same call of fit resumes there"
            if temporary:
                next_call = "without a folder, the next call of fit starts over"
            stopped = f"stopped after {position} by an interrupt; {next_call}"
            if jax.process_index() == 0:
                print_safe(stopped)
        elif outcome.reason:
            stopped = f"stopped after {position}: {outcome.reason}"
        return cls(
            folder=folder,
            step=step,
            stopped=stopped,
            outcome=replace(outcome, state=trained),
            dataset=dataset,
            _temporary=temporary,
        )

    @functools.cached_property
    def metrics(self) -> MetricRows:
        """The rows of metrics.jsonl: `train` and `evaluation`, one row per step."""
        return read_rows(self.folder)

    @functools.cached_property
    def model(self) -> Any:
        """The module with its trained weights, in evaluation mode.

        If the run keeps a moving average of the weights, these are the average.
        """
        return self.outcome.composition.spec.assemble(*self.outcome.state.model_arrays)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
    ) -> list[Generation]:
        """Generates the tokens that follow each prompt.

        Args:
          prompts: token ids, at least one per prompt.
          max_tokens: largest number of new tokens.
          sampling: settings for drawing tokens; default: `SamplingConfig()`.
          seed: seed of the draws.

        Raises:
          ConfigError: the model has no `init_cache` and `decode`, a prompt is empty or
            too long, or a setting is invalid.
        """
        outcome = self.outcome
        spec = outcome.composition.spec
        compute = outcome.composition.config.precision.compute
        generate = text_generator(spec, outcome.built, compute=compute)
        if generate is None:
            name = spec.model_class.__name__
            raise ConfigError(f"{name} has no init_cache and decode; use `model`")
        return generate(
            outcome.state.model_arrays,
            prompts,
            max_tokens=max_tokens,
            sampling=sampling or SamplingConfig(),
            seed=seed,
        )

    def evaluate(self, data: Mapping[str, Any] | None = None) -> HeldOut:
        """Computes the loss over held-out arrays, and the model's own metrics.

        Args:
          data: {entry: [N, ...]}; default: the `validation` that `fit` was called with.

        Raises:
          ConfigError: there are no arrays, their entries differ from those of the
            batches, or they hold no whole batch.
        """
        config = self.outcome.composition.config
        built = self.outcome.built
        dataset: Dataset = self.dataset
        if data is not None:
            dataset = open_held_out(
                data, like=config.data.path, size=config.batch.global_size
            )
        elif not dataset.num_validation_tokens:
            raise ConfigError(
                "evaluate: nothing is held out; give it arrays, or fit its `validation`"
            )
        weights = built.views.weights_by_stage(self.outcome.state)
        return held_out(config, built, weights, dataset)

    def save(self, folder: Path | str) -> Path:
        """Writes the trained weights as a new workdir, and returns its path.

        `load_run(folder, model=...)` and `init.from_run` read it. It has no optimizer
        state. To resume training, call `fit` with the folder that it was called with.

        Args:
          folder: the workdir to write.

        Raises:
          ConfigError: the folder exists and is not empty.
        """
        return save_weights.save(
            self.outcome.composition.config, self.outcome.state, Path(folder)
        )

    def __repr__(self) -> str:
        composition = self.outcome.composition
        step = f"step {self.step}"
        if self.stopped != FINISHED:
            step = f"stopped after {step} of {composition.config.train.steps}"
        loss = ""
        if self.metrics.train:
            loss = f", loss {self.metrics.train[-1]['loss']:.4f}"
        return f"Fitted({step}{loss}, {composition.spec.counts}, {str(self.folder)!r})"
