"""The copies of a run's checkpoints in a store: fetches them where they are needed."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.files import CheckpointError, error_text
from jaxdist.checkpoint.manager import CheckpointManager, Fetch
from jaxdist.config import ConfigError, extras
from jaxdist.operations.copies.copier import Copier
from jaxdist.operations.copies.copies import Copies, fetch_newest
from jaxdist.storage import lock
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import workdir

_BESIDE = (workdir.CONFIG, workdir.RUN)
_LOOK_S = 0.1  # between looks whether a call of the store shows a sign


def fetch_missing(
    config: CheckpointConfig,
    folder: Path,
    place: Path,
    say: Callable[[str], object],
) -> None:
    """Fetches the newest sound step from `checkpoint.copy_to` if the run in `folder`
    has none as new.

    A step here is sound by its manifest and the names and sizes of its files; the
    restore hashes them. If there is one, the run starts even if the store does not
    answer, or has nothing sound that is newer.

    Args:
      config: says where the copies are.
      folder: of the run.
      place: of its checkpoints.
      say: takes lines of progress.

    Raises:
      ConfigError: no such store, or it is the folder itself; with no step here, it does
        not answer or has only damaged steps; the disk cannot be written.
    """
    if not config.copy_to:
        return
    try:
        try:
            run = manifest.identity(
                place, create=False, own=workdir.own_identity(folder)
            )
        except CheckpointError:  # another run's folder: opening it says so
            return
        copies = Copies(config.copy_to)
        if copies.is_at(place):
            raise ConfigError(
                f"checkpoint.copy_to={copies.url}: there are the run's own checkpoints; give another place"
            )
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place) as is_ours:
            here = _newest_sound(place, run)
            if here and is_ours:
                _Fetcher(config, folder, place, here.run, say).fetch_newer(here.step)
            if here:
                return
            beside = [folder / name for name in _BESIDE]
            step, size, bad = fetch_newest(
                copies,
                place,
                beside,
                run=run,
                wanted=lambda step: not copies.is_undone(place, step),
                say=say,
            )
    except lock.Locked:  # opening it says by whom
        return
    except (extras.MissingExtra, manifest.OtherVersion) as error:
        raise ConfigError(f"checkpoint.copy_to={config.copy_to}: {error}") from error
    except CheckpointError as error:
        _write_events(folder, copies.url, _of_copies(copies.url, error.steps))
        raise ConfigError(
            f"{error}; put a good one there, or begin anew with another copy_to"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written ({error}); give a folder that can"
        ) from error
    _write_events(folder, copies.url, _of_copies(copies.url, bad), step, size)
    if step:
        say(
            f"fetched step {step} from {copies.url} ({gib_text(size)}): there was none in {place}"
        )


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Holds the lock of a folder of checkpoints; yields False where its file system has
    no locks.
    """
    with contextlib.ExitStack() as stack:
        try:
            is_ours = bool(stack.enter_context(lock.exclusive(place / folders.LOCK)))
        except OSError as error:
            if error.errno not in lock.UNSUPPORTED:
                raise
            is_ours = False
        yield is_ours


def _write_events(
    folder: Path, url: str, bad: Mapping[int, str], step: int = 0, size: int = 0
) -> None:
    with contextlib.closing(MetricsWriter(folder)) as writer:
        for damaged, reason in bad.items():
            writer.event("bad_checkpoint", damaged, reason=reason)
        if step:
            writer.event("checkpoint_fetched", step, source=url, bytes=size)


def _of_copies(url: str, bad: Mapping[int, str]) -> dict[int, str]:
    return {step: f"its copy in {url}: {reason}" for step, reason in bad.items()}


def _newest_sound(place: Path, run: str | None) -> manifest.Manifest | None:
    for step in reversed(folders.list_steps(place)):
        with contextlib.suppress(CheckpointError, OSError):
            return manifest.check(place, step, run=run, contents=False)
    return None


