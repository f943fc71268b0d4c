"""Protocol of loggers; `known` finds a logger by its name.

A logger is a view of a run: the run reads nothing back. No fault of a logger disturbs
the run (`background.BackgroundLogger`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CLOSE_S = 10.0  # seconds that the end of a run waits for a logger


@dataclass(frozen=True)
class LoggedRun:
    """Description of a run for the constructor of a logger."""

    workdir: Path
    config: Mapping[str, Any]  # values by key, such as "train.steps"
    info: Mapping[str, Any]  # content of run.json: versions, devices, mesh, sizes
    first_step: int  # the restored step; 0 for a new run

    @property
    def name(self) -> str:
        """The name of the workdir."""
        return self.workdir.resolve().name

    @property
    def identity(self) -> str | None:
        """The run's identity of letters and digits, the same at each start."""
        identity = self.info.get("run")
        if isinstance(identity, str) and re.fullmatch(r"\w{1,64}", identity):
            return identity
        return None


class Logger(Protocol):
    """View of a run.

    One thread makes the logger and calls it, in order; it is not the main thread. Calls
    may block or raise.
    """

    def __init__(self, run: LoggedRun) -> None: ...

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Logs a row of metrics.jsonl.

        Steps are written again after a resume or a rollback. The last row of a step
        counts.

        Args:
          step: number of the step.
          values: numbers (also NaN and infinities), None or text, by name.
        """

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Logs an event of events.jsonl. It may do nothing."""

    def close(self) -> None:
        """Flushes everything at the end of the run."""


def event_text(name: str, fields: Mapping[str, object]) -> str:
    """Formats an event for loggers that show text."""
    return ", ".join(f"{key}={value}" for key, value in fields.items()) or name
