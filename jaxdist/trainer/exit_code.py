"""The exit codes of commands."""

import sys
from collections.abc import Callable

import jax

from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import EXIT_CONFIG, ConfigError
from jaxdist.config.command_line import print_faults, quiet_pipe
from jaxdist.config.extras import MissingExtra
from jaxdist.config.redact import without_secrets
from jaxdist.distributed.coordination import PeerFailed
from jaxdist.trainer import preemption


def print_error(line: str | None) -> None:
    """Prints a line to stderr on the first process.

    Args:
      line: the line; None or "" prints nothing.
    """
    if line and jax.process_index() == 0:
        print(without_secrets(line), file=sys.stderr)


def exit_code(main: Callable[[], int]) -> int:
    """Runs a command's main and returns its exit code.

    An error that has an exit code of its own is printed in one line.
    """
    return quiet_pipe(lambda: _code_of_fault(main))


def _code_of_fault(main: Callable[[], int]) -> int:
    try:
        return main()
    except (ConfigError, MissingExtra) as error:
        preemption.keep_exit_code()
        print_faults(error)
        return EXIT_CONFIG
    except CheckpointError as error:
        print_error(f"error: {error}")
        return error.exit_code
    except PeerFailed as error:
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        return error.exit_code
