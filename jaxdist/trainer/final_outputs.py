"""The last files of a finished run: a sample of text and the report."""

from pathlib import Path

import jax

from jaxdist.config import ConfigError
from jaxdist.data import Tokenizer
from jaxdist.inference.decoding import SamplingConfig, TokenGenerator
from jaxdist.operations.page import experts, html, summary
from jaxdist.step.state import State
from jaxdist.telemetry.display import Display
from jaxdist.trainer import workdir
from jaxdist.trainer.run_config import RunConfig


def write_final_outputs(
    config: RunConfig,
    folder: Path,
    state: State,
    display: Display,
    tokenizer: Tokenizer | None,
    generate: TokenGenerator | None,
) -> None:
    """Writes them; every process makes the call.

    Args:
      state: with flat layers.
      tokenizer, generate: see `build.text_generator`; None: no sample can be made.
    """
    train, text = config.train, ""
    if train.sample_tokens and tokenizer is not None and generate is not None:
        display.status("sampling")
        try:
            (generation,) = generate(
                state.model_arrays,
                [tokenizer.encode(train.sample_prompt)],
                max_tokens=train.sample_tokens,
                sampling=SamplingConfig(temperature=0.8),
                seed=config.seed,
            )
            text = train.sample_prompt + tokenizer.decode(generation.tokens)
            display.note(f"sample:\n{text}")
        except ConfigError as error:
            # the run is done and saved: no sample is no failure
            display.note(f"no sample: {error}")
    if jax.process_index() == 0:
        try:
            if text:
                workdir.write_text(folder / workdir.SAMPLE, text)
            run = summary.read_run(folder)
            for line in experts.closing_lines(run):
                display.note(line)
            page = html.render([run])
            workdir.write_text(folder / workdir.REPORT, page)
            display.note(f"report: {folder / workdir.REPORT}")
        except Exception as error:  # the run is done and saved: no report is no failure
            display.note(f"no report: {error}")
