"""The loggers of a run, which are loaded before compilation and started with the run."""

import functools
from collections.abc import Callable
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.models import registry
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.loggers import known, logger
from jaxdist.telemetry.loggers.background import BackgroundLogger
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run
from jaxdist.trainer.run_config import RunConfig, values_of

KEY = "train.loggers"

Make = Callable[[logger.LoggedRun], logger.Logger]


class Loggers(Callback):
    """A callback that starts the loggers of `train.loggers`."""

    lead_only = True
    keys = (KEY,)

    def __init__(self) -> None:
        self._classes: dict[str, Make] = {}
        self._run: Run | None = None

    def on_check(self, config: RunConfig) -> None:
        """Loads the loggers' classes, which executes their modules.

        Raises:
          ConfigError: loggers do not exist or cannot be loaded. It names all of them.
        """
        names = tuple(dict.fromkeys(config.train.loggers))
        faults = list(known.faults(names))
        if faults:
            raise ConfigError(faults)
        for name in names:
            try:
                self._classes[name] = _find(name)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)

    def on_start(self, run: Run) -> None:
        """Keeps the run."""
        self._run = run

    def on_phase(self, phase: str, step: int) -> None:
        """Starts the loggers before the first step, whose number is known by then."""
        if phase != "data" or self._run is None or not self._classes:
            return
        run = self._run
        logged = _logged_run(run)
        # Each logger makes itself in a thread of its own. All are made before the first
        # one is attached.
        background_loggers = [
            BackgroundLogger(
                name,
                functools.partial(make, logged),
                run.writer.event,
                close_s=logger.CLOSE_S,
            )
            for name, make in self._classes.items()
        ]
        for background_logger in background_loggers:
            run.writer.attach(background_logger)
        self._classes = {}


def _logged_run(run: Run) -> logger.LoggedRun:
    """Describes a run to its loggers."""
    file = run.folder / workdir.RUN
    info: dict[str, Any] = run_format.unmarked(untrusted.read_json(file, dict), file)
    flat = values_of(run.config)
    return logger.LoggedRun(run.folder, flat, info, run.progress.step)


def named_classes(config: RunConfig) -> list[str]:
    """Lists the loggers of a config that name a class of a module or file."""
    return [name for name in config.train.loggers if ":" in name]


def _find(name: str) -> Make:
    """Loads the class of a logger, which executes its module.

    Raises:
      ConfigError: the class does not exist or cannot be loaded.
    """
    try:
        if ":" in name:
            # The class need not derive from Logger.
            found: Any = registry.find_class(name, object, "class", key=KEY)
        else:
            found = known.find_known(name)
    except ConfigError:
        raise
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"{KEY}={name}: cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    make: Make = found
    return make
