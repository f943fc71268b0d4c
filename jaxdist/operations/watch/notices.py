"""Callback that saves and stops the run when the cloud takes this machine back."""

import contextlib

from jaxdist.operations.watch import preemption_notice
from jaxdist.telemetry.display import print_safe
from jaxdist.trainer.callbacks import Callback, Run


class PreemptionNotices(Callback):
    """Callback that saves and stops the run at a preemption notice of the cloud.

    Each process asks for notices of its own machine.
    """

    keys = ("resilience",)

    def __init__(self) -> None:
        self._listening = contextlib.ExitStack()

    def on_start(self, run: Run) -> None:
        """Starts a thread that asks for notices."""

        def stop(notice: str) -> None:
            print_safe(notice)
            run.event("preemption_notice", run.progress.step, notice=notice)
            run.request_stop()

        context = preemption_notice.listen_for_notices(
            run.config.resilience, stop, say=print_safe
        )
        self._listening.enter_context(context)

    def __exit__(self, *_: object) -> None:
        """Ends the thread."""
        self._listening.close()
