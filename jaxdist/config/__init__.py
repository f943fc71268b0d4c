"""Typed configuration without jax; here what commands report of bad input: ConfigError, exit codes."""

import argparse
import difflib
import io
import sys
import typing
from collections.abc import Iterable

EXIT_PEER_LOST = 70  # a peer failed: nothing wrong with this process
EXIT_PREEMPTED = 75  # a signal asked to stop; all is saved
EXIT_HANG = 76  # killed by the watchdog
EXIT_NO_CHECKPOINT = 77  # no usable checkpoint where one must be
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: commands exit with it on a ConfigError


class ConfigError(ValueError):
    """All faults of a configuration: one line each, with what is given, required, and to change."""

    exit_code = EXIT_CONFIG

    def __init__(self, faults: str | Iterable[str]):
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)


def exit_code_of(error: BaseException) -> int:
    """Returns what a process ends with for an error that nobody caught."""
    return getattr(error, "exit_code", 1)


class Parser(argparse.ArgumentParser):
    """A command's parser; its errors are configuration errors, as those of all commands."""

    def parse_known_args(self, args=None, namespace=None):
        """Parses as argparse does; from here on a name that is not UTF-8 is printed escaped."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def is_text(value: str) -> bool:
    """Returns whether UTF-8 can write a text: what was read of bytes that are none has lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def suggest(name: str, choices: Iterable[str]) -> str:
    """Returns " Did you mean X?" for the choice nearest to `name`, or ""."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if not near:  # the right leaf under a wrong group: `lr.warmup_steps`, `global_size`
        leaf = name.rpartition(".")[2]
        near = [choice for choice in choices if choice.rpartition(".")[2] == leaf][:1]
    return f" Did you mean {near[0]}?" if near else ""
