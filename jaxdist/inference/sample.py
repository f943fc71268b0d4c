"""A sample of text at the end of a run: a text that goes on, or an answer in a chat."""

import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import Dataset, Tokenizer
from jaxdist.data.chat import open_encoder
from jaxdist.inference.decoding import SamplingConfig, longest_text, text_generator
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.storage.untrusted import visible
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run, RunEnd

_AUTO_TOKENS = 200  # tokens of a sample with train.sample_tokens=auto
_TEMPERATURE = 0.8


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
            if train.sample_tokens != "auto":
                run.note("no sample: the model writes no text")
            return
        try:
            prompt = _prompt(run, run.dataset, tokenizer)
            max_tokens = _length_of_sample(
                train.sample_tokens, len(prompt.tokens), run.spec
            )
            if max_tokens < 1:
                return
            (generation,) = generate(
                run.built.views.flat(end.state).model_arrays,
                [prompt.tokens],
                max_tokens=max_tokens,
                sampling=SamplingConfig(
                    temperature=_TEMPERATURE, end_tokens=prompt.end_tokens
                ),
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
        text = prompt.text + tokenizer.decode(generation.tokens)
        run.note(f"sample:\n{visible(text)}")
        if jax.process_index() == 0:
            try:
                workdir.write_text(run.folder / workdir.SAMPLE, text)
            except ConfigError as error:
                run.note(f"no sample: {error}")


class _Prompt(NamedTuple):
    """The beginning of a sample."""

    tokens: np.ndarray  # [length] int32
    text: str
    end_tokens: tuple[int, ...]  # ids that end the sample


def _prompt(run: Run, dataset: Dataset, tokenizer: Tokenizer) -> _Prompt:
    """Makes the beginning of a run's sample: a text, or a chat up to an answer.

    In a chat, `train.sample_prompt` is the turn of a user. A blank one asks nothing:
    the sample then answers a question of the data.

    Raises:
      ConfigError: the chat template rejects the turn, or exceeds a limit.
      ImportError: the extra that templates need is not installed.
    """
    text = run.config.train.sample_prompt
    end_tokens = tokenizer.end_ids
    tokens = tokenizer.encode(text)
    if not run.config.data.uses_template:
        return _Prompt(tokens, text, end_tokens)
    chats = open_encoder(run.config.data, tokenizer, run.folder)
    if not text.strip():
        tokens = _question(dataset)
    elif chats.template is not None:
        tokens = chats.prompt([{"role": "user", "content": text}])
    return _Prompt(tokens, _spelled(tokenizer, tokens), chats.end_ids)


def _question(dataset: Dataset) -> np.ndarray:
    """Finds the first question of the data: an example up to its first learned token.

    It is held out, if anything is.

    Returns:
      Its tokens, [length] int32; none if nothing in the first row is learned.
    """
    split = "validation" if dataset.num_validation_tokens else "train"
    row = {name: values[0] for name, values in dataset.read(split, np.zeros(1)).items()}
    learned = np.flatnonzero(row["weights"])
    if not learned.size:
        return np.zeros(0, np.int32)
    before = learned[0]  # its target is the first learned token
    examples = row["segment_ids"]
    begin = np.flatnonzero(examples == examples[before])[0]
    tokens: np.ndarray = row["tokens"][begin : before + 1]
    return tokens


def _spelled(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Decodes tokens to a text, with the special tokens that `decode` leaves out."""
    special = tokenizer.special_tokens
    parts = []
    for is_special, group in itertools.groupby(map(int, tokens), special.__contains__):
        if is_special:
            parts += [special[token] for token in group]
        else:
            parts.append(tokenizer.decode(group))
    return "".join(parts)


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
