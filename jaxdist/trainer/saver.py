"""The hook that saves: when a checkpoint is due, and what became of the saves."""

import time
from collections.abc import Callable
from typing import Any

from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.step.train_step import CheckpointViews
from jaxdist.telemetry.display import Display
from jaxdist.telemetry.metrics import Writers
from jaxdist.trainer.hooks import StepView
from jaxdist.trainer.restore import Progress


class Saver:
    """Saves in the background, and reports each save as an event once it has ended."""

    def __init__(
        self,
        store: CheckpointManager,
        views: CheckpointViews,
        writer: Writers,
        display: Display,
        metadata: Callable[[Progress], dict[str, Any]],
    ):
        """Args:
        metadata: what a checkpoint says beside its arrays.
        """
        self._store, self._views, self._metadata = store, views, metadata
        self._writer, self._display = writer, display
        self._last_save_ok = True

    def is_due(self, step: int) -> bool:
        """Returns whether `checkpoint.*` wants a save after this step."""
        return self._store.should_save(step, time.monotonic())

    def __call__(self, view: StepView) -> None:
        """Starts a save if one is due; at the end of a run, waits for the one before."""
        required = view.interrupted or view.save_requested
        if self._store.should_save(view.step, time.monotonic(), last=view.last, stopped=required):
            metadata = self._metadata(view.progress)
            self._store.save(view.step, self._views.flat(view.state), metadata, wait=view.last)
        self.report()

    def report(self) -> None:
        """Writes an event for each save that has ended since the last report."""
        for result in self._store.poll():
            self._writer.event(
                "save",
                result.step,
                ok=result.ok,
                error=result.error and str(result.error),
                seconds=result.seconds,
                bytes=result.bytes,
            )
            if not result.ok:
                self._display.note(f"checkpoint {result.step} failed, training goes on: {result.error}")
            self._last_save_ok = result.ok

    def report_bad_checkpoints(self) -> None:
        """Writes an event for each checkpoint that a restore could not use."""
        for step, reason in self._store.bad_steps.items():
            self._writer.event("bad_checkpoint", step, reason=reason)
            self._display.note(f"checkpoint {step} cannot be used: {reason}")

    def finish(self) -> bool:
        """Waits for the save under way; returns whether the last save, if any, has succeeded."""
        ended = self._store.wait()
        self.report()
        return ended and self._last_save_ok
