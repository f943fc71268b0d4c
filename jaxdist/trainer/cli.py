"""The command lines that take a config: their flags, and the RunConfig that they make.

Commands that start a run take `--config NAME --config.a.b=value`. `workdir_parser` has
the parser of commands that use a trained run.
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

from jaxdist.config import ConfigError, assigned, files, schema, suggest
from jaxdist.config.command_line import Parser, add_trust
from jaxdist.models import registry
from jaxdist.storage import run_format
from jaxdist.trainer import (
    fine_tuning,
    initial_weights,
    loggers,
    source_run,
    teacher_weights,
    workdir,
)
from jaxdist.trainer.default_workdir import default_workdir
from jaxdist.trainer.run_config import (
    RunConfig,
    TrainConfig,
    default_config,
    from_config,
    full_schema,
    model_defaults,
)
from jaxdist.trainer.weight_source import WeightSource


class ConfigParser(Parser):
    """The parser of a command that takes a run's config: --config and --help TEXT."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"jaxdist {name}", description=description, add_help=False
        )
        help_of_help = "list all fields of --config, or those with this text, e.g. --help optimizer"
        self.add_argument(
            "-h", "--help", nargs="?", const="", metavar="TEXT", help=help_of_help
        )
        self.add_argument(
            "--config",
            help="packaged name or path, with optional :argument; --config.KEY=VALUE "
            "sets a key (if a key or a flag is repeated, the last one counts). Tuples: "
            "1,2 or a,b; in Python's form if a value has commas outside of brackets or "
            "begins with one: \"('(a|b)/c', 'd,e')\"",
        )
        add_trust(self)