class _Fetcher:
    """Fetches copies for a run that has steps here. It reports what fails, and raises
    nothing.

    A store that does not answer is asked no more. The steps here may suffice; else the
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
        self._url = config.copy_to
        self._silent = False
        self._tried: set[int] = set()

    def fetch_newer(self, here: int) -> int:
        """Fetches the newest sound copy after a step, unless the run has gone back
        behind it.
        """
        return self._fetch_first(
            lambda copies: [n for n in self._led_here(copies) if n > here],
            why=f"those in {self._place} are older",
        )

    def __call__(self, step: int | None, reason: str) -> int:
        """Fetches a step, or the newest: see `CheckpointManager.fetch`."""
        if step is None:
            # The steps here show how far the run has come: it may have gone back from
            # newer ones.
            last = max(folders.all_steps(self._place), default=folders.LAST_STEP)
            return self._fetch_first(
                lambda copies: [n for n in self._led_here(copies) if n <= last],
                why=f"none in {self._place} is sound",
            )
        fetched = self._fetch_first(
            lambda copies: [step] if copies.holds(self._place, step) else [],
            why=f"that in {self._place} is damaged ({reason})",
        )
        if fetched:
            _write_events(self._folder, self._url, {step: reason})
        return fetched

    def _led_here(self, copies: Copies) -> list[int]:
        """Lists a store's whole steps, newest first, without those that the run has
        gone back behind.
        """
        whole = copies.whole_steps()
        return [step for step in whole if not copies.is_undone(self._place, step)]

    def _fetch_first(self, choose: Callable[[Copies], list[int]], *, why: str) -> int:
        """Fetches the first of the chosen steps that is sound, and returns it; 0 if
        none is.
        """
        if self._silent:
            return 0
        try:
            for step in self._answer(choose, patience_s=self._config.patience_s):
                if step not in self._tried and self._fetch(step, why):
                    return step
        except Exception as error:  # of the store's client, or of the disk
            self._silent = True
            self._say(f"nothing is fetched from {self._url}: {error_text(error)}")
        return 0

    def _fetch(self, step: int, why: str) -> bool:
        self._tried.add(step)

        def download(copies: Copies) -> tuple[Path, int]:
            return copies.download(step, self._place, run=self._run, say=self._say)

        try:
            source, size = self._answer(download)
        except CheckpointError as error:
            bad = _of_copies(self._url, {step: str(error)})
            _write_events(self._folder, self._url, bad)
            self._say(f"checkpoint {step} cannot be used: {bad[step]}")
            return False
        Copies(self._url).place(source, self._place)
        _write_events(self._folder, self._url, {}, step, size)
        self._say(f"fetched step {step} from {self._url} ({gib_text(size)}): {why}")
        return True

    def _answer(
        self, call: Callable[[Copies], Any], patience_s: float | None = None
    ) -> Any:
        """Calls the store in a thread, and waits for the result.

        Args:
          patience_s: seconds that the call may take; None: any, as long as it shows
            signs.

        Raises:
          TimeoutError: it took longer, or has shown no sign for `checkpoint.timeout_s`.
          Exception: the call's.
        """
        copies = Copies(self._url)
        outcome: futures.Future[Any] = futures.Future()

        def work() -> None:
            try:
                outcome.set_result(call(copies))
            except Exception as error:
                outcome.set_exception(error)

        threading.Thread(target=work, name="fetch of a checkpoint", daemon=True).start()
        began = time.monotonic()
        while not futures.wait([outcome], timeout=_LOOK_S).done:
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
    """Makes the function that fetches a copy when a restore finds a step damaged."""
    if not config.copy_to:
        return store.fetch
    return _Fetcher(config, folder, store.folder, store.run, say)


def copier(
    config: CheckpointConfig, folder: Path, store: CheckpointManager
) -> Copier | None:
    """Starts to copy the steps of `store`, on process 0 alone; None if nothing is
    copied.
    """
    if not config.copy_to or jax.process_index():
        return None
    return Copier(Copies(config.copy_to), store, [folder / name for name in _BESIDE])
