"""Contents of a run's workdir.

Anybody may have written the files, so unreadable parts are skipped. Needs no jax.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdist.config import EXIT_PREEMPTED, schema
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page.event_log import EventLog
from jaxdist.storage import lock, run_format, untrusted
from jaxdist.telemetry import metrics

# events that show the end of a life: the last of them counts
ENDS = ("start", "start_failed", "stop", "preempted", "peer_lost", "hang")
# seconds without a write after which a run on another machine counts as ended
_QUIET_S = 3 * run_lives.BEAT_S
_PROFILE = "profile/top_ops.json"
# types of fields of run.json
_INFO_TYPES: Mapping[str, type] = {
    "mesh": dict,
    "pipeline": dict,
    "sharding": list,
    "device_kind": str,
    "timeline_svg": str,
    "split_sequences": list,
}
# types of fields of an operation in a profile
_OPERATION_TYPES: Mapping[str, Any] = {
    "op": str,
    "share": int | float,
    "seconds": int | float,
    "count": int,
}
_MAX_NUMBER = 1e250  # multiplied by the factor of a unit it is still finite


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Contents of a workdir. The content of an absent file is empty."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # values by dotted key
    info: Mapping[str, Any] = field(default_factory=dict)  # content of run.json
    rows: metrics.MetricRows = metrics.MetricRows([], [])
    events: EventLog = field(default_factory=EventLog)
    lives: Sequence[run_lives.Life] = ()  # content of ledger.json
    operations: Sequence[Mapping[str, Any]] = ()  # rows of a profile
    # time at which the files were read, in seconds since 1970
    now: float = field(default_factory=time.time)

    @property
    def unit(self) -> str:
        """The unit of a batch: "tokens", or "samples" if the model has no tokens."""
        if self.info.get("unit") == "samples":
            return "samples"
        return "tokens"

    @property
    def last_row(self) -> metrics.Row:
        """The newest training row; {} if there is none."""
        if not self.rows.train:
            return {}
        return self.rows.train[-1]

    # --- its lives --------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Checks if a process trains the run.

        Such a process holds the lock. If the file system has no locks, it has written
        the ledger recently.
        """
        is_held = lock.is_held(self.folder / ".lock")
        if is_held is not None:
            return is_held
        life = self.last_life
        return life is not None and not life.ended and not self._is_quiet(life)

    @property
    def last_life(self) -> run_lives.Life | None:
        """Reads the newest life of the ledger; None if there is none."""
        if not self.lives:
            return None
        return self.lives[-1]

    @property
    def current_life(self) -> run_lives.Life | None:
        """Finds the life of the running process; None if it has not written one yet."""
        life = self.last_life
        if life is None or life.ended or not self.running:
            return None
        # If the lock is newer than the last write, the last life was killed. The
        # process that holds the lock has another life.
        is_older_than_lock = (self.lock_time or 0.0) > life.written
        if self._is_quiet(life) and is_older_than_lock:
            return None
        return life

    def _is_quiet(self, life: run_lives.Life) -> bool:
        return self.now - life.written >= _QUIET_S

    @property
    def lock_time(self) -> float | None:
        """Finds the time when the lock was taken, in seconds since 1970, or None."""
        try:
            return os.stat(self.folder / ".lock").st_mtime
        except OSError:
            return None

    @functools.cached_property
    def account(self) -> run_lives.Account:
        """Sums the lives. The time of a running process counts up to `now`.

        All goodputs and times since the start that are shown are of this account.
        """
        return run_lives.account(self.lives, self.now if self.current_life else None)

    @property
    def started(self) -> float | None:
        """Finds the time when the run first started, in seconds since 1970, or None."""
        times = [life.began for life in self.lives[:1]]
        event = self.events.first_of("start")
        if event is not None:
            times.append(event["time"])
        return min(times, default=None)

    @property
    def outcome(self) -> tuple[str, str | None]:
        """Finds the state of a run that no process trains, and its reason.

        States are "finished", "stopped", "failed", "preempted", "died" and "not
        started".
        """
        end = self.events.last_of(*ENDS)
        if end is None:
            return self._outcome_before_steps()
        name = end["event"]
        if name == "stop":
            return _stopped(end)
        if name == "start_failed":
            return "failed", f"before its first step: {end.get('error')}"
        if name == "start":
            return "died", "its process ended without a word"
        if name == "preempted":
            return "preempted", None
        return "failed", name

    def _outcome_before_steps(self) -> tuple[str, str | None]:
        """Finds the state of a run whose last start came to no event."""
        if not self.lives:
            return "not started", None
        last = self.lives[-1]
        if not last.ended:
            return "died", "before its first step"
        if last.exit_code == EXIT_PREEMPTED:
            return "preempted", "before its first step"
        return "failed", f"before its first step, exit code {last.exit_code}"


