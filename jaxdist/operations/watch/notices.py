"""Hears when a cloud takes this machine back, and has the run saved."""

import contextlib

from jaxdist.operations.watch import preemption_notice
from jaxdist.telemetry.display import print_safe
from jaxdist.trainer.callbacks import Callback, Run


class PreemptionNotices(Callback):
    """Stops the run, saved, once the cloud announces the end of this machine.

    Each process listens for its own machine.
    """

    keys = ("resilience",)

    def __init__(self) -> None:
        self._listening = contextlib.ExitStack()

    def on_start(self, run: Run) -> None:
        """Begins to listen, in a thread."""

        def stop(notice: str) -> None:
            print_safe(notice)
            run.event("preemption_notice", run.progress.step, notice=notice)
            run.preempt(notice)

        heard = preemption_notice.heard(run.config.resilience, stop, say=print_safe)
        self._listening.enter_context(heard)

    def __exit__(self, *_: object) -> None:
        """Ends the thread."""
        self._listening.close()
