"""Logger for Weights & Biases (extra `wandb`).

WANDB_PROJECT, WANDB_MODE=offline and the other variables of W&B have their usual
effect. The steps of W&B only rise, but a resumed run repeats steps. So `step` is logged
as a value, which is the x axis of all others.
"""

import os
from collections.abc import Mapping

import wandb

from jaxdist.telemetry.loggers.logger import CLOSE_S, LoggedRun, event_text


class WandbLogger:
    """Logger of a run of W&B, with its files in WORKDIR/wandb.

    A resumed run of jaxdist resumes the same run of W&B.
    """

    def __init__(self, run: LoggedRun) -> None:
        """Starts or resumes the run of W&B by the identity of `run`."""
        settings = wandb.Settings(
            console="off",  # the display of jaxdist uses the terminal
            finish_timeout=0.8 * CLOSE_S,
            login_timeout=1.0,  # does not wait until somebody types a key
            silent=True,
        )
        info = {name: run.info[name] for name in _SHOWN if name in run.info}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxdist"),
            name=run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.workdir),
            config={**run.config, "run": info},
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the values to the history; None is skipped."""
        known = {name: value for name, value in values.items() if value is not None}
        self._run.log({"step": step, **known})

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event to the history, as text."""
        self._run.log({"step": step or 0, f"event/{name}": event_text(name, fields)})

    def close(self) -> None:
        """Ends the run of W&B.

        Data that is not uploaded by then stays in WORKDIR/wandb, for `wandb sync`.
        """
        self._run.finish()


_SHOWN = (  # fields of run.json in the config of the run
    "versions",
    "device_kind",
    "num_devices",
    "num_processes",
    "mesh",
    "parameters",
    "flops_per_token",
)
