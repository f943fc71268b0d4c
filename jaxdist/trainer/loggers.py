"""The loggers of a run: refused before anything compiles, or started with it."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.models import registry
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.loggers import logger
from jaxdist.telemetry.loggers.background import BackgroundLogger
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run
from jaxdist.trainer.run_config import RunConfig, TrainConfig

KEY = "train.loggers"

Make = Callable[[logger.LoggedRun], logger.Logger]


class Loggers(Callback):
    """Hands rows and events to the loggers of `train.loggers`."""

    lead_only = True
    keys = (KEY,)

    def __init__(self) -> None:
        self._classes: dict[str, Make] = {}
        self._run: Run | None = None

    def on_check(self, config: RunConfig) -> None:
        """Loads the loggers' classes; executes the modules that they name.

        Raises:
          ConfigError: there is no such logger, or it cannot be loaded.
        """
        self._classes = find(config.train)

    def on_start(self, run: Run) -> None:
        """Takes the run's folder."""
        self._run = run

    def on_phase(self, phase: str, step: int) -> None:
        """Starts the loggers before the first step: they know then which it is."""
        if phase != "data" or self._run is None or not self._classes:
            return
        run = self._run
        for view in start(
            self._classes,
            run.folder,
            run.config,
            first_step=run.progress.step,
            report=run.writer.event,
        ):
            run.writer.attach(view)
        self._classes = {}


def named_classes(config: RunConfig) -> list[str]:
    """Returns the loggers of a config that are code it names by module or file."""
    return [name for name in config.train.loggers if ":" in name]


def find(config: TrainConfig) -> dict[str, Make]:
    """Loads the class of each logger; executes the modules that they name.

    Raises:
      ConfigError: there is no such logger, or it cannot be loaded.
    """
    names = tuple(dict.fromkeys(config.loggers))
    faults = list(logger.faults(names))
    if faults:
        raise ConfigError(faults)
    return {name: _find(name) for name in names}


def _find(name: str) -> Make:
    try:
        if ":" not in name:
            return logger.find_known(name)
        own: Any = registry.find_class(name, object, "class", key=KEY)
        return own
    except ConfigError:
        raise
    except Exception as error:  # of any module's code
        raise ConfigError(
            f"{KEY}={name}: cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def start(
    classes: Mapping[str, Make],
    folder: Path,
    config: RunConfig,
    *,
    first_step: int,
    report: Callable[..., None],
) -> list[BackgroundLogger]:
    """Returns the loggers, each being made in its own thread.

    Args:
      first_step: updates finished before.
      report: writes an event; told of the first fault of each logger.
    """
    if not classes:
        return []
    file = folder / workdir.RUN
    info: dict[str, Any] = run_format.unmarked(untrusted.read_json(file, dict), file)
    flat = schema.flatten(schema.to_config_dict(config))
    run = logger.LoggedRun(folder, flat, info, first_step)
    return [
        BackgroundLogger(
            name, functools.partial(make, run), report, close_s=logger.CLOSE_S
        )
        for name, make in classes.items()
    ]
