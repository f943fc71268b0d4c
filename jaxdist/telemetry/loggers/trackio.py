"""Trackio; wraps trackio (extra `trackio`), loaded by extras.

Runs lie in a local database (TRACKIO_DIR), which `trackio show` draws; TRACKIO_PROJECT
names the project.
"""

import os
from collections.abc import Mapping

import trackio

from jaxdist.telemetry.loggers.logger import LoggedRun, event_text


class TrackioLogger:
    """A run of Trackio; a resumed run goes on as the same one."""

    def __init__(self, run: LoggedRun) -> None:
        """Begins, or goes on with, the run that has the name and the identity
        of ours.
        """
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
        """Adds the values; None is left out."""
        self._run.log(
            {name: x for name, x in values.items() if x is not None}, step=step
        )

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event as text."""
        self._run.log({f"event/{name}": event_text(name, fields)}, step=step or 0)

    def close(self) -> None:
        """Writes what is left, and ends the run."""
        self._run.finish()
