"""Folder of a run's checkpoints as plain files: its steps, and what each one holds.

    <folder>/<step>/state/...             arrays, written by Orbax (OCDBT, zarr)
    <folder>/<step>/metadata/metadata     JSON: {format, step, arrays, run}
    <folder>/<step>/manifest.json         checksums of all files; written last (`integrity.py`)
    <folder>/<step>.unfinished            marker: the step is being written or deleted
    <folder>/<step>.orbax-checkpoint-tmp  files that Orbax has not finished writing
    <folder>/.lock                        lock of the one process that writes here
    <folder>/owner.json                   lease of that process, in stores without locks
    quarantine/<step>/, <step>.json       a step that was set aside, and the reason

Five words describe a step:

    unfinished  it is not sealed and has a marker: a save or a deletion of it is running,
                or was interrupted
    sealed      its arrays' folder, metadata and manifest are present; only then it counts
    torn        it has a folder, and is neither sealed nor unfinished: a part was lost
    damaged     it is torn, or a check of its content has failed
    intact      it is sealed, and its content passes the checks of `integrity.py`

The remains of an unfinished step are deleted. A damaged step is set aside: it moves to
quarantine. So does an intact step if its run goes back behind it; its note says undone.

This module renames nothing to seal a step, so object stores (gs://) work alike. It
needs neither jax, nor Orbax, nor a device.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from jaxdist.config import EXIT_NO_CHECKPOINT, ConfigError, extras
from jaxdist.config.redact import without_secrets
from jaxdist.storage import atomic, run_format
from jaxdist.storage.paths import is_local
from jaxdist.storage.untrusted import Malformed, named, of_kind, read_bytes, read_json

STATE_ITEM = "state"
METADATA_ITEM = "metadata"
MANIFEST = "manifest.json"
QUARANTINE = "quarantine"
LOCK = ".lock"
OWNER = "owner.json"
METADATA_FILE = f"{METADATA_ITEM}/metadata"
_MARKER = ".unfinished"
# Characters to keep of the start and of the end of an error. TensorStore's errors are
# pages long, and their cause comes last.
_HEAD_CHARS = 120
_TAIL_CHARS = 200
# Keys of a run's metadata that must be JSON objects if they are present.
# `trainer/run_metadata.py` describes them.
PROGRESS = "progress"
FINGERPRINTS = "fingerprints"
CONFIG = "config"
_GROUPS = {PROGRESS, FINGERPRINTS, CONFIG}
_MOST_TRIED = 64  # sealed steps that a restore tries
# Times that a folder is listed, if its steps are deleted while they are read.
_MOST_LISTINGS = 20
LAST_STEP = 2**31 - 1  # a state counts its steps in 32 bits
_STEP = re.compile("0|[1-9][0-9]{0,9}")  # name of a step's folder
# Names of folders that Orbax leaves behind. Other files of a user stay.
_LEFTOVER = re.compile(r"\d+\.orbax-checkpoint-tmp")


class CheckpointError(Exception):
    """Error of a checkpoint that cannot be read or written.

    If several steps failed, `steps` has {step: reason}.
    """

    exit_code = EXIT_NO_CHECKPOINT

    def __init__(self, message: str, steps: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.steps = dict(steps or {})


class NotChecked(CheckpointError):
    """Error of a process that could not check files. It says nothing about the files."""

    exit_code = 1


class StepDeleted(CheckpointError):
    """Error of a step whose run has deleted it while it was read."""


def error_text(error: Exception, url: str = "") -> str:
    """Formats an error on one line, with its type unless it is a CheckpointError.

    Args:
      error: the error.
      url: a URL whose secrets the text may contain; they are hidden.
    """
    # TensorStore ends its errors with a dump of options, which does not help a user.
    text = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
    text = without_secrets(text, url)
    if len(text) > _HEAD_CHARS + _TAIL_CHARS:
        text = f"{text[:_HEAD_CHARS]} ... {text[-_TAIL_CHARS:]}"
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text}"


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype name of one stored array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class StepInfo(NamedTuple):
    """Description of a sealed step, and the metadata of its run."""

    arrays: dict[str, ArrayInfo]  # by canonical name
    metadata: dict[str, Any]


def as_path(folder: Path | str) -> Path:
    """Makes an absolute path, or for "gs://..." a path of the same interface.

    Raises:
      extras.MissingExtra: the package that reads such a path is not installed.
    """
    text = os.fspath(folder)
    if "://" not in text:
        return Path(text).absolute()
    extras.require("gcsfs")
    remote: Path = epath.Path(text)
    return remote


def locate(text: str) -> tuple[Path, int | None]:
    """Finds the folder of checkpoints that a path means, and the step if it names one.

    The path is that of a workdir, of its `checkpoints`, or of one step in them.

    Raises:
      ConfigError: there is no such folder, or the workdir's config cannot be read.
      run_format.OtherVersion: another version of jaxdist has written the workdir.
    """
    path = as_path(text)
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, a folder without permission
        raise ConfigError(f"{text[:200]}: {error.strerror}") from None
    if not exists:
        raise ConfigError(f"{text}: there is no such folder")
    if (path / "config.json").exists():  # a workdir
        configured = _configured_folder(path / "config.json")
        return as_path(configured) if configured else path / "checkpoints", None
    if (path / "checkpoints").is_dir():
        return path / "checkpoints", None
    if path.name.isdecimal():
        return path.parent, int(path.name)
    return path, None


def _configured_folder(file: Path) -> str:
    """Reads the checkpoint.folder of a config.json; "" if it has none."""
    try:
        stored = run_format.unmarked(read_json(file, dict), file.parent)
        options = of_kind(stored.get("checkpoint", {}), dict, "checkpoint")
        return of_kind(options.get("folder", ""), str, "checkpoint.folder")
    except Malformed as error:
        raise ConfigError(
            f"{file} is damaged ({error}); name its checkpoints instead"
        ) from None


def present_path(folder: Path, step: int) -> Path:
    """Finds the checkpoint of `step`.

    Raises:
      CheckpointError: the folder has no such step.
    """
    path = folder / str(step)
    if not path.is_dir():
        steps = ", ".join(map(str, list_steps(folder))) or "none"
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {folder}; steps: {steps}"
        )
    return path


def quarantine_folder(folder: Path) -> Path:
    """Names the folder for steps that are set aside.

    It is next to a workdir's `checkpoints`, and inside of any other folder.
    """
    return (folder.parent if folder.name == "checkpoints" else folder) / QUARANTINE


def list_steps(folder: Path) -> list[int]:
    """Lists the sealed steps, ascending; [] if the folder does not exist.

    The content of their files is not read.
    """
    return [step for step in _numbered(folder) if _is_sealed(folder / str(step))]


def all_steps(folder: Path) -> list[int]:
    """Lists the sealed steps and the torn ones, ascending."""
    steps = _numbered(folder)
    return [
        step
        for step in steps
        if _is_sealed(folder / str(step)) or not _marker(folder, step).exists()
    ]


def none_intact(folder: Path, failures: Mapping[int, str]) -> CheckpointError:
    """Makes the error for a folder without any intact step.

    Args:
      folder: folder of the checkpoints.
      failures: {step: reason} of the damaged steps.
    """
    if not failures:
        aside = quarantine_folder(folder)
        hint = f"; {aside} holds steps that were set aside" if aside.is_dir() else ""
        return CheckpointError(f"there is no checkpoint in {folder}{hint}")
    tried = "\n".join(f"  step {step}: {reason}" for step, reason in failures.items())
    return CheckpointError(
        f"no usable checkpoint in {folder}; all are left there:\n{tried}\n"
        f"Put a good one back from a copy, or start a new run in another folder.",
        failures,
    )


def newest_first(
    folder: Path, listed: Callable[[Path], list[int]] = list_steps
) -> Iterator[int]:
    """Yields the sealed steps, newest first, each one once.

    If the step that was yielded last has been deleted in the meantime, the folder is
    listed again. A reader of a run that is training therefore reaches a step that still
    exists.

    Args:
      folder: folder of the checkpoints.
      listed: function that lists the steps, ascending.
    """
    yielded: set[int] = set()
    for _ in range(_MOST_LISTINGS):
        for step in reversed(listed(folder)):
            if step in yielded:
                continue
            yielded.add(step)
            yield step
            if is_deleted(folder, step):
                break
        else:
            return


def steps_to_try(folder: Path) -> list[int]:
    """Lists the newest sealed steps and the torn ones between them, ascending."""
    sealed = list_steps(folder)
    oldest = sealed[-_MOST_TRIED:][0] if sealed else 0
    return [step for step in all_steps(folder) if step >= oldest]


def is_deleted(folder: Path, step: int) -> bool:
    """Tests whether a run has deleted a step, or is deleting it.

    A torn step is not deleted.
    """
    path = folder / str(step)
    return not _is_sealed(path) and (
        _marker(folder, step).exists() or not path.is_dir()
    )


def has_steps(folder: Path) -> bool:
    """Tests whether a run has saved here. Torn steps and those in quarantine count.

    A new run must not start in such a folder.
    """
    if all_steps(folder):
        return True
    aside = quarantine_folder(folder)
    with _readable(aside):
        return any(path.is_dir() for path in _entries(aside))


def links_out(folder: Path, names: Collection[str] | None = None) -> Iterator[Path]:
    """Yields links in a local folder that lead out of it or to nowhere.

    Args:
      folder: the folder, which may be a link itself, or absent.
      names: names of the entries to look at; None = all.
    """
    try:
        entries = list(folder.iterdir())
    except OSError:  # reading or writing it reports that
        return
    inside = os.path.realpath(folder)
    for path in sorted(entries):
        if not path.is_symlink() or (names is not None and path.name not in names):
            continue
        target = os.path.realpath(path)
        if not os.path.exists(path) or os.path.commonpath([inside, target]) != inside:
            yield path


def _numbered(folder: Path) -> list[int]:
    """Lists the steps that have a folder, ascending.

    Raises:
      CheckpointError: something is there that cannot be listed.
    """
    with _readable(folder):
        steps = [
            int(path.name)
            for path in _entries(folder)
            if _STEP.fullmatch(path.name) and path.is_dir()
        ]
    return sorted(step for step in steps if step <= LAST_STEP)


def _entries(folder: Path) -> list[Path]:
    """Lists the entries of a folder; [] if there is none."""
    if is_local(folder):
        return list(folder.iterdir()) if os.path.lexists(folder) else []
    return list(folder.iterdir()) if folder.is_dir() else []


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turns errors of listing a folder into a CheckpointError.

    A run must not begin anew because the folder of its checkpoints cannot be listed.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror or error}), and checkpoints of this run may be "
            f"there. Make it a folder that can be read, or start a new run with another --workdir"
        ) from error


def _is_sealed(path: Path) -> bool:
    try:
        has_items = (path / METADATA_FILE).is_file() and (path / STATE_ITEM).is_dir()
        return has_items and (path / MANIFEST).is_file()
    except PermissionError:
        return False  # the step counts as torn, and its check names the file


def _marker(folder: Path, step: int) -> Path:
    return folder / f"{step}{_MARKER}"


def file_bytes(path: Path) -> int:
    """Looks up the size of a file, here or in an object store."""
    status: Any = path.stat()
    size: int = status.length if hasattr(status, "length") else status.st_size
    return size


def describe(
    step: int, arrays: Mapping[str, ArrayInfo], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes the JSON document of a step, which `read_step` reads.

    Raises:
      TypeError: `metadata` is not JSON.
      ValueError: `metadata` holds NaN or infinity.
    """
    document = {
        run_format.KEY: run_format.FORMAT,
        "step": step,
        "arrays": {
            name: {"dtype": info.dtype, "shape": list(info.shape)}
            for name, info in arrays.items()
        },
        "run": dict(metadata),  # the run's identity is in the manifest, not here
    }
    json.dumps(document, allow_nan=False)
    return document


