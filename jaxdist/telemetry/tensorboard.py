"""TensorBoard event files of a run; wraps tensorboardX (extra `tensorboard`), loaded by extras."""

import os
from collections.abc import Mapping
from pathlib import Path

import tensorboardX


class TensorBoardWriter:
    """Writes the same rows as `telemetry.metrics.MetricsWriter`, for a running TensorBoard.

    metrics.jsonl stays the record of the run; these files are a view of it and are never read back.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, enabled: bool = True, first_step: int = 0) -> None:
        """Opens a new event file in workdir/tensorboard; with enabled=False does nothing.

        Points after `first_step`, the restored step, are hidden, since the run repeats them.
        """
        folder = str(Path(workdir) / "tensorboard")
        self._writer = tensorboardX.SummaryWriter(folder, purge_step=first_step + 1, write_to_disk=enabled)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds every number of `values` as a scalar; None and text are left out."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event as text."""
        text = ", ".join(f"{key}={value}" for key, value in fields.items())
        self._writer.add_text(f"events/{name}", text or name, step)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()
