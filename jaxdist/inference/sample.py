"""A sample of text at the end of a run."""

import jax

from jaxdist.config import ConfigError
from jaxdist.inference.decoding import SamplingConfig, text_generator
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run, RunEnd


class Sample(Callback):
    """A callback that writes a sample of text to `sample.txt` at the end of a run."""

    keys = ("train.sample_tokens", "train.sample_prompt")

    def on_start(self, run: Run) -> None:
        """Keeps the run for `on_end`."""
        self._run = run

    def on_end(self, end: RunEnd) -> None:
        """Generates and writes the text. A failure does not fail the run."""
        run = self._run
        train = run.config.train
        assert run.dataset is not None
        tokenizer = run.dataset.tokenizer
        if not (end.is_final and train.sample_tokens and tokenizer):
            return
        compute = run.config.precision.compute
        generate = text_generator(run.spec, run.built, compute=compute)
        if generate is None:
            return
        try:
            (generation,) = generate(
                run.built.views.flat(end.state).model_arrays,
                [tokenizer.encode(train.sample_prompt)],
                max_tokens=train.sample_tokens,
                sampling=SamplingConfig(temperature=0.8),
                seed=run.config.seed,
            )
        except ConfigError as error:
            run.note(f"no sample: {error}")
            return
        text = train.sample_prompt + tokenizer.decode(generation.tokens)
        run.note(f"sample:\n{text}")
        if jax.process_index() == 0:
            try:
                workdir.write_text(run.folder / workdir.SAMPLE, text)
            except ConfigError as error:
                run.note(f"no sample: {error}")
