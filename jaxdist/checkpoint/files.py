"""The folder of a run's checkpoints as plain files: which steps there are, what each
one says.

    <folder>/<step>/state/...            the arrays, written by Orbax (OCDBT, zarr)
    <folder>/<step>/metadata/metadata    JSON: format, step, arrays {name: dtype,
    shape}, run {...} <folder>/<step>/manifest.json        checksums of all files (see
    `manifest`); written last <folder>/<step>.unfinished           a marker: this step
    is being written or deleted <folder>/<step>.orbax-checkpoint-tmp what Orbax has not
    committed (yet) .lock                                held by the one process that
    writes here; object stores: owner.json quarantine/<step>/, <step>.json      a step
    that cannot be trusted, and the reason

A step counts from the moment its manifest is there. Until then the marker tells a save
that died, which is deleted, from a step that someone or something has damaged. No
rename of ours is needed, so that object stores (gs://) work alike. Nothing here needs
jax, Orbax or a device.
"""

import contextlib
import dataclasses
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
from jaxdist.storage import atomic, run_format
from jaxdist.storage.untrusted import Malformed, named, of_kind, read_bytes, read_json

STATE_ITEM = "state"
METADATA_ITEM = "metadata"
MANIFEST = "manifest.json"
QUARANTINE = "quarantine"
# of the process that writes to the folder; where no lock is, a lease
LOCK = ".lock"
OWNER = "owner.json"
_METADATA_FILE = Path(METADATA_ITEM) / "metadata"
_MARKER = ".unfinished"
# TensorStore errors run to pages; the cause stands last
_HEAD_CHARS = 120
_TAIL_CHARS = 200
# of a run's metadata: objects, where they are there
_GROUPS = {"progress", "fingerprints", "config"}
_MOST_TRIED = 64  # whole steps that a restore looks at
_MOST_LISTINGS = 20  # of a folder whose steps are deleted while they are read
LAST_STEP = 2**31 - 1  # a state counts its steps in 32 bits
_STEP = re.compile("0|[1-9][0-9]{0,9}")  # a folder of any other name is not ours
# Only what Orbax leaves for steps of ours: a user's own files stay.
_LEFTOVER = re.compile(r"\d+\.orbax-checkpoint-tmp")


