"""The workdir of a run: its lock, its config.json, and the checks on resume.

A config.json, or its copy in a checkpoint, is untrusted: anybody may have written it.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import CheckpointError, as_path, has_steps
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, annotations, is_text, redact, schema
from jaxdist.models import registry
from jaxdist.storage import atomic, lock, run_format, untrusted
from jaxdist.storage.paths import is_local
from jaxdist.trainer import run_metadata
from jaxdist.trainer.run_config import (
    RunConfig,
    document_of,
    from_config,
    keys_that_may_change,
    model_defaults,
)

_MOST_CHANGES = 4  # changed keys that are told one by one
CONFIG = run_format.CONFIG
RUN = run_format.RUN
LOCK = ".lock"
SAMPLE = "sample.txt"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
# Folders in which jaxdist writes at any depth. wandb and trackio have links of their own
# in theirs, such as wandb's to a log in the user's cache.
_WRITTEN_FOLDERS = (".beats", "profile", "tensorboard")
# Folders and files of a workdir that a run writes in place, or deletes. A file that is
# replaced as a whole is listed, too: its link would be lost.
_WRITTEN = (
    *_WRITTEN_FOLDERS,
    "trackio",
    "wandb",
    CHECKPOINTS,
    folders.QUARANTINE,
    CONFIG,
    RUN,
    SAMPLE,
    REPORT,
    "arrays.jsonl",
    "events.jsonl",
    "huggingface",
    "ledger.json",
    "metrics.jsonl",
    "reference.npz",
    "skipped.json",
)
IDENTITY_KEY = "run"  # key of run.json: the identity of the run, as in its checkpoints


def checkpoints_folder(folder: Path, config: RunConfig) -> Path:
    """Finds the folder of a run's checkpoints.

    Args:
      folder: the workdir.
      config: the run's config.

    Raises:
      ConfigError: the name is not valid for a folder of checkpoints.
    """
    chosen = config.checkpoint.folder
    fault = name_fault(chosen or folder)
    if fault:
        raise ConfigError(fault)
    return as_path(chosen) if chosen else folder / CHECKPOINTS


_MAX_NAME_BYTES = 255  # bytes of a name in any of Linux's file systems


def name_fault(folder: Path | str) -> str:
    """Explains why a name is not valid for a folder of checkpoints; "" if it is."""
    whole = str(folder)
    if "://" not in whole:
        whole = os.path.abspath(folder)
    if not is_text(whole):
        return f"{whole!r}: not UTF-8, so that the checkpoint library cannot write there; give another folder"
    longest = max(map(len, os.fsencode(whole).split(b"/")))
    if "://" not in whole and longest > _MAX_NAME_BYTES:
        return f"{whole}: a name of {longest} bytes; at most {_MAX_NAME_BYTES} can be the name of a folder"
    return ""


def own_identity(folder: Path) -> str | None:
    """Reads the identity of a workdir's run from run.json; None if there is none."""
    with contextlib.suppress(OSError, untrusted.Malformed, KeyError):
        document = untrusted.read_json(folder / RUN, dict)
        return untrusted.of_kind(document[IDENTITY_KEY], str)
    return None


def open_checkpoints(folder: Path, config: RunConfig) -> CheckpointManager:
    """Opens the checkpoints of a run for writing.

    Args:
      folder: the workdir.
      config: the run's config.

    Raises:
      ConfigError: they cannot be written, are in use, or belong to another run.
    """
    place = checkpoints_folder(folder, config)
    try:
        return CheckpointManager(place, config.checkpoint, run=own_identity(folder))
    except lock.Locked as holder:
        raise ConfigError(
            f"checkpoint.folder {place}: in use by {holder}; stop it, or give this run a folder of its own"
        ) from None
    except CheckpointError as error:
        fix = ", or give another --workdir and checkpoint.folder"
        if isinstance(error.__cause__, OSError):
            fix = "; give a --workdir or checkpoint.folder that can"
        raise ConfigError(f"{error}{fix}") from error


