"""Chats, and prompts with completions, as tokens, and which of these are learned.

Learned are the assistant's turns, each with what ends it, and of prompts with
completions the completions. What is the assistant's, a template may mark; of one that
does not, a turn is by what rendering it adds.
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

_VERSION = 1  # of the rules below; part of the cache key
_ANSWER = "answer-0f3a"  # a text that no template has
_NOTES = {  # what is said of rows that are not as usual
    "last": "the chat template rewrites earlier turns, so the last turn alone is learned",
    "mismatch": "the whole does not begin with the prompt's tokens; as many are not learned",
}
Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class _Example(NamedTuple):
    """A row as text."""

    text: str
    learned: Sequence[Span] = ()  # ranges of characters
    # the text before what is learned, where that is how the row says it
    prompt: str | None = None
    begins: bool = False  # whether what begins a document comes first
    note: str = ""  # a key of _NOTES


class ChatEncoder:
    """Makes tokens and weights of rows; made by `open_encoder`."""

    def __init__(self, tokenizer: Tokenizer, template: Any = None):
        """Args:
        template: a chat_template.ChatTemplate; None: rows have prompts and completions
        that are texts.
        """
        self.tokenizer, self.template, self.vocab_size = (
            tokenizer,
            template,
            tokenizer.vocab_size,
        )
        special = tokenizer.config.special
        self.fingerprint = digest(
            _VERSION,
            tokenizer.fingerprint,
            template and template.source,
            sorted(special.items()),
        )
        self.end_ids = tuple(sorted({*tokenizer.end_ids, *self._turn_ends()}))
        end = tokenizer.end_of_document
        self._end = special.get(
            "eos_token", "" if end is None else tokenizer.special_tokens.get(end, "")
        )

    def prompt(self, messages: Messages) -> np.ndarray:
        """Returns the ids of a conversation whose next turn is the assistant's,
        [length] int32.

        Raises:
          ConfigError: there is no template, or it refuses the messages.
        """
        return self.tokenizer.encode(
            self._render(messages, add_generation_prompt=True)[0]
        )

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Returns of each row ids and weights (1: learned), and how many rows were not
        as usual, by key.

        Args:
          documents: rows as JSON, see `chat_rows`.

        Raises:
          ConfigError: a row that the template refuses, by its id.
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
        prompts = iter(
            self.tokenizer.encode_documents(
                [e.prompt for e in examples if e.prompt is not None]
            )
        )
        ids, weights = [], []
        for example, (tokens, learned) in zip(examples, encoded, strict=True):
            if example.prompt is not None:
                before = next(prompts)
                notes["mismatch"] += int(
                    not np.array_equal(tokens[: len(before)], before)
                )
                learned = np.arange(len(tokens)) >= len(before)
            if example.begins and self.tokenizer.begin_of_document is not None:
                tokens, learned = (
                    np.insert(tokens, 0, self.tokenizer.begin_of_document),
                    np.insert(learned, 0, 0),
                )
            ids.append(tokens)
            weights.append(learned.astype(np.uint8))
        return ids, weights, +notes

    def notes(self, counts: Counter[str]) -> list[str]:
        """Returns what to say of the rows that were not as usual."""
        return [
            f"{counts[key]} rows: {text}" for key, text in _NOTES.items() if counts[key]
        ]

    def _example(self, row: Mapping[str, Any]) -> _Example:
        options = {"tools": row["tools"]} if "tools" in row else {}
        if "messages" in row:
            return self._conversation(row["messages"], options)
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str):
            whole = prompt + completion
            return _Example(
                whole if whole.endswith(self._end) else whole + self._end,
                prompt=prompt,
                begins=True,
            )
        before, _ = self._render(prompt, add_generation_prompt=True, **options)
        return _Example(
            self._render([*prompt, *completion], **options)[0], prompt=before
        )

    def _conversation(self, messages: Messages, options: Mapping[str, Any]) -> _Example:
        text, marked = self._render(messages, **options)
        if self.template.marks_answers:
            return _Example(text, marked)
        turns = [
            i for i, message in enumerate(messages) if message["role"] == "assistant"
        ]
        spans = [self._added(messages[: i + 1], options) for i in turns]
        if all(span is not None and text.startswith(span[0]) for span in spans):
            return _Example(text, [span[1] for span in spans if span])
        last = (
            self._added(messages, options) if turns[-1] == len(messages) - 1 else None
        )
        return _Example(text, [last[1]] if last else [], note="last")

    def _added(
        self, messages: Messages, options: Mapping[str, Any]
    ) -> tuple[str, Span] | None:
        """Returns a conversation's text, and which characters the last turn, an answer,
        has added to it.

        None: it does not begin with what the assistant is given to answer.
        """
        try:
            before, _ = self._render(
                messages[:-1], add_generation_prompt=True, **options
            )
            whole, _ = self._render(messages, **options)
        except ConfigError:
            # some templates refuse what does not end, or begin, with a user's turn
            return None
        return (whole, (len(before), len(whole))) if whole.startswith(before) else None

    def _render(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        if self.template is None:
            raise ConfigError(
                "messages need a chat template, and the tokenizer has none; set data.chat_template=FILE.jinja"
            )
        return self.template.render(messages, **options)

    def _turn_ends(self) -> list[int]:
        """Returns the special token (of bytes: the control character) that follows an
        answer, if one does.
        """
        chat = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text = self.template.render(chat)[0] if self.template else ""
        except ConfigError:
            return []
        _, answer, after = text.rpartition(_ANSWER)
        first = self.tokenizer.encode(after)[:1].tolist() if answer else []
        control = (i for i in range(32) if chr(i) not in "\t\n\r")
        ends = set(self.tokenizer.special_tokens if self.tokenizer.content else control)
        return [i for i in first if i in ends]


def open_encoder(
    config: DataConfig, tokenizer: Tokenizer, folder: Path | None = None
) -> ChatEncoder:
    """Returns what encodes the rows of a config: with its template, else the
    tokenizer's own.

    Args:
      folder: where a run has kept a template (its workdir), which then is the one.

    Raises:
      ConfigError: the template cannot be read, is none, or is harmful.
      ImportError: naming the extra, where jinja2 is not installed.
    """
    kept, where = (
        tokenizer_config.kept_template(folder),
        "the tokenizer's chat template",
    )
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
