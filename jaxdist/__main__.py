"""The command `jaxdist NAME ...`: exactly `python -m jaxdist.NAME ...`."""

import runpy
import sys

import jaxdist
from jaxdist import config

COMMANDS = {
    "train": "train, or resume when the workdir has a run",
    "plan": "prove that a run fits hardware that is not here, and how fast it will be",
    "verify": "prove that a config's layouts compute what one device computes",
    "launch": "start and supervise a run's processes; the agent of a node under a scheduler",
    "checkpoint": "list, inspect, verify and diff checkpoints",
    "convert": "a model from Hugging Face's form into ours, or back",
    "generate": "sample text from a checkpoint",
    "evaluate": "exact weighted loss of a checkpoint on a held-out set",
    "report": "one self-contained HTML page of any number of runs",
    "runs": "a table of the runs below a folder, and how their configs differ",
    "status": "what a run is doing now, since when, and where its time went",
    "doctor": "devices, versions, peaks, links, disk, and what MFU will mean here",
}


def help_text() -> str:
    """Lists the commands, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {meaning}" for name, meaning in COMMANDS.items()]
    commands = "\n".join(lines)
    return f"usage: jaxdist COMMAND [flags]\n\n{commands}\n\njaxdist COMMAND --help"


def main() -> None:
    """Runs the command that sys.argv names; its exit code is ours."""
    sys.exit(config.quiet_pipe(_run))


def _run() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "help"):
        print(help_text())
    elif name == "--version":
        print(jaxdist.__version__)
    elif name not in COMMANDS:
        hint = config.suggest(name, COMMANDS)
        print(
            f"jaxdist {name}: no such command.{hint}\n\n{help_text()}", file=sys.stderr
        )
        return config.EXIT_CONFIG
    else:
        del sys.argv[1]
        runpy.run_module(f"jaxdist.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    main()
