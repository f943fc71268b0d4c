"""TensorBoard event files of a run; wraps tensorboardX (extra `tensorboard`), loaded by extras."""

import os
from collections.abc import Mapping
from pathlib import Path

import tensorboardX

FOLDER = "tensorboard"


class TensorBoardWriter:
    """Writes the same rows as `telemetry.metrics.MetricsWriter`, for a running TensorBoard.

    metrics.jsonl stays the record of the run; these files are a view of it and are never read back.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, enabled: bool = True, first_step: int = 0
    ) -> None:
        """Opens a new event file in workdir/tensorboard; with enabled=False does nothing.

        Args:
          workdir: folder of the run.
          enabled: True on the one process that writes.
          first_step: the restored step; points after it are hidden, since the run repeats them.
        """
        self._writer: tensorboardX.SummaryWriter | None = None
        if enabled:
            folder = str(Path(workdir) / FOLDER)
            self._writer = tensorboardX.SummaryWriter(folder, purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Adds every number of `values` as a scalar; None and text are left out."""
        if self._writer is None:
            return
        for name, value in values.items():
            if hasattr(value, "item"):
                value = value.item()
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Adds the event as text."""
        if self._writer is not None:
            text = ", ".join(f"{key}={value}" for key, value in fields.items())
            self._writer.add_text(f"events/{name}", text or name, step)

    def close(self) -> None:
        """Flushes and closes; later writes do nothing."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def __enter__(self) -> "TensorBoardWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