def read_step(folder: Path, step: int) -> StepInfo:
    """Reads the description of a sealed step.

    Raises:
      CheckpointError: the step is absent or torn, has an unknown format, or holds the
        content of another step.
    """
    path = present_path(folder, step)
    if not _is_sealed(path):
        raise CheckpointError(
            f"{path} lacks {METADATA_FILE}, {STATE_ITEM}/ or {MANIFEST}"
        )
    return read_description(path, step)


def read_description(path: Path, step: int) -> StepInfo:
    """Reads the description in a step's folder, which may lack other files.

    Raises:
      CheckpointError: the description is absent, has an unknown format, or is that of
        another step.
    """
    file = path / METADATA_FILE
    try:
        document = read_json(file, dict)
        version = document[run_format.KEY], document["step"]
        arrays = {}
        for name, entry in document["arrays"].items():
            sizes = of_kind(entry["shape"], list, name)
            shape = tuple(of_kind(size, int, name) for size in sizes)
            arrays[name] = ArrayInfo(shape, of_kind(entry["dtype"], str, name))
        metadata = of_kind(document["run"], dict, "run")
        for group in _GROUPS & metadata.keys():
            of_kind(metadata[group], dict, group)
        run_step = metadata[PROGRESS]["step"] if PROGRESS in metadata else step
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not readable: {named(error)}") from error
    if version != (run_format.FORMAT, step):
        raise CheckpointError(
            f"{file} says format, step = {version}; required: {(run_format.FORMAT, step)}"
        )
    if run_step != step:
        raise CheckpointError(
            f"its run had made {run_step} steps, not {step}: another step's content"
        )
    return StepInfo(arrays, metadata)


