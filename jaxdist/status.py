"""`python -m jaxdist.status WORKDIR [--watch]`: what a run is doing, since when, and
where its time went.

Reads the workdir alone, also that of a run on another machine; needs no jax, and
disturbs nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from jaxdist import config
from jaxdist.operations.page import status


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the status, with --watch until the run is finished or Ctrl-C; returns 0,
    or 78.
    """
    try:
        flags = _parser().parse_args(argv)
        if flags.watch is not None and not 0.1 <= flags.watch <= 86_400:
            raise config.ConfigError(
                f"--watch {flags.watch:g}: must be seconds between 0.1 and 86400"
            )
        _show(flags)
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return config.EXIT_CONFIG
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
    parser = config.Parser(
        prog="jaxdist status", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("workdir", help="workdir of a run")
    watch_help = (
        "show it again every so many seconds (default: 2), until the run is finished"
    )
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="S", help=watch_help
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object, on a line of its own"
    )
    return parser


if __name__ == "__main__":
    sys.exit(config.quiet_pipe(main))