def _stopped(stop: metrics.Row) -> tuple[str, str | None]:
    """Finds the state after the event `stop`, and its reason."""
    reason = stop.get("reason")
    text = None if reason is None else str(reason)
    if "error" in stop or reason == "nonfinite":
        return "failed", text
    if reason == "finished":
        return "finished", None
    return "stopped", text


def state_text(state: str, reason: str | None) -> str:
    """Formats a state with its reason: "stopped: enough", or "finished"."""
    if not reason:
        return state
    return f"{state}: {reason}"


class WorkdirReader:
    """Reader of the small files of a workdir. It lists unreadable parts in `faults`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []

    def read(self, rows: metrics.MetricRows, events: EventLog) -> dict[str, Any]:
        """Reads the fields of `RunFiles`.

        Args:
          rows: the rows of metrics.jsonl.
          events: the events of events.jsonl.
        """
        self.note_lines(metrics.METRICS_FILE, rows.unreadable)
        self.note_lines(metrics.EVENTS_FILE, events.unreadable)
        return {
            "folder": self.folder,
            "config": schema.flatten(self.document(run_format.CONFIG)),
            "info": self.info(),
            "rows": rows,
            "events": events,
            "lives": run_lives.read_lives(self.folder),
            "operations": self.operations(),
        }

    def info(self) -> dict[str, Any]:
        """Reads run.json; fields of a wrong type are dropped."""
        info = self.document(run_format.RUN)
        for name, kind in _INFO_TYPES.items():
            if name in info and not isinstance(info[name], kind):
                value = info.pop(name)
                self.faults.append(f"{run_format.RUN}: {name} is {_type_of(value)}")
        return info

    def operations(self) -> list[dict[str, Any]]:
        """Reads the operations of a profile, longest first; [] without a profile."""
        stored = self.document(_PROFILE).get("ops", [])
        if not isinstance(stored, list):
            self.faults.append(f"{_PROFILE}: ops is {_type_of(stored)}")
            return []
        operations = [row for row in stored if _is_operation(row)]
        num_bad = len(stored) - len(operations)
        if num_bad:
            self.faults.append(
                f"{_PROFILE}: {num_bad} of {len(stored)} rows could not be read"
            )
        return operations

    def text(self, name: str) -> str:
        """Reads a text file; "" if it is absent or unreadable."""
        with self._collecting_faults(name):
            return untrusted.read_bytes(self.folder / name).decode(errors="replace")
        return ""

    def document(self, name: str) -> dict[str, Any]:
        """Reads a JSON object of this version; {} if it is absent or unreadable."""
        with self._collecting_faults(name):
            stored = untrusted.read_json(self.folder / name, dict)
            return run_format.unmarked(stored, name)
        return {}

    def note_lines(self, name: str, count: int) -> None:
        """Adds a fault for the number of unreadable lines of a file, unless it is 0."""
        if count == 1:
            self.faults.append(f"{name}: 1 line could not be read")
        elif count:
            self.faults.append(f"{name}: {count} lines could not be read")

    @contextlib.contextmanager
    def _collecting_faults(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass
        except run_format.OtherVersion as error:
            self.faults.append(str(error))
        except untrusted.Malformed as error:
            self.faults.append(f"{name}: {error}")


def number(value: object) -> float | None:
    """Converts a value of a file to a float; None if it is no number.

    A number that is too large for a chart becomes infinite.
    """
    if not isinstance(value, int | float):
        return None
    if abs(value) > _MAX_NUMBER:
        return math.copysign(math.inf, value)
    return float(value)


def finite(value: object) -> float | None:
    """Converts a value of a file to a float; None if it is no finite number."""
    converted = number(value)
    if converted is None or not math.isfinite(converted):
        return None
    return converted


def fields(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reads a JSON object within another; {} if it is absent or no object."""
    value = document.get(name)
    if not isinstance(value, dict):
        return {}
    return value


def _is_operation(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    return all(
        isinstance(row.get(name), kind) for name, kind in _OPERATION_TYPES.items()
    )


def _type_of(value: object) -> str:
    return type(value).__name__
