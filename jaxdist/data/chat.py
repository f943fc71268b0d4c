"""Chats, and prompts with completions, as tokens and their weights.

The learned tokens of a chat are the assistant's turns, each with its end. A completion
is learned, its prompt is not.

A template may mark the assistant's text. If it does not, the text that a turn adds to
the rendered chat is the turn.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import chat_template, tokenizer_config
from jaxdist.data.chat_template import Chat, ChatTemplate, Rendered, Span, View
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
_SHOWN = 20  # characters of the end of a turn that a warning shows
_ENDLESS = (
    "warning: after an answer the chat template writes {!r}, without an end token: generation "
    "does not stop there. Write {{{{ eos_token }}}} after each answer, or, for byte tokens, a "
    "control character, as configs/bytes_chat.jinja does."
)
Messages = Sequence[Mapping[str, Any]]


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

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        """Finds the end of a turn in the template.

        Args:
          tokenizer: tokenizer of the texts.
          template: None if prompts and completions are texts.

        Raises:
          ConfigError: the template exceeds a limit.
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
        end_of_turn = self._end_of_turn()
        ids = [] if end_of_turn is None else tokenizer.encode(end_of_turn).tolist()
        self.end_ids = tuple(sorted({*tokenizer.end_ids, *self._turn_ends(ids)}))
        # a line to print, unless generation stops where a turn ends; "" = it stops
        self.warning = ""
        if end_of_turn is not None and not set(ids) & set(self.end_ids):
            self.warning = _ENDLESS.format(end_of_turn[:_SHOWN])
        end = ""
        if tokenizer.end_of_document is not None:
            end = tokenizer.special_tokens.get(tokenizer.end_of_document, "")
        self._end = special.get("eos_token", end)

    def prompt(self, messages: Messages) -> np.ndarray:
        """Encodes a conversation whose next turn is the assistant's, [length] int32.

        Raises:
          ConfigError: there is no template, it refuses the messages, or it exceeds a
            limit.
        """
        template = self._checked_template()
        return self.tokenizer.encode(template.render(messages, prompts=True).text)

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
          ConfigError: the template refuses a row, or exceeds a limit. The error names
            the row's id.
        """
        examples = list(self._examples(documents))
        notes = Counter(example.note for example in examples if example.note)
        encoded = self.tokenizer.encode_spans(
            [(example.text, example.learned) for example in examples]
        )
        texts = [example.prompt for example in examples if example.prompt is not None]
        prompts = self.tokenizer.encode_documents(texts)
        pairs = zip(examples, encoded, strict=True)
        wholes = [
            tokens for example, (tokens, _) in pairs if example.prompt is not None
        ]
        for whole, prompt in zip(wholes, prompts, strict=True):
            if not np.array_equal(whole[: len(prompt)], prompt):
                notes["mismatch"] += 1
        starts = iter(self._completion_starts(wholes, prompts))
        begin = self.tokenizer.begin_of_document
        ids = []
        weights = []
        for example, (tokens, learned) in zip(examples, encoded, strict=True):
            if example.prompt is not None:
                learned = np.arange(len(tokens)) >= next(starts)
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

    def _completion_starts(
        self, wholes: Sequence[np.ndarray], prompts: Sequence[np.ndarray]
    ) -> list[int]:
        """Counts the tokens before the first learned one of each prompted example.

        Args:
          wholes: ids of each example.
          prompts: ids of its prompt alone.
        """
        return [len(prompt) for prompt in prompts]

    def _examples(self, documents: Sequence[Document]) -> Iterator[_Example]:
        """Yields the text of each row, with the parts that are learned.

        Raises:
          ConfigError: the template refuses a row, or exceeds a limit.
        """
        rows = [json.loads(document.text) for document in documents]
        chats = [self._chat_of(row) for row in rows]
        rendered: Iterator[list[Rendered]] = iter(())
        if self.template is not None:
            rendered = self.template.render_all([chat for chat in chats if chat])
        for document, row, chat in zip(documents, rows, chats, strict=True):
            try:
                if chat is None:
                    yield self._text_example(row)
                else:
                    template = self._checked_template()
                    views = next(rendered)
                    yield _chat_example(row, views, marks=template.marks_answers)
            except ConfigError as error:
                raise ConfigError(f"{document.id}: {error}") from error

    def _chat_of(self, row: Mapping[str, Any]) -> Chat | None:
        """Chooses what is rendered of a row; None if its prompt is a text.

        The first view is the whole conversation. Others are pairs: what prompts an
        answer, and the conversation with that answer.
        """
        options = {"tools": row["tools"]} if "tools" in row else {}
        if "messages" in row:
            messages = row["messages"]
            answers = [
                end
                for end, message in enumerate(messages, 1)
                if message["role"] == "assistant"
            ]
            if self.template is not None and self.template.marks_answers:
                answers = []
        elif isinstance(row["prompt"], str):
            return None
        else:
            messages = [*row["prompt"], *row["completion"]]
            return Chat(
                messages,
                [View(len(messages)), View(len(row["prompt"]), prompts=True)],
                options,
            )
        views = [View(len(messages))]
        for end in answers:
            views += [View(end - 1, prompts=True), View(end)]
        return Chat(messages, views, options)

    def _text_example(self, row: Mapping[str, Any]) -> _Example:
        """Joins the texts of a prompt and its completion."""
        prompt = row["prompt"]
        text = prompt + row["completion"]
        if not text.endswith(self._end):
            text += self._end
        return _Example(text, prompt=prompt, begins=True)

    def _checked_template(self) -> ChatTemplate:
        """Checks that there is a template, and hands it back.

        Raises:
          ConfigError: there is none.
        """
        if self.template is None:
            raise ConfigError(
                "messages need a chat template, and the tokenizer has none; "
                "set data.chat_template=FILE.jinja"
            )
        return self.template

    def _end_of_turn(self) -> str | None:
        """Renders what follows an answer.

        It is None without a template, or if the template refuses such a chat.
        """
        if self.template is None:
            return None
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _ANSWER},
        ]
        ((rendered,),) = self.template.render_all([Chat(messages, [View(2)])])
        _, answer, end = rendered.text.rpartition(_ANSWER)  # no text if it is refused
        return end if answer else None

    def _turn_ends(self, end: list[int]) -> list[int]:
        """Finds the special token that follows an answer; [] if there is none.

        For a tokenizer of bytes it is a control character.

        Args:
          end: ids of what follows an answer.
        """
        possible_ends = set(self.tokenizer.special_tokens)
        if not self.tokenizer.content:
            possible_ends = {i for i in range(32) if chr(i) not in "\t\n\r"}
        return [token for token in end[:1] if token in possible_ends]


def _chat_example(
    row: Mapping[str, Any], views: Sequence[Rendered], *, marks: bool
) -> _Example:
    """Finds what is learned of a rendered chat.

    Args:
      row: messages, or a prompt and its completion.
      views: the views of `ChatEncoder._chat_of`.
      marks: whether the template marks the assistant's text.

    Raises:
      ConfigError: the template refuses the row.
    """
    if "messages" not in row:
        prompt = views[1].checked()
        return _Example(views[0].checked().text, prompt=prompt.text)
    whole = views[0].checked()
    if marks:
        return _Example(whole.text, whole.spans)
    pairs = zip(views[1::2], views[2::2], strict=True)
    answers = [_added(prompt, text) for prompt, text in pairs]
    if all(answer and whole.text.startswith(answer[0]) for answer in answers):
        return _Example(whole.text, [answer[1] for answer in answers if answer])
    # The template renders an earlier turn differently once others follow.
    last = answers[-1]
    if last and row["messages"][-1]["role"] == "assistant":
        return _Example(whole.text, [last[1]], note="last")
    return _Example(whole.text, note="last")


def _added(prompt: Rendered, text: Rendered) -> tuple[str, Span] | None:
    """Finds the text that an answer, the last turn of a conversation, adds.

    Args:
      prompt: the conversation up to the answer, with the beginning of it.
      text: the conversation with the answer.

    Returns:
      The text, and the answer's range of characters. None if the text does not begin
      with the prompt, or the template refuses one of them. Some templates refuse chats
      that do not begin or end with a user's turn.
    """
    is_refused = bool(prompt.refusal or text.refusal)
    if is_refused or not text.text.startswith(prompt.text):
        return None
    return text.text, (len(prompt.text), len(text.text))


def open_encoder(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    encoder_class: type[ChatEncoder] = ChatEncoder,
) -> ChatEncoder:
    """Makes the encoder of a config's rows, with its chat template or the tokenizer's.

    Args:
      config: settings of the data.
      tokenizer: tokenizer of the texts.
      folder: workdir of a run. A template that it has kept takes precedence.
      encoder_class: class of the encoder.

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
        return encoder_class(tokenizer)
    template = chat_template.load(source, tokenizer.config.special, where=where)
    return encoder_class(tokenizer, template)
