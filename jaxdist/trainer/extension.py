"""The schedule of a run that goes on: as its checkpoints say, extended where
`train.steps` was raised.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.optim import schedules
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.storage import run_format, untrusted
from jaxdist.trainer.run_config import RunConfig

SCHEDULE_KEY = "schedule"  # in run.json and in a checkpoint's metadata
CONFIG_KEY = "config"


class SettledSchedule(NamedTuple):
    """The schedule that a run trains with from now on."""

    steps: ScheduleSteps
    back_to: int | None  # the checkpoint to go on from; None: the newest
    newest: int  # step of the newest checkpoint, 0 without one

    def lines(self, config: RunConfig) -> list[str]:
        """Returns what to print at the start."""
        if config.optimizer.name == "given":
            return []
        size = config.batch.global_size
        lines = schedules.describe(
            config.optimizer,
            self.steps,
            train_steps=config.train.steps,
            global_size=size,
        )
        if self.back_to is None:
            return lines
        again = f"steps {self.back_to + 1}-{self.newest} are done again, and their rows replaced"
        return [
            *lines,
            f"back to the checkpoint {self.back_to}, where the decay began: {again}",
        ]


def settle_schedule(
    config: RunConfig, folder: Path, store: CheckpointManager
) -> SettledSchedule:
    """Returns the schedule of the run in `folder`; every process makes the call, the
    first decides.

    Raises:
      ConfigError: what is stored of the schedule cannot be read.
    """
    told: Any = None
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            steps, back_to, newest = _settle(config, folder, store)
            told = steps.to_json(), back_to, newest
    value, back_to, newest = coordination.broadcast(told)
    return SettledSchedule(ScheduleSteps.from_json(value), back_to, newest)


def milestones(config: RunConfig, steps: ScheduleSteps) -> frozenset[int]:
    """Returns the steps to save and keep: where wsd's decay begins, which a longer run
    goes on from.
    """
    saves, optimizer = config.checkpoint, config.optimizer
    if not (
        saves.interval == "auto"
        or saves.every_steps
        or saves.every_minutes
        or saves.save_at_end
    ):
        return frozenset()
    if optimizer.schedule != "wsd" or not schedules.depends_on_train_steps(optimizer):
        return frozenset()
    return frozenset({schedules.decay_start(optimizer, steps)})


def stored_steps(metadata: Mapping[str, Any]) -> ScheduleSteps:
    """Returns the schedule that a checkpoint was trained with.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return ScheduleSteps.from_json(metadata.get(SCHEDULE_KEY))
    except untrusted.Malformed as error:
        raise ConfigError(
            f"the checkpoint's schedule is damaged ({error}); put it back"
        ) from error


def _settle(
    config: RunConfig, folder: Path, store: CheckpointManager
) -> SettledSchedule:
    metadata = manifest.newest_metadata(store.folder, store.run)
    if "progress" not in metadata:
        return SettledSchedule(
            schedules.settle(config.optimizer, config.train.steps), None, 0
        )
    done: int = metadata["progress"]["step"]
    stored = stored_steps(metadata)

    def saved(step: int) -> bool:
        with contextlib.suppress(CheckpointError, OSError):
            return step in store.steps() and bool(
                manifest.check(store.folder, step, run=store.run)
            )
        return False

    def back_to(steps: ScheduleSteps) -> int | None:
        added = [
            p.start
            for p in steps.extensions
            if p not in stored.extensions and p.start < done
        ]
        return added[0] if added else None

    # run.json may know of an extension from which nothing has been saved yet.
    noted = _noted_steps(folder)
    if (
        noted
        and replace(noted, extensions=noted.extensions[: len(stored.extensions)])
        == stored
    ):
        if noted.end == config.train.steps and (
            (step := back_to(noted)) is None or saved(step)
        ):
            return SettledSchedule(noted, step, done)
    steps = schedules.extend(
        config.optimizer, stored, done=done, train_steps=config.train.steps, saved=saved
    )
    return SettledSchedule(steps, back_to(steps), done)


def _noted_steps(folder: Path) -> ScheduleSteps | None:
    with contextlib.suppress(OSError, untrusted.Malformed):
        if value := untrusted.read_json(folder / run_format.RUN, dict).get(
            SCHEDULE_KEY
        ):
            return ScheduleSteps.from_json(value)
    return None