def parse(
    parser: ConfigParser,
    arguments: Sequence[str] | None = None,
    *,
    weight_sources: Sequence[WeightSource] = (),
) -> tuple[argparse.Namespace, RunConfig]:
    """Parses the flags of a command and makes the RunConfig that they name.

    `--help` with `--config` prints every key with its type, default and meaning. If
    `--workdir` names a run, `--config` may be missing: the run resumes with its config.

    Args:
      parser: the command's parser.
      arguments: words of the command line; default: those of this process.
      weight_sources: sources of initial weights in addition to those of the core.
        Commands pass jaxdist.interop.WEIGHT_SOURCES.

    Raises:
      ConfigError: the command line or the config is invalid. It lists all faults of
        flags, names and types. `validation.validate` checks the values.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    overrides, words, override_faults = _take_overrides(arguments)
    flags, unknown = parser.parse_known_args(words)
    faults = [*_unknown_faults(unknown, vars(flags)), *override_faults]
    folder = getattr(flags, "workdir", None)
    if folder:
        faults += _workdir_faults(folder)
    if flags.help == "":
        parser.print_help()
    if flags.config is None:
        flags.config = _config_in(folder, flags, faults)
    # Commands without --dry-run, such as plan, use a folder only if --workdir names it.
    if folder or _trains(flags):
        run_format.check_folder(workdir_of(flags))
    config, fields = _load_for_model(flags, overrides)
    set_keys = _set_keys(flags, overrides, config)
    if flags.help is not None:
        _print_fields(config, fields, flags.help)
        raise SystemExit(0)
    try:
        files.apply_overrides(config, overrides, fields)
        faults += _choose_length(config, overrides)
    except ConfigError as error:
        faults += error.faults
    if faults:
        raise ConfigError(faults)
    sources = initial_weights.chosen_sources(config, weight_sources)
    trained_with: Mapping[str, Any] = {}
    if sources:
        before = _config_in_workdir(flags, _target_of(config))
        trained_with = initial_weights.apply_config(
            config, sources, set_keys=overrides, before=before
        )
    if teacher_weights.is_needed(config):
        before = _config_in_workdir(flags, _target_of(config))
        teacher_weights.apply_config(config, weight_sources, before)
    run = from_config(config)
    if _trains(flags):
        fine_tuning.check(run, set_keys, trained_with)
    _check_loggers(flags, run, chosen=loggers.KEY in overrides)
    if _trains(flags):
        workdir.refuse_links(workdir_of(flags), run)
    return flags, run


def _choose_length(config: ConfigDict, overrides: Mapping[str, str]) -> list[str]:
    """Lets train.epochs of the command line replace a config's train.steps, or reverse.

    Returns:
      The fault of a command line that has both; [] for others.
    """
    lengths = {"train.steps", "train.epochs"}
    named = lengths & overrides.keys()
    has_epochs = bool(schema.flatten(config).get("train.epochs"))
    if not has_epochs:  # 0 leaves the length to train.steps
        named.discard("train.epochs")
    fault = (
        "train.steps and train.epochs both say how long the run is; leave out one. To "
        "make a run longer, raise the one that its command has"
    )
    if named == lengths:
        return [fault]
    if named == {"train.steps"}:
        config.update_from_flattened_dict({"train.epochs": 0.0})
    elif has_epochs and named:
        config.update_from_flattened_dict({"train.steps": TrainConfig.steps})
    elif has_epochs and lengths <= assigned.assigned_keys(config):
        return [fault]
    return []


def _load_for_model(
    flags: argparse.Namespace, overrides: Mapping[str, str]
) -> tuple[ConfigDict, schema.Schema]:
    """Loads the config, and lists its keys for the model that the run trains.

    Raises:
      ConfigError: the config or its model cannot be loaded.
    """
    config = _load(flags, overrides)
    configured = _target_of(config)
    target = overrides.get("model.target", configured)
    if hasattr(flags, "workdir"):
        registry.refuse_inside(target, workdir_of(flags))
    _refuse_source_code(target, overrides, config)
    if target != configured:
        # The other overrides are checked against the keys of this model.
        with config.unlocked():
            config.model = model_defaults(target)
    return config, full_schema(target)


def _trains(flags: argparse.Namespace) -> bool:
    """Tests whether a command trains: `train`, also with --dry-run."""
    return hasattr(flags, "dry_run")


def _set_keys(
    flags: argparse.Namespace, overrides: Mapping[str, str], config: ConfigDict
) -> set[str]:
    """Lists the keys that the user has set: on the command line or in a config file.

    The keys of a packaged config count only if it names the initial weights itself: it
    is then written for these weights.

    Args:
      flags: the parsed flags.
      overrides: the overrides of the command line.
      config: the config that --config names, without the overrides.
    """
    in_file = assigned.assigned_keys(config)
    if _is_json_file(flags.config):
        return {*overrides, *in_file}
    if files.is_packaged(flags.config, folders=files.packaged_folders()):
        weights = {*initial_weights.weight_keys()}
        if weights & overrides.keys() or not weights & in_file:
            return {*overrides}
    return {*overrides, *in_file}


def _target_of(config: ConfigDict) -> str:
    target: str = schema.flatten(config).get("model.target", registry.DEFAULT_TARGET)
    return target


def _print_fields(config: ConfigDict, fields: schema.Schema, words: str) -> None:
    width = shutil.get_terminal_size().columns
    text = files.help_text(config, fields, words=words, width=width)
    if not words:
        print()  # below the help of the flags
    print(text)


def _take_overrides(
    arguments: Sequence[str],
) -> tuple[dict[str, str], list[str], list[str]]:
    """Takes the overrides, such as --config.a.b=value, out of a command line.

    The value may also be a word of its own: --config.a.b value. This comes before
    argparse, which would read a value such as -hello as a flag.

    Returns:
      The overrides by key, the other words, and faults.
    """
    overrides = {}
    others = []
    faults = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        path, equals, value = word.removeprefix("--config.").partition("=")
        if not word.startswith("--config."):
            others.append(word)
        elif equals:
            overrides[path] = value
        elif _has_value(words):
            overrides[path] = words.popleft()
        else:
            faults.append(f"{path}: has no value; write --config.{path}=VALUE")
    return overrides, others, faults


def _has_value(words: deque[str]) -> bool:
    """Tests whether the next word may be the value of the previous flag."""
    return bool(words) and not words[0].startswith("--")


def _workdir_faults(folder: str) -> Iterator[str]:
    if "://" in folder:
        yield f"--workdir {folder}: must be a local folder; checkpoint.folder takes gs://"
        return
    fault = workdir.name_fault(folder)
    if fault:
        yield f"--workdir {fault}"


def _config_in(
    folder: str | None, flags: argparse.Namespace, faults: Sequence[str]
) -> str:
    """Finds the config of the run in a workdir, for a command line without --config.

    Args:
      folder: the workdir, if the command line names one.
      flags: the parsed flags.
      faults: faults found so far, which the error repeats.

    Raises:
      ConfigError: there is no such config.
      SystemExit: the command line has --help, whose text was printed.
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
    where = f", and {folder} holds no run to resume" if folder else ""
    missing = f"--config is missing{where}: name one, e.g. --config quickstart"
    raise ConfigError([*faults, missing])


