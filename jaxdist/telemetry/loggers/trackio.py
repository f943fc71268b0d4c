"""Logger for Trackio (extra `trackio`).

Runs are stored in a local database (TRACKIO_DIR), which `trackio show` draws.
TRACKIO_PROJECT names the project.
"""

import os
from collections.abc import Mapping

import trackio

from jaxdist.telemetry.loggers.logger import LoggedRun, event_text


class TrackioLogger:
    """Logger of a run of Trackio; a resumed run of jaxdist resumes the same run."""

    def __init__(self, run: LoggedRun) -> None:
        """Starts or resumes the run of Trackio by the name and identity of `run`."""
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "jaxdist"),
            name="-".join(filter(None, (run.name, run.identity))),
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the values; None is skipped."""
        known = {name: value for name, value in values.items() if value is not None}
        self._run.log(known, step=step)

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event as text."""
        self._run.log({f"event/{name}": event_text(name, fields)}, step=step or 0)

    def close(self) -> None:
        """Flushes, and ends the run of Trackio."""
        self._run.finish()
