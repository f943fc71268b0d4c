"""The state of a run: what it is doing, since when, and where its time went.

The command reads the workdir only, so the run may be on another machine. It needs no jax
and does not disturb the run. Example: `jaxdist status runs/quickstart --watch`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from jaxdist.config import EXIT_CONFIG, ConfigError, command_line
from jaxdist.operations.page import status


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the status and returns the exit code (0 or 78).

    With --watch it prints until the run is finished or the user presses Ctrl-C.
    """
    try:
        flags = _parser().parse_args(argv)
        if flags.watch is not None and not 0.1 <= flags.watch <= 86_400:
            raise ConfigError(
                f"--watch {flags.watch:g}: must be seconds between 0.1 and 86400"
            )
        _show(flags)
    except ConfigError as error:
        command_line.print_faults(error)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        pass
    return 0


def _show(flags: argparse.Namespace) -> None:
    format_status = json.dumps if flags.json else status.as_text
    clear = ""
    if flags.watch and sys.stdout.isatty() and not flags.json:
        clear = "\x1b[H\x1b[2J"
    while True:
        document = status.read_status(flags.workdir).document()
        print(clear + format_status(document), flush=True)
        if flags.watch is None or document["state"] == "finished":
            return
        time.sleep(flags.watch)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(prog="jaxdist status", description=__doc__)
    parser.add_argument("workdir", help="folder of the run")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=2.0,
        metavar="SECONDS",
        help="print the status again every SECONDS until the run is finished "
        "(default interval: 2)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line"
    )
    return parser


if __name__ == "__main__":
    sys.exit(command_line.quiet_pipe(main))
