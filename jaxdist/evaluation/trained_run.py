"""A trained run on devices: generates text, and scores text and held-out data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.config import ConfigError, is_text
from jaxdist.data import Tokenizer
from jaxdist.data.chat import ChatEncoder, Messages, open_encoder
from jaxdist.evaluation import held_out_set
from jaxdist.evaluation.run_tokenizer import run_tokenizer
from jaxdist.inference.decoding import (
    Generation,
    SamplingConfig,
    TokenGenerator,
    longest_text,
    text_generator,
    until_stop,
    writes_text,
)
from jaxdist.inference.logits import Ids, LogitsFunction
from jaxdist.inference.scoring import Score, Scorer, build_scorer, windows
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import user_model
from jaxdist.trainer.held_out import HeldOut, held_out
from jaxdist.trainer.run_config import RunConfig

Watch = Callable[[int, int], None]  # number of the current batch, number of batches
_STREAMED_TOKENS = 8  # tokens generated between two pieces of a stream


class Sample(NamedTuple):
    """A generated text."""

    text: str  # of `generate`: with the prompt; of `chat`: the answer alone
    tokens: np.ndarray  # [new tokens] int32, without the end token
    ended: bool  # whether an end token ended the text, and not the length


class TextScore(NamedTuple):
    """The log-probability of a text after its context."""

    log_probability: float  # nats, summed over all tokens
    greedy: bool  # whether each token is the likeliest after those before it
    tokens: int  # number of scored tokens


@dataclass(frozen=True)
class TrainedRun:
    """A run's model on devices, ready for use; made by `loading.load_run`."""

    folder: Path
    config: RunConfig  # with the mesh and the batch of these devices
    spec: ModelSpec
    built: TrainStep
    # without optimizer state; `trainable` holds the moving average if the run keeps one
    state: State
    log: Callable[[str], None]  # receives a line per event

    def __repr__(self) -> str:
        return f"TrainedRun(step {int(self.state.step)}, {str(self.folder)!r})"

    @property
    def mesh(self) -> Mesh:
        """The mesh that the model is on."""
        return self.built.mesh

    @property
    def rules(self) -> Rules:
        """The sharding rules of the model's arrays."""
        return self.built.rules

    @functools.cached_property
    def model(self) -> Any:
        """The module with its trained weights, in evaluation mode.

        Its arrays are split over the mesh as in training. Calls compute in the dtype
        of the parameters; `logits` computes in the compute dtype of the run.
        """
        return self.spec.assemble(*self.state.model_arrays)

    def logits(
        self, ids: Ids, *, positions: Ids | None = None, segment_ids: Ids | None = None
    ) -> jax.Array:
        """Computes the logits of token ids as training does, without dropout.

        It compiles once for each shape of the ids. The result is on the devices of the
        mesh. A run with 8-bit matmuls is read in its compute dtype.

        Args:
          ids: token ids, integers [B, S].
          positions: position of each token in its document, integers [B, S]; default:
            0 to S - 1.
          segment_ids: documents of each row, integers [B, S]; a token sees tokens of
            its own document only. Default: a row is one document.

        Returns:
          Float32 [B, S, V]; [:, i] scores the token after ids[:, i]. For a reward model
          [B, S, 1]: the score of a text stands at its last token.

        Raises:
          ConfigError: the model has no `forward(batch)` that returns logits; or an
            array has another shape or dtype, an id is no token of the model, or a row
            is too long. It lists all faults.
        """
        return self._logits(
            self.state.model_arrays, ids, positions=positions, segment_ids=segment_ids
        )

    @functools.cached_property
    def _logits(self) -> LogitsFunction:
        compute = self.config.precision.compute
        return LogitsFunction(self.spec, self.mesh, self.rules, compute)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer.

        Raises:
          ConfigError: the run's data hold token ids and name no tokenizer, or the
            tokenizer has more ids than the model.
        """
        return run_tokenizer(self.config, self.folder)

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
        """Generates `num_samples` texts that begin with each prompt.

        A text depends on the weights, the prompt and its position, the settings and the
        seed, but not on the mesh or the other prompts.

        Args:
          prompts: the beginnings of the texts.
          max_tokens: largest number of new tokens.
          sampling: settings for drawing tokens; None: `SamplingConfig()`. If it has no
            end tokens, those of the tokenizer are used.
          seed: seed of the draws.
          num_samples: number of texts per prompt.

        Returns:
          A list of `num_samples` samples for each prompt.

        Raises:
          ConfigError: a setting is invalid, a prompt is empty, or a text exceeds the
            model's longest sequence.
        """
        self._check_decodes()
        rows = [self._encode(prompt) for prompt in prompts]

        def text_of(number: int, new_tokens: np.ndarray) -> str:
            return self._text_with_prompt(prompts[number], rows[number], new_tokens)

        return self._samples(
            rows,
            text_of,
            num_samples,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=seed,
        )

    def chat(
        self,
        conversations: Sequence[Messages],
        *,
        max_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        num_samples: int = 1,
    ) -> list[list[Sample]]:
        """Generates `num_samples` answers of the assistant to each conversation.

        A sample's text is the answer without the conversation.

        Args:
          conversations: lists of messages, {"role": ..., "content": ...}.
          max_tokens: largest number of new tokens.
          sampling: settings for drawing tokens; None: `SamplingConfig()`. If it has no
            end tokens, those of the chat template are used.
          seed: seed of the draws.
          num_samples: number of answers per conversation.

        Returns:
          A list of `num_samples` samples for each conversation.

        Raises:
          ConfigError: as in `generate`, or the tokenizer has no chat template, or the
            template rejects the messages.
          ImportError: the extra that templates need is not installed.
        """
        rows = [self._chats.prompt(messages) for messages in conversations]

        def text_of(number: int, new_tokens: np.ndarray) -> str:
            return self._new_text(rows[number], new_tokens)

        return self._samples(
            rows,
            text_of,
            num_samples,
            sampling=self._sampling_of_turns(sampling),
            max_tokens=max_tokens,
            seed=seed,
        )

    def _samples(
        self,
        rows: list[np.ndarray],
        text_of: Callable[[int, np.ndarray], str],
        count: int,
        **options: Any,
    ) -> list[list[Sample]]:
        """Generates `count` samples of each row.

        Args:
          rows: the token ids of each prompt.
          text_of: makes a sample's text from the number of its row and its new tokens.
          count: number of samples per row.
          **options: arguments of `_continue_rows`.
        """
        if count < 1:
            raise ConfigError(f"num_samples={count}: must be >= 1")
        sample_numbers = range(count * len(rows))
        repeated = [rows[i // count] for i in sample_numbers]
        generations = self._continue_rows(repeated, sample_numbers, **options)
        samples = []
        for i, generation in enumerate(generations):
            text = text_of(i // count, generation.tokens)
            samples.append(Sample(text, generation.tokens, generation.ended))
        return [samples[i : i + count] for i in sample_numbers[::count]]

    @property
    def chat_warning(self) -> str:
        """A line to print, because answers do not stop at the end of a turn; "" = they do.

        Raises:
          ConfigError: the tokenizer has no chat template, or the template exceeds a
            limit.
          ImportError: the extra that templates need is not installed.
        """
        return self._chats.warning

    def _sampling_of_turns(self, sampling: SamplingConfig | None) -> SamplingConfig:
        """Adds the ids that end a turn to the sampling, if it has no end tokens."""
        sampling = sampling or SamplingConfig()
        end_tokens = sampling.end_tokens or self._chats.end_ids
        return dataclasses.replace(sampling, end_tokens=end_tokens)

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
        if not writes_text(self.spec):
            raise ConfigError(
                f"{self.folder} is a reward model (model.head=score): it scores texts and "
                f"predicts no tokens. Call logits(ids) for the scores, or name a run of "
                f"a language model."
            )

    def generate_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
    ) -> list[Generation]:
        """Generates the token ids that follow each prompt of token ids.

        It needs no tokenizer, so it also serves models with your own tokens.

        Args:
          prompts: token ids, at least one per prompt.
          max_tokens: largest number of new tokens.
          sampling: settings for drawing tokens; None: `SamplingConfig()`.
          seed: seed of the draws.

        Raises:
          ConfigError: the model has no decode method, or as in `generate`.
        """
        return self._generate(
            self.state.model_arrays,
            prompts,
            max_tokens=max_tokens,
            sampling=sampling or SamplingConfig(),
            seed=seed,
        )

    def _continue_rows(
        self,
        rows: list[np.ndarray],
        sample_numbers: Sequence[int],
        *,
        sampling: SamplingConfig | None,
        max_tokens: int,
        seed: int,
    ) -> list[Generation]:
        """Generates the tokens that follow each row, a batch at a time."""
        sampling = sampling or SamplingConfig()
        if not sampling.end_tokens:
            sampling = dataclasses.replace(sampling, end_tokens=self.tokenizer.end_ids)
        size = self.config.batch.global_size
        generations = []
        for start in range(0, len(rows), size):
            batch = slice(start, start + size)
            generations += self._generate(
                self.state.model_arrays,
                rows[batch],
                max_tokens=max_tokens,
                sampling=sampling,
                seed=seed,
                samples=sample_numbers[batch],
            )
        return generations

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
        """Generates the text that follows each prompt, up to the first of `stops`.

        The tokens are those that `generate` draws. A prompt that leaves no room is cut
        off on the left. An answer takes at most half of the longest text.

        Args:
          prompts: the beginnings of the texts.
          stops: texts that end an answer; they are not part of it.
          max_tokens: largest number of new tokens.
          sampling: settings for drawing tokens; None: `SamplingConfig()`.
          seed: seed of the draws.
          longest: longest prompt and answer together, in tokens; None: the model's.

        Returns:
          The answers without the prompts.

        Raises:
          ConfigError: as in `generate`.
        """
        longest = longest or self.longest
        max_new = max(min(max_tokens, longest // 2), 1)
        rows = [self._encode(prompt)[-(longest - max_new) :] for prompt in prompts]
        new_tokens = [np.zeros(0, np.int32) for _ in rows]
        texts = [""] * len(rows)
        running = list(range(len(rows)))
        num_generated = 0
        # tokens to generate before the text is searched for stops; doubled each time
        size = 32 if any(stops) else max_new
        while running:
            size = min(size, max_new - num_generated)
            prefixes = [np.concatenate([rows[i], new_tokens[i]]) for i in running]
            generations = self._continue_rows(
                prefixes, running, sampling=sampling, max_tokens=size, seed=seed
            )
            num_generated += size
            for i, generation in zip(tuple(running), generations, strict=True):
                new_tokens[i] = np.concatenate([new_tokens[i], generation.tokens])
                answer = self._new_text(rows[i], new_tokens[i])
                texts[i], has_stop = until_stop(answer, stops)
                if has_stop or generation.ended or num_generated == max_new:
                    running.remove(i)
            size *= 2
        return texts

    def _text_with_prompt(
        self, prompt: str, ids: np.ndarray, new_tokens: np.ndarray
    ) -> str:
        """Joins a prompt and the text that follows it.

        Special tokens decode to "". A prompt that spells some is therefore not decoded.
        """
        if set(ids[1:].tolist()).isdisjoint(self.tokenizer.special_tokens):
            return self._decode(ids, new_tokens)
        return prompt + self._new_text(ids, new_tokens)

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int,
        sampling: SamplingConfig | None = None,
        seed: int,
    ) -> Iterator[str]:
        """Yields the new text of one prompt in pieces, while it is generated.

        The pieces join to the new text of `generate` (for a text) or `chat` (for
        messages) with these settings.

        Args:
          prompt: the beginning of a text, or messages.
          max_tokens: largest number of new tokens.
          sampling: settings for drawing tokens; None: `SamplingConfig()`.
          seed: seed of the draws.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt)
        else:
            ids = self._chats.prompt(prompt)
            sampling = self._sampling_of_turns(sampling)
        new_tokens = np.zeros(0, np.int32)
        yielded = ""
        ended = False
        while not ended:
            prefixes = [np.concatenate([ids, new_tokens])]
            size = min(_STREAMED_TOKENS, max_tokens - new_tokens.size)
            (generation,) = self._continue_rows(
                prefixes, [0], sampling=sampling, max_tokens=size, seed=seed
            )
            new_tokens = np.concatenate([new_tokens, generation.tokens])
            text = self._new_text(ids, new_tokens)
            ended = generation.ended or new_tokens.size >= max_tokens
            is_half_character = text.endswith("\ufffd")
            if ended or not is_half_character:
                yield text[len(yielded) :]
                yielded = text

    def _new_text(self, prompt: np.ndarray, new_tokens: np.ndarray) -> str:
        """Decodes new tokens after their prompt.

        The text of a token may depend on those before it: a space, half a character.
        """
        nothing = new_tokens[:0]
        before = self._decode(prompt, nothing)
        whole = self._decode(prompt, new_tokens)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode(nothing, new_tokens)

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        longest: int | None = None,
        stride: int | None = None,
        watch: Watch | None = None,
    ) -> list[TextScore]:
        """Scores the second text of each pair after the first one.

        A text that is too long for the model is scored in windows. Each token is scored
        once, after as many earlier tokens as fit. A continuation without context is
        scored as the beginning of a document: after the tokenizer's begin or end of a
        document, or after a newline if it has neither.

        Args:
          pairs: (context, continuation); the context may be empty.
          longest: longest window in tokens; None: the model's longest sequence.
          stride: tokens by which windows move; see `jaxdist.inference.scoring.windows`.
          watch: called with every batch.

        Raises:
          ConfigError: the model has no decode method, or the stride is not between 1
            and `longest`.
        """
        longest = longest or self.longest
        held_out_set.check_range(stride, longest, "tokens read at once")
        text_windows = []
        for context, continuation in pairs:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
            text_windows.append(windows(context_ids, continuation_ids, longest, stride))
        all_windows = list(itertools.chain(*text_windows))
        scores = iter(
            self._score(
                self.state.model_arrays, all_windows, longest=longest, watch=watch
            )
        )
        return [
            _total(list(itertools.islice(scores, len(windows_of_text))))
            for windows_of_text in text_windows
        ]

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
        """The model's longest sequence in tokens; without a limit, that of training."""
        return longest_text(self.spec) or self.config.batch.sequence_length

    def _encode_pair(
        self, context: str, continuation: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a context and its continuation.

        Spaces between the two belong to the continuation, as tokenizers split words.
        """
        stripped = context.rstrip()
        if not stripped:
            context_ids = self._encode("")
            if not context_ids.size:
                context_ids = self.tokenizer.encode("\n")
            text = _checked_text(context + continuation)
            return context_ids, self.tokenizer.encode(text)
        ids = self._encode(context + continuation)
        context_ids = self._encode(stripped)
        return context_ids, ids[len(context_ids) :]

    def _encode(self, prompt: str) -> np.ndarray:
        """Encodes a prompt, after the token that begins a document if there is one.

        If the tokenizer has none, an empty prompt becomes the end of another document.
        """
        first = self.tokenizer.begin_of_document
        if first is None and not prompt:
            first = self.tokenizer.end_of_document
        ids = self.tokenizer.encode(_checked_text(prompt))
        if first is None:
            return ids
        return np.concatenate([np.array([first], np.int32), ids])

    def _decode(self, prompt: np.ndarray, new_tokens: np.ndarray) -> str:
        """Decodes both together, since a character may begin in the prompt."""
        end_ids = self.tokenizer.end_ids
        ids = [*prompt.tolist(), *new_tokens.tolist()]
        return self.tokenizer.decode([i for i in ids if i not in end_ids])

    def evaluate(
        self,
        data: Mapping[str, Any] | str | None = None,
        *,
        validation_tokens: int | None = None,
        stride: int | None = None,
        watch: Watch | None = None,
    ) -> HeldOut:
        """Computes the exact loss over the run's held-out set, and the model's metrics.

        Args:
          data: {entry: [N, ...]} to score instead, which runs of `jaxdist.fit` need; or
            files, as `data.path` has them, in the format of the run's data.
          validation_tokens: number of targets to score, 0 = all; None: the run's
            data.validation_tokens, or all of other files.
          stride: score each document by itself, in windows that move by this many
            tokens. Then every token but a document's first sequence_length - stride is
            scored after at least that many tokens. None: documents are packed as in
            training.
          watch: called with every batch.

        Raises:
          ConfigError: nothing is held out, the data are of another kind than the model
            was trained on, the stride is invalid, or the run was loaded without its
            objective.
        """
        trained_for = user_model.objective_in(self.config)
        if (
            trained_for
            and user_model.objective_text(self.spec.objective) != trained_for
        ):
            raise ConfigError(
                f"evaluate: the run was trained for {trained_for}, and was loaded without "
                f"it. Its loss needs load_run(folder, model=..., objective=..., "
                f"modules=...), with the arguments of fit."
            )
        dataset = held_out_set.open_set(
            self.config,
            self.folder,
            self.log,
            data,
            validation_tokens=validation_tokens,
            stride=stride,
        )
        return held_out(self.config, self.built, self.state, dataset, watch)


def _total(scores: Sequence[Score]) -> TextScore:
    """Adds the scores of a text's windows."""
    log_probabilities = [float(x) for part in scores for x in part.log_probabilities]
    greedy = all(bool(part.likeliest.all()) for part in scores)
    return TextScore(math.fsum(log_probabilities), greedy, len(log_probabilities))


def _checked_text(text: str) -> str:
    """Checks that a text can be encoded, and returns it."""
    if is_text(text):
        return text
    raise ConfigError(
        f"the prompt {text[:80]!r} is not UTF-8 text; give its characters as UTF-8"
    )
