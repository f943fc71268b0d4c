"""What a logger is: the protocol, the loggers that come with jaxdist, and how a name
becomes a class.

A logger is a view of a run: nothing reads it back, and whatever it does, the run does
not notice (`background.BackgroundLogger`).
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

GROUP = (
    # of the entry points by which a package adds a logger: NAME =
    # "package.module:Class"
    "jaxdist.loggers"
)
CLOSE_S = 10.0  # that the end of a run waits for a logger

# Name -> its module and its class.
BUILT_IN = {
    "tensorboard": ("jaxdist.telemetry.loggers.tensorboard", "TensorBoardLogger"),
    "trackio": ("jaxdist.telemetry.loggers.trackio", "TrackioLogger"),
    "wandb": ("jaxdist.telemetry.loggers.wandb", "WandbLogger"),
}


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told about its run as it is made."""

    workdir: Path
    config: Mapping[str, Any]  # all keys, "train.steps" and so on
    info: Mapping[str, Any]  # what run.json says: versions, devices, mesh, sizes
    first_step: int  # updates finished before: the restored step, 0 for a new run

    @property
    def name(self) -> str:
        return self.workdir.resolve().name

    @property
    def identity(self) -> str | None:
        """What the run has kept since its first start, of letters and digits."""
        identity = self.info.get("run")
        if isinstance(identity, str) and re.fullmatch(r"\w{1,64}", identity):
            return identity
        return None


class Logger(Protocol):
    """A view of a run. Its calls come in order, from one thread, which it may block or
    raise in.
    """

    def __init__(self, run: LoggedRun) -> None: ...

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Takes a row of metrics.jsonl: numbers (NaN and infinities, too), None and
        text by name.
        """

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Takes an event of events.jsonl."""

    def close(self) -> None:
        """Writes what is left: the run has ended."""


def event_text(name: str, fields: Mapping[str, object]) -> str:
    """Formats an event for loggers that show text."""
    return ", ".join(f"{key}={value}" for key, value in fields.items()) or name


def faults(names: Iterable[str]) -> Iterator[str]:
    """Yields the faults of names that can be found without executing any code."""
    for name in names:
        if name in BUILT_IN:
            module, _ = BUILT_IN[name]
            package = LATE_IMPORTS[module].package
            if find_spec(package) is None:
                cure = extras.install_command(extras.EXTRAS[package])
                yield f"train.loggers={name} needs {package}: {cure}"
        elif ":" not in name and name not in _entry_points():
            known = [*BUILT_IN, *_entry_points()]
            yield (
                f"train.loggers={name}: no such logger;{suggest(name, known)} there are {', '.join(known)}, "
                f"and package.module:Class for one of your own"
            )


def find_known(name: str) -> Any:
    """Loads the class of a logger that jaxdist or an installed package has by this
    name.

    Raises:
      MissingExtra, ImportError, AttributeError: it cannot be loaded.
    """
    if name in BUILT_IN:
        module, cls = BUILT_IN[name]
        return getattr(extras.load(module), cls)
    return _entry_points()[name].load()


@functools.cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}
