"""Loggers of jaxdist and of installed packages, by name."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from jaxdist.config import extras, suggest
from jaxdist.config.late_imports import LATE_IMPORTS

# group of entry points: a package adds a logger by NAME = "package.module:Class"
GROUP = "jaxdist.loggers"


@dataclass(frozen=True)
class Known:
    """Logger of jaxdist."""

    load: Callable[[], Any]  # returns the class
    package: str = ""  # optional package that it needs; "" = none


def _late(module: str, name: str) -> Known:
    """Describes a logger whose module is imported on first use (`LATE_IMPORTS`)."""
    return Known(
        load=lambda: getattr(extras.load(module), name),
        package=LATE_IMPORTS[module].package,
    )


# One without an optional package is `Known(lambda: SomeLogger)`.
LOGGERS = {
    "tensorboard": _late("jaxdist.telemetry.loggers.tensorboard", "TensorBoardLogger"),
    "trackio": _late("jaxdist.telemetry.loggers.trackio", "TrackioLogger"),
    "wandb": _late("jaxdist.telemetry.loggers.wandb", "WandbLogger"),
}


def faults(names: Iterable[str]) -> Iterator[str]:
    """Yields faults of loggers' names, without loading any logger."""
    for name in names:
        if name in LOGGERS:
            package = LOGGERS[name].package
            if package and find_spec(package) is None:
                yield (
                    f"train.loggers={name}: the package {package} is not installed. "
                    f"Install it with: {extras.install_package(package)}"
                )
        elif ":" not in name and name not in _entry_points():
            known = [*LOGGERS, *_entry_points()]
            yield (
                f"train.loggers={name}: no such logger;{suggest(name, known)} there are {', '.join(known)}, "
                f"and package.module:Class for one of your own"
            )


def find_known(name: str) -> Any:
    """Loads the class of a logger of jaxdist, or of an installed package.

    Raises:
      MissingExtra, ImportError, AttributeError: the class cannot be loaded.
    """
    if name in LOGGERS:
        return LOGGERS[name].load()
    return _entry_points()[name].load()


@functools.cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}
