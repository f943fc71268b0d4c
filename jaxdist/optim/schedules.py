"""Learning-rate schedules, and their extension if `train.steps` is raised."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults
from jaxdist.optim.config import OptimizerConfig, warmup_faults
from jaxdist.optim.schedule_table import SCHEDULES
from jaxdist.storage.untrusted import Malformed, of_kind

Schedule = Callable[[ArrayLike], jax.Array]  # updates done so far -> learning rate

# Share of the peak. A model learns next to nothing at a lower rate, so no extension
# decays from it.
_FADED = 0.01
_MAX_STEPS = 2**31
MOST_WARMUP = 100  # most steps of a warm-up that the config does not set


@dataclass(frozen=True)
class Extension:
    """A part of a schedule that raising `train.steps` added; steps are updates done."""

    start: int  # step at which it starts; the schedule before it stays the same
    end: int  # step at which its decay ends: the raised `train.steps`
    share: float  # rate at its start, as a share of the peak
    rewarm_steps: int = 0  # steps in which the rate first rises linearly
    peak: float = 1.0  # rate after these steps, as a share of the peak


@dataclass(frozen=True)
class ScheduleSteps:
    """The steps at which the parts of a run's schedule end.

    They are fixed when a run starts. Later values of the config do not change them.
    """

    warmup_steps: int
    decay_steps: int  # step at which the first decay ends
    extensions: tuple[Extension, ...] = ()

    @property
    def end(self) -> int:
        """The step at which the last decay ends."""
        return self.extensions[-1].end if self.extensions else self.decay_steps

    def to_json(self) -> dict[str, Any]:
        """Converts the steps to a JSON object."""
        return asdict(self) | {"extensions": [asdict(part) for part in self.extensions]}

    @classmethod
    def from_json(cls, value: Any) -> "ScheduleSteps":
        """Reads the steps from the value of `to_json`.

        Raises:
          Malformed: it is another value.
        """
        steps = of_kind(value, dict, "schedule")
        extensions = of_kind(steps.get("extensions"), list, "extensions")
        return cls(
            _count(steps, "warmup_steps"),
            _count(steps, "decay_steps"),
            tuple(map(_extension, extensions)),
        )


def _extension(value: Any) -> Extension:
    part = of_kind(value, dict, "an extension")
    extension = Extension(
        start=_count(part, "start"),
        end=_count(part, "end"),
        rewarm_steps=_count(part, "rewarm_steps"),
        share=of_kind(part.get("share"), float, "share"),
        peak=of_kind(part.get("peak"), float, "peak"),
    )
    if not (0 <= extension.share <= 1 and 0 <= extension.peak <= 1):
        raise Malformed(
            f"an extension's shares are {extension.share} and {extension.peak}, "
            f"required 0 to 1"
        )
    return extension


def _count(steps: Mapping[str, Any], name: str) -> int:
    number: int = of_kind(steps.get(name), int, name)
    if not 0 <= number < _MAX_STEPS:
        raise Malformed(f"{name} is {number}")
    return number


def depends_on_train_steps(config: OptimizerConfig) -> bool:
    """Checks whether the decay ends at `train.steps`, so that raising it extends it."""
    return SCHEDULES[config.schedule].ends and config.decay_steps is None


def has_cooldown(config: OptimizerConfig) -> bool:
    """Checks whether the schedule decays in its last steps, after a constant part."""
    return SCHEDULES[config.schedule].cools_down


def rate_of_one(step: ArrayLike) -> jax.Array:
    """Is a schedule of 1, for optimizers whose learning rate is applied elsewhere."""
    rate: jax.Array = jnp.float32(1)
    return rate


def default_warmup(steps: int) -> int:
    """Computes the default number of warm-up steps for a schedule of this length."""
    return min(MOST_WARMUP, steps // 10)


def settle(config: OptimizerConfig, train_steps: int) -> ScheduleSteps:
    """Computes the steps of the schedule of a run that starts with this config."""
    end = train_steps if config.decay_steps is None else config.decay_steps
    warmup = config.warmup_steps
    if warmup is None:
        warmup = default_warmup(min(train_steps, end))
    return ScheduleSteps(warmup, end)


def extend(
    config: OptimizerConfig,
    steps: ScheduleSteps,
    *,
    done: int,
    train_steps: int,
    saved: Callable[[int], bool],
) -> ScheduleSteps:
    """Extends a run's schedule to `train_steps`, if it ends earlier.

    A schedule that cools down (`wsd`) continues at its peak, from the step where its
    decay started. If the run is past that step and cannot go back to it, a re-warm
    comes first. Others (`cosine`, `linear`) decay again from their present rate. If
    that is close to 0, a re-warm first raises it to the rate that a new schedule of
    this length has there.

    Args:
      config: options of the schedule.
      steps: of the run so far.
      done: updates after which the run resumes.
      train_steps: the raised number of steps.
      saved: checks whether the run can go back to a step.
    """
    if not depends_on_train_steps(config) or train_steps == steps.end:
        return steps
    # the run has no step of later extensions
    parts = tuple(part for part in steps.extensions if part.start < done)
    steps = replace(steps, extensions=parts)
    if train_steps <= steps.end:
        return steps
    start = done
    decay = decay_start(config, steps)
    cools_down = has_cooldown(config)
    if cools_down and decay < done and saved(decay):
        start = decay
    share = float(_shape(config, steps)(jnp.float32(start)))
    peak = 1.0
    if not cools_down:
        peak = share
        if share < _FADED:
            longer = ScheduleSteps(steps.warmup_steps, train_steps)
            peak = max(share, float(_shape(config, longer)(jnp.float32(start))))
    rewarm = max(default_warmup(train_steps - start), 1) if peak > share else 0
    part = Extension(start, train_steps, share, rewarm, peak)
    return replace(steps, extensions=(*steps.extensions, part))


def decay_start(config: OptimizerConfig, steps: ScheduleSteps) -> int:
    """Computes the step of the last decay's start, whose update is not decayed."""
    return int(_exact_decay_start(config, steps))


