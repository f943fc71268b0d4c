"""The command line of a run: `--config NAME --config.a.b=value ...` to a RunConfig, and
exit codes.
"""

import argparse
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxdist.config import (
    ConfigError,
    Parser,
    files,
    schema,
    suggest,
)
from jaxdist.models import registry
from jaxdist.storage import run_format
from jaxdist.trainer import (
    config_json,
    from_run,
    initial_weights,
    loggers,
    workdir,
)
from jaxdist.trainer.default_workdir import default_workdir
from jaxdist.trainer.run_config import (
    RunConfig,
    default_config,
    from_config,
    full_schema,
    model_defaults,
)
from jaxdist.trainer.weight_source import WeightSource


class ConfigParser(Parser):
    """A parser with --config and --help, for commands that take `--config NAME
    --config.a.b=value ...`.
    """

    def __init__(self, name: str, description: str | None):
        super().__init__(
            prog=f"jaxdist {name}", description=description, add_help=False
        )
        listed = "list all fields of --config, or those with this text, e.g. --help optimizer"
        self.add_argument(
            "-h", "--help", nargs="?", const="", metavar="TEXT", help=listed
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
    """Parses a command's own flags and the RunConfig of `--config NAME
    --config.a.b=value ...`.

    With `--config` and `--help`, lists every field with type, default and meaning. A
    `--workdir` that holds a run needs no `--config`: it resumes with its own.

    Args:
      weight_sources: the sources of initial weights beside those of the core. A command
        passes jaxdist.interop.WEIGHT_SOURCES.

    Raises:
      ConfigError: everything wrong with the config, at once.
    """
    overrides, rest, faults = _take_overrides(
        sys.argv[1:] if arguments is None else arguments
    )
    flags, unknown = parser.parse_known_args(rest)
    faults = [*_unknown_faults(unknown, vars(flags)), *faults]
    if folder := getattr(flags, "workdir", None):
        if "://" in folder:
            faults.append(
                f"--workdir {folder}: must be a local folder; checkpoint.folder takes gs://"
            )
        elif fault := workdir.name_fault(folder):
            faults.append(f"--workdir {fault}")
    if flags.help == "":
        parser.print_help()
    if flags.config is None:
        flags.config = _config_named(flags, folder, faults)
    if folder or hasattr(flags, "dry_run"):  # a plan keeps nothing without a workdir
        run_format.check_folder(_workdir(flags))
    config = _load(flags, overrides)
    configured = schema.flatten(config).get("model.target", registry.DEFAULT_TARGET)
    target = overrides.get("model.target", configured)
    if hasattr(flags, "workdir"):
        registry.refuse_inside(target, _workdir(flags))
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


def _print_fields(config: ConfigDict, fields: schema.Schema, words: str | None) -> None:
    if words is not None:
        width = shutil.get_terminal_size().columns
        print(
            "\n" * (not words)
            + files.help_text(config, fields, words=words, width=width)
        )


def _take_overrides(
    arguments: Sequence[str],
) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the overrides --config.a.b=value (or --config.a.b value), the other
    words, and faults.

    They are taken first: to argparse a value such as -hello would be a flag.
    """
    overrides, rest, faults, words = {}, [], [], deque(arguments)
    while words:
        path, equals, value = (
            (word := words.popleft()).removeprefix("--config.").partition("=")
        )
        if not word.startswith("--config."):
            rest.append(word)
        elif not equals and (not words or words[0].startswith("--")):
            faults.append(f"{path}: has no value; write --config.{path}=VALUE")
        else:
            overrides[path] = value if equals else words.popleft()
    return overrides, rest, faults


def _config_named(
    flags: argparse.Namespace, folder: str | None, faults: Sequence[str]
) -> str:
    """Returns the --config of a command line without one: that of the run in its
    workdir.

    Raises:
      ConfigError: it has none; also the faults so far.
    """
    if folder and (file := Path(folder) / workdir.CONFIG).is_file():
        return str(file)
    if flags.help is not None:
        _print_fields(
            default_config(), full_schema(registry.DEFAULT_TARGET), flags.help or None
        )
        raise SystemExit(0)
    where = f", and {folder} holds no run that could go on" if folder else ""
    missing = f"--config is missing{where}: name one, e.g. --config quickstart"
    raise ConfigError(
        faults if any(_AS_CONFIG in fault for fault in faults) else [*faults, missing]
    )


_AS_CONFIG = "Did you mean --config "


def _unknown_faults(words: Sequence[str], flags: Iterable[str]) -> Iterator[str]:
    """Yields a line for each word of a command line that is no flag, with what may be
    meant.
    """
    names, left = ["--" + flag.replace("_", "-") for flag in flags], deque(words)
    paths = full_schema(registry.DEFAULT_TARGET) if words else {}
    packaged = {
        file.stem
        for folder in files.packaged_folders()
        for file in folder.glob("[a-z]*.py")
    }
    while left:
        name, equals, value = (word := left.popleft()).partition("=")
        wanted = name.removeprefix("--").replace("-", "_")
        meant = [path for path in paths if wanted in (path, path.rpartition(".")[2])]
        hint = suggest(name, names)
        if name.startswith("--") and meant:
            taken = (
                left.popleft()
                if not equals and left and not left[0].startswith("--")
                else value
            )
            hint = (
                " Did you mean "
                + " or ".join(f"--config.{p}={taken or 'VALUE'}" for p in meant[:3])
                + "?"
            )
        elif name.partition(":")[0] in packaged or name.endswith((".py", ".json")):
            hint = f" {_AS_CONFIG}{word}?"
        yield f"{word}: no such flag;{hint} --help lists them"


def _load(flags: argparse.Namespace, overrides: Mapping[str, str]) -> ConfigDict:
    """Returns the config that --config names: a Python file's, or that of a run's
    config.json.
    """
    # its folder may have a colon
    whole = flags.config.endswith(".json") and os.path.isfile(flags.config)
    name, colon, argument = (
        (flags.config, "", "") if whole else flags.config.partition(":")
    )
    if not (name.endswith(".json") and os.path.isfile(name)):
        return files.load(flags.config, folders=files.packaged_folders())
    if colon:
        raise ConfigError(
            f"--config={flags.config}: {name} takes no argument. Remove ':{argument}'."
        )
    stored = config_json.read(Path(name))
    _refuse_source_code(config_json.target_of(stored), overrides, stored)
    named = overrides.get("model.target")
    run = config_json.resolve(
        stored, Path(name).parent, named=named, trust_code=flags.trust_code
    )
    return schema.to_config_dict(run)


def _refuse_source_code(
    target: str, overrides: Mapping[str, str], config: Mapping | ConfigDict
) -> None:
    """Raises ConfigError if the model's file lies in the run that it begins with."""
    source = {**schema.flatten(config), **overrides}.get("init.from_run")
    if isinstance(source, str) and source:
        from_run.refuse_code(source, target)


def _check_loggers(
    flags: argparse.Namespace, config: RunConfig, *, chosen: bool
) -> None:
    """Refuses, for a command that trains, a logger's code in the run's folder, or named
    by its config alone.

    Args:
      chosen: whether the command line names the loggers.

    Raises:
      ConfigError: it would be executed unasked.
    """
    trains = hasattr(flags, "dry_run")
    for target in loggers.named_classes(config) if trains else ():
        registry.refuse_inside(target, _workdir(flags), key=loggers.KEY)
        if flags.config.endswith(".json") and not chosen:
            folder, trust = Path(flags.config).parent, flags.trust_code
            registry.check_stored_target(
                target, folder, trust_code=trust, key=loggers.KEY
            )


def _workdir(flags: argparse.Namespace) -> Path:
    return Path(flags.workdir or default_workdir(flags.config))


def _config_in_workdir(flags: argparse.Namespace, target: str) -> RunConfig | None:
    """Returns the config of the run that lies in a command's workdir, if it has one."""
    if (
        not hasattr(flags, "workdir")
        or not ((folder := _workdir(flags)) / workdir.CONFIG).is_file()
    ):
        return None
    return workdir.read_config(folder, named=target, trust_code=flags.trust_code)


def add_trust(parser: argparse.ArgumentParser) -> None:
    trusted = "execute the model code that a stored config names (docs/security.md)"
    parser.add_argument("--trust-code", action="store_true", help=trusted)
