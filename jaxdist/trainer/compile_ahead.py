"""The train step compiled before its first call."""

from jaxdist.distributed import initialize
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.flops import is_uncounted, jaxpr_flops
from jaxdist.trainer.compose import Composition, batch_shapes


def compile_step(composition: Composition, built: TrainStep) -> float | None:
    """Compiles the train step for the run's batches, and counts its FLOPs.

    The result stays in jax's cache, where the step's first call finds it. (Calling the
    compiled object itself costs the host a fifth more at every step.)

    Returns:
      The FLOPs of a step, all devices together; None where not all count.
    """
    batch = built.abstract_batch(batch_shapes(composition.config))
    traced = built.step.trace(built.abstract_state, batch)
    lowered = traced.lower()
    with initialize.lead_first("step"):
        lowered.compile()
    return None if is_uncounted(traced.jaxpr) else jaxpr_flops(traced.jaxpr)
