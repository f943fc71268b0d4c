"""The command line of a run: from `--config NAME --config.a.b=value` to a RunConfig, and
from `--workdir` to a trained run.
"""

import argparse
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdist.config import (
    ConfigError,
    Parser,
    files,
    schema,
    suggest,
)
from jaxdist.distributed import initialize
from jaxdist.models import registry
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.storage import run_format
from jaxdist.trainer import (
    initial_weights,
    loggers,
    source_run,
    workdir,
)
from jaxdist.trainer.default_workdir import default_workdir
from jaxdist.trainer.exit_code import print_error
from jaxdist.trainer.run_config import (
    RunConfig,
    default_config,
    from_config,
    full_schema,
    model_defaults,
)
from jaxdist.trainer.weight_source import WeightSource


class ConfigParser(Parser):
    """A parser with --config and --help TEXT, for commands that take a run's config."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"jaxdist {name}", description=description, add_help=False
        )
        help_of_help = "list all fields of --config, or those with this text, e.g. --help optimizer"
        self.add_argument(
            "-h", "--help", nargs="?", const="", metavar="TEXT", help=help_of_help
        )
        self.add_argument(
            "--config", help="packaged name or path, with optional :argument"
        )
        add_trust(self)


def parse(
    parser: ConfigParser,
    arguments: Sequence[str] | None = None,
    *,
    weight_sources: Sequence[WeightSource] = (),
) -> tuple[argparse.Namespace, RunConfig]:
    """Parses a command's own flags, and the RunConfig that they name.

    With `--config` and `--help` it lists every field with type, default and meaning. A
    `--workdir` with a run needs no `--config`: the run resumes with its own.

    Args:
      arguments: the words of the command line; None: those of this process.
      weight_sources: the sources of initial weights beside those of the core. A command
        passes jaxdist.interop.WEIGHT_SOURCES.

    Raises:
      ConfigError: everything wrong with the config, at once.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    overrides, rest, override_faults = _take_overrides(arguments)
    flags, unknown = parser.parse_known_args(rest)
    faults = [*_unknown_faults(unknown, vars(flags)), *override_faults]
    folder = getattr(flags, "workdir", None)
    if folder:
        faults += _workdir_faults(folder)
    if flags.help == "":
        parser.print_help()
    if flags.config is None:
        flags.config = _config_in(folder, flags, faults)
    if folder or hasattr(flags, "dry_run"):  # a plan keeps nothing without a workdir
        run_format.check_folder(workdir_of(flags))
    config = _load(flags, overrides)
    configured = schema.flatten(config).get("model.target", registry.DEFAULT_TARGET)
    target = overrides.get("model.target", configured)
    if hasattr(flags, "workdir"):
        registry.refuse_inside(target, workdir_of(flags))
    _refuse_source_code(target, overrides, config)
    if target != configured:  # the other overrides are checked against its fields
        with config.unlocked():
            config.model = model_defaults(target)
    fields = full_schema(target)
    if flags.help is not None:
        _print_fields(config, fields, flags.help)
        raise SystemExit(0)
    try:
        files.apply_overrides(config, overrides, fields)
    except ConfigError as error:
        faults += error.faults
    if faults:
        raise ConfigError(faults)
    sources = initial_weights.chosen_sources(config, weight_sources)
    if sources:
        before = _config_in_workdir(flags, target)
        initial_weights.apply_config(config, sources, set_keys=overrides, before=before)
    run = from_config(config)
    _check_loggers(flags, run, chosen=loggers.KEY in overrides)
    return flags, run


def _print_fields(config: ConfigDict, fields: schema.Schema, words: str) -> None:
    width = shutil.get_terminal_size().columns
    text = files.help_text(config, fields, words=words, width=width)
    if not words:
        print()  # below the help of the flags
    print(text)


def _take_overrides(
    arguments: Sequence[str],
) -> tuple[dict[str, str], list[str], list[str]]:
    """Takes the overrides out of a command line: --config.a.b=value or --config.a.b value.

    argparse would read a value such as -hello as a flag, so this comes first.

    Returns:
      The overrides by path, the other words, and faults.
    """
    overrides = {}
    rest = []
    faults = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        path, equals, value = word.removeprefix("--config.").partition("=")
        if not word.startswith("--config."):
            rest.append(word)
        elif equals:
            overrides[path] = value
        elif _has_value(words):
            overrides[path] = words.popleft()
        else:
            faults.append(f"{path}: has no value; write --config.{path}=VALUE")
    return overrides, rest, faults


def _has_value(words: deque[str]) -> bool:
    """Tests whether the next word may be the value of the flag before it."""
    return bool(words) and not words[0].startswith("--")


def _workdir_faults(folder: str) -> Iterator[str]:
    if "://" in folder:
        yield f"--workdir {folder}: must be a local folder; checkpoint.folder takes gs://"
    elif fault := workdir.name_fault(folder):
        yield f"--workdir {fault}"


