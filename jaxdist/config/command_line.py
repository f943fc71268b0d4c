"""The parser of all commands, and how they print their errors and end.

It imports no jax.
"""

import argparse
import contextlib
import errno
import io
import os
import select
import sys
import typing
from collections.abc import Callable, Sequence

from jaxdist.config import EXIT_CLOSED_PIPE, EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError
from jaxdist.config.redact import without_secrets


def print_faults(error: Exception) -> None:
    """Prints an error to stderr, with a line for each fault of a ConfigError."""
    for fault in getattr(error, "faults", (str(error),)):
        print(f"error: {without_secrets(fault)}", file=sys.stderr)


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


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the flag --trust-code."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="execute the model code that a stored config names (docs/explanation/security.md)",
    )
