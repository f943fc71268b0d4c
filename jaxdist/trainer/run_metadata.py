"""The metadata of a run in its checkpoints, and functions that read it.

`saver.checkpoint_metadata` writes the metadata.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.checkpoint import folders
from jaxdist.config import ConfigError
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.step.state import State
from jaxdist.storage import run_format
from jaxdist.storage.untrusted import Malformed, of_kind, read_json
from jaxdist.trainer.health import SKIPPED_FILE

# keys of the metadata
PROGRESS = folders.PROGRESS  # the fields of `Progress`
# Fingerprints of the data, by the key DATA, and of the config, by CONFIG. Nothing reads
# that of the config: it tells people whether two checkpoints have equal configs.
FINGERPRINTS = folders.FINGERPRINTS
DATA = "data"
CONFIG = folders.CONFIG  # the run's whole config; also a key of FINGERPRINTS
SCHEDULE = "schedule"  # steps of the learning-rate schedule; also a key of run.json
SKIPPED = "skipped_data"  # windows of batches that the run has skipped
CALLBACKS = "callbacks"  # states of callbacks by name
READER = "data_state"  # state of a caller's iterator

_MAX_BATCHES = 2**62


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0  # number of updates
    tokens_seen: int = 0  # targets with weight > 0
    elapsed_s: float = 0.0  # training time in seconds, over all restarts
    # seconds that count for train.max_minutes, over all restarts (`time_limit`)
    wall_s: float = 0.0

    def go_to(self, other: "Progress") -> None:
        """Goes back to the step and tokens of a checkpoint. The time stays."""
        self.step = other.step
        self.tokens_seen = other.tokens_seen


class InitialState(NamedTuple):
    """The state of a new run."""

    state: State
    # metadata of the checkpoint that gave its weights; {} = they are of no run
    metadata: Mapping[str, Any] = {}


def progress_of(metadata: Mapping[str, Any]) -> Progress:
    """Reads the progress of a checkpoint's run.

    Raises:
      Malformed: the metadata has no valid progress.
    """
    stored = of_kind(metadata.get(PROGRESS), dict, PROGRESS)
    kinds = {item.name: {int, type(item.default)} for item in fields(Progress)}
    for name, value in stored.items():
        if type(value) not in kinds.get(name, ()) or not 0 <= value < math.inf:
            raise Malformed(f"{PROGRESS}.{name:.40} is {value!r:.40}")
    return Progress(**stored)


def schedule_of(metadata: Mapping[str, Any]) -> ScheduleSteps:
    """Reads the learning-rate schedule of a checkpoint's run.

    Raises:
      ConfigError: the schedule is damaged.
    """
    try:
        return ScheduleSteps.from_json(metadata.get(SCHEDULE))
    except Malformed as error:
        raise ConfigError(
            f"the checkpoint's schedule is damaged ({error}); put it back"
        ) from error


def check(metadata: Mapping[str, Any]) -> None:
    """Checks that a checkpoint belongs to a run in training.

    Raises:
      Malformed: the metadata lacks a part, or a part is damaged.
    """
    progress_of(metadata)
    data = metadata.get(FINGERPRINTS, {}).get(DATA)
    of_kind(data, str, "the data's fingerprint")
    check_windows(metadata.get(SKIPPED, []))
    of_kind(metadata.get(CALLBACKS, {}), dict, CALLBACKS)


def check_windows(windows: object) -> list[list[int]]:
    """Checks a list of windows of batches, each [first, end), and returns it.

    Raises:
      Malformed: the value is no such list.
    """
    checked: list[list[int]] = of_kind(windows, list, "windows")
    for window in checked:
        if not _is_window(window):
            raise Malformed(f"{window!r:.40} is no window [first, end) of batches")
    return checked


def _is_window(value: Any) -> bool:
    if not isinstance(value, list) or [type(n) for n in value] != [int, int]:
        return False
    first: int = value[0]
    end: int = value[1]
    return 0 <= first <= end < _MAX_BATCHES


def skipped_windows(folder: Path, metadata: Mapping[str, Any]) -> list[list[int]]:
    """Reads the windows of batches that the run of a workdir skips.

    The file of the workdir also has windows that were added after the checkpoint. If
    there is no file, the checkpoint was moved here, and its own list counts.

    Raises:
      ConfigError: the file is damaged, or another version of jaxdist wrote it.
    """
    file = folder / SKIPPED_FILE
    try:
        document = run_format.unmarked(read_json(file, dict), file)
        return check_windows(document.get("windows"))
    except FileNotFoundError:
        windows: list[list[int]] = metadata.get(SKIPPED, [])
        return windows
    except Malformed as error:
        raise ConfigError(f"{file} is damaged ({error}); put it back") from error
