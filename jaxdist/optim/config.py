"""Options of optimizers and learning-rate schedules, with their ranges."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from jaxdist.config.annotations import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadWith,
    Share,
)
from jaxdist.config.patterns import pattern_faults
from jaxdist.optim.schedule_table import SCHEDULES, cooling_down, ending

# given: an optimizer that was passed to jaxdist.fit
OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "muon", "given"]
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]

# fit's own optimizer, `given`, does all that these keys could configure
_NAMED = ReadWith("optimizer.name", ("adamw", "lion", "adafactor", "sgd", "muon"))
_DECAYING = ReadWith("optimizer.schedule", ending())
_COOLING = ReadWith("optimizer.schedule", cooling_down())
_SCALING = ReadWith("optimizer.learning_rate_scaling", ("sqrt", "linear"))
_MOMENTS = ReadWith("optimizer.name", ("adamw", "lion", "muon"))
_ADAM = ReadWith("optimizer.name", ("adamw", "muon"))
_MOMENTUM = ReadWith("optimizer.name", ("sgd", "muon"))
_FIRST_MOMENT = ReadWith("optimizer.name", ("adamw", "lion", "sgd", "muon"))
_MUON = ReadWith("optimizer.name", ("muon",))


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of the optimizer; steps are updates, and batch sizes are sequences."""

    name: OptimizerName = "adamw"  # adamw, lion, adafactor, sgd or muon
    learning_rate: Annotated[PositiveFloat, _NAMED] = 3e-4  # peak, before batch scaling
    schedule: ScheduleName = "cosine"  # shape of the learning rate after the warm-up
    # steps of linear warm-up, the last one at the peak; none = a tenth of train.steps,
    # at most 100
    warmup_steps: NonNegativeInt | None = None
    # step at which the decay ends; none = train.steps
    decay_steps: Annotated[PositiveInt | None, _NAMED] = None
    # wsd: final share of decay_steps in which the rate decays linearly
    decay_fraction: Annotated[float, Interval(gt=0, le=1), _COOLING] = 0.2
    # cosine, linear, wsd: final learning rate, as a fraction of the peak
    final_learning_rate: Annotated[float, Interval(ge=0, le=1), _DECAYING] = 0.0
    # factor of the peak: (global_size / reference_batch)^(0, 1/2, 1)
    learning_rate_scaling: Annotated[Literal["none", "sqrt", "linear"], _NAMED] = "none"
    # learning_rate_scaling: sequences per step that learning_rate was tuned for
    reference_batch: Annotated[PositiveInt, _SCALING, _NAMED] = 256
    # adamw, lion, muon's Adam: decay of the first moment
    b1: Annotated[Share, _MOMENTS] = 0.9
    # adamw, lion (0.99 in its paper), muon's Adam: decay of the second moment
    b2: Annotated[Share, _MOMENTS] = 0.95
    # adamw, muon: added to the denominator
    eps: Annotated[PositiveFloat, _ADAM] = 1e-8
    # sgd, muon: Nesterov momentum
    momentum: Annotated[Share, _MOMENTUM] = 0.95
    # all but adafactor: dtype of the first moment; all other state is float32
    momentum_dtype: Annotated[Literal["float32", "bfloat16"], _FIRST_MOMENT] = "float32"
    # decoupled weight decay of matrices, per unit of learning rate
    weight_decay: NonNegativeFloat = 0.1
    # whether embedding tables have weight decay, too; the head always has
    decay_embeddings: Annotated[bool, _NAMED] = True
    # muon: Adam's learning rate, as a multiple of learning_rate
    other_learning_rate_ratio: Annotated[PositiveFloat, _MUON] = 0.3
    # muon: RMS of an update's elements, e.g. 0.2 as in AdamW; 0 = scaled by
    # sqrt(max(1, out/in))
    muon_update_rms: Annotated[NonNegativeFloat, _MUON] = 0.0
    # global norm that gradients are clipped to, in the train step; 0 = no clipping
    clip_norm: NonNegativeFloat = 1.0
    # regexes of parameters that are not trained, e.g. "^embedding"
    frozen: tuple[str, ...] = ()
    # (regex of parameters, multiple of the learning rate, weight decay; none = as
    # weight_decay); the first match wins
    groups: Annotated[
        tuple[tuple[str, NonNegativeFloat, NonNegativeFloat | None], ...], _NAMED
    ] = ()
    # consecutive non-finite steps that are skipped before the run stops
    nonfinite_limit: NonNegativeInt = 10

    def faults(self) -> Iterator[str]:
        """Yields a message for each pattern that cannot be used."""
        yield from pattern_faults("optimizer.frozen", self.frozen)
        groups = [pattern for pattern, *_ in self.groups]
        yield from pattern_faults("optimizer.groups", groups)


def warmup_faults(config: OptimizerConfig, train_steps: int) -> Iterator[str]:
    """Yields a message if the warm-up is longer than the decay or the run."""
    end = train_steps
    name = "train.steps"
    if config.decay_steps is not None:
        end = config.decay_steps
        name = "optimizer.decay_steps"
    if config.warmup_steps is not None and config.warmup_steps > end:
        rule = f"must be <= {name} = {end}; lower it or raise {name}."
        yield f"optimizer.warmup_steps = {config.warmup_steps}: {rule}"
