"""Program that renders a chat template (package `jinja2`) within limits.

A template is a program of a model's author. It runs in jinja2's sandbox, where it cannot
reach files, modules or Python's attributes. It can still loop or make long texts, also
while it is compiled. So it only runs in this process, which `chat_template.py` starts
by this file's path: nothing but the standard library and jinja2 is imported.

The process reads lines of JSON: first [source, special tokens], then batches. A batch is a
line [number of chats, bytes to render], and a line for each chat: [messages, views,
options]. The answer has a line for each view of each chat. A process that exceeds a
limit ends. It also ends at the end of its input, so it does not outlive its parent.
"""

import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 1 << 30  # memory of the process
# Processor time of a batch: a part, and a second for so many bytes. Published templates
# render 5 MB a second.
SECONDS = 4
BYTES_PER_S = 100_000
# Characters of a rendered text: a part, and a multiple of the bytes of the chat
MAX_ADDED = 100_000
MAX_GROWTH = 20
_MAX_REASON = 1000  # characters of a refusal

# exit codes of the process
_MEMORY = 3
_LENGTH = 4
_DEPTH = 5

# exit code of the process: the limit that was exceeded
LIMITS = {
    _MEMORY: f"it needs more than {MAX_BYTES >> 20} MiB of memory",
    _LENGTH: (
        f"it makes more than {MAX_ADDED:,} characters, and {MAX_GROWTH} times as many "
        "as the conversation has"
    ),
    _DEPTH: "it nests or calls itself without end",
    -signal.SIGPROF: (
        f"it takes more than {SECONDS} s, and a second for {BYTES_PER_S:,} bytes: a loop "
        "almost without end"
    ),
}

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TooLongError(Exception):
    """Error of a rendered text that exceeds its limit."""


class Renderer:
    """Template, and the special tokens that it may name (`bos_token`, ...)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compiles a template.

        Raises:
          Exception: of any type; `source` is no template.
        """
        self.marks_answers = bool(_MARKED.search(source))
        self._special = special
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._template = self._environment.from_string(source)

    def render(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        max_characters: int,
    ) -> dict[str, Any]:
        """Renders messages as transformers renders them.

        Returns:
          The `text` and the `spans` of characters that the template marks as generated.
          Or `refused`, the reason why the template fails on these messages.

        Raises:
          MemoryError: the process has reached its limit.
          RecursionError: the template nests too deeply.
          TooLongError: the text has more than `max_characters`.
        """
        tracker: Any = self._environment.extensions[_Generation.identifier]
        tracker.blocks = []
        tracker.spans = []
        length = 0
        variables = {"tools": None, "documents": None, **self._special, **variables}
        try:
            for block in self._template.generate(messages=messages, **variables):
                tracker.blocks.append(block)
                length += len(block)
                if length > max_characters:
                    raise TooLongError
        except (MemoryError, RecursionError, TooLongError):
            raise
        except Exception as error:
            # A template may raise any type, for undefined names or wrong types.
            return {"refused": _reason(error)}
        return {"text": "".join(tracker.blocks), "spans": tracker.spans}


class _Generation(Extension):
    """Extension for `{% generation %}`, which marks the model's text in a template."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks: list[str] = []  # parts of the text that are rendered so far
        self.spans: list[tuple[int, int]] = []

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


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Formats JSON without escapes for HTML, which jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON]


# --- The process ----------------------------------------------------------------------


def _limit_seconds(num_bytes: int) -> None:
    """Ends the process if it takes too long for an input; 0 bytes = no limit."""
    seconds = 0.0
    if num_bytes:
        seconds = SECONDS + num_bytes / BYTES_PER_S
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _open() -> Renderer | None:
    """Reads and compiles the template; None if there is none."""
    line = sys.stdin.buffer.readline()
    _limit_seconds(1)
    source, special = json.loads(line)
    try:
        renderer = Renderer(source, special)
    except MemoryError:
        raise
    except Exception as error:
        # Python itself refuses some programs that jinja2 makes of a template.
        line_number = getattr(error, "lineno", None)
        place = f"line {line_number}: " if line_number else ""
        _answer({"fault": place + _reason(error)})
        return None
    _answer({"marks_answers": renderer.marks_answers})
    return renderer


def _serve(renderer: Renderer) -> None:
    """Answers batches until the input ends."""
    while True:
        _limit_seconds(0)
        header = sys.stdin.buffer.readline()
        if not header:
            return
        count, num_bytes = json.loads(header)
        # All of a batch is read before it is answered: each side reads while the other
        # one writes.
        lines = [sys.stdin.buffer.readline() for _ in range(count)]
        _limit_seconds(num_bytes)
        for line in lines:
            messages, views, options = json.loads(line)
            max_characters = MAX_ADDED + MAX_GROWTH * len(line)
            # Each view has a line of its own: all views of a long chat would need much
            # memory at once.
            for end, prompts in views:
                variables = {"add_generation_prompt": prompts, **options}
                _answer(renderer.render(messages[:end], variables, max_characters))


def main() -> None:
    """Runs the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    # Signals for the whole group are the parent's: it decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        renderer = _open()
        if renderer:
            _serve(renderer)
    except MemoryError:
        sys.exit(_MEMORY)
    except TooLongError:
        sys.exit(_LENGTH)
    except RecursionError:
        sys.exit(_DEPTH)


if __name__ == "__main__":
    main()
