"""Background copy of a run's finished steps to a store."""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import MANIFEST, CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.operations.copies.copies import Abandoned, Copies

_MAX_THREADS = 3  # most threads, with those in calls that do not return
_POLL_S = 1.0  # seconds between two checks for such a call at the end of the run


class CopyResult(NamedTuple):
    """Result of a copy."""

    step: int
    error: str  # "": the copy is whole
    seconds: float
    bytes: int


class Copier:
    """Thread that copies the steps of a checkpoint manager to a store, newest first.

    Only `finish` waits for it. A step that could not be copied is tried again with the
    next one. A call of the store without progress for `checkpoint.timeout_s` is given
    up, and so is its step until the next start. Another thread copies the other steps.
    """

    def __init__(
        self,
        copies: Copies,
        manager: CheckpointManager,
        extra_files: Sequence[Path] = (),
    ) -> None:
        """Starts to copy the steps that are missing in the store.

        Args:
          copies: the store.
          manager: manager of the run's checkpoints.
          extra_files: files that are copied with each step.
        """
        self.url = copies.url  # without secrets
        self._first = copies
        self._manager = manager
        self._extra_files = extra_files
        self._results = queue.SimpleQueue[CopyResult]()
        # (step, time of its manifest) of copied steps; None: the store was not read yet
        self._known: set[tuple[int, int]] | None = None
        self._seen: set[int] = set()  # steps that this process has seen in the folder
        self._stuck: set[int] = set()  # steps in a call that did not return
        self._threads: list[threading.Thread] = []
        self._state = threading.Condition()  # guards the next two
        self._requested = True
        self._idle = False
        # client of the working thread; None: too many threads are stuck
        self._copies: Copies | None = None
        self._start_thread(copies)

    def wake(self) -> None:
        """Requests a copy of a step that was just saved."""
        with self._state:
            self._requested = True
            self._idle = False
            self._state.notify_all()
        if self._copies is None:
            self._start_thread(self._first.renewed())
        if self._copies is None:
            error = f"{len(self._threads)} calls of the store have not returned"
            self._report(None, self._manager.last_sealed, error, time.monotonic(), 0)

    def poll(self) -> list[CopyResult]:
        """Collects the results since the last call, oldest first; does not wait."""
        self._give_up_silent_call()
        return [self._results.get() for _ in range(self._results.qsize())]

    def finish(self, seconds: float) -> bool:
        """Waits until all steps are copied.

        Args:
          seconds: seconds to wait at most.

        Returns:
          True if the copies have ended in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._give_up_silent_call()
            left_s = deadline - time.monotonic()
            with self._state:
                if self._state.wait_for(
                    lambda: self._idle or self._copies is None, min(left_s, _POLL_S)
                ):
                    return self._idle
            if left_s <= 0:
                return False

    def _give_up_silent_call(self) -> None:
        """Gives up a call without progress; another thread copies the other steps."""
        copies = self._copies
        if copies is None:
            return
        silent_s = copies.silent_s()
        if silent_s <= self._manager.config.timeout_s:
            return
        copies.abandoned = True
        self._stuck |= self._manager.held
        step = max(self._manager.held, default=self._manager.last_sealed)
        self._manager.held = frozenset()
        error = (
            f"the store has made no progress for {silent_s:.0f} s (checkpoint.timeout_s); other steps are "
            f"copied now, this one by the next start"
        )
        self._report(None, step, error, time.monotonic() - silent_s, 0)
        with self._state:
            self._requested = True
            self._idle = False
        self._start_thread(copies.renewed())

    def _start_thread(self, copies: Copies) -> None:
        """Starts a thread that uses the client, unless too many threads are stuck."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _MAX_THREADS:
            self._copies = None
            return
        self._copies = copies
        thread = threading.Thread(
            target=self._run,
            args=(copies,),
            name="copy of checkpoints",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _run(self, copies: Copies) -> None:
        while True:
            with self._state:
                if copies.abandoned:
                    return
                self._idle = not self._requested
                self._state.notify_all()
                self._state.wait_for(lambda: self._requested)
                self._requested = False
            self._update(copies)

    def _update(self, copies: Copies) -> None:
        """Copies all missing steps, and deletes expired steps of the store."""
        began = time.monotonic()
        local: list[int] = []
        failed: set[int] = set()
        try:
            local = self._manager.steps()
            stored = self._stored_steps(copies)
            if self._known is None:
                both = [step for step in local if MANIFEST in stored.get(step, {})]
                self._known = {
                    self._key(n) for n in both if copies.holds(self._manager.folder, n)
                }
            for step in stored:  # partial copies, which may fill the store
                if MANIFEST not in stored[step] and step not in local:
                    copies.remove(step, stored[step])
            while missing := self._missing_steps(failed):
                self._copy(copies, missing[-1], failed)
                # After each copy: if saves are faster than copies, the loop never ends.
                if not failed:
                    self._expire(copies)
            if not failed:
                self._expire(copies)
        except Exception as error:  # an error of the store's client, or of the disk
            self._report(copies, max(local, default=0), copies.text(error), began, 0)
        finally:
            if not copies.abandoned:
                self._manager.held = frozenset()

    def _stored_steps(self, copies: Copies) -> dict[int, dict[str, int]]:
        """Lists the store's steps.

        Raises:
          CheckpointError: the steps belong to another run.
        """
        stored = copies.steps()
        # Checked after the listing: a run claims the store before it writes a step.
        copies.is_claimed(self._manager.run)
        return stored

    def _missing_steps(self, failed: set[int]) -> list[int]:
        """Lists local steps that are to be copied, without those that have failed."""
        return [n for n in self._manager.steps() if n not in failed and self._is_due(n)]

    def _is_due(self, step: int) -> bool:
        """Checks if a local step is neither copied, damaged nor given up."""
        assert self._known is not None
        self._seen.add(step)
        if step in self._manager.damaged_steps or step in self._stuck:
            return False
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            return self._key(step) not in self._known
        return False

    def _key(self, step: int) -> tuple[int, int]:
        # A step that is saved again, after a rollback, has a newer manifest.
        return step, (self._manager.folder / str(step) / MANIFEST).stat().st_mtime_ns

    def _copy(self, copies: Copies, step: int, failed: set[int]) -> None:
        """Copies a step, and reports the result; a step that fails joins `failed`."""
        if copies.abandoned:
            raise Abandoned(self.url)
        began = time.monotonic()
        is_sound = False
        self._manager.held = frozenset({step})
        assert self._known is not None
        try:
            key = self._key(step)
            # In this thread only: Python would wait for a pool's threads at its end.
            integrity.check(
                self._manager.folder, step, run=self._manager.run, threads=1
            )
            is_sound = True
            size = copies.copy(self._manager.folder, step, self._extra_files)
            self._known.add(key)
            self._report(copies, step, "", began, size)
        except Abandoned:
            raise
        except Exception as error:  # an error of the store's client, or of the disk
            failed.add(step)
            # a step that is damaged in the folder is reported once
            if isinstance(error, CheckpointError) and not is_sound:
                self._known.add(key)
            if not folders.is_deleted(self._manager.folder, step):
                self._report(copies, step, copies.text(error), began, 0)

    def _expire(self, copies: Copies) -> None:
        """Deletes steps of the store that the config does not keep or a rollback undid.

        Other steps stay if they are newer than all local ones: the folder may be an old
        one of another machine. They are replaced once the run reaches them.
        """
        local = self._manager.steps()
        stored = self._stored_steps(copies)
        if not local:
            return
        whole = [step for step in stored if MANIFEST in stored[step]]
        candidates = [step for step in whole if step not in self._manager.milestones]
        expired = folders.expired(
            candidates,
            newest=local[-1],
            keep_last=self._manager.config.keep_last,
            keep_every=self._manager.config.keep_every,
            best=self._manager.best,
        )
        for step in stored:
            if step > local[-1] and (
                step in self._seen or copies.is_undone(self._manager.folder, step)
            ):
                expired.append(step)
        for step in expired:
            if step not in local:
                copies.remove(step, stored[step])

    def _report(
        self, copies: Copies | None, step: int, error: str, began: float, size: int
    ) -> None:
        """Adds a result for `poll`, unless the thread's work was given up."""
        if copies is None or not copies.abandoned:
            self._results.put(CopyResult(step, error, time.monotonic() - began, size))
