"""What a train step needs to know beside the model, the optimizer and the mesh."""

from dataclasses import dataclass

import jax

from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.loss_scale import DynamicLossScale
from jaxdist.step.reduction import Reduce

# what the seed's first fold is for
INIT = 0
STEPS = 1


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know beside the model, the optimizer and the mesh."""

    seed: int = 0
    accumulation: int = 1
    compute: str = "float32"
    params: str = "float32"
    reduce: str = "float32"
    recipe: Recipe | None = None  # of large kernels; None: multiplied in `compute`
    reduce_over_replicas: Reduce = "auto"  # mesh.reduce
    remat: RematConfig | str = "dots"  # or its policy
    loss_scale: DynamicLossScale | None = None  # None: the backward pass begins with 1
    ema_decay: float = 0.0
    # memory kind where optimizer state waits; None: it stays on the device
    moments_in: str | None = None
    # how a pipeline cuts up the layers; None: no pipeline
    staging: Staging | None = None
    # times that `step` may be traced, where one shape is expected; None: any
    max_traces: int | None = None

    @property
    def parts(self) -> int:
        """Returns the sequential parts that a step's batch is cut into."""
        return self.accumulation * (self.staging.microbatches if self.staging else 1)


def key_of(seed: int, purpose: int) -> jax.Array:
    """Returns the random key of a run for a purpose, `INIT` or `STEPS`."""
    high, low = divmod(seed, 2**32)
    # without 64-bit types, jax would leave the upper half out
    key = jax.random.key(low)
    return jax.random.fold_in(jax.random.fold_in(key, high) if high else key, purpose)
