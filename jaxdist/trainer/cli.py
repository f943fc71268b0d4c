"""The command line of a run: `--config NAME --config.a.b=value ...` to a RunConfig, and exit codes."""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxdist.checkpoint.files import CheckpointError
from jaxdist.config import EXIT_CONFIG, EXIT_NO_CHECKPOINT, ConfigError, Parser, files, schema, suggest
from jaxdist.config.extras import MissingExtra
from jaxdist.distributed import initialize
from jaxdist.models import registry
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.resilience.run_progress import default_workdir
from jaxdist.trainer import pretrained, workdir
from jaxdist.trainer.run_config import RunConfig, from_config, full_schema, model_defaults


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> tuple[argparse.Namespace, RunConfig]:
    """Returns a command's own flags and the RunConfig of `--config NAME --config.a.b=value ...`.

    With `--config` and `--help`, lists every field with type, default and meaning.

    Raises:
      ConfigError: everything wrong with the config, at once.
    """
    parser.add_argument("--config", help="packaged name or path, with optional :argument")
    argv = list(sys.argv[1:] if arguments is None else arguments)
    overrides, rest, faults = _take_overrides(argv)
    asks_help = "--help" in rest or "-h" in rest
    flags, unknown = _own_flags(parser, [a for a in rest if a not in ("--help", "-h")])
    if "://" in (getattr(flags, "workdir", None) or ""):
        faults.append(f"--workdir {flags.workdir}: must be a local folder; checkpoint.folder takes gs://")
    if asks_help:
        parser.print_help()
    if flags.config is None:
        if asks_help:
            raise SystemExit(0)
        raise ConfigError("--config is missing: name one, e.g. --config quickstart")
    config = _retarget(files.load(flags.config, folders=files.packaged_folders()), overrides)
    fields = full_schema(_target(config))
    if asks_help:
        print("\n" + files.help_text(config, fields))
        raise SystemExit(0)
    try:
        files.apply_overrides(config, overrides, fields)
    except ConfigError as error:
        faults += error.faults
    if faults or unknown:
        raise ConfigError(unknown + faults)
    if schema.flatten(config).get("init.from_huggingface"):
        pretrained.apply_hf_config(config, overrides, _before(flags))
    return flags, from_config(config)


def _before(flags: argparse.Namespace) -> RunConfig | None:
    """Returns the config of the run that lies in a command's workdir, if it has one."""
    if not hasattr(flags, "workdir"):
        return None
    folder = Path(flags.workdir or default_workdir(flags.config))
    return workdir.read_config(folder) if (folder / workdir.CONFIG).is_file() else None


def _take_overrides(argv: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the --config.a.b=value overrides (or --config.a.b value), the rest, and faults."""
    overrides, rest, faults = {}, [], []
    items = deque(argv)
    while items:
        if not (item := items.popleft()).startswith("--config."):
            rest.append(item)
            continue
        path, equals, value = item.removeprefix("--config.").partition("=")
        if equals:
            overrides[path] = value
        elif items and not items[0].startswith("--"):
            overrides[path] = items.popleft()
        else:
            faults.append(f"{path}: has no value; write --config.{path}=VALUE")
    return overrides, rest, faults


def _own_flags(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns a command's own flags, and a fault for each argument that is none."""
    parser.exit_on_error = False  # its exit code would be 2
    try:
        flags, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --help lists the flags") from None
    names = ["--" + name.replace("_", "-") for name in vars(flags)]
    return flags, [
        f"{item}: no such flag;{suggest(item.partition('=')[0], names)} --help lists them" for item in unknown
    ]


def _target(config: ConfigDict) -> str:
    return schema.flatten(config).get("model.target", registry.DEFAULT_TARGET)


def _retarget(config: ConfigDict, overrides: Mapping[str, str]) -> ConfigDict:
    """Returns the config with the model's fields of an overridden target, which is read first."""
    target = overrides.get("model.target", _target(config))
    if target != _target(config):
        with config.unlocked():
            config.model = model_defaults(target)
    return config


class WorkdirParser(Parser):
    """A parser with --workdir, --step and --mesh, for commands that use a trained run."""

    def __init__(self, name: str, description: str | None):
        super().__init__(prog=f"jaxdist {name}", description=description)
        self.add_argument("--workdir", required=True, type=Path, help="folder of the run")
        self.add_argument("--step", type=int, help="checkpoint to read (default: the newest)")
        self.add_argument("--mesh", help="AXIS=SIZE,..., e.g. fsdp=4,tensor=2 (default: one that fits)")


def run_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what the flags of a WorkdirParser say, for `trained_run.load_run`; joins its processes.

    Standard output is for results: all else goes to standard error.

    Raises:
      ConfigError: --mesh names no mesh.
    """
    mesh = None
    if flags.mesh:
        sizes = dict(part.partition("=")[::2] for part in flags.mesh.split(","))
        axes = {name.strip(): int(n) if n.strip().isdecimal() else n for name, n in sizes.items()}
        mesh = schema.from_config_dict(MeshConfig, axes)
    _print_error(initialize.prepare())
    return {"folder": flags.workdir, "step": flags.step, "mesh": mesh, "log": _print_error}


def _print_error(line: str | None) -> None:
    if line and jax.process_index() == 0:
        print(line, file=sys.stderr)


def exit_code(main: Callable[[], int]) -> int:
    """Returns the exit code of a command's main; of a fault that has one, after a line to say so."""
    try:
        return main()
    except (ConfigError, MissingExtra) as error:
        for fault in getattr(error, "faults", (str(error),)):
            print(f"error: {fault}", file=sys.stderr)
        return EXIT_CONFIG
    except CheckpointError as error:
        _print_error(f"error: {error}")
        return EXIT_NO_CHECKPOINT


def exit_with_code(main: Callable[[], int]) -> None:
    """Runs a command's main and ends the process with its exit code."""
    raise SystemExit(exit_code(main))
