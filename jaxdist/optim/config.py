"""The options of optimizers and schedules, and their ranges."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from jaxdist.config import suggest

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "muon", "given"]  # given: to jaxdist.fit


ScheduleName = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]


Scaling = Literal["none", "sqrt", "linear"]


MomentumDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated. Steps are optimizer updates, batch sizes are sequences."""

    name: OptimizerName = "adamw"  # adamw, lion, adafactor, sgd or muon
    learning_rate: float = 3e-4  # peak, before batch scaling; > 0
    schedule: ScheduleName = "cosine"  # cosine, linear, wsd, constant or inverse_sqrt
    warmup_steps: int = 100  # steps of linear warm-up, the last one at the peak; >= 0
    decay_steps: int | None = None  # step at which the decay ends; none = train.steps
    decay_fraction: float = 0.2  # wsd: last share of decay_steps, linear decay; 0 < x <= 1
    final_learning_rate: float = 0.0  # fraction of the peak where the decay ends; 0 <= x <= 1
    learning_rate_scaling: Scaling = "none"  # peak * (global_size / reference_batch)^(0, 1/2, 1)
    reference_batch: int = 256  # sequences for which learning_rate was tuned; >= 1
    b1: float = 0.9  # adamw, lion, muon's Adam: first-moment decay; 0 <= x < 1
    b2: float = 0.95  # adamw, lion (0.99 in its paper), muon's Adam: second decay; 0 <= x < 1
    eps: float = 1e-8  # adamw, muon: added to the denominator; > 0
    momentum: float = 0.95  # sgd, muon: Nesterov momentum; 0 <= x < 1
    momentum_dtype: MomentumDtype = "float32"  # first moment; all other state is float32
    weight_decay: float = 0.1  # decoupled, per unit of learning rate, matrices only; >= 0
    decay_embeddings: bool = True  # weight decay also on embedding tables (the head: always)
    other_learning_rate_ratio: float = 0.3  # muon: Adam's learning rate as a multiple; > 0
    muon_update_rms: float = 0.0  # muon: 0 = sqrt(max(1, out/in)); 0.2 = AdamW-like RMS; >= 0
    clip_norm: float = 1.0  # largest global gradient norm (in the train step); 0 = off; >= 0
    frozen: tuple[str, ...] = ()  # regexes of parameters that are not trained, e.g. "^embedding"
    groups: tuple[tuple[str, float, float | None], ...] = ()  # (regex, rate multiple, weight decay); 1st wins
    nonfinite_limit: int = 10  # consecutive non-finite steps skipped before the run stops; >= 0


_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("> 0", lambda x: 0 < x < math.inf, ("learning_rate", "eps", "other_learning_rate_ratio")),
    (">= 1", lambda x: x >= 1, ("decay_steps", "reference_batch")),
    (">= 0", lambda x: x >= 0, ("warmup_steps", "weight_decay", "muon_update_rms")),
    (">= 0", lambda x: x >= 0, ("clip_norm", "nonfinite_limit")),
    ("in [0, 1)", lambda x: 0 <= x < 1, ("b1", "b2", "momentum")),
    ("in (0, 1]", lambda x: 0 < x <= 1, ("decay_fraction",)),
    ("in [0, 1], a fraction of the peak", lambda x: 0 <= x <= 1, ("final_learning_rate",)),
)


_HINTS = get_type_hints(OptimizerConfig)


_CHOICES = {field: get_args(hint) for field, hint in _HINTS.items() if get_origin(hint) is Literal}


_DECAYING = ("cosine", "linear", "wsd")


def faults(config: OptimizerConfig, train_steps: int | None = None) -> list[str]:
    """Returns one line per illegal value: what was given and what is required; [] if legal.

    Args:
      train_steps: the run's number of updates where known; checks the warm-up against it.
    """
    found = []
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        if value not in choices:
            rule = f"must be one of {', '.join(choices)}.{suggest(str(value), choices)}"
            found.append(f"optimizer.{field} = {value!r}: {rule}")
    for rule, legal, fields in _RANGES:
        for field in fields:
            value = getattr(config, field)
            if value is not None and not legal(value):
                found.append(f"optimizer.{field} = {value}: must be {rule}.")
    found += _pattern_faults(config)
    end = train_steps if config.decay_steps is None else config.decay_steps
    name = "train.steps" if config.decay_steps is None else "optimizer.decay_steps"
    if end is not None and config.warmup_steps > end:
        rule = f"must be <= {name} = {end}; lower it or raise {name}."
        found.append(f"optimizer.warmup_steps = {config.warmup_steps}: {rule}")
    return found


def _pattern_faults(config: OptimizerConfig) -> Iterator[str]:
    for pattern, field in [(p, "frozen") for p in config.frozen] + [(g[0], "groups") for g in config.groups]:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"optimizer.{field}: {pattern!r} is no regular expression ({error})"
    for pattern, rate, decay in config.groups:
        if not (0 <= rate < math.inf and 0 <= (decay or 0) < math.inf):
            yield (
                f"optimizer.groups: ({pattern!r}, {rate}, {decay}): learning-rate multiple and weight decay "
                f"must be >= 0; None leaves the weight decay as it is"
            )
