"""Errors and exit codes of all commands, and their parser. It imports no jax."""

import argparse
import contextlib
import difflib
import errno
import io
import os
import select
import sys
import typing
from collections.abc import Callable, Iterable, Sequence

from jaxdist.config.redact import without_secrets

EXIT_PEER_LOST = 70  # another process failed; this one did nothing wrong
EXIT_PREEMPTED = 75  # a signal asked to stop; all is saved
EXIT_HANG = 76  # killed by the watchdog
EXIT_NO_CHECKPOINT = 77  # a checkpoint is required, and none can be used
EXIT_CONFIG = 78  # a ConfigError; sysexits.h calls it EX_CONFIG
EXIT_INTERRUPTED = 130  # Ctrl-C, without a save; 128 + SIGINT
EXIT_CLOSED_PIPE = 141  # the reader of the output has gone (`| head`); 128 + SIGPIPE


class ConfigError(ValueError):
    """Faults of a configuration: one line for each, with value, rule and fix."""

    exit_code = EXIT_CONFIG

    def __init__(self, faults: str | Iterable[str]) -> None:
        if isinstance(faults, str):
            faults = [faults]
        self.faults: tuple[str, ...] = tuple(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)


def print_faults(error: Exception) -> None:
    """Prints an error to stderr, with a line for each fault of a ConfigError."""
    for fault in getattr(error, "faults", (str(error),)):
        print(f"error: {without_secrets(fault)}", file=sys.stderr)


def exit_code_of(error: BaseException) -> int:
    """Reads the exit code of a process that ends with an error."""
    code = getattr(error, "exit_code", 1)
    # A user's class may use the name for something else.
    return code if isinstance(code, int) else 1


def quiet_pipe(main: Callable[[], int]) -> int:
    """Runs a command's main; ends quietly without a reader of its output, or at Ctrl-C.

    A path with too long a name is a user's error, wherever it is first used.

    Returns:
      The exit code of main; EXIT_CLOSED_PIPE if main could not write its output.
    """
    try:
        return main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not any(map(_reader_has_gone, _outputs())):
            raise  # another pipe is broken
        return EXIT_CLOSED_PIPE
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_CONFIG
    finally:
        for stream in _outputs():
            try:
                stream.flush()
            except BrokenPipeError:
                # Python flushes once more when it ends, and would print an error.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _outputs() -> list[typing.TextIO]:
    streams = (sys.stdout, sys.stderr)
    return [stream for stream in streams if stream and not stream.closed]


def _reader_has_gone(stream: typing.TextIO) -> bool:
    """Tests whether the other end of a pipe is closed."""
    # A stream without a file descriptor raises these errors.
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream, 0)
        return any(
            event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
        )
    return False


class Parser(argparse.ArgumentParser):
    """Argument parser of a command, whose errors are ConfigErrors.

    Flags must be written out. If a flag is repeated, the last one counts.
    """

    def __init__(self, **options: typing.Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses as argparse does; outputs escape names that are not UTF-8."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        """Raises a ConfigError, in place of argparse's exit with 2."""
        raise ConfigError(f"{message}; --help lists the flags")


def is_text(value: str) -> bool:
    """Tests whether a text can be encoded as UTF-8.

    Python decodes bytes that are not UTF-8, such as names of files, to lone surrogates.
    """
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def suggest(name: str, choices: Iterable[str]) -> str:
    """Suggests the choice nearest to a name: " Did you mean X?", or ""."""
    leaf = name.rpartition(".")[2]
    leaves = {choice: choice.rpartition(".")[2] for choice in choices}
    # `lr` and `wd` are the initials of `learning_rate` and `weight_decay`.
    near = [
        choice
        for choice, word in leaves.items()
        if "_" in word and _initials(word) == leaf
    ]
    if not near:
        # The leaves must be alike, too: `optimizer.wd` is not `optimizer.b2`.
        near = [
            choice
            for choice in difflib.get_close_matches(name, leaves, n=3, cutoff=0.6)
            if difflib.SequenceMatcher(None, leaf, leaves[choice]).ratio() >= 0.4
        ]
    if not near:
        # The right leaf in a wrong group: `lr.warmup_steps`, `global_size`.
        near = [choice for choice, word in leaves.items() if word == leaf]
    return f" Did you mean {near[0]}?" if near else ""
