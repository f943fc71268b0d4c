"""Learning-rate schedules, and how a run's goes on where `train.steps` is raised."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults
from jaxdist.optim.config import OptimizerConfig, warmup_faults
from jaxdist.storage.untrusted import Malformed, of_kind

Schedule = Callable[[ArrayLike], jax.Array]  # updates done so far -> learning rate

# of the peak: a lower rate teaches next to nothing, and is no rate to decay from
_FADED = 0.01
_MAX_STEPS = 2**31


@dataclass(frozen=True)
class Extension:
    """A part of a schedule that was added by raising `train.steps`. Steps are updates
    done.
    """

    start: int  # where it begins; what is before stays as it was
    end: int  # where its decay ends: the `train.steps` it was made for
    share: float  # of the peak, at its start
    rewarm_steps: int = 0  # in which the rate first rises in a line
    peak: float = 1.0  # share of the peak that it then has, and decays from


@dataclass(frozen=True)
class ScheduleSteps:
    """Where a run's schedule turns, settled when the run begins; later values of the
    config don't move it.
    """

    warmup_steps: int
    decay_steps: int  # where the first decay ends
    extensions: tuple[Extension, ...] = ()

    @property
    def end(self) -> int:
        """Where the last decay ends."""
        return self.extensions[-1].end if self.extensions else self.decay_steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"extensions": [asdict(each) for each in self.extensions]}

    @classmethod
    def from_json(cls, value: Any) -> "ScheduleSteps":
        """Reads what `to_json` has made.

        Raises:
          Malformed: it is something else.
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
    start, end, rewarm = (
        _count(part, name) for name in ("start", "end", "rewarm_steps")
    )
    share, peak = (of_kind(part.get(name), float, name) for name in ("share", "peak"))
    if not (0 <= share <= 1 and 0 <= peak <= 1):
        raise Malformed(
            f"an extension's shares are {share} and {peak}, required 0 to 1"
        )
    return Extension(start, end, share, rewarm, peak)


def _count(steps: Mapping[str, Any], name: str) -> int:
    if not 0 <= (number := of_kind(steps.get(name), int, name)) < _MAX_STEPS:
        raise Malformed(f"{name} is {number}")
    return number


def depends_on_train_steps(config: OptimizerConfig) -> bool:
    """Checks whether the decay ends with `train.steps`, so that raising it extends the
    schedule.
    """
    return config.schedule in ("cosine", "linear", "wsd") and config.decay_steps is None


def default_warmup(steps: int) -> int:
    """Returns the steps of warm-up where none are set."""
    return min(100, steps // 10)


def settle(config: OptimizerConfig, train_steps: int) -> ScheduleSteps:
    """Settles where the schedule of a run turns that begins with this config."""
    end = train_steps if config.decay_steps is None else config.decay_steps
    warmup = config.warmup_steps
    return ScheduleSteps(
        default_warmup(min(train_steps, end)) if warmup is None else warmup, end
    )


def extend(
    config: OptimizerConfig,
    steps: ScheduleSteps,
    *,
    done: int,
    train_steps: int,
    saved: Callable[[int], bool],
) -> ScheduleSteps:
    """Returns a run's schedule for `train_steps`, with an extension where it ended
    before.

    `cosine` and `linear` decay again from the rate they have; where that has come to
    nothing, a re-warm first takes it to what a schedule of the new length has there.
    `wsd` goes on at its peak: from the step where its decay began, if the run has not
    come further or has kept that step; else after a re-warm.

    Args:
      done: updates after which the run goes on.
      saved: whether the run can go back to a step.
    """
    if not depends_on_train_steps(config) or train_steps == steps.end:
        return steps
    # no step of the others is kept
    parts = tuple(part for part in steps.extensions if part.start < done)
    steps = replace(steps, extensions=parts)
    if train_steps <= steps.end:
        return steps
    start = done
    turn = decay_start(config, steps)
    if config.schedule == "wsd" and turn < done and saved(turn):
        start = turn
    share = float(_shape(config, steps)(jnp.float32(start)))
    peak = 1.0
    if config.schedule != "wsd":
        anew = float(
            _shape(config, ScheduleSteps(steps.warmup_steps, train_steps))(
                jnp.float32(start)
            )
        )
        peak = max(share, anew) if share < _FADED else share
    rewarm = max(default_warmup(train_steps - start), 1) if peak > share else 0
    part = Extension(start, train_steps, share, rewarm, peak)
    return replace(steps, extensions=(*steps.extensions, part))


def decay_start(config: OptimizerConfig, steps: ScheduleSteps) -> int:
    """Returns the last number of updates done after which the next one is not decayed
    yet.
    """
    return int(_decay_begins(config, steps))


def _decay_begins(config: OptimizerConfig, steps: ScheduleSteps) -> float:
    begins = float(steps.warmup_steps)
    end = steps.end
    if steps.extensions:
        last = steps.extensions[-1]
        begins = max(begins, float(last.start + last.rewarm_steps))
    return (
        max(begins, end - config.decay_fraction * end)
        if config.schedule == "wsd"
        else begins
    )


def peak_learning_rate(config: OptimizerConfig, global_size: int) -> float:
    """Returns the peak learning rate at `global_size` sequences per step.

    `sqrt` suits Adam-like optimizers (https://arxiv.org/abs/2205.10287), `linear` suits
    SGD (https://arxiv.org/abs/1706.02677).
    """
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.learning_rate_scaling]
    return config.learning_rate * (global_size / config.reference_batch) ** power


