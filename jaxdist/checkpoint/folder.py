"""The folder of a run's checkpoints as plain files: which steps there are, what each one says.

    <folder>/<step>/state/...            the arrays, written by Orbax (OCDBT, zarr)
    <folder>/<step>/metadata/metadata    JSON: format, step, arrays {name: dtype, shape}, run {...}
    <folder>/<step>.orbax-checkpoint-tmp a save that has not been committed (yet)

A step is committed by one rename, so both items appear together or not at all. Nothing here needs
jax, Orbax or a device.
"""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

FORMAT = 1  # raised when names or files change so that older code could not read them
STATE_ITEM = "state"
METADATA_ITEM = "metadata"
_METADATA_FILE = Path(METADATA_ITEM) / "metadata"
# Only what Orbax (or `remove_step`) leaves for steps of ours: a user's own files stay.
_LEFTOVER = re.compile(r"\d+(\.deleted)?\.orbax-checkpoint-tmp")

_REMOVE_TRIES, _REMOVE_PAUSE_S = 10, 0.1


EXIT_NO_CHECKPOINT = 77  # of commands that need a checkpoint where no usable one is


class CheckpointError(Exception):
    """A checkpoint cannot be read or written; `steps` holds {step: reason} where several failed."""

    def __init__(self, message: str, steps: Mapping[int, str] | None = None):
        super().__init__(message)
        self.steps = dict(steps or {})


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape and dtype name of one stored array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a committed step says about itself: its arrays by canonical name, the run's metadata."""

    step: int
    arrays: dict[str, ArrayInfo]
    metadata: dict[str, Any]


def step_path(folder: Path, step: int) -> Path:
    """Returns where the checkpoint of `step` is or would be."""
    return folder / str(step)


def list_steps(folder: Path) -> list[int]:
    """Returns the committed steps, ascending; [] if the folder does not exist.

    Only the presence of both items is looked at, not their content.
    """
    return [step for step in _numbered(folder) if _is_whole(step_path(folder, step))]


def torn_steps(folder: Path) -> list[int]:
    """Returns the step folders that lack an item (damaged by hand or by the disk), ascending."""
    return [step for step in _numbered(folder) if not _is_whole(step_path(folder, step))]


def _numbered(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def _is_whole(path: Path) -> bool:
    return (path / _METADATA_FILE).is_file() and (path / STATE_ITEM).is_dir()


def describe(step: int, arrays: Mapping[str, ArrayInfo], metadata: Mapping[str, Any]) -> dict:
    """Returns the JSON document of a step, the inverse of `read_step`.

    Raises:
      TypeError, ValueError: `metadata` is not JSON (or holds NaN, which JSON does not have).
    """
    document = {
        "format": FORMAT,
        "step": step,
        "arrays": {name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in arrays.items()},
        "run": dict(metadata),
    }
    json.dumps(document, allow_nan=False)
    return document


def read_step(folder: Path, step: int) -> StepInfo:
    """Returns what the checkpoint of `step` says about itself.

    Raises:
      CheckpointError: the step is absent, torn, of an unknown format or not what it claims to be.
    """
    path = step_path(folder, step)
    if not path.is_dir():
        there = ", ".join(map(str, list_steps(folder))) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; steps: {there}")
    if not _is_whole(path):
        raise CheckpointError(f"{path} is incomplete: {_METADATA_FILE} or {STATE_ITEM}/ is missing")
    try:
        document = json.loads((path / _METADATA_FILE).read_text(encoding="utf-8"))
        found = document["format"], document["step"]
        arrays = {
            name: ArrayInfo(tuple(entry["shape"]), entry["dtype"])
            for name, entry in document["arrays"].items()
        }
        metadata = dict(document["run"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / _METADATA_FILE} is not readable: {error!r}") from error
    if found != (FORMAT, step):
        raise CheckpointError(
            f"{path / _METADATA_FILE} says format, step = {found}; required: {(FORMAT, step)}"
        )
    return StepInfo(step, arrays, metadata)


def expired(steps: Collection[int], *, newest: int, keep_last: int, keep_every: int) -> list[int]:
    """Returns which of `steps` to delete once `newest` has been committed.

    Kept are `newest` and the `keep_last - 1` before it, multiples of `keep_every` (0 = none), and
    all steps after `newest`: those belong to a run that was rewound, and are not ours to delete.
    """
    past = sorted(step for step in steps if step < newest)
    recent = past[-(keep_last - 1) :] if keep_last > 1 else []
    return [step for step in past if step not in recent and not (keep_every and step % keep_every == 0)]


def remove_step(folder: Path, step: int) -> None:
    """Delete the checkpoint of `step`: renamed first, so that no half-deleted step is ever seen."""
    doomed = folder / f"{step}.deleted.orbax-checkpoint-tmp"
    step_path(folder, step).rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> list[str]:
    """Delete what dead saves and deletions left, and return the names; other files stay.

    Call it only while no save into `folder` runs, in any process.
    """
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    for name in names:
        _remove_busy(folder / name)
    return names


def _remove_busy(path: Path) -> None:
    # When one file of a save fails, writers of the others go on for a moment and add files. What
    # they still manage to leave is deleted before the next save.
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(_REMOVE_PAUSE_S)


def set_aside(folder: Path, step: int) -> Path:
    """Rename the unusable checkpoint of `step` to `<step>.unusable[-n]` and return the new path."""
    target, number = folder / f"{step}.unusable", 1
    while target.exists():
        number += 1
        target = folder / f"{step}.unusable-{number}"
    step_path(folder, step).rename(target)
    return target
