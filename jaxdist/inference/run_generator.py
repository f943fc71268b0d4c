"""Text generation with the model of a run."""

from jaxdist.inference.decoding import TokenGenerator
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer.run_config import RunConfig


def text_generator(
    run: RunConfig, spec: ModelSpec, built: TrainStep
) -> TokenGenerator | None:
    """Makes the generator that continues prompts with a run's model.

    Returns:
      None if the model has no `decode`.
    """
    if not hasattr(spec.model_class, "decode"):
        return None
    return TokenGenerator(spec, built.mesh, built.rules, compute=run.precision.compute)