def build_schedule(
    config: OptimizerConfig,
    train_steps: int,
    global_size: int,
    steps: ScheduleSteps | None = None,
) -> Schedule:
    """Returns a function from the number of updates done to the next update's learning
    rate.

    It takes a traced or a Python number and returns a float32 scalar. With w warm-up
    steps and the decay ending at T (`decay_steps`, else `train_steps`), update s = 0,
    1, ... gets peak * min(1, (s + 1) / w) * shape(s), shape being 1 until the decay
    starts. So neither the first update is lost nor the last, s = T - 1: the final value
    is reached at s = T and kept. `cosine` and `linear` decay from w to T; `wsd` is
    linear over the last `decay_fraction * T` steps, but not before w; `inverse_sqrt` is
    sqrt(w / (s + 1)) and has no end, like `constant`.

    Args:
      steps: w, T and the extensions of a run that goes on; default: `settle`.

    Raises:
      ConfigError: a value is out of range, or the warm-up is longer than the schedule.
    """
    wrong = [*faults(config, "optimizer."), *warmup_faults(config, train_steps)]
    if wrong:
        raise ConfigError(wrong)
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
    """Returns the factor in [0, 1] that follows the warm-up, as a function of updates
    done.
    """
    if not steps.extensions:
        return _decay(
            config, _decay_begins(config, steps), steps.end, 1.0, steps.warmup_steps
        )
    before = _shape(config, replace(steps, extensions=steps.extensions[:-1]))
    part = steps.extensions[-1]
    decay = _decay(
        config, _decay_begins(config, steps), part.end, part.peak, steps.warmup_steps
    )

    def shape(done: jax.Array) -> jax.Array:
        after = decay(done)
        if part.rewarm_steps:
            risen = (done + 1 - part.start) / part.rewarm_steps
            after = jnp.where(
                risen < 1, part.share + (part.peak - part.share) * risen, after
            )
        return jnp.where(done < part.start, before(done), after)

    return shape


def _decay(
    config: OptimizerConfig, start: float, end: int, first: float, warmup_steps: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns the decay from `first` at `start` to the final value at `end`; steps are
    updates done.
    """
    if config.schedule == "constant":
        return jnp.ones_like
    if config.schedule == "inverse_sqrt":
        warmup = max(warmup_steps, 1)
        return lambda done: jnp.sqrt(warmup / jnp.maximum(done + 1, warmup))
    length = max(end - start, 1e-6)  # a warm-up that fills the schedule leaves no decay
    final = min(config.final_learning_rate, first)

    def shape(done: jax.Array) -> jax.Array:
        progress = jnp.clip((done - start) / length, 0.0, 1.0)
        if config.schedule == "cosine":
            progress = 0.5 * (1 - jnp.cos(jnp.pi * progress))
        return first - (first - final) * progress

    return shape


def describe(
    config: OptimizerConfig, steps: ScheduleSteps, *, train_steps: int, global_size: int
) -> list[str]:
    """Returns the lines that say what the rate does, with the settled numbers."""
    peak = peak_learning_rate(config, global_size)
    line = f"learning rate: {steps.warmup_steps} steps of warm-up to {peak:g}, then {config.schedule}"
    if config.schedule in ("cosine", "linear", "wsd"):
        first = replace(steps, extensions=())
        begins = (
            f" from step {decay_start(config, first)}"
            if config.schedule == "wsd"
            else ""
        )
        line += f", decays{begins} to {config.final_learning_rate * peak:g} at step {first.end}"
        if train_steps < steps.end and not steps.extensions:
            line += f"; the run ends before, at step {train_steps}"
    parts = [
        replace(steps, extensions=steps.extensions[: n + 1])
        for n in range(len(steps.extensions))
    ]
    return [line, *(_describe_extension(config, part, peak) for part in parts)]


def _describe_extension(
    config: OptimizerConfig, steps: ScheduleSteps, peak: float
) -> str:
    part = steps.extensions[-1]
    words = f"train.steps raised to {part.end} at step {part.start}: the rate "
    if part.rewarm_steps:
        words += f"rises from {part.share * peak:g} to {part.peak * peak:g} in {part.rewarm_steps} steps, "
    elif config.schedule == "wsd":
        words += f"stays at {part.peak * peak:g}, "
    start = decay_start(config, steps)
    final = min(config.final_learning_rate, part.peak)
    return f"{words}decays from {part.peak * peak:g} after step {start} to {final * peak:g} at step {part.end}"
