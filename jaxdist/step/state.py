"""What training carries from step to step."""

from typing import NamedTuple

import jax

from jaxdist.parallel.offload import to_device
from jaxdist.protocols.model_spec import Tree
from jaxdist.step.loss_scale import LossScale


class State(NamedTuple):
    """The state after `step` updates. Random keys are not stored: they fold from seed
    and step.
    """

    step: jax.Array  # int32
    trainable: Tree
    frozen: Tree  # parameters that are not trained
    # what the model keeps beside parameters: running statistics, counters
    model_state: Tree
    opt_state: Tree
    ema: Tree  # None without a moving average
    # arrays of the objective's frozen modules, by the modules' names
    modules: Tree = {}

    @property
    def model_arrays(self) -> tuple[Tree, Tree, Tree]:
        """The arguments of `ModelSpec.assemble` to evaluate with; a moving average
        stands for the weights.
        """
        weights = (
            self.trainable if self.ema is None else jax.tree.map(to_device, self.ema)
        )
        return weights, self.model_state, self.frozen


Metrics = dict[str, jax.Array]


class OptState(NamedTuple):
    """The optimizer's state; the position in its schedule is `State.step`."""

    optimizer: Tree
    skipped: jax.Array  # int32, steps in a row left out for non-finite gradients
    loss_scale: LossScale | None = None  # None without one
