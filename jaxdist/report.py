"""One self-contained HTML page of a run, or of several runs overlaid.

The command needs neither jax nor a network. It also works on a laptop with a copy of the
workdir. Example: `jaxdist report runs/first runs/second --out page.html`.
"""

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config import EXIT_CONFIG, ConfigError, command_line
from jaxdist.operations.page import html, summary
from jaxdist.storage import atomic


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, prints its path and returns the exit code (0, 1 or 78)."""
    try:
        flags = _parser().parse_args(argv)
        runs = [
            summary.read_run(workdir, name)
            for workdir, name in zip(flags.workdir, _names(flags.workdir), strict=True)
        ]
        target = Path(flags.out) if flags.out else runs[0].folder / _file_name(runs)
        _check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(target, html.render(runs))
    except ConfigError as error:
        command_line.print_faults(error)
        return EXIT_CONFIG
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise
        command_line.print_faults(error)
        return 1
    print(target)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(prog="jaxdist report", description=__doc__)
    parser.add_argument(
        "workdir", nargs="+", help="folder of a run; several folders are compared"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="page to write (default: report.html in the first workdir, or "
        "report_vs_OTHERS.html if there are several)",
    )
    return parser


def _names(workdirs: Sequence[str]) -> list[str]:
    """Names each workdir by its folder, with the parents that keep names distinct."""
    paths = [Path(workdir).resolve().parts for workdir in workdirs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _file_name(runs: Sequence[summary.RunSummary]) -> str:
    if len(runs) == 1:
        return "report.html"
    others = f"{len(runs) - 1}_runs"
    if len(runs) == 2:
        others = runs[-1].name.replace("/", "_")
    return f"report_vs_{others}.html"


def _check_target(target: Path) -> None:
    """Checks that the page replaces nothing but an older page.

    Raises:
      ConfigError: the target is a folder, or a file that is no jaxdist report.
    """
    if target.is_dir():
        raise ConfigError(f"--out {target} is a folder; give the file to write")
    if not target.exists():
        return
    with target.open("rb") as file:
        if html.GENERATOR.encode() not in file.read(4096):
            raise ConfigError(
                f"--out {target} exists and is no jaxdist report; "
                "give another name or remove it"
            )


if __name__ == "__main__":
    sys.exit(command_line.quiet_pipe(main))
