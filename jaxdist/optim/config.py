"""The options of optimizers and schedules, and their ranges."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from jaxdist.config.annotations import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)

# given: to jaxdist.fit
OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "muon", "given"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated. Steps are optimizer updates, batch sizes are
    sequences.
    """

    name: OptimizerName = "adamw"  # adamw, lion, adafactor, sgd or muon
    learning_rate: PositiveFloat = 3e-4  # peak, before batch scaling
    schedule: ScheduleName = "cosine"  # of the learning rate, after the warm-up
    # steps of linear warm-up, the last one at the peak; none = a tenth of train.steps,
    # at most 100
    warmup_steps: NonNegativeInt | None = None
    # step at which the decay ends; none = train.steps
    decay_steps: PositiveInt | None = None
    # wsd: last share of decay_steps, linear decay
    decay_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.2
    # fraction of the peak where the decay ends
    final_learning_rate: Annotated[float, Interval(ge=0, le=1)] = 0.0
    # peak * (global_size / reference_batch)^(0, 1/2, 1)
    learning_rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    reference_batch: PositiveInt = 256  # sequences for which learning_rate was tuned
    b1: Share = 0.9  # adamw, lion, muon's Adam: first-moment decay
    b2: Share = 0.95  # adamw, lion (0.99 in its paper), muon's Adam: second decay
    eps: PositiveFloat = 1e-8  # adamw, muon: added to the denominator
    momentum: Share = 0.95  # sgd, muon: Nesterov momentum
    # first moment; all other state is float32
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    # decoupled, per unit of learning rate, matrices only
    weight_decay: NonNegativeFloat = 0.1
    # weight decay also on embedding tables (the head: always)
    decay_embeddings: bool = True
    # muon: Adam's learning rate as a multiple
    other_learning_rate_ratio: PositiveFloat = 0.3
    # muon: 0 = sqrt(max(1, out/in)); 0.2 = AdamW-like RMS
    muon_update_rms: NonNegativeFloat = 0.0
    # largest global gradient norm (in the train step); 0 = off
    clip_norm: NonNegativeFloat = 1.0
    # regexes of parameters that are not trained, e.g. "^embedding"
    frozen: tuple[str, ...] = ()
    # (regex, rate multiple, weight decay or none = as it is); the first that matches
    # wins
    groups: tuple[tuple[str, NonNegativeFloat, NonNegativeFloat | None], ...] = ()
    # consecutive non-finite steps skipped before the run stops
    nonfinite_limit: NonNegativeInt = 10

    def faults(self) -> Iterator[str]:
        """Yields the patterns that cannot be read."""
        patterns = [(p, "frozen") for p in self.frozen] + [
            (g[0], "groups") for g in self.groups
        ]
        for pattern, field in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"optimizer.{field}: {pattern!r} is no regular expression ({error})"


def warmup_faults(config: OptimizerConfig, train_steps: int) -> Iterator[str]:
    """Yields what is wrong where the warm-up is longer than the decay or the run."""
    end = train_steps if config.decay_steps is None else config.decay_steps
    name = "train.steps" if config.decay_steps is None else "optimizer.decay_steps"
    if config.warmup_steps is not None and config.warmup_steps > end:
        rule = f"must be <= {name} = {end}; lower it or raise {name}."
        yield f"optimizer.warmup_steps = {config.warmup_steps}: {rule}"
