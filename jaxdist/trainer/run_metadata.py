"""What a checkpoint keeps of a run beside its arrays, and how it is read back.

`saver.checkpoint_metadata` writes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.storage.untrusted import Malformed, of_kind

CONFIG = "config"  # the run's whole config
SCHEDULE = "schedule"  # steps of the learning rate's schedule; also in run.json
SKIPPED = "skipped_data"  # windows of batches that were left out by then
CALLBACKS = "callbacks"  # what is kept of each callback, by name
READER = "data_state"  # the state of a caller's iterator

_MAX_BATCHES = 2**62


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0  # updates finished
    tokens_seen: int = 0  # targets with weight > 0
    elapsed_s: float = 0.0  # training time, over all restarts

    def go_to(self, other: "Progress") -> None:
        """Takes the step and tokens of an earlier checkpoint; time goes on."""
        self.step = other.step
        self.tokens_seen = other.tokens_seen


def progress_of(metadata: Mapping[str, Any]) -> Progress:
    """Reads how far the run of a checkpoint had come.

    Raises:
      Malformed: the metadata is not that of a run in training.
    """
    stored = of_kind(metadata.get("progress"), dict, "progress")
    kinds = {item.name: {int, type(item.default)} for item in fields(Progress)}
    for name, value in stored.items():
        if type(value) not in kinds.get(name, ()) or not 0 <= value < math.inf:
            raise Malformed(f"progress.{name:.40} is {value!r:.40}")
    return Progress(**stored)


def schedule_of(metadata: Mapping[str, Any]) -> ScheduleSteps:
    """Reads the schedule that a checkpoint was trained with.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return ScheduleSteps.from_json(metadata.get(SCHEDULE))
    except Malformed as error:
        raise ConfigError(
            f"the checkpoint's schedule is damaged ({error}); put it back"
        ) from error


def check(metadata: Mapping[str, Any]) -> None:
    """Checks that a checkpoint is one of a run in training.

    Raises:
      Malformed: it is not.
    """
    progress_of(metadata)
    data = metadata.get("fingerprints", {}).get("data")
    of_kind(data, str, "the data's fingerprint")
    check_windows(metadata.get(SKIPPED, []))
    of_kind(metadata.get(CALLBACKS, {}), dict, CALLBACKS)


def check_windows(windows: object) -> list[list[int]]:
    """Checks a list of windows, each [first, after the last] batch, and returns it.

    Raises:
      Malformed: it is no such list.
    """
    for window in of_kind(windows, list, "windows"):
        if not _is_window(window):
            raise Malformed(f"{window!r:.40} is no [first, end] of batches")
    return windows  # type: ignore[return-value]


def _is_window(value: Any) -> bool:
    whole = isinstance(value, list) and [type(n) for n in value] == [int, int]
    return whole and 0 <= value[0] <= value[1] < _MAX_BATCHES
