"""The events of a run's start and of an early end; loggers receive them."""

import jax

from jaxdist.data.dataset import SourceError
from jaxdist.telemetry.metrics import EXTENDED
from jaxdist.trainer import elastic
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.restore import SettledSchedule
from jaxdist.trainer.saver import Saver
from jaxdist.trainer.start import Start


def started(run: Run, saver: Saver, schedule: SettledSchedule, start: Start) -> None:
    """Writes the events of a start, which are the first that loggers receive."""
    step = run.progress.step
    devices = len(run.devices)
    resized = elastic.resized(run.folder, run.config, devices)
    if resized:
        run.event("resize", step, **resized)
    facts: dict[str, object] = {"devices": devices, "processes": jax.process_count()}
    if start.roofline is not None:
        facts["roofline"] = start.roofline.to_json()
    run.event("start", step, **facts)
    saver.report_bad_checkpoints()
    for part in schedule.steps.extensions:
        if part.start == step:
            run.writer.write(step, {EXTENDED: part.end})
    if step:
        run.event("restore", step)
        run.note(f"resumed after step {step}")


def failed_to_start(run: Run, error: Exception) -> None:
    """Writes the error of a run that ends before its first step, for `status`.

    Before the workdir is locked and open, nothing is written: it may be another's.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    run.event("start_failed", error=lines[0])


def stopped(run: Run, error: Exception) -> None:
    """Writes the event `stop` of a run that an error ends."""
    if isinstance(error, SourceError):
        cause = "data"
    else:
        cause = getattr(error, "reason", "runtime")
    run.event("stop", run.progress.step, reason=cause, error=str(error))
