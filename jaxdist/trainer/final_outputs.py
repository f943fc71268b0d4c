"""The last files of a finished run: a sample of text and the report."""

from pathlib import Path

import jax

from jaxdist.data import Tokenizer
from jaxdist.inference.sample import sample_text
from jaxdist.operations.page import experts, html, summary
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.display import Display
from jaxdist.trainer import workdir
from jaxdist.trainer.run_config import RunConfig


def write_final_outputs(
    config: RunConfig,
    folder: Path,
    spec: ModelSpec,
    built: TrainStep,
    state: State,
    tokenizer: Tokenizer | None,
    display: Display,
) -> None:
    """Writes them; every process makes the call.

    Args:
      state: with flat layers.
      tokenizer: None: no sample can be made.
    """
    text = sample_text(config, spec, built, state, tokenizer, display)
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
