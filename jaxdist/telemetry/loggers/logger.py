"""Protocol of loggers, and the lookup of a logger by its name.

A logger is a view of a run: the run reads nothing back. No fault of a logger disturbs
the run (`background.BackgroundLogger`).
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from jaxdist.config import extras, suggest
from jaxdist.config.late_imports import LATE_IMPORTS

# group of entry points: a package adds a logger by NAME = "package.module:Class"
GROUP = "jaxdist.loggers"
CLOSE_S = 10.0  # seconds that the end of a run waits for a logger

# loggers of jaxdist, each with an optional package: (module, class) by name
OPTIONAL = {
    "tensorboard": ("jaxdist.telemetry.loggers.tensorboard", "TensorBoardLogger"),
    "trackio": ("jaxdist.telemetry.loggers.trackio", "TrackioLogger"),
    "wandb": ("jaxdist.telemetry.loggers.wandb", "WandbLogger"),
}


@dataclass(frozen=True)
class LoggedRun:
    """Description of a run for the constructor of a logger."""

    workdir: Path
    config: Mapping[str, Any]  # values by key, such as "train.steps"
    info: Mapping[str, Any]  # content of run.json: versions, devices, mesh, sizes
    first_step: int  # the restored step; 0 for a new run

    @property
    def name(self) -> str:
        """Returns the name of the workdir."""
        return self.workdir.resolve().name

    @property
    def identity(self) -> str | None:
        """Returns the run's identity of letters and digits, the same at each start."""
        identity = self.info.get("run")
        if isinstance(identity, str) and re.fullmatch(r"\w{1,64}", identity):
            return identity
        return None


class Logger(Protocol):
    """View of a run.

    Calls come in order from one thread. They may block or raise.
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


def faults(names: Iterable[str]) -> Iterator[str]:
    """Yields faults of loggers' names, without loading any logger."""
    for name in names:
        if name in OPTIONAL:
            module, _ = OPTIONAL[name]
            package = LATE_IMPORTS[module].package
            if find_spec(package) is None:
                command = extras.install_command(extras.EXTRAS[package])
                yield (
                    f"train.loggers={name}: the package {package} is not installed. "
                    f"Install it with: {command}"
                )
        elif ":" not in name and name not in _entry_points():
            known = [*OPTIONAL, *_entry_points()]
            yield (
                f"train.loggers={name}: no such logger;{suggest(name, known)} there are {', '.join(known)}, "
                f"and package.module:Class for one of your own"
            )


def find_known(name: str) -> Any:
    """Loads the class of a logger of jaxdist, or of an installed package.

    Raises:
      MissingExtra, ImportError, AttributeError: the class cannot be loaded.
    """
    if name in OPTIONAL:
        module, cls = OPTIONAL[name]
        return getattr(extras.load(module), cls)
    return _entry_points()[name].load()


@functools.cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}
