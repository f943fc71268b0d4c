"""Download of a run's checkpoints from its store of copies, when they are needed."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError, error_text
from jaxdist.checkpoint.manager import CheckpointManager, Fetch
from jaxdist.config import ConfigError, extras, redact
from jaxdist.operations.copies.copier import Copier
from jaxdist.operations.copies.copies import (
    Accept,
    Copies,
    Foreign,
    Unreadable,
    config_test,
    fetch_newest,
)
from jaxdist.storage import lock
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import workdir

_EXTRA_FILES = (workdir.CONFIG, workdir.RUN)  # copied with each step
_POLL_S = 0.1  # seconds between two checks of a call's progress


def fetch_missing(
    config: CheckpointConfig,
    folder: Path,
    place: Path,
    say: Callable[[str], object],
    accept: Accept | None = None,
) -> None:
    """Fetches the newest sound step from `checkpoint.copy_to` if the run lacks it.

    A local step counts as sound if its manifest and the names and sizes of its files
    are right; the restore hashes the files. If there is such a step, the run starts
    even if the store does not answer or has no newer sound step.

    Args:
      config: its `copy_to` is the store.
      folder: folder of the run.
      place: folder of the run's checkpoints.
      say: prints a line of progress.
      accept: checks the metadata of a step that is fetched because there is no local
        one. It raises a ConfigError if the run cannot resume from the step.

    Raises:
      ConfigError: the store is unknown, or is `place` itself; the disk cannot be
        written; or, without a local step, the store does not answer, has only damaged
        steps, or is another run's.
      Unreadable: without a local step, the store's steps cannot be listed or read.
    """
    if not config.copy_to:
        return
    try:
        try:
            run = integrity.identity(
                place, create=False, own=workdir.own_identity(folder)
            )
        except CheckpointError:  # another run's folder: its opening reports that
            return
        copies = Copies(config.copy_to, config_test(accept))
        if copies.is_at(place):
            raise ConfigError(
                f"checkpoint.copy_to={copies.url} holds the run's own checkpoints; give another place"
            )
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place) as has_lock:
            newest, damaged = _newest_sound(place, run)
            if newest and has_lock:
                fetcher = _Fetcher(config, folder, place, newest.run, say)
                fetched = fetcher.fetch_newer(newest.step)
                _write_events(folder, copies.url, _of_step(fetched, damaged))
            if newest:
                return
            step, size, bad = fetch_newest(
                copies,
                place,
                [folder / name for name in _EXTRA_FILES],
                run=run,
                wanted=lambda step: not copies.is_undone(place, step),
                say=say,
                accept=accept,
            )
    except lock.Locked:  # the opening of the folder reports who holds it
        return
    except (extras.MissingExtra, integrity.OtherVersion) as error:
        shown = redact.without_secrets(config.copy_to)
        raise ConfigError(f"checkpoint.copy_to={shown}: {error}") from error
    except Foreign as error:
        raise ConfigError(f"checkpoint.copy_to: {error}") from error
    except Unreadable:
        raise
    except CheckpointError as error:
        _write_events(folder, copies.url, _copy_reasons(copies.url, error.steps))
        raise ConfigError(
            f"{error}; put a good copy there, or start again with another checkpoint.copy_to"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written ({error}); give a folder that can be written"
        ) from error
    _write_events(folder, copies.url, _copy_reasons(copies.url, bad), step, size)
    _write_events(folder, copies.url, _of_step(step, damaged))
    if step:
        say(
            f"fetched step {step} from {copies.url} ({gib_text(size)}): there was none in {place}"
        )


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Holds the lock of a folder of checkpoints.

    Yields:
      False if the file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        try:
            has_lock = bool(stack.enter_context(lock.exclusive(place / folders.LOCK)))
        except OSError as error:
            if error.errno not in lock.UNSUPPORTED:
                raise
            has_lock = False
        yield has_lock


def _write_events(
    folder: Path, url: str, bad: Mapping[int, str], step: int = 0, size: int = 0
) -> None:
    """Writes the events of a download.

    Args:
      folder: folder of the run.
      url: the store.
      bad: {step: reason} of damaged steps.
      step: the step that was fetched; 0 = none.
      size: its bytes.
    """
    if not bad and not step:
        return
    with contextlib.closing(MetricsWriter(folder)) as writer:
        for damaged, reason in bad.items():
            writer.event("bad_checkpoint", damaged, reason=reason)
        if step:
            writer.event("checkpoint_fetched", step, source=url, bytes=size)


def _copy_reasons(url: str, bad: Mapping[int, str]) -> dict[int, str]:
    """Adds to each reason that the damaged step is a copy in the store."""
    return {step: f"its copy in {url}: {reason}" for step, reason in bad.items()}


def _of_step(step: int, damaged: Mapping[int, str]) -> dict[int, str]:
    """Selects the reason for one step, whose copy has taken its place."""
    return {step: damaged[step]} if step in damaged else {}


def _newest_sound(
    place: Path, run: str | None
) -> tuple[integrity.Manifest | None, dict[int, str]]:
    """Finds the newest step whose manifest, names and sizes are right.

    Returns:
      Its manifest, None if there is none, and {step: reason} of newer damaged steps.
    """
    damaged: dict[int, str] = {}
    for step in reversed(folders.all_steps(place)):
        try:
            return integrity.check(place, step, run=run, contents=False), damaged
        except (CheckpointError, OSError) as error:
            damaged[step] = error_text(error)
    return None, damaged


class _Fetcher:
    """Fetcher of copies for a run with local steps. It reports errors and raises none.

    After an error the store is not used again. The local steps may suffice; if not, the
    restore fails with its own message.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        place: Path,
        run: str | None,
        say: Callable[[str], object],
    ) -> None:
        self._config = config
        self._folder = folder
        self._place = place
        self._run = run
        self._say = say
        self._url = redact.without_secrets(config.copy_to)  # for messages
        self._has_failed = False
        self._tried: set[int] = set()

    def fetch_newer(self, newest: int) -> int:
        """Fetches the newest sound copy after the newest local step.

        Returns:
          The step; 0 = none was fetched.
        """
        return self._fetch_first(
            lambda copies: [n for n in self._valid_steps(copies) if n > newest],
            why=f"those in {self._place} are older",
        )

    def __call__(self, step: int | None, reason: str) -> int:
        """Fetches a step, or the newest: see `CheckpointManager.fetch`."""
        if step is None:
            # Local steps, even damaged ones, show how far the run has come. It may have
            # rolled back newer ones.
            last = max(folders.all_steps(self._place), default=folders.LAST_STEP)
            return self._fetch_first(
                lambda copies: [n for n in self._valid_steps(copies) if n <= last],
                why=f"none in {self._place} is sound",
            )
        fetched = self._fetch_first(
            lambda copies: [step] if copies.holds(self._place, step) else [],
            why=f"that in {self._place} is damaged ({reason})",
        )
        if fetched:
            _write_events(self._folder, self._url, {step: reason})
        return fetched

    def _valid_steps(self, copies: Copies) -> list[int]:
        """Lists the store's whole steps that were not rolled back, newest first."""
        whole = copies.whole_steps()
        return [step for step in whole if not copies.is_undone(self._place, step)]

    def _fetch_first(self, choose: Callable[[Copies], list[int]], *, why: str) -> int:
        """Fetches the first sound step.

        Args:
          choose: lists the steps to try, in order.
          why: reason of the download, for its message.

        Returns:
          The step; 0 = none was fetched.
        """
        if self._has_failed:
            return 0
        try:
            steps: list[int] = self._call(choose, patience_s=self._config.patience_s)
            for step in steps:
                if step not in self._tried and self._fetch(step, why):
                    return step
        except Exception as error:  # an error of the store's client, or of the disk
            self._has_failed = True
            reason = error_text(error, self._config.copy_to)
            self._say(f"nothing is fetched from {self._url}: {reason}")
        return 0

    def _fetch(self, step: int, why: str) -> bool:
        """Fetches a step, or reports that it is damaged; True means success."""
        self._tried.add(step)

        def download(copies: Copies) -> tuple[Path, int]:
            return copies.download(step, self._place, run=self._run, say=self._say)

        try:
            source, size = self._call(download)
        except CheckpointError as error:
            bad = _copy_reasons(self._url, {step: str(error)})
            _write_events(self._folder, self._url, bad)
            self._say(f"checkpoint {step} cannot be used: {bad[step]}")
            return False
        Copies(self._config.copy_to).place(source, self._place)
        _write_events(self._folder, self._url, {}, step, size)
        self._say(f"fetched step {step} from {self._url} ({gib_text(size)}): {why}")
        return True

    def _call(
        self, call: Callable[[Copies], Any], patience_s: float | None = None
    ) -> Any:
        """Calls the store in a thread, and waits for the result.

        Args:
          call: uses the store's client.
          patience_s: seconds that the call may take; None = no limit while it makes
            progress.

        Raises:
          TimeoutError: the call took longer, or made no progress for
            `checkpoint.timeout_s`.
          Exception: an error of the call.
        """
        copies = Copies(self._config.copy_to)
        outcome: futures.Future[Any] = futures.Future()

        def work() -> None:
            try:
                outcome.set_result(call(copies))
            except Exception as error:
                outcome.set_exception(error)

        threading.Thread(target=work, name="fetch of a checkpoint", daemon=True).start()
        began = time.monotonic()
        while not futures.wait([outcome], timeout=_POLL_S).done:
            limit_s: float = self._config.timeout_s
            waited_s = copies.silent_s()
            if patience_s is not None:
                limit_s = patience_s
                waited_s = time.monotonic() - began
            if waited_s > limit_s:
                copies.abandoned = True
                raise TimeoutError(f"no answer for {waited_s:.0f} s")
        return outcome.result()


def fetcher(
    config: CheckpointConfig,
    folder: Path,
    store: CheckpointManager,
    say: Callable[[str], object],
) -> Fetch:
    """Makes the function that fetches a copy if a restore finds a step damaged."""
    if not config.copy_to:
        return store.fetch
    return _Fetcher(config, folder, store.folder, store.run, say)


def copier(
    config: CheckpointConfig,
    folder: Path,
    store: CheckpointManager,
    accept: Accept | None = None,
) -> Copier | None:
    """Starts to copy the steps of `store` on process 0.

    Args:
      config: its `copy_to` is the store.
      folder: folder of the run.
      store: manager of the run's checkpoints.
      accept: raises a ConfigError if a step's metadata is not that of this run.

    Returns:
      The copier; None on other processes, and if nothing is to be copied.
    """
    if not config.copy_to or jax.process_index():
        return None
    extra_files = [folder / name for name in _EXTRA_FILES]
    copies = Copies(config.copy_to, config_test(accept))
    return Copier(copies, store, extra_files)
