"""Weights & Biases; wraps wandb (extra `wandb`), loaded by extras.

WANDB_PROJECT, WANDB_MODE=offline and the other variables of W&B hold. Its own steps
only go up, and a resumed run repeats some of ours: so `step` is a value like others,
and the x axis of them all.
"""

import os
from collections.abc import Mapping

import wandb

from jaxdist.telemetry.loggers.logger import CLOSE_S, LoggedRun, event_text


class WandbLogger:
    """A run of W&B, with its files in WORKDIR/wandb; a resumed run goes on as the same
    one.
    """

    def __init__(self, run: LoggedRun) -> None:
        """Begins, or goes on with, the run of W&B that has the identity of ours."""
        settings = wandb.Settings(
            console="off",  # our display owns the terminal
            finish_timeout=0.8 * CLOSE_S,
            login_timeout=1.0,  # do not wait for somebody to type a key
            silent=True,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxdist"),
            name=run.name,
            id=run.identity,
            resume="allow",
            dir=str(run.workdir),
            config={
                **run.config,
                "run": {k: v for k, v in run.info.items() if k in _SHOWN},
            },
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the values to the history; None is left out."""
        self._run.log(
            {"step": step} | {name: x for name, x in values.items() if x is not None}
        )

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event to the history, as text."""
        self._run.log({"step": step or 0, f"event/{name}": event_text(name, fields)})

    def close(self) -> None:
        """Ends the run of W&B; what is not uploaded by then lies in WORKDIR/wandb, for
        `wandb sync`.
        """
        self._run.finish()


_SHOWN = (
    "versions",
    "device_kind",
    "num_devices",
    "num_processes",
    "mesh",
    "parameters",
    "flops_per_token",
)
