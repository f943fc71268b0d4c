"""The program `jaxdist`: `jaxdist NAME ...` runs `python -m jaxdist.NAME ...`."""

import runpy
import sys

import jaxdist
from jaxdist.config import EXIT_CONFIG, command_line, suggest

COMMANDS = {
    "train": "train a model, or resume the run of the workdir",
    "plan": "estimate memory, step time and cost of a run on hardware that you name",
    "verify": "prove that a config's layouts compute what one device computes",
    "launch": "start and supervise the processes of a run on this machine or node",
    "checkpoint": "list, inspect, verify and diff checkpoints",
    "convert": "convert a model from Hugging Face to jaxdist, or back",
    "generate": "sample text from a checkpoint",
    "evaluate": "compute the exact loss of a checkpoint on a held-out set",
    "report": "write one self-contained HTML page of one or more runs",
    "runs": "list the runs below a folder, and how their configs differ",
    "status": "show what a run is doing, since when, and where its time went",
    "doctor": "show devices, versions, peaks, links, disk, and what MFU means here",
}


def help_text() -> str:
    """Lists the commands, one per line."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {meaning}" for name, meaning in COMMANDS.items()]
    commands = "\n".join(lines)
    return f"usage: jaxdist COMMAND [flags]\n\n{commands}\n\njaxdist COMMAND --help"


def main() -> None:
    """Runs the command that sys.argv names and exits with its exit code."""
    sys.exit(command_line.quiet_pipe(_run))


def _run() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "help"):
        print(help_text())
    elif name == "--version":
        print(jaxdist.__version__)
    elif name not in COMMANDS:
        hint = suggest(name, COMMANDS)
        print(
            f"error: jaxdist {name}: no such command.{hint}\n\n{help_text()}",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    else:
        del sys.argv[1]
        runpy.run_module(f"jaxdist.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    main()
