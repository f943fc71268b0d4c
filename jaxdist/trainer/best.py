"""Which evaluation was the best so far: its checkpoint is kept, and a run that gets no
better ends.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint import files
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.config import ConfigError, suggest
from jaxdist.step.train_step import TrainStep
from jaxdist.storage.untrusted import Malformed, of_kind
from jaxdist.trainer import compose, run_metadata
from jaxdist.trainer.callbacks import Callback, Run, StepView
from jaxdist.trainer.run_config import RunConfig


@dataclass(frozen=True)
class BestRule:
    """The figure of evaluations that is to become small, or large, and how long it may
    not.
    """

    name: str  # a field of an evaluation row
    largest: bool
    keeps: bool  # whether the best checkpoint is kept
    patience: int  # evaluations without a better one that end the run; 0 = any number

    def judged(
        self, before: Mapping[str, Any], step: int, row: Mapping[str, float]
    ) -> dict[str, Any]:
        """Returns the best so far after an evaluation: of, step, value, and since:
        evaluations since then.

        Args:
          before: the same before it; {}: none, or of another figure.
        """
        value = row[self.name]
        known = before.get("of") == self._of
        sign = -1 if self.largest else 1
        is_better = not known or sign * value < sign * before["value"]
        if is_better and math.isfinite(value):
            return {"of": self._of, "step": step, "value": value, "since": 0}
        return {**before, "since": before["since"] + 1} if known else {}

    def exhausted(self, best: Mapping[str, Any]) -> str:
        """Explains why the run ends; "" if it does not."""
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
        """Checks that the evaluations of a run's model have such a field; traces one.

        Raises:
          ConfigError: they have not.
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
    """Keeps the checkpoint of the best evaluation; ends a run that gets no better."""

    keys = ("checkpoint.keep_best", "train.patience")
    name = "best"

    def on_start(self, run: Run) -> None:
        """Takes the rule of the run."""
        self._run = run
        self._rule = best_rule(run.config)
        self._best: dict[str, Any] = {}

    def load(self, state: Any) -> None:
        """Takes the best evaluation so far.

        Raises:
          ConfigError: the run's evaluations have no such figure.
          Malformed: `state` is something else.
        """
        self._best = checked_best(state or {})
        if self._rule is None:
            return
        self._rule.check(self._run.config, self._run.built)
        if "step" in self._best:
            self._run.store.best.append(self._best["step"])
        self._run.stop(self._rule.exhausted(self._best))

    def state(self) -> Any:
        """Returns the best evaluation so far."""
        return self._best

    def on_evaluate(self, view: StepView, row: Mapping[str, float]) -> None:
        """Requests a checkpoint of the best evaluation; stops where none was for long."""
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
    """Returns the rule of a run; None if nothing depends on the best evaluation."""
    chosen = config.checkpoint.keep_best
    patience = config.train.patience
    if not (chosen or patience):
        return None
    name, _, end = chosen.partition(":")
    return BestRule(name or "eval_loss", end == "max", bool(chosen), patience)


def checked_best(value: Any) -> dict[str, Any]:
    """Returns the best so far as a checkpoint's metadata has it.

    Raises:
      Malformed: it is no such thing.
    """
    best = of_kind(value, dict, "the best evaluation")
    kinds = {"of": str, "step": int, "value": float, "since": int} if best else {}
    for name in {**best, **kinds}:
        if name not in kinds:
            raise Malformed(f"the best evaluation has {name:.40}")
        of_kind(best.get(name), kinds[name], f"the best evaluation: {name}")
    if best and (
        min(best["step"], best["since"]) < 0 or not math.isfinite(best["value"])
    ):
        raise Malformed(f"the best evaluation is {best!r:.80}")
    return best


def best_step(checkpoints: Path) -> int:
    """Reads the step of the best evaluation from the newest readable checkpoint.

    Raises:
      ConfigError: none tells one.
    """
    for step in files.newest_first(checkpoints):
        with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
            kept = files.read_step(checkpoints, step).metadata[run_metadata.CALLBACKS]
            return of_kind(kept[KeepBest.name]["step"], int)
    raise ConfigError(
        f"step best: no checkpoint in {checkpoints} tells it; train with checkpoint.keep_best"
    )
