"""The config of a train step."""

from dataclasses import dataclass

import jax

from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.loss_scale import DynamicLossScale
from jaxdist.step.reduction import Reduce

# purposes of random keys: initial values, and steps
INIT = 0
STEPS = 1


@dataclass(frozen=True)
class StepConfig:
    """The settings of a step, apart from the model, the optimizer and the mesh."""

    seed: int = 0
    # number of accumulation steps of a batch, which run one after another
    accumulation: int = 1
    compute: str = "float32"  # dtype of matrix products and activations
    params: str = "float32"  # dtype in which parameters are stored
    reduce: str = "float32"  # dtype in which kernels' gradients cross devices
    # number format of large kernels' products; None = `compute`
    recipe: Recipe | None = None
    reduce_over_replicas: Reduce = "auto"  # value of mesh.reduce
    remat: RematConfig | str = "dots"  # rematerialization, or the name of its policy
    loss_scale: DynamicLossScale | None = None  # None = gradients are not scaled
    ema_decay: float = 0.0  # decay of the moving average of parameters; 0 = no average
    # memory kind in which the optimizer's state waits. The update then goes layer by
    # layer. None = the memory of the devices, and all parameters are updated at once
    moments_in: str | None = None
    # memory kind where the stored parameters wait between steps, beside the moments;
    # None = on the device
    params_in: str | None = None
    # a pipeline's partition of the layers; None = no pipeline
    staging: Staging | None = None
    # traces of `step` after which another one fails; None = no limit
    max_traces: int | None = None

    @property
    def total_microbatches(self) -> int:
        """The product accumulation x microbatches of a step's batch."""
        return self.accumulation * (self.staging.microbatches if self.staging else 1)


def key_of(seed: int, purpose: int) -> jax.Array:
    """Makes the random key of a run for a purpose, `INIT` or `STEPS`."""
    # jax would drop the upper 32 bits if 64-bit types are off.
    high, low = divmod(seed, 2**32)
    key = jax.random.key(low)
    if high:
        key = jax.random.fold_in(key, high)
    return jax.random.fold_in(key, purpose)
