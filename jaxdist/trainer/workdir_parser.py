"""The command lines that use a trained run: --workdir, --step and --mesh."""

import argparse
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema, suggest
from jaxdist.config.command_line import Parser, add_trust
from jaxdist.distributed import initialize
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.trainer.exit_code import print_error


def _step(text: str) -> int | str:
    return text if text == "best" else int(text)


class WorkdirParser(Parser):
    """The parser of a command that uses a trained run: --workdir, --step and --mesh."""

    def __init__(self, name: str, description: str | None) -> None:
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
        self.add_argument(
            "--config.model.target",
            dest="target",
            metavar="TARGET",
            help="the run's model, if it is your own; only this code is trusted",
        )
        add_trust(self)


def run_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Joins the processes and makes the options of `loading.load_run`.

    Standard output is kept for results, so messages go to standard error.

    Args:
      flags: flags of a WorkdirParser.

    Raises:
      ConfigError: --mesh is no valid mesh.
    """
    mesh = None
    if flags.mesh:
        sizes = dict(part.partition("=")[::2] for part in flags.mesh.split(","))
        axes = {
            name.strip(): int(n) if n.strip().isdecimal() else n
            for name, n in sizes.items()
        }
        known = schema.schema_of(MeshConfig)
        unknown = [name for name in axes if name not in known]
        if unknown:
            raise ConfigError(
                f"--mesh: there is no axis {name!r}.{suggest(name, known)} "
                f"Axes: {', '.join(AXES)}"
                for name in unknown
            )
        mesh = schema.from_config_dict(MeshConfig, axes)
    print_error(initialize.prepare())
    return {
        "folder": flags.workdir,
        "step": flags.step,
        "mesh": mesh,
        "log": print_error,
        "target": flags.target,
        "trust_code": flags.trust_code,
    }
