"""The command line of commands that use a trained run."""

import argparse
from pathlib import Path
from typing import Any

from jaxdist.config import (
    Parser,
    schema,
)
from jaxdist.distributed import initialize
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.trainer import cli
from jaxdist.trainer.exit_code import print_error


def _step(text: str) -> int | str:
    return text if text == "best" else int(text)


class WorkdirParser(Parser):
    """A parser with --workdir, --step and --mesh, for commands that use a
    trained run.
    """

    def __init__(self, name: str, description: str | None):
        super().__init__(prog=f"jaxdist {name}", description=description)
        self.add_argument(
            "--workdir", required=True, type=Path, help="folder of the run"
        )
        self.add_argument(
            "--step",
            type=_step,
            help="checkpoint to read, or best (default: the newest)",
        )
        self.add_argument(
            "--mesh",
            help="AXIS=SIZE,..., e.g. fsdp=4,tensor=2 (default: one that fits); context for long texts",
        )
        named = "of the run, if its model is your own: trusts this code alone"
        self.add_argument(
            "--config.model.target", dest="target", metavar="TARGET", help=named
        )
        cli.add_trust(self)


def run_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what the flags of a WorkdirParser say, for `loading.load_run`; joins
    its processes.

    Standard output is for results: all else goes to standard error.

    Raises:
      ConfigError: --mesh names no mesh.
    """
    mesh = None
    if flags.mesh:
        sizes = dict(part.partition("=")[::2] for part in flags.mesh.split(","))
        axes = {
            name.strip(): int(n) if n.strip().isdecimal() else n
            for name, n in sizes.items()
        }
        mesh = schema.from_config_dict(MeshConfig, axes)
    print_error(initialize.prepare())
    trust = {"target": flags.target, "trust_code": flags.trust_code}
    return {
        "folder": flags.workdir,
        "step": flags.step,
        "mesh": mesh,
        "log": print_error,
        **trust,
    }
