"""The sample of text that a finished run writes."""

from jaxdist.config import ConfigError
from jaxdist.data import Tokenizer
from jaxdist.inference.decoding import SamplingConfig, text_generator
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.display import Display
from jaxdist.trainer.run_config import RunConfig

TEMPERATURE = 0.8


def sample_text(
    config: RunConfig,
    spec: ModelSpec,
    built: TrainStep,
    state: State,
    tokenizer: Tokenizer | None,
    display: Display,
) -> str:
    """Generates the sample of a finished run and shows it. Every process makes the
    call.

    A sample that cannot be made is no failure, as the run is saved: the display says
    why.

    Args:
      state: with flat layers.
      tokenizer: None: the run's tokens are no text.

    Returns:
      train.sample_prompt and the text that follows it; "" if train.sample_tokens is 0,
      the run has no text, or the model cannot generate.
    """
    train = config.train
    if not train.sample_tokens or tokenizer is None:
        return ""
    generate = text_generator(spec, built, compute=config.precision.compute)
    if generate is None:
        return ""
    display.status("sampling")
    try:
        (generation,) = generate(
            state.model_arrays,
            [tokenizer.encode(train.sample_prompt)],
            max_tokens=train.sample_tokens,
            sampling=SamplingConfig(temperature=TEMPERATURE),
            seed=config.seed,
        )
    except ConfigError as error:
        display.note(f"no sample: {error}")
        return ""
    text = train.sample_prompt + tokenizer.decode(generation.tokens)
    display.note(f"sample:\n{text}")
    return text
