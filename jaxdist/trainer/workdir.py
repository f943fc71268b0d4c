"""The folder of a run: its lock, its config, and what may change on resume."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.files import CheckpointError, as_path, has_steps
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, is_text, schema
from jaxdist.data import Dataset
from jaxdist.storage import atomic, lock, run_format, untrusted
from jaxdist.trainer import config_json, extension
from jaxdist.trainer.run_config import (
    HARMLESS,
    RunConfig,
)

CONFIG, RUN, LOCK = run_format.CONFIG, run_format.RUN, ".lock"
SAMPLE, REPORT = "sample.txt", "report.html"
CHECKPOINTS = "checkpoints"
CONFIG_KEY = extension.CONFIG_KEY  # in a checkpoint's metadata: the run's whole config
IDENTITY_KEY = "run"  # in run.json: the identity of the run, as in its checkpoints


def checkpoints_folder(folder: Path, config: RunConfig) -> Path:
    """Returns where the checkpoints of the run in `folder` are.

    Raises:
      ConfigError: the name cannot be a folder of checkpoints.
    """
    chosen = config.checkpoint.folder
    if fault := name_fault(chosen or folder):
        raise ConfigError(fault)
    return as_path(chosen) if chosen else folder / CHECKPOINTS


def name_fault(folder: Path | str) -> str:
    """Returns what is wrong with the name of a folder for checkpoints; "" if nothing
    is.
    """
    whole = str(folder) if "://" in str(folder) else os.path.abspath(folder)
    if is_text(whole):
        return ""
    return f"{whole!r}: not UTF-8, so that the checkpoint library cannot write there; give another folder"


def own_identity(folder: Path) -> str | None:
    """Returns the identity of the run in `folder`, as its run.json has it; None if that
    is not known.
    """
    with contextlib.suppress(OSError, untrusted.Malformed, KeyError):
        return untrusted.of_kind(
            untrusted.read_json(folder / RUN, dict)[IDENTITY_KEY], str
        )
    return None


def open_checkpoints(folder: Path, config: RunConfig) -> CheckpointManager:
    """Returns the store of the run in `folder`, to write.

    Raises:
      ConfigError: it cannot be written, is in use, or belongs to another run.
    """
    place = checkpoints_folder(folder, config)
    try:
        return CheckpointManager(place, config.checkpoint, run=own_identity(folder))
    except lock.Locked as holder:
        raise ConfigError(
            f"checkpoint.folder {place}: in use by {holder}; stop it, or give this run a folder of its own"
        ) from None
    except CheckpointError as error:
        cure = "; give a --workdir or checkpoint.folder that can"
        other = ", or give another --workdir and checkpoint.folder"
        raise ConfigError(
            f"{error}{cure if isinstance(error.__cause__, OSError) else other}"
        ) from error


@contextlib.contextmanager
def workdir_lock(folder: Path) -> Iterator[None]:
    """Creates the folder and holds its lock: one live run per workdir.

    Raises:
      ConfigError: it cannot be written, or another process holds it.
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
            links = [
                path
                for path in (folder, *folder.parents)
                if path.is_symlink() and not path.exists()
            ]
            why = (
                f"{links[0]} is a symbolic link to nowhere" if links else error.strerror
            )
            raise ConfigError(
                f"--workdir {folder}: cannot be written ({why}); give a folder that can"
            ) from error
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        atomic.write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free the disk, or give another --workdir"
        ) from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document of a run, with its format, whole or not at all."""
    write_text(path, json.dumps(run_format.marked(document), indent=1) + "\n")


def refuse_other_version(folder: Path, config: RunConfig) -> None:
    """Checks that no other version has written the workdir, or its checkpoints.

    Raises:
      ConfigError: one has; nothing was changed there.
    """
    run_format.check_folder(folder)
    try:
        manifest.refuse_other_versions(checkpoints_folder(folder, config))
    except manifest.OtherVersion as error:
        raise ConfigError(str(error)) from error


def check_resume_config(folder: Path, run: RunConfig) -> None:
    """Writes config.json; for a run that goes on, refuses changes that would alter its
    losses.

    Raises:
      ConfigError: one line per such change; the checkpoints are another run's.
    """
    checkpoints = checkpoints_folder(folder, run)
    exists, target = (folder / CONFIG).exists(), run.model["target"]
    old = read_config(folder, named=target, trust_code=None) if exists else None
    if has_steps(checkpoints):
        try:
            owner = manifest.identity(
                checkpoints, create=False, own=own_identity(folder)
            )
        except CheckpointError as error:
            raise ConfigError(
                f"{error}, or give another --workdir and checkpoint.folder"
            ) from error
        metadata = manifest.newest_metadata(checkpoints, owner)
        # no step is sound: the restore says so, or fetches one
        if old is not None and CONFIG_KEY not in metadata:
            metadata |= stored_config(old)
        check_stored_config(
            metadata,
            run,
            folder if checkpoints == folder / CHECKPOINTS else checkpoints,
        )
    elif old is not None and has_steps(before := checkpoints_folder(folder, old)):
        raise ConfigError(
            f"checkpoint.folder: the run in {folder} has its checkpoints in {before}, and {checkpoints} "
            f"has none; put it back, copy them, or start a new run with another --workdir"
        )
    write_json(folder / CONFIG, schema.to_config_dict(run).to_dict())


def stored_config(run: RunConfig) -> dict[str, Any]:
    """Returns what a checkpoint's metadata says of its run's config: all of it, as
    config.json does.
    """
    return {CONFIG_KEY: schema.to_config_dict(run).to_dict()}


def check_stored_config(
    metadata: Mapping[str, Any], run: RunConfig, place: Path
) -> None:
    """Refuses to go on from a checkpoint whose run has other losses than `run`.

    Args:
      metadata: of the checkpoint; {} if none is sound.
      place: the folder to name.

    Raises:
      ConfigError: one line for each key whose change alters them.
    """
    if not isinstance(stored := metadata.get(CONFIG_KEY), dict):
        return
    at = f"@{metadata['progress']['step']}" if "progress" in metadata else ""
    cure = f"put it back, or branch with init.from_run={place}{at} in another --workdir"
    # Without a warm-up of its own, a config has the one that the run began with.
    same_warmup: set[int | None] = {None}
    if extension.SCHEDULE_KEY in metadata:
        same_warmup.add(extension.stored_steps(metadata).warmup_steps)
    faults = [
        f"{change.path}: the run in {place} has {_shown(change.old)}, now {_shown(change.new)}; {cure}"
        for change in schema.diff(
            config_json.tupled(stored), schema.to_config_dict(run)
        )
        if not any(fnmatch(change.path, pattern) for pattern in HARMLESS)
        and not (change.path == "optimizer.warmup_steps" and change.new in same_warmup)
    ]
    if faults:
        raise ConfigError(faults)


def _shown(value: object) -> str:
    return "(absent)" if value is schema.MISSING else repr(value)


def check_data(metadata: Mapping[str, Any], dataset: Dataset) -> None:
    """Raises ConfigError if the run was trained on other data: its position means
    nothing here.
    """
    known = metadata["fingerprints"]["data"]
    if known != dataset.fingerprint:
        raise ConfigError(
            f"the data has changed: the run has read {known}, {dataset.name} is {dataset.fingerprint} now; "
            f"put the corpus and its settings back, or start anew with another --workdir"
        )


def read_config(
    folder: Path, *, named: str | None = None, trust_code: bool | None = False
) -> RunConfig:
    """Returns the config that a run was started with.

    Args: as `registry.check_stored_target`.

    Raises:
      ConfigError: the folder holds no run, what is no config, or a model whose code is
        not trusted.
    """
    stored = config_json.read(folder / CONFIG)
    return config_json.resolve(stored, folder, named=named, trust_code=trust_code)
