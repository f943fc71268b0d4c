"""A table of the runs below a folder, and how their configs differ.

The command reads files only: it needs no jax and does not disturb a run. Example:
`jaxdist runs runs/ablations`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config import EXIT_CONFIG, ConfigError, command_line
from jaxdist.operations.page import runs


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code (0 or 78)."""
    try:
        flags = _parser().parse_args(argv)
        document = runs.table(Path(flags.folder))
    except ConfigError as error:
        command_line.print_faults(error)
        return EXIT_CONFIG
    print(json.dumps(document, indent=1) if flags.json else runs.as_text(document))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(prog="jaxdist runs", description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs",
        help="folder that contains runs (default: runs)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON, with all config keys that differ",
    )
    return parser


if __name__ == "__main__":
    sys.exit(command_line.quiet_pipe(main))
