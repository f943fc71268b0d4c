"""Chat templates (package `jinja2`); load this module with `extras.load`.

They are rendered as transformers renders them. A template is a program of a model's
author. It runs in jinja2's sandbox, where it cannot reach files, modules or Python's
attributes. It can still loop or make long texts, so it is tried out first, like a
tokenizer.json. `python -m jaxdist.data.chat_template` is the process of the trial.
"""

import contextlib
import datetime
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxdist.config import ConfigError
from jaxdist.data import trial
from jaxdist.data.reading import one_line

Message = Mapping[str, Any]
Span = tuple[int, int]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Template, and the special tokens that it may name (`bos_token`, ...)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compiles a template.

        Args:
          source: text of the template.
          special: {name: text} of special tokens.

        Raises:
          ConfigError: `source` is no template.
        """
        self.source = source
        self._special = dict(special)
        self.marks_answers = bool(_MARKED.search(source))
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            place = f"line {line}: " if line else ""
            raise ConfigError(f"{place}{one_line(error)}") from error

    def render(
        self, messages: Sequence[Message], **options: Any
    ) -> tuple[str, list[Span]]:
        """Renders a conversation as a text.

        Args:
          messages: turns of the conversation.
          **options: further variables of the template: `add_generation_prompt`,
            `tools`.

        Returns:
          The text, and the ranges of characters that the template marks as generated.

        Raises:
          ConfigError: the template fails on these messages, or refuses them.
        """
        variables = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **self._special,
            **options,
        }
        tracker: Any = self._environment.extensions[_Generation.identifier]
        tracker.blocks = []
        tracker.spans = []
        try:
            for block in self._template.generate(messages=list(messages), **variables):
                tracker.blocks.append(block)
        except Exception as error:
            # A template may raise any type, for undefined names or wrong types.
            raise ConfigError(f"its chat template fails: {one_line(error)}") from error
        return "".join(tracker.blocks), tracker.spans


class _Generation(Extension):
    """Extension for `{% generation %}`, which marks the model's text in a template."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks: list[str] = []  # parts of the text that are rendered so far
        self.spans: list[Span] = []

    def parse(self, parser: Any) -> nodes.Node:
        """Replaces both tags by a call of `_mark` on the text between them."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text: str = caller()
        start = sum(map(len, self.blocks))
        self.spans.append((start, start + len(text)))
        return text


def _environment() -> ImmutableSandboxedEnvironment:
    """Makes the environment that templates are written for, that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Formats JSON without escapes for HTML, which jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


# --- The trial ------------------------------------------------------------------------


def load(
    source: str, special: Mapping[str, str], *, where: str, cache: Path | None = None
) -> ChatTemplate:
    """Loads a template, after a trial.

    Args:
      source: text of the template.
      special: {name: text} of special tokens.
      where: name of the template in errors, such as "data.chat_template=chat.jinja".
      cache: folder that remembers templates that have passed. None tries it out in any
        case.

    Raises:
      ConfigError: the text is no template, or takes too long or too much memory on a
        short conversation.
    """
    try:
        trial.once(
            "chat-template",
            version=jinja2.__version__,
            module=__name__,
            content=source.encode(),
            cache=cache,
        )
        return ChatTemplate(source, special)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _try_out(content: bytes) -> None:
    """Renders short conversations. A template may refuse them."""
    special = {"bos_token": "<>", "eos_token": "<>"}
    template = ChatTemplate(content.decode(), special)
    turns = [
        {"role": role, "content": "text " * 40} for role in ("user", "assistant") * 2
    ]
    system = {"role": "system", "content": "text"}
    for messages in (turns, turns[:1], [system, *turns]):
        with contextlib.suppress(ConfigError):
            template.render(messages, add_generation_prompt=True)


if __name__ == "__main__":
    trial.child(_try_out, sys.stdin.buffer.read())