_AS_CONFIG = "Did you mean --config "


def _unknown_faults(words: Sequence[str], flags: Iterable[str]) -> Iterator[str]:
    """Yields an error for each unknown word, and suggests the flag that may be meant."""
    if not words:
        return
    flag_names = ["--" + flag.replace("_", "-") for flag in flags]
    paths = full_schema(registry.DEFAULT_TARGET)
    packaged = files.packaged_configs(files.packaged_folders())
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        name, equals, value = word.partition("=")
        key_name = name.removeprefix("--").replace("-", "_")
        keys = [path for path in paths if key_name in (path, path.rpartition(".")[2])]
        hint = suggest(name, flag_names)
        if name.startswith("--") and keys:
            if not equals and _has_value(remaining):
                value = remaining.popleft()
            texts = [f"--config.{key}={value or 'VALUE'}" for key in keys[:3]]
            hint = f" Did you mean {' or '.join(texts)}?"
        elif name.partition(":")[0] in packaged or name.endswith((".py", ".json")):
            hint = f" {_AS_CONFIG}{word}?"
        yield f"{word}: no such flag;{hint} --help lists them"


def _load(flags: argparse.Namespace, overrides: Mapping[str, str]) -> ConfigDict:
    """Loads the config that --config names: a Python file, or a run's config.json."""
    name = flags.config
    # The name of a folder above a config.json may have a colon.
    if not _is_json_file(name):
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
    target: str, overrides: Mapping[str, str], config: Mapping[str, Any] | ConfigDict
) -> None:
    """Checks that the model's code is not stored in the run of `init.from_run`.

    Raises:
      ConfigError: it is stored there.
    """
    source = {**schema.flatten(config), **overrides}.get("init.from_run")
    if isinstance(source, str) and source:
        source_run.refuse_code(source, target)


def _check_loggers(
    flags: argparse.Namespace, config: RunConfig, *, chosen: bool
) -> None:
    """Checks that a command that trains executes no untrusted code of a logger.

    Args:
      flags: the parsed flags.
      config: the run's config.
      chosen: whether the command line names the loggers.

    Raises:
      ConfigError: the code is stored in the run's folder, or only a stored config names
        it.
    """
    if not _trains(flags):
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
    """Finds the workdir of a command that takes a run's config."""
    return Path(flags.workdir or default_workdir(flags.config))


def _config_in_workdir(flags: argparse.Namespace, target: str) -> RunConfig | None:
    """Reads the config of the run in a command's workdir; None if there is none."""
    if not hasattr(flags, "workdir"):
        return None
    folder = workdir_of(flags)
    if not (folder / workdir.CONFIG).is_file():
        return None
    return workdir.read_config(folder, named=target, trust_code=flags.trust_code)