def _exact_decay_start(config: OptimizerConfig, steps: ScheduleSteps) -> float:
    """Computes the start of the last decay, which may be a fraction of a step."""
    start = float(steps.warmup_steps)
    if steps.extensions:
        last = steps.extensions[-1]
        start = max(start, float(last.start + last.rewarm_steps))
    if has_cooldown(config):
        start = max(start, steps.end - config.decay_fraction * steps.end)
    return start


def peak_learning_rate(config: OptimizerConfig, global_size: int) -> float:
    """Computes the peak learning rate at `global_size` sequences per step.

    `sqrt` suits optimizers like Adam (https://arxiv.org/abs/2205.10287), and `linear`
    suits SGD (https://arxiv.org/abs/1706.02677).
    """
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.learning_rate_scaling]
    factor: float = (global_size / config.reference_batch) ** power
    return config.learning_rate * factor


def build_schedule(
    config: OptimizerConfig,
    train_steps: int,
    global_size: int,
    steps: ScheduleSteps | None = None,
) -> Schedule:
    """Builds the function from the number of updates done to the next learning rate.

    The function takes a traced or a Python number and returns a float32 scalar. Let w be
    the number of warm-up steps, and T the step at which the decay ends (`decay_steps`,
    by default `train_steps`). Update s = 0, 1, ... has the rate
    peak * min(1, (s + 1) / w) * shape(s). shape is 1 until the decay starts. So neither
    the first update has rate 0 nor the last one, s = T - 1: the final value is reached
    at s = T and stays.

    `cosine` and `linear` decay from w to T. `wsd` decays linearly over the last
    `decay_fraction * T` steps, but not before w. `inverse_sqrt` is sqrt(w / (s + 1)).
    It has no end, and neither has `constant`.

    Args:
      config: options of the schedule.
      train_steps: number of updates of the run.
      global_size: sequences per step.
      steps: w, T and the extensions of a run that resumes; None: those of `settle`.

    Raises:
      ConfigError: a value is out of range, or the warm-up is longer than the schedule.
    """
    found = [*faults(config, "optimizer."), *warmup_faults(config, train_steps)]
    if found:
        raise ConfigError(found)
    steps = steps or settle(config, train_steps)
    peak = peak_learning_rate(config, global_size)
    warmup = max(steps.warmup_steps, 1)
    shape = _shape(config, steps)

    def schedule(step: ArrayLike) -> jax.Array:
        done = jnp.asarray(step, jnp.float32)
        return peak * jnp.minimum(1.0, (done + 1) / warmup) * shape(done)

    return schedule