@contextlib.contextmanager
def workdir_lock(folder: Path) -> Iterator[None]:
    """Creates a workdir and holds its lock, so that only one run uses it.

    Raises:
      ConfigError: the folder cannot be written, or another process holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.exclusive(folder / LOCK))
        except lock.Locked as holder:
            raise ConfigError(
                f"--workdir {folder}: in use by {holder}; stop it or give another --workdir"
            ) from None
        except OSError as error:
            reason = error.strerror
            for path in [*reversed(folder.parents), folder]:
                if path.is_symlink() and not path.exists():
                    reason = f"{path} is a symbolic link to nowhere"
            raise ConfigError(
                f"--workdir {folder}: cannot be written ({reason}); give a folder that can"
            ) from error
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically: completely or not at all.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        atomic.write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free the disk, or give another --workdir"
        ) from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON file of a run atomically, with the version of its format.

    Raises:
      ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(run_format.marked(document), indent=1) + "\n")


def refuse_links(folder: Path, config: RunConfig) -> None:
    """Checks that no link leads out of the folders that a run writes and deletes in.

    The workdir itself may be a link, and so may the folder that `checkpoint.folder`
    names.

    Raises:
      ConfigError: there are such links, with a line for each. Nothing was written.
    """
    faults = []
    own = "replace it by a folder or file of its own"
    for path in folders.links_out(folder, _WRITTEN):
        fix = own
        if path.name == CHECKPOINTS and not config.checkpoint.folder:
            fix += f", or set checkpoint.folder={os.path.realpath(path)}"
        faults.append(_link_fault(path, fix))
    for name in _WRITTEN_FOLDERS:
        for path in _links_below(folder / name):
            faults.append(_link_fault(path, "replace it by what it leads to"))
    place = checkpoints_folder(folder, config)
    if is_local(place):
        quarantine = folders.quarantine_folder(place)
        for path in folders.links_out(place):
            faults.append(_link_fault(path, "replace it by what it leads to"))
        for path in folders.links_out(quarantine.parent, {quarantine.name}):
            faults.append(_link_fault(path, own))
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


def _link_fault(path: Path, fix: str) -> str:
    return (
        f"{path} is a link that leads out of its folder, to {os.readlink(path)}. A run writes and "
        f"deletes no files there; {fix}"
    )


def _links_below(folder: Path) -> Iterator[Path]:
    """Yields links that lead out of a folder of the workdir, at any depth."""
    if folder.is_symlink():
        return  # `refuse_links` has looked at it
    inside = os.path.realpath(folder.parent)
    for place, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(place, name)
            if not path.is_symlink():
                continue
            target = os.path.realpath(path)
            if os.path.commonpath([inside, target]) != inside:
                yield path


# --- config.json ----------------------------------------------------------------------


def read_config(
    folder: Path, *, named: str | None = None, trust_code: bool | None = False
) -> RunConfig:
    """Reads the config that a run was started with.

    Args:
      folder: the workdir.
      named: the model that the user trusts; see `registry.check_stored_target`.
      trust_code: whether to trust any model; see `registry.check_stored_target`.

    Raises:
      ConfigError: the folder has no readable run, or the model's code is not trusted.
    """
    stored = read_stored(folder / CONFIG)
    return resolve(stored, folder, named=named, trust_code=trust_code)


def read_stored(file: Path) -> dict[str, Any]:
    """Reads a config.json. No code that it names is executed.

    Raises:
      ConfigError: the file is missing, is damaged, or has another version.
    """
    try:
        stored = untrusted.read_json(file, dict)
    except FileNotFoundError:
        raise ConfigError(
            f"{file.parent}: no run there (no {file.name}); give a run's folder"
        ) from None
    except untrusted.Malformed as error:
        raise ConfigError(
            f"{file} is damaged ({error}); put it back, or delete it if --config is what it was"
        ) from error
    config: dict[str, Any] = tupled(run_format.unmarked(stored, file.parent))
    return config


def target_of(stored: Mapping[str, Any]) -> str:
    """Reads the model.target of a stored config.

    Raises:
      ConfigError: the value is not a text.
    """
    target = schema.flatten(stored).get("model.target", registry.DEFAULT_TARGET)
    if not isinstance(target, str):
        raise ConfigError(f"model.target: got {target!r}, required str.")
    return target


def resolve(
    stored: Mapping[str, Any],
    folder: Path,
    *,
    named: str | None = None,
    trust_code: bool | None = False,
) -> RunConfig:
    """Converts a stored config to a RunConfig. Every stored config passes through here.

    Args:
      stored: the config.
      folder: the folder where it is stored.
      named: the model that the user trusts; see `registry.check_stored_target`.
      trust_code: whether to trust any model; see `registry.check_stored_target`.

    Raises:
      ConfigError: keys are unknown, values have wrong types, or the model's code is not
        trusted.
    """
    registry.check_stored_target(
        target_of(stored), folder, named=named, trust_code=trust_code
    )
    return from_config(stored)


def tupled(value: Any) -> Any:
    """Converts the lists of a JSON document to tuples, which configs use."""
    if isinstance(value, dict):
        return {key: tupled(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(tupled(item) for item in value)
    return value


# --- resuming -------------------------------------------------------------------------


def check_run_versions(folder: Path, config: RunConfig) -> None:
    """Checks that no other version of jaxdist has written the workdir or checkpoints.

    Raises:
      ConfigError: another version has. Nothing was changed.
    """
    run_format.check_folder(folder)
    try:
        integrity.refuse_other_versions(checkpoints_folder(folder, config))
    except integrity.OtherVersion as error:
        raise ConfigError(str(error)) from error


def check_and_write_config(folder: Path, config: RunConfig) -> None:
    """Checks that a config fits the run in the workdir, and writes config.json.

    It compares the config with that of the newest checkpoint. A run without checkpoints
    has nothing to compare.

    Args:
      folder: the workdir.
      config: the run's config, before it was refitted to the devices.

    Raises:
      ConfigError: keys have changed that would alter the losses, with a line for each;
        or the checkpoints belong to another run.
    """
    checkpoints = checkpoints_folder(folder, config)
    old = None
    if (folder / CONFIG).exists():
        old = read_config(folder, named=config.model["target"], trust_code=None)
    if has_steps(checkpoints):
        try:
            owner = integrity.identity(
                checkpoints, create=False, own=own_identity(folder)
            )
        except CheckpointError as error:
            raise ConfigError(
                f"{error}, or give another --workdir and checkpoint.folder"
            ) from error
        metadata = integrity.newest_metadata(checkpoints, owner)
        if old is not None and run_metadata.CONFIG not in metadata:
            # No checkpoint here is intact. The restore reports that, or downloads one.
            metadata |= stored_config(old)
        place = folder if checkpoints == folder / CHECKPOINTS else checkpoints
        check_stored_config(metadata, config, place, folder)
    elif old is not None:
        before = checkpoints_folder(folder, old)
        if has_steps(before):
            raise ConfigError(
                f"checkpoint.folder: the run in {folder} has its checkpoints in {before}, and {checkpoints} "
                f"has none; put it back, copy them, or start a new run with another --workdir"
            )
    write_config(folder, config)


def write_config(folder: Path, config: RunConfig) -> None:
    """Writes the config.json of a workdir."""
    write_json(folder / CONFIG, document_of(config))


def stored_config(config: RunConfig) -> dict[str, Any]:
    """Makes the entry of a checkpoint's metadata that has the run's config."""
    return {run_metadata.CONFIG: document_of(config)}


def check_stored_config(
    metadata: Mapping[str, Any],
    config: RunConfig,
    place: Path | str,
    folder: Path | None = None,
    *,
    fix: str = "",
) -> None:
    """Checks that a config does not alter the losses of a checkpoint's run.

    If the stored config lacks an option of the model, the option's default counts. If
    it lacks another key, it is damaged, and the key counts as changed.

    Args:
      metadata: metadata of the checkpoint; {} if no checkpoint is intact.
      config: the config to resume with.
      place: the folder or store that errors name.
      folder: the workdir; None: `place`, or a store's copies.
      fix: the advice of errors; default: the old value, or a branch of the run.

    Raises:
      ConfigError: keys have changed that may not change on resume. It has a line for
        each.
    """
    stored = metadata.get(run_metadata.CONFIG)
    if not isinstance(stored, dict):
        return
    at = ""
    if run_metadata.PROGRESS in metadata:
        at = f"@{metadata[run_metadata.PROGRESS]['step']}"
    source = f"{place}{at}"
    branch = f"branch with init.from_run={source} in another --workdir"
    advice = fix or f"put it back, or {branch}"
    # A config without warm-up steps uses those that the run began with.
    same_warmup: set[int | None] = {None}
    if run_metadata.SCHEDULE in metadata:
        same_warmup.add(run_metadata.schedule_of(metadata).warmup_steps)
    free_keys = keys_that_may_change(config)
    faults = []
    changed = {}
    free = {}
    before = _with_new_options(tupled(stored), config)
    for change in schema.diff(redact.redacted(before), document_of(config)):
        if change.path in free_keys:
            free[change.path] = change.new
            continue
        if change.path == "optimizer.warmup_steps" and change.new in same_warmup:
            continue
        changed[change.path] = change.new
        fault = (
            f"{change.path}: the run in {place} has {_shown(change.old)}, "
            f"now {_shown(change.new)}; {advice}"
        )
        if change.path.startswith("model.") and not fix:
            fault += ". A branch keeps the shapes of the model's arrays"
        if change.path == "batch.global_size" and not fix:
            fault += ". With another batch set optimizer.learning_rate, too"
        faults.append(fault)
    if len(faults) > _MOST_CHANGES:
        raise ConfigError(_another_run(list(changed), config, place, at=at, fix=fix))
    is_of_optimizer = all(path.startswith("optimizer.") for path in changed)
    is_command = config.model["target"] != registry.USER_TARGET and not fix
    run_folder = folder or Path(place)
    has_config = (run_folder / CONFIG).is_file()
    if changed and is_of_optimizer and is_command and has_config:
        command = _branch_command(run_folder, source, changed | free, config)
        data = "from 0 (or from where the run stands, with --config.init.data_position=true)"
        if config.init.data_position:  # the command begins with the run's own config
            data = "from where the run stands"
        faults.append(f"the command that branches, with its data {data}: {command}")
    if faults:
        raise ConfigError(faults)


def _another_run(
    keys: Sequence[str], config: RunConfig, place: Path | str, *, at: str, fix: str
) -> str:
    """Formats the fault of a folder or store that holds a run of another config.

    Args:
      keys: the keys that differ.
      config: the config to resume with.
      place: the folder or store.
      at: the newest step as `@STEP`, or "".
      fix: the advice; "": that for a folder.
    """
    shown = ", ".join(keys[:_MOST_CHANGES])
    shown += f" and {len(keys) - _MOST_CHANGES} more keys"
    if fix:
        return f"{place} holds a run of another config: {shown} differ; {fix}"
    resume = "resume its run with its own config"
    if config.model["target"] == registry.USER_TARGET:
        resume = "resume its run by fit with its own arguments"
    elif (Path(place) / CONFIG).is_file():  # a workdir, and no checkpoint.folder
        resume = f"resume its run: python -m jaxdist.train --workdir {place}"
    return (
        f"{place} holds a run of another config: {shown} differ. "
        f"Give this run another folder; or {resume}; or branch with "
        f"init.from_run={place}{at} in another folder"
    )


# keys by which the arrays of the optimizer's state differ
_OF_OPTIMIZER_STATE = {"optimizer.name", "optimizer.frozen"}


def _branch_command(
    folder: Path, source: str, changed: Mapping[str, Any], config: RunConfig
) -> str:
    """Writes the command that branches a run with another optimizer.

    Args:
      folder: the run's workdir.
      source: the value of init.from_run.
      changed: the new values by key.
      config: the config with these values.
    """
    values = {**changed, "init.from_run": source}
    # The config.json names this code, which only the command line can trust.
    if not config.model["target"].startswith("jaxdist."):
        values["model.target"] = config.model["target"]
    if any(":" in name for name in config.train.loggers):
        values["train.loggers"] = config.train.loggers
    if not _OF_OPTIMIZER_STATE & changed.keys():
        values["init.optimizer"] = True
    elif (
        config.init.optimizer
    ):  # of the run's own config, which the command begins with
        values["init.optimizer"] = False
    if config.init.from_huggingface:
        values |= {"init.from_huggingface": "", "lora.from_peft": ""}
    if config.checkpoint.folder:
        values["checkpoint.folder"] = f"{config.checkpoint.folder.rstrip('/')}-branch"
    if config.checkpoint.copy_to:
        values["checkpoint.copy_to"] = ""  # the store is the old run's
    words = ["jaxdist", "train", "--config", str(folder / CONFIG)]
    words += ["--workdir", f"{folder}-branch"]
    words += [
        f"--config.{path}={annotations.flag_text(value)}"
        for path, value in values.items()
    ]
    return shlex.join(words)


def _with_new_options(stored: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Flattens a stored config, and adds defaults of the model's missing options."""
    model = model_defaults(config.model["target"])
    model.pop("target")
    return schema.flatten({"model": model}) | schema.flatten(stored)


def _shown(value: object) -> str:
    return "(absent)" if value is schema.MISSING else repr(value)