class CheckpointError(Exception):
    """A checkpoint cannot be read or written; `steps` holds {step: reason} where
    several failed.
    """

    exit_code = EXIT_NO_CHECKPOINT

    def __init__(self, message: str, steps: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.steps = dict(steps or {})


def error_text(error: Exception) -> str:
    """Returns an error in one line, with its type where it is none of ours."""
    # TensorStore's reason comes last, but for a dump of its options, which says nothing
    # to a user.
    text = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
    if len(text) > _HEAD_CHARS + _TAIL_CHARS:
        text = f"{text[:_HEAD_CHARS]} ... {text[-_TAIL_CHARS:]}"
    return (
        text
        if isinstance(error, CheckpointError)
        else f"{type(error).__name__}: {text}"
    )


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype name of one stored array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class StepInfo(NamedTuple):
    """What a committed step says about itself: its arrays by canonical name, the run's
    metadata.
    """

    arrays: dict[str, ArrayInfo]
    metadata: dict[str, Any]


def as_path(folder: Path | str) -> Path:
    """Returns an absolute path, or for "gs://..." one of the same methods.

    Raises:
      extras.MissingExtra: what reads such a path is not installed.
    """
    text = os.fspath(folder)
    if "://" not in text:
        return Path(text).absolute()
    extras.require("gcsfs")
    return epath.Path(text)


def locate(text: str) -> tuple[Path, int | None]:
    """Returns the folder of checkpoints that a path means, and the step if it names
    one.

    The path is that of a workdir, of its `checkpoints`, or of one step in them.

    Raises:
      ConfigError: nothing is there, or the workdir's config cannot be read.
      run_format.OtherVersion: another version has written it.
    """
    path = as_path(text)
    try:
        there = path.exists()
    except OSError as error:  # a name too long, a folder that is closed to us
        raise ConfigError(f"{text[:200]}: {error.strerror}") from None
    if not there:
        raise ConfigError(f"{text}: there is no such folder")
    if (path / "config.json").exists():  # a workdir
        chosen = _chosen_folder(path / "config.json")
        return (as_path(chosen) if chosen else path / "checkpoints"), None
    if (path / "checkpoints").is_dir():
        return path / "checkpoints", None
    return (path.parent, int(path.name)) if path.name.isdecimal() else (path, None)


def _chosen_folder(file: Path) -> str:
    """Returns the checkpoint.folder of a config.json, "" if it has none."""
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
      CheckpointError: nothing is there.
    """
    path = folder / str(step)
    if not path.is_dir():
        steps = ", ".join(map(str, list_steps(folder))) or "none"
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {folder}; steps: {steps}"
        )
    return path


def quarantine_folder(folder: Path) -> Path:
    """Names the folder where untrusted steps go: beside a workdir's `checkpoints`, else
    inside.
    """
    return (folder.parent if folder.name == "checkpoints" else folder) / QUARANTINE


def list_steps(folder: Path) -> list[int]:
    """Returns the committed steps, ascending; [] if the folder does not exist.

    Only the presence of both items and of the manifest is looked at, not their content.
    """
    return [step for step in _numbered(folder) if _is_whole(folder / str(step))]


def all_steps(folder: Path) -> list[int]:
    """Returns the committed steps and those that lack a part, damaged by hand or by the
    disk, ascending.
    """
    steps = _numbered(folder)
    return [
        step
        for step in steps
        if _is_whole(folder / str(step)) or not _marker(folder, step).exists()
    ]


def none_usable(folder: Path, failures: Mapping[int, str]) -> CheckpointError:
    """Makes the error to raise where none of the steps can be used, {step: reason}."""
    if not failures:
        aside = quarantine_folder(folder)
        hint = f"; {aside} holds what could not be trusted" if aside.is_dir() else ""
        return CheckpointError(f"there is no checkpoint in {folder}{hint}")
    tried = "\n".join(f"  step {bad}: {reason}" for bad, reason in failures.items())
    return CheckpointError(
        f"no usable checkpoint in {folder}; all are left there:\n{tried}\n"
        f"put a good one back from a copy, or begin anew in another folder",
        failures,
    )


def newest_first(
    folder: Path, listed: Callable[[Path], list[int]] | None = None
) -> Iterator[int]:
    """Yields the committed steps, newest first; lists them anew if the last one yielded
    is deleted by then.

    Who reads the checkpoints of a run that is training so comes to one that stays as
    long as it is read. No step is yielded twice.

    Args:
      listed: what lists the steps, ascending, instead of `list_steps`.
    """
    yielded: set[int] = set()
    for _ in range(_MOST_LISTINGS):
        for step in reversed((listed or list_steps)(folder)):
            if step not in yielded:
                yielded.add(step)
                yield step
                if is_deleted(folder, step):
                    break
        else:
            return


def steps_to_try(folder: Path) -> list[int]:
    """Returns the newest whole steps and the torn ones between them, ascending."""
    whole = list_steps(folder)
    oldest = whole[-_MOST_TRIED:][0] if whole else 0
    return [step for step in all_steps(folder) if step >= oldest]


def is_deleted(folder: Path, step: int) -> bool:
    """Tests whether a step was deleted, or is being deleted, by its run; not if it is
    damaged.
    """
    path = folder / str(step)
    return not _is_whole(path) and (_marker(folder, step).exists() or not path.is_dir())


def has_steps(folder: Path) -> bool:
    """Tests whether a run has saved here, however damaged that may be by now.

    Also if all that is left is in quarantine: a run must not begin anew where one has
    been.
    """
    aside = quarantine_folder(folder)
    return bool(all_steps(folder)) or (
        aside.is_dir() and any(path.is_dir() for path in aside.iterdir())
    )


def _numbered(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    names = [
        path.name
        for path in folder.iterdir()
        if _STEP.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(step for step in map(int, names) if step <= LAST_STEP)


def _is_whole(path: Path) -> bool:
    whole = (path / _METADATA_FILE).is_file() and (path / STATE_ITEM).is_dir()
    return whole and (path / MANIFEST).is_file()


def _marker(folder: Path, step: int) -> Path:
    return folder / f"{step}{_MARKER}"


def file_bytes(path: Path) -> int:
    """Returns the size of a file, here or in an object store."""
    status: Any = path.stat()
    return status.length if hasattr(status, "length") else status.st_size


def describe(
    step: int, arrays: Mapping[str, ArrayInfo], metadata: Mapping[str, Any]
) -> dict:
    """Returns the JSON document of a step, the inverse of `read_step`.

    Raises:
      TypeError, ValueError: `metadata` is not JSON (or holds NaN, which JSON does not
      have).
    """
    document = {
        run_format.KEY: run_format.FORMAT,
        "step": step,
        "arrays": {
            name: {"dtype": info.dtype, "shape": list(info.shape)}
            for name, info in arrays.items()
        },
        "run": dict(metadata),
    }
    json.dumps(document, allow_nan=False)
    return document


def read_step(folder: Path, step: int) -> StepInfo:
    """Reads what the checkpoint of `step` says about itself.

    Raises:
      CheckpointError: the step is absent, torn, of an unknown format or not what it
        claims to be.
    """
    path = present_path(folder, step)
    if not _is_whole(path):
        raise CheckpointError(
            f"{path} lacks {_METADATA_FILE}, {STATE_ITEM}/ or {MANIFEST}"
        )
    file = path / _METADATA_FILE
    try:
        document = read_json(file, dict)
        version = document[run_format.KEY], document["step"]
        arrays = {
            name: ArrayInfo(
                tuple(
                    of_kind(size, int, name)
                    for size in of_kind(entry["shape"], list, name)
                ),
                of_kind(entry["dtype"], str, name),
            )
            for name, entry in document["arrays"].items()
        }
        metadata = of_kind(document["run"], dict, "run")
        for group in _GROUPS & metadata.keys():
            of_kind(metadata[group], dict, group)
        says = metadata["progress"]["step"] if "progress" in metadata else step
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not readable: {named(error)}") from error
    if version != (run_format.FORMAT, step):
        raise CheckpointError(
            f"{file} says format, step = {version}; required: {(run_format.FORMAT, step)}"
        )
    if says != step:
        raise CheckpointError(
            f"its run had made {says} steps, not {step}: another step's content"
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
    """Chooses which of `steps` to delete once `newest` has been committed.

    Kept are `newest` and the `keep_last - 1` before it, multiples of `keep_every` (0 =
    none), the last of `best` that is there (the save of one may have failed), and all
    steps after `newest`: those belong to a run that was rewound, and are not ours to
    delete.
    """
    past = sorted(step for step in steps if step < newest)
    recent = past[-(keep_last - 1) :] if keep_last > 1 else []
    stays = {*recent, *[step for step in best if step in steps][-1:]}
    return [
        step
        for step in past
        if step not in stays and not (keep_every and step % keep_every == 0)
    ]


def begin_save(folder: Path, step: int) -> None:
    """Mark `step` as being written; what is there without the marker was once
    finished.
    """
    _marker(folder, step).write_text("")  # no bytes, so that it fits on a full disk


def end_save(folder: Path, step: int) -> None:
    """Take the mark of `begin_save` away, once the manifest is written."""
    _marker(folder, step).unlink()


def remove_step(folder: Path, step: int) -> None:
    """Delete the checkpoint of `step`; should this be interrupted, `remove_leftovers`
    goes on.
    """
    begin_save(folder, step)
    (folder / str(step) / MANIFEST).unlink()
    _remove_tree(folder / str(step))
    end_save(folder, step)


def remove_leftovers(folder: Path) -> None:
    """Delete what dead saves and deletions left; other files stay.

    Call it only while no save into `folder` runs, in any process.
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
    # When one file of a save fails, writers of the others go on for a moment and add
    # files. What they still manage to leave is deleted before the next save.
    for _ in range(10):
        with contextlib.suppress(OSError):
            _remove_tree(path)
        if not path.exists():
            return
        time.sleep(0.1)


def _remove_tree(path: Path) -> None:
    if isinstance(path, Path):
        shutil.rmtree(path)
    else:
        path.rmtree()


def quarantine(folder: Path, step: int, reason: str, *, undone: bool = False) -> None:
    """Move what is at `step`'s place to the quarantine folder, with the reason.

    Args:
      undone: whether it is sound, but the run has gone back behind it.

    Raises:
      OSError: it cannot be moved.
    """
    aside = quarantine_folder(folder)
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
    document |= {"undone": True} if undone else {}
    if isinstance(source, Path):
        # also to another disk; first, as a full one takes no note
        shutil.move(source, target)
    atomic.write_text(note, json.dumps(document, indent=1) + "\n", durable=True)
    if not isinstance(source, Path):
        # last: in an object store the note is what makes the folder be
        source.rename(target)


def undone_manifests(folder: Path, step: int) -> list[bytes]:
    """Returns the manifests that `step` had each time when the run went back
    behind it.
    """
    found = []
    for note in quarantine_folder(folder).glob(f"{step}*.json"):
        with contextlib.suppress(OSError, Malformed):
            document = read_json(note, dict)
            if document.get("undone") is True and document.get("step") == step:
                found.append(read_bytes(note.with_suffix("") / MANIFEST))
    return found