def _shape(
    config: OptimizerConfig, steps: ScheduleSteps
) -> Callable[[jax.Array], jax.Array]:
    """Builds the factor in [0, 1] of the peak rate, as a function of updates done.

    It does not contain the warm-up.
    """
    start = _exact_decay_start(config, steps)
    warmup = steps.warmup_steps
    if not steps.extensions:
        return _decay(
            config, start=start, end=steps.end, first=1.0, warmup_steps=warmup
        )
    before = _shape(config, replace(steps, extensions=steps.extensions[:-1]))
    part = steps.extensions[-1]
    decay = _decay(
        config, start=start, end=part.end, first=part.peak, warmup_steps=warmup
    )

    def shape(done: jax.Array) -> jax.Array:
        after = decay(done)
        if part.rewarm_steps:
            progress = (done + 1 - part.start) / part.rewarm_steps
            is_rising = progress < 1
            rising = part.share + (part.peak - part.share) * progress
            after = jnp.where(is_rising, rising, after)
        return jnp.where(done < part.start, before(done), after)

    return shape


def _decay(
    config: OptimizerConfig,
    *,
    start: float,
    end: int,
    first: float,
    warmup_steps: int,
) -> Callable[[jax.Array], jax.Array]:
    """Builds the decay from `first` at `start` to the final value at `end`.

    Args:
      config: has the shape of the decay and the final value.
      start: step, in updates done.
      end: step, in updates done.
      first: value before the decay, as a share of the peak.
      warmup_steps: w, for schedules without an end.
    """
    kind = SCHEDULES[config.schedule]
    endless = kind.endless
    if endless:
        warmup = max(warmup_steps, 1)
        return lambda done: endless(done, warmup)
    length = max(end - start, 1e-6)  # a warm-up that fills the schedule leaves no decay
    final = min(config.final_learning_rate, first)

    def shape(done: jax.Array) -> jax.Array:
        progress = jnp.clip((done - start) / length, 0.0, 1.0)
        return first - (first - final) * kind.descent(progress)

    return shape


def describe(
    config: OptimizerConfig, steps: ScheduleSteps, *, train_steps: int, global_size: int
) -> list[str]:
    """Describes the schedule of a run in lines for its log.

    Args:
      config: options of the schedule.
      steps: of the run.
      train_steps: number of updates of the run.
      global_size: sequences per step.
    """
    peak = peak_learning_rate(config, global_size)
    line = f"learning rate: {steps.warmup_steps} steps of warm-up to {peak:g}, then {config.schedule}"
    kind = SCHEDULES[config.schedule]
    if kind.ends:
        first = replace(steps, extensions=())
        line += ", decays"
        if kind.cools_down:
            line += f" from step {decay_start(config, first)}"
        line += f" to {config.final_learning_rate * peak:g} at step {first.end}"
        if train_steps < steps.end and not steps.extensions:
            line += f"; the run ends before, at step {train_steps}"
    lines = [line]
    if depends_on_train_steps(config) and not steps.extensions:
        lines.append(_describe_rule(config, peak))
    for count in range(1, len(steps.extensions) + 1):
        so_far = replace(steps, extensions=steps.extensions[:count])
        lines.append(_describe_extension(config, so_far, peak))
    return lines


def _describe_rule(config: OptimizerConfig, peak: float) -> str:
    """Describes how a schedule goes on if `train.steps` is raised; see `extend`."""
    if has_cooldown(config):
        how = (
            "the run goes back to the step where the decay began, stays at its peak, and "
            "decays at the new end"
        )
    elif config.final_learning_rate < _FADED:
        how = (
            f"the rate rises again in at most {MOST_WARMUP} steps, then decays to the "
            f"new end"
        )
    else:
        final = config.final_learning_rate * peak
        how = f"the rate goes from where it is then to {final:g} at the new end"
    return f"learning rate: if train.steps is raised later, {how}"


def _describe_extension(
    config: OptimizerConfig, steps: ScheduleSteps, peak: float
) -> str:
    """Describes the last extension of a schedule."""
    part = steps.extensions[-1]
    text = f"train.steps raised to {part.end} at step {part.start}: the rate "
    if part.rewarm_steps:
        text += f"rises from {part.share * peak:g} to {part.peak * peak:g} in {part.rewarm_steps} steps, "
    elif has_cooldown(config):
        text += f"stays at {part.peak * peak:g}, "
    start = decay_start(config, steps)
    final = min(config.final_learning_rate, part.peak)
    return f"{text}decays from {part.peak * peak:g} after step {start} to {final * peak:g} at step {part.end}"