def expired(
    steps: Collection[int],
    *,
    newest: int,
    keep_last: int,
    keep_every: int,
    best: Sequence[int] = (),
) -> list[int]:
    """Chooses which of `steps` to delete once `newest` is sealed.

    It keeps `newest`, the `keep_last - 1` steps before it, and multiples of
    `keep_every` (0 = none). It also keeps the last of `best` that is present, because
    the save of a best step may have failed.

    Steps after `newest` stay: they belong to a run that was rewound.
    """
    past = sorted(step for step in steps if step < newest)
    recent = past[-(keep_last - 1) :] if keep_last > 1 else []
    stays = {*recent, *[step for step in best if step in steps][-1:]}
    return [
        step
        for step in past
        if step not in stays and not (keep_every and step % keep_every == 0)
    ]


def mark_unfinished(folder: Path, step: int) -> None:
    """Marks `step` as unfinished, before it is written or deleted."""
    _marker(folder, step).write_text("")  # no bytes, so that it fits on a full disk


def unmark(folder: Path, step: int) -> None:
    """Removes the mark of `mark_unfinished`, once `step` is sealed or deleted."""
    _marker(folder, step).unlink()


def remove_step(folder: Path, step: int) -> None:
    """Deletes the checkpoint of `step`.

    If the deletion is interrupted, `remove_leftovers` completes or undoes it.
    """
    if is_local(folder) and (folder / str(step)).is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link", str(folder / str(step)))
    mark_unfinished(folder, step)
    (folder / str(step) / MANIFEST).unlink()
    _remove_tree(folder / str(step))
    unmark(folder, step)


