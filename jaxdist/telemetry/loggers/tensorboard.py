"""Logger that writes TensorBoard event files by tensorboardX (extra `tensorboard`)."""

import json
from collections.abc import Mapping

import tensorboardX
from tensorboardX.summary import hparams

from jaxdist.telemetry.loggers.logger import LoggedRun, event_text


class TensorBoardLogger:
    """Logger that writes WORKDIR/tensorboard.

    Rows become scalars, events and the config become text. The config is also written
    as hyperparameters.
    """

    def __init__(self, run: LoggedRun) -> None:
        """Opens a new event file.

        Points after the restored step are hidden, since the run repeats them.
        """
        folder = str(run.workdir / "tensorboard")
        self._writer = tensorboardX.SummaryWriter(
            folder,
            purge_step=run.first_step + 1,
            # The name of a file has the second of its start, and a file of that name
            # would be overwritten.
            filename_suffix=f".{run.first_step}",
        )
        rows = "\n".join(
            f"| {key} | `{json.dumps(value)}` |" for key, value in run.config.items()
        )
        self._writer.add_text(
            "config", f"| key | value |\n|---|---|\n{rows}", run.first_step
        )
        values = {
            key: value
            if isinstance(value, bool | int | float | str)
            else json.dumps(value)
            for key, value in run.config.items()
        }
        for summary in hparams(values, {"loss": None, "eval_loss": None}):
            self._writer.file_writer.add_summary(summary)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds each number as a scalar; None and text are skipped."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event as text."""
        self._writer.add_text(f"events/{name}", event_text(name, fields), step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()
