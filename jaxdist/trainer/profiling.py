"""Profiles the steps that `profile.*` names."""

from types import TracebackType

from jaxdist.telemetry.profile import ProfileWindow
from jaxdist.trainer.callbacks import Callback, Run, StepView


class Profile(Callback):
    """Traces a few steps on the first process; waits for devices at both ends."""

    lead_only = True
    keys = ("profile",)

    def __init__(self) -> None:
        self._window: ProfileWindow | None = None

    def on_start(self, run: Run) -> None:
        """Takes which steps to trace."""
        config = run.config.profile
        self._window = ProfileWindow(run.folder, config.start_step, config.num_steps)

    def on_step(self, view: StepView) -> None:
        """Begins or ends the trace, if this is its first or last step."""
        if self._window is not None:
            self._window.step(view.step, view.metrics)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends a trace under way."""
        if self._window is not None:
            self._window.close()
