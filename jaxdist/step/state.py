"""The state of training that a step takes and returns."""

from typing import Any, NamedTuple

import jax

from jaxdist.parallel.offload import to_device
from jaxdist.protocols.model import Loss
from jaxdist.protocols.model_spec import Tree
from jaxdist.step.loss_scale import LossScale


class OptState(NamedTuple):
    """The optimizer's state. The position in its schedule is `State.step`."""

    optimizer: Tree
    # int32, consecutive updates skipped for non-finite gradients; 0 after a good
    # update. Batches that a run skips after a rollback are not counted
    # (`trainer.health`).
    skipped: jax.Array
    loss_scale: LossScale | None = None  # None = gradients are not scaled


# The optimizer's state of a state that no step takes, such as one to evaluate.
NO_OPT_STATE: Any = None


class State(NamedTuple):
    """The state after `step` updates.

    It has no random keys: each step derives its key from the seed and `step`.
    """

    step: jax.Array  # int32, number of updates
    trainable: Tree  # parameters that are trained
    frozen: Tree  # parameters that are not trained
    # the model's other variables, such as running statistics and counters
    model_state: Tree
    opt_state: OptState  # or NO_OPT_STATE
    ema: Tree  # moving average of `trainable`; None = the run has none
    # parameters of the objective's frozen modules, by the modules' names
    modules: Tree = {}

    @property
    def model_arrays(self) -> tuple[Tree, Tree, Tree]:
        """The arguments of `ModelSpec.assemble` for an evaluation.

        If the run has a moving average, it replaces the weights.
        """
        weights = self.trainable if self.ema is None else self.ema
        return jax.tree.map(to_device, weights), self.model_state, self.frozen


Metrics = dict[str, jax.Array]


class Sums(NamedTuple):
    """Sums over the global batch in float32, and the model's state after it.

    The sums are not divided by the count.
    """

    gradients: Tree
    loss: Loss
    # the model's state after the batch; with several accumulation steps, that before it
    model_state: Tree
