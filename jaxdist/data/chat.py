"""Chats, and prompts with completions, as tokens and their weights.

The learned tokens of a chat are the assistant's turns, each with its end. A completion
is learned, its prompt is not.

A template may mark the assistant's text. If it does not, the text that a turn adds to
the rendered chat is the turn.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError, extras
from jaxdist.data import tokenizer_config
from jaxdist.data.config import DataConfig
from jaxdist.data.reading import expanded, one_line
from jaxdist.data.sources.documents import Document
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import read_bytes

_VERSION = 1  # version of the rules below, a part of the cache key
_ANSWER = "answer-0f3a"  # a text that no template contains
# Lines to log about unusual rows.
_NOTES = {
    "last": "the chat template rewrites earlier turns, so the last turn alone is learned",
    "mismatch": "the whole does not begin with the prompt's tokens; as many are not learned",
}
Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class _Example(NamedTuple):
    """Text of a row, and the parts of it that are learned."""

    text: str
    learned: Sequence[Span] = ()  # ranges of characters that are learned
    # text before the completion, which is learned; None = `learned` has the ranges
    prompt: str | None = None
    begins: bool = False  # whether to insert the begin-of-document id
    note: str = ""  # a key of _NOTES; "" = the row is as usual


class ChatEncoder:
    """Encoder of rows to tokens and weights. `open_encoder` makes it."""

    def __init__(self, tokenizer: Tokenizer, template: Any = None) -> None:
        """Finds the end of a turn in the template.

        Args:
          tokenizer: tokenizer of the texts.
          template: a chat_template.ChatTemplate. None if prompts and completions are
            texts.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = tokenizer.vocab_size
        special = tokenizer.config.special
        self.fingerprint = digest(
            _VERSION,
            tokenizer.fingerprint,
            template and template.source,
            sorted(special.items()),
        )
        self.end_ids = tuple(sorted({*tokenizer.end_ids, *self._turn_ends()}))
        end = ""
        if tokenizer.end_of_document is not None:
            end = tokenizer.special_tokens.get(tokenizer.end_of_document, "")
        self._end = special.get("eos_token", end)

    def prompt(self, messages: Messages) -> np.ndarray:
        """Encodes a conversation whose next turn is the assistant's, [length] int32.

        Raises:
          ConfigError: there is no template, or it refuses the messages.
        """
        text, _ = self._render(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text)

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Encodes rows.

        Args:
          documents: rows as JSON; see `chat_rows`.

        Returns:
          The ids of each row; the weights of its ids (1 = learned); the number of
          unusual rows, by key of _NOTES.

        Raises:
          ConfigError: the template refuses a row. The error names the row's id.
        """
        examples = []
        for document in documents:
            try:
                examples.append(self._example(json.loads(document.text)))
            except ConfigError as error:
                raise ConfigError(f"{document.id}: {error}") from error
        notes = Counter(example.note for example in examples if example.note)
        encoded = self.tokenizer.encode_spans(
            [(example.text, example.learned) for example in examples]
        )
        prompts = [example.prompt for example in examples if example.prompt is not None]
        encoded_prompts = iter(self.tokenizer.encode_documents(prompts))
        begin = self.tokenizer.begin_of_document
        ids = []
        weights = []
        for example, (tokens, learned) in zip(examples, encoded, strict=True):
            if example.prompt is not None:
                prompt = next(encoded_prompts)
                if not np.array_equal(tokens[: len(prompt)], prompt):
                    notes["mismatch"] += 1
                learned = np.arange(len(tokens)) >= len(prompt)
            if example.begins and begin is not None:
                tokens = np.insert(tokens, 0, begin)
                learned = np.insert(learned, 0, 0)
            ids.append(tokens)
            weights.append(learned.astype(np.uint8))
        return ids, weights, notes

    def notes(self, counts: Counter[str]) -> list[str]:
        """Formats a line for each kind of unusual rows."""
        return [
            f"{counts[key]} rows: {text}" for key, text in _NOTES.items() if counts[key]
        ]

    def _example(self, row: Mapping[str, Any]) -> _Example:
        """Formats a row as text, with the parts that are learned."""
        options = {"tools": row["tools"]} if "tools" in row else {}
        if "messages" in row:
            return self._conversation(row["messages"], options)
        prompt = row["prompt"]
        completion = row["completion"]
        if isinstance(prompt, str):
            text = prompt + completion
            if not text.endswith(self._end):
                text += self._end
            return _Example(text, prompt=prompt, begins=True)
        prompt_text, _ = self._render(prompt, add_generation_prompt=True, **options)
        text, _ = self._render([*prompt, *completion], **options)
        return _Example(text, prompt=prompt_text)

    def _conversation(self, messages: Messages, options: Mapping[str, Any]) -> _Example:
        """Renders messages, and finds the assistant's turns in the text."""
        text, marked = self._render(messages, **options)
        if self.template.marks_answers:
            return _Example(text, marked)
        answers = [
            self._added(messages[:end], options)
            for end, message in enumerate(messages, 1)
            if message["role"] == "assistant"
        ]
        if all(answer and text.startswith(answer[0]) for answer in answers):
            return _Example(text, [answer[1] for answer in answers if answer])
        # The template renders an earlier turn differently once others follow.
        last = answers[-1]
        if last and messages[-1]["role"] == "assistant":
            return _Example(text, [last[1]], note="last")
        return _Example(text, note="last")

    def _added(
        self, messages: Messages, options: Mapping[str, Any]
    ) -> tuple[str, Span] | None:
        """Finds the text that the last turn of a conversation, an answer, adds.

        Returns:
          The text of the conversation, and the answer's range of characters. None if
          the text does not begin with the prompt of the answer.
        """
        try:
            prompt, _ = self._render(
                messages[:-1], add_generation_prompt=True, **options
            )
            text, _ = self._render(messages, **options)
        except ConfigError:
            # Some templates refuse chats that do not begin or end with a user's turn.
            return None
        if not text.startswith(prompt):
            return None
        return text, (len(prompt), len(text))

    def _render(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        """Renders messages by the template.

        Raises:
          ConfigError: there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise ConfigError(
                "messages need a chat template, and the tokenizer has none; "
                "set data.chat_template=FILE.jinja"
            )
        rendered: tuple[str, list[Span]] = self.template.render(messages, **options)
        return rendered

    def _turn_ends(self) -> list[int]:
        """Finds the special token that follows an answer; [] if there is none.

        For a tokenizer of bytes it is a control character.
        """
        chat = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text, _ = self._render(chat)
        except ConfigError:
            return []
        _, answer, end = text.rpartition(_ANSWER)
        if not answer:
            return []
        possible_ends = set(self.tokenizer.special_tokens)
        if not self.tokenizer.content:
            possible_ends = {i for i in range(32) if chr(i) not in "\t\n\r"}
        first = self.tokenizer.encode(end)[:1].tolist()
        return [token for token in first if token in possible_ends]


def open_encoder(
    config: DataConfig, tokenizer: Tokenizer, folder: Path | None = None
) -> ChatEncoder:
    """Makes the encoder of a config's rows, with its chat template or the tokenizer's.

    Args:
      config: settings of the data.
      tokenizer: tokenizer of the texts.
      folder: workdir of a run. A template that it has kept takes precedence.

    Raises:
      ConfigError: the template cannot be read, is invalid, or is harmful.
      ImportError: jinja2 is not installed. The error names the extra.
    """
    kept = tokenizer_config.kept_template(folder)
    where = "the tokenizer's chat template"
    source = kept or tokenizer.config.chat_template
    if config.chat_template and not kept:
        where = f"data.chat_template={config.chat_template}"
        try:
            source = read_bytes(expanded(config.chat_template)).decode()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{where}: {one_line(error)}; required: a text file, a jinja template"
            ) from error
    if not source:
        return ChatEncoder(tokenizer)
    templates = extras.load("jaxdist.data.chat_template")
    template = templates.load(
        source, tokenizer.config.special, where=where, cache=config.cache_folder()
    )
    return ChatEncoder(tokenizer, template)
