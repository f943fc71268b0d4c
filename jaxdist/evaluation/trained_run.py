"""A trained run on devices: it writes text, and scores held-out text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxdist.config import ConfigError, is_text
from jaxdist.data import Tokenizer, load_tokenizer
from jaxdist.data.chat import ChatEncoder, Messages, open_encoder
from jaxdist.data.sources.source import TokenSource
from jaxdist.data.sources.table import SOURCES
from jaxdist.evaluation import held_out_set
from jaxdist.inference.decoding import (
    Generation,
    SamplingConfig,
    TokenGenerator,
    longest_text,
    text_generator,
    until_stop,
)
from jaxdist.inference.scoring import Scorer, build_scorer, windows
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import workdir
from jaxdist.trainer.held_out import HeldOut, held_out
from jaxdist.trainer.run_config import RunConfig

Watch = Callable[[int, int], None]  # batches begun, batches in all
_STREAMED = 8  # tokens at a time


class Sample(NamedTuple):
    """A text that starts with a prompt."""

    text: str  # the prompt and what was generated
    tokens: np.ndarray  # [new tokens] int32, without the end token
    ended: bool  # by an end token, not by the length


class TextScore(NamedTuple):
    """How probable a text is to the model, after its context."""

    log_probability: float  # nats, of all tokens together
    greedy: bool  # whether each token is the likeliest after those before it
    tokens: int  # scored


@dataclass(frozen=True)
class TrainedRun:
    """A run's model on devices, ready for use; made by `loading.load_run`."""

    folder: Path
    config: RunConfig  # mesh and batch as they are here
    spec: ModelSpec
    built: TrainStep
    # without optimizer state; trainable holds the average, where there is one
    state: State
    log: Callable[[str], None]

    @property
    def mesh(self) -> Mesh:
        return self.built.mesh

    @property
    def rules(self) -> Rules:
        return self.built.rules

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer.

        Raises:
          ConfigError: its tokens were made elsewhere, or the tokenizer is not the
            model's.
        """
        data = self.config.data
        source = SOURCES[data.source]
        made_elsewhere = isinstance(source, TokenSource) or source.from_caller
        if made_elsewhere and data.tokenizer == "bytes":
            by_ids = ""
            if source.from_caller:
                by_ids = "; or take generate_tokens, whose prompts are ids"
            raise ConfigError(
                f"data.source={data.source}: these tokens were made elsewhere; set data.tokenizer "
                f"in {self.folder / workdir.CONFIG} to the path of their tokenizer.json{by_ids}"
            )
        tokenizer = load_tokenizer(
            data.tokenizer,
            folder=self.folder,
            cache=data.cache_folder(),
            special_tokens=data.special_tokens,
        )
        vocab_size = self.config.vocab_size
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer {data.tokenizer} has ids up to {tokenizer.vocab_size - 1}, model.vocab_size "
                f"is {vocab_size}; put the model's tokenizer.json into {self.folder}"
            )
        return tokenizer

    @functools.cached_property
    def _generate(self) -> TokenGenerator:
        self._check_decodes()
        compute = self.config.precision.compute
        generate = text_generator(self.spec, self.built, compute=compute)
        assert generate is not None  # as it decodes
        return generate

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        num_samples: int = 1,
    ) -> list[list[Sample]]:
        """Returns `num_samples` continuations of each prompt.

        They depend on the weights, the prompt, its number, the settings and the seed
        alone. Where `sampling` has no end tokens, those of the tokenizer and its model
        are used.

        Raises:
          ConfigError: illegal settings, an empty prompt, a text longer than the model
            can hold.
        """
        self._check_decodes()
        rows = [self._encode(prompt) for prompt in prompts]

        def text_of(number: int, new: np.ndarray) -> str:
            return self._whole(prompts[number], rows[number], new)

        options = {"sampling": sampling, "max_tokens": max_tokens, "seed": seed}
        return self._samples(rows, text_of, num_samples, **options)

    def chat(
        self,
        conversations: Sequence[Messages],
        *,
        max_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        num_samples: int = 1,
    ) -> list[list[Sample]]:
        """Returns `num_samples` answers of the assistant to each conversation, a list
        of messages.

        A sample's text is the answer alone. See `generate` for the rest.

        Raises:
          ConfigError: as `generate`; the tokenizer has no chat template, or it refuses
            the messages.
          ImportError: naming the extra that templates need.
        """
        rows = [self._chats.prompt(messages) for messages in conversations]
        options = {
            "sampling": self._ending_turns(sampling),
            "max_tokens": max_tokens,
            "seed": seed,
        }
        return self._samples(
            rows,
            lambda number, new: self._answer(rows[number], new),
            num_samples,
            **options,
        )

    def _samples(
        self,
        rows: list[np.ndarray],
        text_of: Callable[[int, np.ndarray], str],
        count: int,
        **options: Any,
    ) -> list[list[Sample]]:
        """Returns `count` continuations of each row; `text_of` makes texts of row
        number and new tokens.
        """
        if count < 1:
            raise ConfigError(f"num_samples={count}: must be >= 1")
        numbers = range(count * len(rows))
        answers = self._continued(
            [rows[i // count] for i in numbers], numbers, **options
        )
        samples = [
            Sample(text_of(i // count, answers[i].tokens), *answers[i]) for i in numbers
        ]
        return [samples[i : i + count] for i in numbers[::count]]

    def _ending_turns(self, sampling: SamplingConfig | None) -> SamplingConfig:
        """Returns the sampling that ends where the assistant's turn does."""
        sampling = sampling or SamplingConfig()
        ends = sampling.end_tokens or self._chats.end_ids
        return dataclasses.replace(sampling, end_tokens=ends)

    @functools.cached_property
    def _chats(self) -> ChatEncoder:
        encoder = open_encoder(self.config.data, self.tokenizer, self.folder)
        if encoder.template is None:
            raise ConfigError(
                f"{self.folder}: its tokenizer has no chat template; put one there as chat_template.jinja"
            )
        return encoder

    def _check_decodes(self) -> None:
        if not hasattr(self.spec.model_class, "decode"):
            raise ConfigError(
                f"the model {self.spec.model_class.__name__} has no decode method"
            )

    def generate_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
    ) -> list[Generation]:
        """Returns the ids that follow each prompt of ids: `generate` for a model whose
        tokens are your own.

        Raises:
          ConfigError: the model has no decode method; as `generate`.
        """
        weights = self.state.model_arrays
        sampling = sampling or SamplingConfig()
        return self._generate(
            weights, prompts, max_tokens=max_tokens, sampling=sampling, seed=seed
        )

    def _continued(
        self,
        rows: list[np.ndarray],
        samples: Sequence[int],
        sampling: SamplingConfig | None,
        **options: Any,
    ) -> list[Generation]:
        """Continues each row of tokens, a batch at a time; options as of
        `TokenGenerator`.
        """
        sampling = sampling or SamplingConfig()
        if not sampling.end_tokens:
            sampling = dataclasses.replace(sampling, end_tokens=self.tokenizer.end_ids)
        size = self.config.batch.global_size
        answers = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            options |= {"sampling": sampling, "samples": samples[part]}
            answers += self._generate(self.state.model_arrays, rows[part], **options)
        return answers

    def complete(
        self,
        prompts: Sequence[str],
        *,
        stops: Sequence[str] = (),
        max_tokens: int = 256,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        longest: int | None = None,
    ) -> list[str]:
        """Continues each prompt, and returns the text without it, up to where the first of
        `stops` would begin.

        Tokens are those that `generate` draws. A prompt that leaves no room is cut off
        on the left; an answer takes at most half of the longest text.

        Args:
          longest: tokens of prompt and answer; default: `longest`.

        Raises:
          ConfigError: as `generate`.
        """
        longest = longest or self.longest
        most = max(min(max_tokens, longest // 2), 1)
        rows = [self._encode(prompt)[-(longest - most) :] for prompt in prompts]
        new = [np.zeros(0, np.int32) for _ in rows]
        texts = [""] * len(rows)
        running = list(range(len(rows)))
        done = 0
        # new tokens before a look for a stop; doubled each time
        size = 32 if any(stops) else most
        while running:
            size = min(size, most - done)
            begun = [np.concatenate([rows[i], new[i]]) for i in running]
            answers = self._continued(
                begun, running, sampling, max_tokens=size, seed=seed
            )
            done += size
            for i, answer in zip(tuple(running), answers, strict=True):
                new[i] = np.concatenate([new[i], answer.tokens])
                texts[i], stopped = until_stop(self._answer(rows[i], new[i]), stops)
                if stopped or answer.ended or done == most:
                    running.remove(i)
            size *= 2
        return texts

    def _whole(self, prompt: str, ids: np.ndarray, new: np.ndarray) -> str:
        """Returns a prompt and what follows it; special tokens that it spells are
        decoded to nothing.
        """
        if set(ids[1:].tolist()).isdisjoint(self.tokenizer.special_tokens):
            return self._decode(ids, new)
        return prompt + self._answer(ids, new)

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int,
        sampling: SamplingConfig | None = None,
        seed: int,
    ) -> Iterator[str]:
        """Yields what `generate` (of a text) or `chat` (of messages) gives, some tokens
        at a time.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt)
        else:
            ids = self._chats.prompt(prompt)
            sampling = self._ending_turns(sampling)
        new = np.zeros(0, np.int32)
        shown = ""
        ended = False
        while not ended:
            begun = [np.concatenate([ids, new])]
            size = min(_STREAMED, max_tokens - new.size)
            (answer,) = self._continued(
                begun, [0], sampling, max_tokens=size, seed=seed
            )
            new = np.concatenate([new, answer.tokens])
            text = self._answer(ids, new)
            ended = answer.ended or new.size >= max_tokens
            if ended or not text.endswith("\ufffd"):  # half a character is held back
                yield text[len(shown) :]
                shown = text

    def _answer(self, prompt: np.ndarray, new: np.ndarray) -> str:
        """Returns the text of new tokens, which may depend on those before: a space,
        half a character.
        """
        before = self._decode(prompt, new[:0])
        whole = self._decode(prompt, new)
        return (
            whole[len(before) :]
            if whole.startswith(before)
            else self._decode(new[:0], new)
        )

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        longest: int | None = None,
        stride: int | None = None,
        watch: Watch | None = None,
    ) -> list[TextScore]:
        """Scores how probable each pair's second text is after its first, which may be
        empty.

        A text that is too long for the model is scored in windows: each token once,
        after as much of what is before it as there is room for. With no context, a text
        is scored as one that a document begins with: after the tokenizer's begin or end
        of a document, else after a newline.

        Args:
          longest: tokens that the model reads at once; default: `longest`.
          stride: see `jaxdist.inference.scoring.windows`.
          watch: told of every batch.

        Raises:
          ConfigError: the model has no decode method, or a stride beyond 1 to
            `longest`.
        """
        longest = longest or self.longest
        held_out_set.check_range(stride, longest, "tokens read at once")
        cut = [windows(*self._encode_pair(*pair), longest, stride) for pair in pairs]
        flat = list(itertools.chain(*cut))
        scores = iter(
            self._score(self.state.model_arrays, flat, longest=longest, watch=watch)
        )
        texts = []
        for parts in (list(itertools.islice(scores, len(some))) for some in cut):
            probabilities = [float(x) for part in parts for x in part.log_probabilities]
            greedy = all(bool(part.likeliest.all()) for part in parts)
            texts.append(
                TextScore(math.fsum(probabilities), greedy, len(probabilities))
            )
        return texts

    @functools.cached_property
    def _score(self) -> Scorer:
        self._check_decodes()
        rows = self.config.batch.global_size
        compute = self.config.precision.compute
        return build_scorer(
            self.spec, self.built.mesh, self.built.rules, rows=rows, compute=compute
        )

    @functools.cached_property
    def longest(self) -> int:
        """Tokens that the model can take, or, without such a limit, that it was trained
        on at once.
        """
        return longest_text(self.spec) or self.config.batch.sequence_length

    def _encode_pair(
        self, context: str, continuation: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of both; spaces between them go to the second, as tokenizers
        have it.
        """
        kept = context.rstrip()
        if not kept:
            begin = self._encode("")
            first = begin if begin.size else self.tokenizer.encode("\n")
            return first, self.tokenizer.encode(_text(context + continuation))
        whole = self._encode(context + continuation)
        first = self._encode(kept)
        return first, whole[len(first) :]

    def _encode(self, prompt: str) -> np.ndarray:
        """Returns a prompt's ids after what begins a document, if the tokenizer can say
        so.

        Where it has no begin, only an empty prompt starts a document: after the end of
        another.
        """
        begin = self.tokenizer.begin_of_document
        end = self.tokenizer.end_of_document
        first = begin
        if begin is None and not prompt:
            first = end
        ids = self.tokenizer.encode(_text(prompt))
        return (
            ids if first is None else np.concatenate([np.array([first], np.int32), ids])
        )

    def _decode(self, prompt: np.ndarray, new: np.ndarray) -> str:
        """Returns the whole text: a character may begin in the prompt and end behind
        it.
        """
        ends = self.tokenizer.end_ids
        return self.tokenizer.decode(
            [t for t in (*prompt.tolist(), *new.tolist()) if t not in ends]
        )

    def evaluate(
        self,
        data: Mapping[str, Any] | None = None,
        *,
        validation_tokens: int | None = None,
        stride: int | None = None,
        watch: Watch | None = None,
    ) -> HeldOut:
        """Returns the exact loss over the run's held-out set, and the model's own
        metrics.

        Args:
          data: arrays {entry: [N, ...]} to score instead; a run of `jaxdist.fit` has no
            others.
          validation_tokens: targets at most, 0 = all; default: the run's
            data.validation_tokens.
          stride: score each document by itself, in windows that move by so many tokens,
            so that all but its first sequence_length - stride tokens are scored after
            at least as many. Default: as in training.
          watch: told of every batch.

        Raises:
          ConfigError: nothing is held out; data of another kind than the model was
            trained on; a stride that is none.
        """
        options = {"validation_tokens": validation_tokens, "stride": stride}
        dataset = held_out_set.open_set(
            self.config, self.folder, self.log, data, **options
        )
        return held_out(self.config, self.built, self.state, dataset, watch)


def _text(text: str) -> str:
    """Returns a text that can be encoded; raises ConfigError if it cannot."""
    if is_text(text):
        return text
    raise ConfigError(
        f"the prompt {text[:80]!r} is not UTF-8 text; give its characters as UTF-8"
    )
