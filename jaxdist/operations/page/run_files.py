"""Contents of a run's workdir.

Anybody may have written the files, so unreadable parts are skipped. Needs no jax.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdist.config import schema
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page.event_log import EventLog
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry import metrics

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