def _config_in(
    folder: str | None, flags: argparse.Namespace, faults: Sequence[str]
) -> str:
    """Finds the config of the run in a workdir, for a command line without --config.

    Raises:
      ConfigError: there is none. Has the faults so far, too.
      SystemExit: the command line asks for --help, which is printed.
    """
    if folder and (Path(folder) / workdir.CONFIG).is_file():
        return str(Path(folder) / workdir.CONFIG)
    if flags.help:
        fields = full_schema(registry.DEFAULT_TARGET)
        _print_fields(default_config(), fields, flags.help)
    if flags.help is not None:
        raise SystemExit(0)
    if any(_AS_CONFIG in fault for fault in faults):
        raise ConfigError(faults)
    where = f", and {folder} holds no run that could go on" if folder else ""
    missing = f"--config is missing{where}: name one, e.g. --config quickstart"
    raise ConfigError([*faults, missing])


_AS_CONFIG = "Did you mean --config "


def _unknown_faults(words: Sequence[str], flags: Iterable[str]) -> Iterator[str]:
    """Yields a line for each word that is no flag, with the flag that may be meant."""
    if not words:
        return
    flag_names = ["--" + flag.replace("_", "-") for flag in flags]
    paths = full_schema(registry.DEFAULT_TARGET)
    packaged = files.packaged_configs(files.packaged_folders())
    left = deque(words)
    while left:
        word = left.popleft()
        name, equals, value = word.partition("=")
        wanted = name.removeprefix("--").replace("-", "_")
        keys = [path for path in paths if wanted in (path, path.rpartition(".")[2])]
        hint = suggest(name, flag_names)
        if name.startswith("--") and keys:
            if not equals and _has_value(left):
                value = left.popleft()
            texts = [f"--config.{key}={value or 'VALUE'}" for key in keys[:3]]
            hint = f" Did you mean {' or '.join(texts)}?"
        elif name.partition(":")[0] in packaged or name.endswith((".py", ".json")):
            hint = f" {_AS_CONFIG}{word}?"
        yield f"{word}: no such flag;{hint} --help lists them"


def _load(flags: argparse.Namespace, overrides: Mapping[str, str]) -> ConfigDict:
    """Loads the config that --config names: a Python file, or a run's config.json."""
    name = flags.config
    if not _is_json_file(name):  # whose folder may have a colon
        file, _, argument = name.partition(":")
        if _is_json_file(file):
            raise ConfigError(
                f"--config={name}: {file} takes no argument. Remove ':{argument}'."
            )
        return files.load(name, folders=files.packaged_folders())
    stored = workdir.read_stored(Path(name))
    _refuse_source_code(workdir.target_of(stored), overrides, stored)
    named = overrides.get("model.target")
    run = workdir.resolve(
        stored, Path(name).parent, named=named, trust_code=flags.trust_code
    )
    return schema.to_config_dict(run)


def _is_json_file(name: str) -> bool:
    return name.endswith(".json") and os.path.isfile(name)


def _refuse_source_code(
    target: str, overrides: Mapping[str, str], config: Mapping | ConfigDict
) -> None:
    """Raises ConfigError if the model's file lies in the run that it begins with."""
    source = {**schema.flatten(config), **overrides}.get("init.from_run")
    if isinstance(source, str) and source:
        source_run.refuse_code(source, target)


def _check_loggers(
    flags: argparse.Namespace, config: RunConfig, *, chosen: bool
) -> None:
    """Checks that a command that trains executes no logger's code unasked.

    Args:
      chosen: the command line names the loggers.

    Raises:
      ConfigError: the code is in the run's folder, or only its config names it.
    """
    trains = hasattr(flags, "dry_run")
    if not trains:
        return
    for target in loggers.named_classes(config):
        registry.refuse_inside(target, workdir_of(flags), key=loggers.KEY)
        if flags.config.endswith(".json") and not chosen:
            registry.check_stored_target(
                target,
                Path(flags.config).parent,
                trust_code=flags.trust_code,
                key=loggers.KEY,
            )


def workdir_of(flags: argparse.Namespace) -> Path:
    """Returns the workdir of a command that takes a run's config."""
    return Path(flags.workdir or default_workdir(flags.config))


def _config_in_workdir(flags: argparse.Namespace, target: str) -> RunConfig | None:
    """Reads the config of the run in a command's workdir, if there is one."""
    if not hasattr(flags, "workdir"):
        return None
    folder = workdir_of(flags)
    if not (folder / workdir.CONFIG).is_file():
        return None
    return workdir.read_config(folder, named=target, trust_code=flags.trust_code)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the flag --trust-code."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="execute the model code that a stored config names (docs/security.md)",
    )


# --- commands that use a trained run --------------------------------------------------


def _step(text: str) -> int | str:
    return text if text == "best" else int(text)


class WorkdirParser(Parser):
    """A parser with --workdir, --step and --mesh, for commands that use a
    trained run.
    """

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
        named = "of the run, if its model is your own: trusts this code alone"
        self.add_argument(
            "--config.model.target", dest="target", metavar="TARGET", help=named
        )
        add_trust(self)


def run_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Joins the processes; returns the options of `loading.load_run` that the flags of
    a WorkdirParser give.

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
