"""What `jaxdist.fit` returns: the trained model, its metrics, and what it can do."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.data import Dataset
from jaxdist.data.user_batches import UserDataset, open_held_out
from jaxdist.inference.decoding import Generation, SamplingConfig, text_generator
from jaxdist.telemetry.display import print_safe
from jaxdist.telemetry.metrics import MetricRows, read_rows
from jaxdist.trainer import preemption, save_weights
from jaxdist.trainer.callbacks import TrainResult
from jaxdist.trainer.held_out import HeldOut, held_out


@dataclass(frozen=True, eq=False)
class Fitted:
    """What `fit` has come to."""

    folder: Path
    step: int  # updates finished
    stopped: str  # why it ended early, and how to go on; "" if it did not
    # its state holds flat layers, weights or their average, and no optimizer's
    outcome: TrainResult
    dataset: UserDataset
    # removes the folder with the last reference to this; None: the folder stays
    _temporary: TemporaryDirectory | None

    @classmethod
    def of(
        cls,
        outcome: TrainResult,
        dataset: UserDataset,
        folder: Path,
        temporary: TemporaryDirectory | None,
    ) -> Fitted:
        """Takes the trained model out of a run that has ended.

        Raises:
          Preempted: a signal asked the process to end.
        """
        if outcome.stopped and preemption.PROCESS.must_leave:
            raise preemption.Preempted(outcome.stopped)
        state = outcome.built.views.flat(outcome.state)
        trained = state._replace(
            trainable=state.model_arrays[0], opt_state=None, ema=None
        )
        step = int(state.step)
        at = f"stopped after step {step} of {outcome.composition.config.train.steps}"
        stopped = ""
        if outcome.stopped:
            onward = f"saved in {folder}: the same call of fit goes on from there"
            if temporary:
                onward = "without a folder the next call begins anew"
            stopped = f"{at} by an interrupt; {onward}"
            if jax.process_index() == 0:
                print_safe(stopped)
        elif outcome.reason:
            stopped = f"{at}: {outcome.reason}"
        outcome = replace(outcome, state=trained)
        return cls(folder, step, stopped, outcome, dataset, temporary)

    @functools.cached_property
    def metrics(self) -> MetricRows:
        """What metrics.jsonl has: `train` and `evaluation`, rows of one step each."""
        return read_rows(self.folder)

    @functools.cached_property
    def model(self) -> Any:
        """The module with its trained weights (their average, if one is kept), in
        evaluation mode.
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
        """Generates the tokens that follow each prompt, for a model with `init_cache`
        and `decode`.

        Raises:
          ConfigError: it has none; as `decoding.TokenGenerator`.
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
        """Computes the loss over held-out arrays, and the model's own metrics, as
        `jaxdist evaluate` does.

        Args:
          data: {entry: [N, ...]}; default: the `validation` that was given to `fit`.

        Raises:
          ConfigError: there is none; it holds something else than the batches, or no
            whole batch.
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
        weights = built.views.staged_weights(self.outcome.state)
        return held_out(config, built, weights, dataset)

    def save(self, folder: Path | str) -> Path:
        """Writes the trained weights as a workdir of their own, and returns it.

        `load_run(folder, model=...)` and `init.from_run` read it. It has no optimizer's
        state: what goes on with training is the folder that was given to `fit`.

        Raises:
          ConfigError: something is there already.
        """
        return save_weights.save(
            self.outcome.composition.config, self.outcome.state, Path(folder)
        )

    def __repr__(self) -> str:
        composition = self.outcome.composition
        step = f"step {self.step}"
        if self.stopped:
            step = f"stopped after {step} of {composition.config.train.steps}"
        losses = [row["loss"] for row in self.metrics.train]
        last = f", loss {losses[-1]:.4f}" if losses else ""
        return f"Fitted({step}{last}, {composition.spec.counts}, {str(self.folder)!r})"
