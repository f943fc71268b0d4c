"""Chat templates, rendered in a process of their own.

The process has limits of memory, time and length (`chat_renderer.py`). It answers many
chats, and ends with its template or with this process, whichever is first.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config import ConfigError, extras
from jaxdist.data.reading import one_line

Message = Mapping[str, Any]
Span = tuple[int, int]

_RENDERER = "jaxdist.data.chat_renderer"
_MAX_SOURCE = 1 << 20  # bytes of a template; published ones have less than 50,000
_BATCH_BYTES = 1_000_000  # bytes that are rendered at once
_TIMEOUT_S = 300  # limit by the clock for a batch, for a busy machine


class View(NamedTuple):
    """Beginning of a conversation that is rendered."""

    end: int  # number of messages
    prompts: bool = False  # whether the text ends with the beginning of an answer


class Chat(NamedTuple):
    """Conversation, and what of it is rendered."""

    messages: Sequence[Message]
    views: Sequence[View]
    # further variables of the template, such as `tools`
    options: Mapping[str, Any] = MappingProxyType({})


class Rendered(NamedTuple):
    """Text of a view."""

    text: str = ""
    spans: Sequence[Span] = ()  # ranges of characters that are marked as generated
    refusal: str = ""  # why the template fails on these messages; "" = it does not

    def checked(self) -> "Rendered":
        """Checks that the template took the messages, and hands the view back.

        Raises:
          ConfigError: the template refuses them.
        """
        if self.refusal:
            raise ConfigError(f"its chat template fails: {self.refusal}")
        return self


class ChatTemplate:
    """Template, and the special tokens that it may name (`bos_token`, ...).

    Threads may use it at once. A process that was forked or spawned from this one starts
    a process of its own.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        *,
        where: str = "the chat template",
    ) -> None:
        """Compiles a template.

        Args:
          source: text of the template.
          special: {name: text} of special tokens.
          where: name of the template in errors, such as "data.chat_template=a.jinja".

        Raises:
          ConfigError: `source` is no template, or exceeds a limit.
          MissingExtra: jinja2 is not installed.
        """
        self.source = source
        self.where = where
        self._special = dict(special)
        opening = _line([source, self._special])
        if len(opening) > _MAX_SOURCE:
            raise ConfigError(
                f"{where}: more than {_MAX_SOURCE:,} bytes; use another one"
            )
        self._process = _Process(opening, where)
        self.marks_answers = self._process.marks_answers

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what the template is made of: its process stays here."""
        return _unpickled, (self.source, self._special, self.where)

    def try_out(self) -> None:
        """Renders short conversations. The template may refuse them.

        Raises:
          ConfigError: it exceeds a limit.
        """
        turns = [
            {"role": role, "content": "text " * 40}
            for role in ("user", "assistant") * 2
        ]
        system = {"role": "system", "content": "text"}
        chats = (turns, turns[:1], [system, *turns])
        views = [Chat(chat, [View(len(chat), prompts=True)]) for chat in chats]
        for _ in self.render_all(views):
            pass

    def render(
        self, messages: Sequence[Message], *, prompts: bool = False, **options: Any
    ) -> Rendered:
        """Renders a conversation as a text.

        Args:
          messages: turns of the conversation, of types that JSON has.
          prompts: whether the text ends with the beginning of an answer.
          **options: further variables of the template.

        Raises:
          ConfigError: the template fails on these messages, or refuses them; or it
            exceeds a limit.
        """
        chat = Chat(messages, [View(len(messages), prompts)], options)
        ((rendered,),) = self.render_all([chat])
        return rendered.checked()

    def render_all(self, chats: Sequence[Chat]) -> Iterator[list[Rendered]]:
        """Yields the views of each chat.

        Raises:
          ConfigError: the next chat exceeds a limit, or is no JSON.
        """
        batch: list[tuple[Chat, bytes]] = []
        size = 0
        work = 0
        for chat in chats:
            line = _chat_line(chat)
            batch.append((chat, line))
            size += len(line)
            work += len(line) * len(chat.views)
            if size > _BATCH_BYTES:
                yield from self._render_batch(batch, work)
                batch = []
                size = 0
                work = 0
        if batch:
            yield from self._render_batch(batch, work)

    def _render_batch(
        self, batch: Sequence[tuple[Chat, bytes]], work: int
    ) -> Iterator[list[Rendered]]:
        """Renders chats.

        Args:
          batch: the chats, each with its line.
          work: bytes that all their views have together, which take time.
        """
        if not self._process.is_alive():
            self._process = _Process(_line([self.source, self._special]), self.where)
        content = _line([len(batch), work]) + b"".join(line for _, line in batch)
        views = [_distinct(chat.views) for chat, _ in batch]
        lines, fault = self._process.ask(content, sum(map(len, views)))
        answers = iter(lines)
        for (chat, _), distinct in zip(batch, views, strict=True):
            found = list(itertools.islice(answers, len(distinct)))
            if len(found) < len(distinct):
                break
            results = [_rendered(**json.loads(line)) for line in found]
            by_view = dict(zip(distinct, results, strict=True))
            yield [by_view[view] for view in chat.views]
        if fault:
            raise ConfigError(f"{self.where}: {fault}; use another one")


def load(source: str, special: Mapping[str, str], *, where: str) -> ChatTemplate:
    """Loads a template, after a trial.

    Args:
      source: text of the template.
      special: {name: text} of special tokens.
      where: name of the template in errors.

    Raises:
      ConfigError: the text is no template, or it exceeds a limit on a short
        conversation.
      MissingExtra: jinja2 is not installed.
    """
    template = ChatTemplate(source, special, where=where)
    template.try_out()
    return template


def _unpickled(source: str, special: Mapping[str, str], where: str) -> ChatTemplate:
    return ChatTemplate(source, special, where=where)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _chat_line(chat: Chat) -> bytes:
    try:
        views = _distinct(chat.views)
        return _line([list(chat.messages), views, dict(chat.options)])
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"messages of a chat must be JSON: {one_line(error)}"
        ) from error


def _distinct(views: Sequence[View]) -> list[View]:
    return list(dict.fromkeys(views))


def _rendered(
    text: str = "", spans: Sequence[Sequence[int]] = (), refused: str = ""
) -> Rendered:
    ranges = [(start, end) for start, end in spans]
    return Rendered(text, ranges, one_line(refused) if refused else "")


# --- The process ----------------------------------------------------------------------


class _Process:
    """Process that renders one template."""

    def __init__(self, opening: bytes, where: str) -> None:
        """Starts the process.

        Args:
          opening: the line that opens the template.
          where: name of the template in errors.

        Raises:
          ConfigError: the process cannot be started, the text is no template, or it
            exceeds a limit.
        """
        renderer = extras.load(_RENDERER)
        self._limits: Mapping[int, str] = renderer.LIMITS
        self._lock = threading.Lock()
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(renderer.__file__)],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ConfigError(
                f"{where}: no process can be started to render it ({one_line(error)})"
            ) from error
        self._end = weakref.finalize(self, _end, self._popen)
        _PROCESSES.add(self)
        lines, fault = self.ask(opening, 1)
        opened: dict[str, Any] = {"fault": fault}
        if lines:
            opened = json.loads(lines[0])
        if "fault" in opened:
            self._end()
            raise ConfigError(f"{where}: {one_line(opened['fault'])}; use another one")
        self.marks_answers: bool = opened["marks_answers"]

    def ask(self, content: bytes, count: int) -> tuple[list[bytes], str]:
        """Writes to the process and reads its answers.

        Args:
          content: what to write.
          count: number of lines that answer it.

        Returns:
          The answers, and the reason if there are fewer than `count`.
        """
        assert self._popen.stdin
        assert self._popen.stdout
        lines: list[bytes] = []
        with self._lock:
            if not self._end.alive:
                return lines, "its process has ended with chats of another thread"
            timer = threading.Timer(_TIMEOUT_S, self._popen.kill)
            timer.daemon = True
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    self._popen.stdin.write(content)
                    self._popen.stdin.flush()
                while len(lines) < count:
                    line = self._popen.stdout.readline()
                    if not line.endswith(b"\n"):
                        return lines, self._fault()
                    lines.append(line)
            except BaseException:
                # Answers that nobody reads would be those of the next chats.
                self._end()
                raise
            finally:
                timer.cancel()
        return lines, ""

    def is_alive(self) -> bool:
        """Checks whether the process can be asked from here."""
        return self._end.alive and self._popen.poll() is None

    def forget(self) -> None:
        """Closes the pipes in a process that was forked from the one that has them.

        The renderer could not see the end of its input while another process has them
        open.
        """
        if self._end.detach() is None:
            return  # it has ended, and its pipes are closed
        nowhere = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe
            # The file object is not closed: it would write what a thread of the other
            # process has begun to write.
            os.dup2(nowhere, pipe.fileno(), inheritable=False)
        os.close(nowhere)

    def _fault(self) -> str:
        """Explains why the process has ended."""
        code = self._popen.wait()
        self._end()
        if code in self._limits:
            return self._limits[code]
        if code == -signal.SIGKILL:
            return (
                f"its process was killed: it took more than {_TIMEOUT_S} s, or the machine "
                "has no memory left"
            )
        return f"its process ended with status {code}"


_PROCESSES: weakref.WeakSet[_Process] = weakref.WeakSet()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, which has nothing to save."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with contextlib.suppress(OSError):
            pipe.close()


def _forget_processes() -> None:
    for process in list(_PROCESSES):
        _PROCESSES.discard(process)
        process.forget()


os.register_at_fork(after_in_child=_forget_processes)
