"""The loggers of a run: refused before anything compiles, or started with it."""

import functools
from collections.abc import Callable
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.models import registry
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.loggers import logger
from jaxdist.telemetry.loggers.background import BackgroundLogger
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run
from jaxdist.trainer.run_config import RunConfig

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
        names = tuple(dict.fromkeys(config.train.loggers))
        faults = list(logger.faults(names))
        if faults:
            raise ConfigError(faults)
        self._classes = {name: _find(name) for name in names}

    def on_start(self, run: Run) -> None:
        """Takes the run's folder."""
        self._run = run

    def on_phase(self, phase: str, step: int) -> None:
        """Starts the loggers before the first step: they know then which it is."""
        if phase != "data" or self._run is None or not self._classes:
            return
        run = self._run
        logged = _logged_run(run)
        # each is made in a thread of its own
        views = [
            BackgroundLogger(
                name,
                functools.partial(make, logged),
                run.writer.event,
                close_s=logger.CLOSE_S,
            )
            for name, make in self._classes.items()
        ]
        for view in views:
            run.writer.attach(view)
        self._classes = {}


def _logged_run(run: Run) -> logger.LoggedRun:
    """Describes a run to its loggers."""
    file = run.folder / workdir.RUN
    info: dict[str, Any] = run_format.unmarked(untrusted.read_json(file, dict), file)
    flat = schema.flatten(schema.to_config_dict(run.config))
    return logger.LoggedRun(run.folder, flat, info, run.progress.step)


def named_classes(config: RunConfig) -> list[str]:
    """Returns the loggers of a config that are code it names by module or file."""
    return [name for name in config.train.loggers if ":" in name]


def _find(name: str) -> Make:
    """Loads the class of a logger; executes the module that it names.

    Raises:
      ConfigError: there is no such class, or it cannot be loaded.
    """
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
