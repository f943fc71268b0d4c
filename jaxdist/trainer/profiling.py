"""The profile of the steps that `profile.*` chooses."""

from types import TracebackType

from jaxdist.telemetry.profile import ProfileWindow
from jaxdist.trainer.callbacks import Callback, Run, StepView


class Profile(Callback):
    """A callback that traces a few steps on the first process.

    It waits for the devices before and after these steps.
    """

    may_request = False
    lead_only = True
    keys = ("profile",)

    def __init__(self) -> None:
        self._window: ProfileWindow | None = None

    def on_start(self, run: Run) -> None:
        """Reads the steps to trace from the config."""
        config = run.config.profile
        self._window = ProfileWindow(run.folder, config.start_step, config.num_steps)

    def on_step(self, view: StepView) -> None:
        """Starts or ends the trace, if this is its first or last step."""
        if self._window is not None:
            self._window.step(view.step, view.metrics)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends a trace in progress."""
        if self._window is not None:
            self._window.close()
