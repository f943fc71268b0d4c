"""The best evaluation of a run: its checkpoint is kept, and a run without progress ends.

The stored record has the keys `of` (the metric and its direction), `step`, `value`, and
`since` (the number of evaluations after it).
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint import folders
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import ConfigError, suggest
from jaxdist.step.train_step import TrainStep
from jaxdist.storage.untrusted import Malformed, of_kind
from jaxdist.trainer import compose, run_metadata
from jaxdist.trainer.callbacks import Callback, Run, StepView
from jaxdist.trainer.run_config import RunConfig


@dataclass(frozen=True)
class BestRule:
    """The metric that decides which evaluation is best, and its consequences."""

    name: str  # a field of evaluation rows
    largest: bool  # whether the largest value is best, not the smallest
    keeps: bool  # whether the best checkpoint is kept
    # evaluations without a better one after which the run ends; 0 = no limit
    patience: int

    def judged(
        self, before: Mapping[str, Any], step: int, row: Mapping[str, float]
    ) -> dict[str, Any]:
        """Computes the record of the best evaluation after an evaluation.

        Args:
          before: the record before; {} or that of another metric: none.
          step: the step of the evaluation.
          row: the row of the evaluation.
        """
        value = row[self.name]
        known = before.get("of") == self._of
        sign = -1 if self.largest else 1
        is_better = not known or sign * value < sign * before["value"]
        if is_better and math.isfinite(value):
            return {"of": self._of, "step": step, "value": value, "since": 0}
        if not known:
            return {}
        return {**before, "since": before["since"] + 1}

    def exhausted(self, best: Mapping[str, Any]) -> str:
        """Explains why the run ends; "" if it does not.

        Args:
          best: the record of the best evaluation.
        """
        if (
            not self.patience
            or best.get("of") != self._of
            or best["since"] < self.patience
        ):
            return ""
        return (
            f"{self.name} has been no better than {best['value']:.6g} (step {best['step']}) in the last "
            f"{best['since']} evaluations (train.patience={self.patience})"
        )

    @property
    def _of(self) -> str:
        return f"{self.name}:{'max' if self.largest else 'min'}"

    def check(self, config: RunConfig, built: TrainStep) -> None:
        """Traces an evaluation to check that its row has the metric.

        Raises:
          ConfigError: the row does not have it.
        """
        abstract = built.abstract_batch(compose.batch_shapes(config))
        *_, others = jax.eval_shape(built.evaluate, built.abstract_state, abstract)
        known = ["eval_loss", *(f"eval_{name}" for name in others)]
        if self.name not in known:
            raise ConfigError(
                f"checkpoint.keep_best={self.name}: evaluations of this model have {', '.join(known)}."
                f"{suggest(self.name, known)}"
            )


class KeepBest(Callback):
    """A callback that keeps the best checkpoint, and ends a run without progress."""

    keys = ("checkpoint.keep_best", "train.patience")
    name = "best"

    def on_start(self, run: Run) -> None:
        """Reads the rule from the run's config."""
        self._run = run
        self._rule = best_rule(run.config)
        self._best: dict[str, Any] = {}

    def load(self, state: Any) -> None:
        """Restores the record of the best evaluation, and may end a resumed run.

        Raises:
          ConfigError: the run's evaluations do not have the metric.
          Malformed: the state is damaged.
        """
        self._best = checked_best(state or {})
        if self._rule is None:
            return
        self._rule.check(self._run.config, self._run.built)
        if "step" in self._best:
            self._run.store.best.append(self._best["step"])
        self._run.stop(
            self._rule.exhausted(self._best), fix="To continue, raise train.patience."
        )

    def state(self) -> Any:
        """Gives the record of the best evaluation."""
        return self._best

    def on_evaluate(self, view: StepView, row: Mapping[str, float]) -> None:
        """Requests a checkpoint of a best evaluation, or stops a run without progress."""
        if self._rule is None:
            return
        self._best = self._rule.judged(self._best, view.step, row)
        if self._rule.keeps and self._best.get("step") == view.step:
            self._run.store.best.append(view.step)
            view.request_save()
        reason = self._rule.exhausted(self._best)
        if reason:
            view.stop(reason)


def best_rule(config: RunConfig) -> BestRule | None:
    """Reads the rule of a run; None if nothing depends on the best evaluation."""
    keep_best = config.checkpoint.keep_best
    patience = config.train.patience
    if not (keep_best or patience):
        return None
    name, _, end = keep_best.partition(":")
    return BestRule(
        name=name or "eval_loss",
        largest=end == "max",
        keeps=bool(keep_best),
        patience=patience,
    )


def checked_best(value: Any) -> dict[str, Any]:
    """Checks the record of the best evaluation in a checkpoint, and returns it.

    Raises:
      Malformed: the record is damaged.
    """
    best: dict[str, Any] = of_kind(value, dict, "the best evaluation")
    if not best:
        return best
    kinds = {"of": str, "step": int, "value": float, "since": int}
    for name in {**best, **kinds}:
        if name not in kinds:
            raise Malformed(f"the best evaluation has {name:.40}")
        of_kind(best.get(name), kinds[name], f"the best evaluation: {name}")
    is_negative = min(best["step"], best["since"]) < 0
    if is_negative or not math.isfinite(best["value"]):
        raise Malformed(f"the best evaluation is {best!r:.80}")
    return best


def best_step(checkpoints: Path) -> int:
    """Reads the step of the best evaluation from the newest readable checkpoint.

    Raises:
      ConfigError: no checkpoint has a record of it.
    """
    for step in folders.newest_first(checkpoints):
        with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
            kept = folders.read_step(checkpoints, step).metadata[run_metadata.CALLBACKS]
            return of_kind(kept[KeepBest.name]["step"], int)
    raise ConfigError(
        f"step best: no checkpoint in {checkpoints} records it; train with checkpoint.keep_best"
    )
