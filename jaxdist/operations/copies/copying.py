"""Callback that copies the checkpoints of a run to a store while it trains."""

import functools
from typing import Any

import jax

from jaxdist.config import ConfigError, redact
from jaxdist.distributed import coordination
from jaxdist.operations.copies import step_copies
from jaxdist.operations.copies.copier import Copier
from jaxdist.operations.copies.copies import Accept
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run, RunEnd, StepView


def _accept(run: Run) -> Accept:
    """Makes the check of a copy's metadata, before the copy is fetched."""
    return functools.partial(
        workdir.check_stored_config,
        config=run.config,
        place=redact.without_secrets(run.config.checkpoint.copy_to),
        fix="put it back, or start a new run with another checkpoint.copy_to",
    )


class CheckpointCopies(Callback):
    """Callback that copies checkpoints to `checkpoint.copy_to`.

    It also fetches checkpoints that are missing. The first process copies, in a thread.
    The end of the run waits for it.
    """

    may_request = False
    keys = ("checkpoint.copy_to",)
    name = "copies"

    def __init__(self) -> None:
        self._run: Run | None = None
        self._copier: Copier | None = None

    def on_check(self, config: Any) -> None:
        """Checks that the store's URL is whole.

        Raises:
          ConfigError: the URL comes from a stored config, which has no secrets.
        """
        url = config.checkpoint.copy_to
        if redact.is_redacted(url):
            raise ConfigError(
                f"checkpoint.copy_to={url}: config.json does not store the secrets of a URL. Give the "
                f"URL again, --config.checkpoint.copy_to=URL, or empty for no copies"
            )

    def on_open(self, run: Run) -> None:
        """Fetches the store's newest sound step if local steps are older."""
        if jax.process_index() == 0:
            step_copies.fetch_missing(
                config=run.config.checkpoint,
                folder=run.folder,
                place=workdir.checkpoints_folder(run.folder, run.config),
                say=run.say,
                accept=_accept(run),
            )

    def on_start(self, run: Run) -> None:
        """Lets a restore fetch the copy of a damaged step."""
        self._run = run
        if jax.process_index() == 0:
            run.store.fetch = step_copies.fetcher(
                run.config.checkpoint, run.folder, run.store, run.say
            )

    def load(self, state: Any) -> None:
        """Starts to copy: after the restore it is known which steps are kept."""
        run = self._run
        assert run is not None
        if self._copier is None:
            self._copier = step_copies.copier(
                run.config.checkpoint, run.folder, run.store, _accept(run)
            )

    def on_step(self, view: StepView) -> None:
        """Reports copies that have ended."""
        self._report()

    def on_save(self, step: int) -> None:
        """Requests a copy of the new checkpoint."""
        if self._copier is not None:
            self._copier.wake()

    def on_end(self, end: RunEnd) -> None:
        """Waits for the copies on all processes, since jax waits only two minutes."""
        self._finish(hurry=bool(end.stopped))
        if self._run is not None and self._run.config.checkpoint.copy_to:
            coordination.barrier()

    def __exit__(self, *_: object) -> None:
        """Waits for a short time if an error has ended the run."""
        self._finish(hurry=True)

    def _finish(self, *, hurry: bool) -> None:
        """Waits until all steps are copied, and reports if the time was too short.

        Args:
          hurry: waits only for a short time, since the run was stopped.
        """
        if self._copier is None or self._run is None:
            return
        config = self._run.config.checkpoint
        seconds = config.copy_wait_s
        if hurry:
            seconds = min(seconds, config.patience_s)
        ended = self._copier.finish(seconds)
        self._report()
        if not ended:
            error = (
                f"the run's end has waited {seconds:.0f} s (checkpoint.copy_wait_s); "
                f"the next start continues"
            )
            self._report_missing(self._run.progress.step, error)
        self._copier = None

    def _report(self) -> None:
        if self._copier is None or self._run is None:
            return
        for copy in self._copier.poll():
            if copy.error:
                self._report_missing(copy.step, copy.error)
                continue
            self._run.event(
                "checkpoint_copied",
                copy.step,
                seconds=copy.seconds,
                bytes=copy.bytes,
            )

    def _report_missing(self, step: int, error: str) -> None:
        assert self._run is not None
        assert self._copier is not None
        url = self._copier.url
        self._run.event("checkpoint_copy_failed", step, error=error, store=url)
        self._run.note(f"checkpoint {step} is not copied to {url}: {error}")
