"""Typed configuration without jax; here what commands report of bad input: ConfigError,
exit codes.
"""

import argparse
import contextlib
import difflib
import io
import os
import select
import sys
import typing
from collections.abc import Callable, Iterable

EXIT_PEER_LOST = 70  # a peer failed: nothing wrong with this process
EXIT_PREEMPTED = 75  # a signal asked to stop; all is saved
EXIT_HANG = 76  # killed by the watchdog
EXIT_NO_CHECKPOINT = 77  # no usable checkpoint where one must be
# what reads our output has gone (`| head`): as shells report a SIGPIPE
EXIT_CLOSED_PIPE = 141
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: commands exit with it on a ConfigError


class ConfigError(ValueError):
    """All faults of a configuration: one line each, with what is given, required, and
    to change.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, faults: str | Iterable[str]):
        self.faults: tuple[str, ...] = (
            (faults,) if isinstance(faults, str) else tuple(faults)
        )
        super().__init__(self.faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)


def exit_code_of(error: BaseException) -> int:
    """Returns what a process ends with for an error that nobody caught."""
    code = getattr(error, "exit_code", 1)
    # a user's class may mean something else by it
    return code if isinstance(code, int) else 1


def quiet_pipe(main: Callable[[], int]) -> int:
    """Returns the exit code of a command's main; EXIT_CLOSED_PIPE, without a word, if
    its reader has gone.

    Code that main returns stands, also where its last output was read by nobody.
    """
    try:
        return main()
    except BrokenPipeError:
        if not any(map(_reader_has_gone, _outputs())):
            raise  # of another pipe
        return EXIT_CLOSED_PIPE
    finally:
        for stream in _outputs():
            try:
                stream.flush()
            except BrokenPipeError:
                # Python would flush once more as it ends, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _outputs() -> list[typing.TextIO]:
    return [
        stream for stream in (sys.stdout, sys.stderr) if stream and not stream.closed
    ]


def _reader_has_gone(stream: typing.TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):  # of a stream without a descriptor
        poll = select.poll()
        poll.register(stream, 0)
        return any(
            event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
        )
    return False


class Parser(argparse.ArgumentParser):
    """A command's parser; its errors are configuration errors, as those of all
    commands.
    """

    def parse_known_args(self, args=None, namespace=None):
        """Parses as argparse does; from here on a name that is not UTF-8 is printed
        escaped.
        """
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def is_text(value: str) -> bool:
    """Returns whether UTF-8 can write a text: what was read of bytes that are none has
    lone surrogates.
    """
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def suggest(name: str, choices: Iterable[str]) -> str:
    """Returns " Did you mean X?" for the choice nearest to `name`, or ""."""
    choices, leaf = list(choices), name.rpartition(".")[2]
    leaves = {choice: choice.rpartition(".")[2] for choice in choices}
    # lr, wd
    near = [
        choice
        for choice, one in leaves.items()
        if "_" in one and _initials(one) == leaf
    ]
    if not near:  # of `optimizer.wd` the group alone is like that of `optimizer.b2`
        close = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
        near = [
            one
            for one in close
            if difflib.SequenceMatcher(None, leaf, leaves[one]).ratio() >= 0.4
        ]
    if not near:  # the right leaf under a wrong group: `lr.warmup_steps`, `global_size`
        near = [choice for choice, one in leaves.items() if one == leaf]
    return f" Did you mean {near[0]}?" if near else ""
