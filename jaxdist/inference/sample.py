"""A sample of text at the end of a run."""

from typing import Literal

import jax

from jaxdist.config import ConfigError
from jaxdist.inference.decoding import SamplingConfig, longest_text, text_generator
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run, RunEnd

_AUTO_TOKENS = 200  # tokens of a sample with train.sample_tokens=auto


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
        prompt = tokenizer.encode(train.sample_prompt)
        max_tokens = _length_of_sample(train.sample_tokens, len(prompt), run.spec)
        if max_tokens < 1:
            return
        compute = run.config.precision.compute
        generate = text_generator(run.spec, run.built, compute=compute)
        if generate is None:
            return
        try:
            (generation,) = generate(
                run.built.views.flat(end.state).model_arrays,
                [prompt],
                max_tokens=max_tokens,
                sampling=SamplingConfig(temperature=0.8),
                seed=run.config.seed,
            )
        except ConfigError as error:
            run.note(f"no sample: {error}")
            return
        except Exception as error:
            if train.sample_tokens != "auto":
                raise
            # Nobody asked for it, and the run is saved. A model of the user may have
            # another `decode`, or the devices no memory for it.
            first_line = next(iter(str(error).splitlines()), "")
            run.note(f"no sample: {type(error).__name__}: {first_line}")
            return
        text = train.sample_prompt + tokenizer.decode(generation.tokens)
        run.note(f"sample:\n{text}")
        if jax.process_index() == 0:
            try:
                workdir.write_text(run.folder / workdir.SAMPLE, text)
            except ConfigError as error:
                run.note(f"no sample: {error}")


def _length_of_sample(
    sample_tokens: int | Literal["auto"], prompt_tokens: int, spec: ModelSpec
) -> int:
    """Chooses the number of tokens to write; 0 = no sample.

    With auto there is none if the prompt is empty or the model has no room for more. Nor
    is there with several processes, of which one that failed would stop the others.
    """
    if sample_tokens != "auto":
        return sample_tokens
    longest = longest_text(spec)
    if not prompt_tokens or jax.process_count() > 1:
        return 0
    if longest is None:
        return _AUTO_TOKENS
    return min(_AUTO_TOKENS, longest - prompt_tokens)