def remove_leftovers(folder: Path) -> None:
    """Deletes the remains of interrupted saves and deletions. Other files stay.

    Call it only while no process saves into `folder`.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            _remove_busy(path)
        elif path.suffix == _MARKER and path.stem.isdecimal():
            step = folder / path.stem
            if step.exists() and not (step / MANIFEST).exists():
                _remove_busy(step)
            if not step.exists() or (step / MANIFEST).exists():
                path.unlink()


def _remove_busy(path: Path) -> None:
    # When one file of a save fails, the writers of the others continue for a moment and
    # add files. Files that this loop misses are deleted before the next save.
    for _ in range(10):
        with contextlib.suppress(OSError):
            _remove_tree(path)
        if not path.exists():
            return
        time.sleep(0.1)


def _remove_tree(path: Path) -> None:
    if is_local(path):
        shutil.rmtree(path)
    else:
        epath.Path(path).rmtree()


def quarantine(folder: Path, step: int, reason: str, *, undone: bool = False) -> None:
    """Moves the content of `step`'s place to the quarantine folder, with the reason.

    Args:
      folder: folder of the checkpoints.
      step: step to move.
      reason: text for the user.
      undone: whether the run has gone back behind the step, which may be intact.

    Raises:
      OSError: the step cannot be moved, or it was moved and its note not written.
    """
    aside = quarantine_folder(folder)
    if is_local(aside) and aside.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link; remove it", str(aside))
    aside.mkdir(parents=True, exist_ok=True)
    target = aside / str(step)
    number = 1
    while target.exists():
        number += 1
        target = aside / f"{step}-{number}"
    source = folder / str(step)
    note = target.with_name(f"{target.name}.json")
    document = {
        run_format.KEY: run_format.FORMAT,
        "step": step,
        "reason": reason,
        "time": time.time(),
        "from": str(source),
    }
    if undone:
        document["undone"] = True
    # The note comes first. If the process dies in between, the step is still at its
    # place. A moved step without a note would be fetched again from the store of copies.
    try:
        atomic.write_text(note, json.dumps(document, indent=1) + "\n", durable=True)
    except OSError:
        if is_local(source):  # a full disk takes no note, but the step can move
            shutil.move(source, target)
        raise
    if is_local(source):
        shutil.move(source, target)  # this works across disks
    else:
        source.rename(target)


def was_damaged(folder: Path, step: int) -> bool:
    """Tests whether a run has moved a step to quarantine because it was damaged."""
    for note in quarantine_folder(folder).glob(f"{step}*.json"):
        with contextlib.suppress(OSError, Malformed):
            document = read_json(note, dict)
            if document.get("step") == step and "undone" not in document:
                return True
    return False


def undone_manifests(folder: Path, step: int) -> list[bytes]:
    """Reads the manifests of the undone copies of `step` in quarantine.

    There is one for each time that the run went back behind the step.
    """
    manifests = []
    for note in quarantine_folder(folder).glob(f"{step}*.json"):
        with contextlib.suppress(OSError, Malformed):
            document = read_json(note, dict)
            if document.get("undone") is True and document.get("step") == step:
                manifests.append(read_bytes(note.with_suffix("") / MANIFEST))
    return manifests
