"""TensorBoard event files of a run; wraps tensorboardX (extra `tensorboard`), loaded by
extras.
"""

import json
from collections.abc import Mapping

import tensorboardX
from tensorboardX.summary import hparams

from jaxdist.telemetry.loggers.logger import LoggedRun, event_text


class TensorBoardLogger:
    """Writes WORKDIR/tensorboard: rows as scalars, events and the config as text, and
    the hyperparameters.
    """

    def __init__(self, run: LoggedRun) -> None:
        """Opens a new event file. Points after the restored step are hidden, since the
        run repeats them.
        """
        folder = str(run.workdir / "tensorboard")
        self._writer = tensorboardX.SummaryWriter(folder, purge_step=run.first_step + 1)
        rows = "\n".join(
            f"| {key} | `{json.dumps(value)}` |" for key, value in run.config.items()
        )
        self._writer.add_text(
            "config", f"| key | value |\n|---|---|\n{rows}", run.first_step
        )
        values = {
            k: v if isinstance(v, bool | int | float | str) else json.dumps(v)
            for k, v in run.config.items()
        }
        for summary in hparams(values, {"loss": None, "eval_loss": None}):
            self._writer.file_writer.add_summary(summary)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds every number of `values` as a scalar; None and text are left out."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event as text."""
        self._writer.add_text(f"events/{name}", event_text(name, fields), step)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()
