"""Copies a run's finished steps to a store while it trains, in a thread that nothing
waits for.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest as integrity
from jaxdist.checkpoint.files import MANIFEST, CheckpointError, error_text
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.operations.copies.copies import Abandoned, Copies

_MOST_STUCK = 3  # threads in calls that do not return; then none is added
_LOOK_S = 1.0  # between looks for such a call at the end


class CopyResult(NamedTuple):
    """How one copy ended; no `error`: it is whole."""

    step: int
    error: str
    seconds: float
    bytes: int


class Copier:
    """Copies the steps of a store of checkpoints in a thread of its own, newest first.

    Only `finish` waits for it. A step that could not be copied is tried again with the
    next one. A call of the store that shows no sign for `checkpoint.timeout_s` is given
    up, and so is its step until the next start. Another thread copies the other steps.
    """

    def __init__(
        self, copies: Copies, store: CheckpointManager, beside: Sequence[Path] = ()
    ) -> None:
        """Begins with what the copies lack already.

        Args:
          beside: files that are copied with every step.
        """
        self.url = copies.url
        self._store = store
        self._beside = beside
        self._results = queue.SimpleQueue[CopyResult]()
        # (step, its manifest's time) of what is copied
        self._known: set[tuple[int, int]] | None = None
        self._seen: set[int] = set()  # steps that were here in this process's time
        self._stuck: set[int] = set()  # steps in a call that did not return
        self._threads: list[threading.Thread] = []
        self._state = threading.Condition()
        self._requested = True
        self._idle = False
        # of the thread at work; None: too many are stuck
        self._copies: Copies | None = None
        self._begin(copies)

    def wake(self) -> None:
        """Requests a copy: a step is finished."""
        with self._state:
            self._requested = True
            self._idle = False
            self._state.notify_all()
        if self._copies is None:
            self._begin(Copies(self.url))
        if self._copies is None:
            error = f"{len(self._threads)} calls of the store have not returned"
            self._report(None, self._store.newest, error, time.monotonic(), 0)

    def poll(self) -> list[CopyResult]:
        """Collects the copies that ended since the last call, oldest first, without
        waiting.
        """
        self._give_up_silent()
        return [self._results.get() for _ in range(self._results.qsize())]

    def finish(self, seconds: float) -> bool:
        """Waits for copies under way and due; returns True if they have ended in time.

        Args:
          seconds: to wait at most.
        """
        until = time.monotonic() + seconds
        while True:
            self._give_up_silent()
            left_s = until - time.monotonic()
            with self._state:
                if self._state.wait_for(
                    lambda: self._idle or self._copies is None, min(left_s, _LOOK_S)
                ):
                    return self._idle
            if left_s <= 0:
                return False

    def _give_up_silent(self) -> None:
        """Abandons a call that has shown no sign for too long; another thread copies
        the other steps.
        """
        copies = self._copies
        if copies is None:
            return
        silent_s = copies.silent_s()
        if silent_s <= self._store.config.timeout_s:
            return
        copies.abandoned = True
        self._stuck |= self._store.held
        step = max(self._store.held, default=self._store.newest)
        self._store.held = frozenset()
        error = (
            f"the store has shown no sign for {silent_s:.0f} s (checkpoint.timeout_s); other steps are "
            f"copied meanwhile, this one by the next start"
        )
        self._report(None, step, error, time.monotonic() - silent_s, 0)
        with self._state:
            self._requested = True
            self._idle = False
        self._begin(Copies(self.url))

    def _begin(self, copies: Copies) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._copies = copies if len(self._threads) < _MOST_STUCK else None
        if self._copies:
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
            self._round(copies)

    def _round(self, copies: Copies) -> None:
        """Copies all that the store lacks, and deletes there what has expired."""
        began = time.monotonic()
        local: list[int] = []
        failed: set[int] = set()
        try:
            local = self._store.steps()
            there = self._listed(copies)
            if self._known is None:
                both = [step for step in local if MANIFEST in there.get(step, {})]
                self._known = {
                    self._key(n) for n in both if copies.holds(self._store.folder, n)
                }
            for step in there:  # halves, which may be what fills the store
                if MANIFEST not in there[step] and step not in local:
                    copies.remove(step, there[step])
            while missing := [
                n for n in self._store.steps() if n not in failed and self._is_due(n)
            ]:
                self._copy(copies, missing[-1], failed)
                # each time: where saves come faster than copies, there is always
                # another
                if not failed:
                    self._expire(copies)
            if not failed:
                self._expire(copies)
        except Exception as error:  # of the store's client, or of the disk
            self._report(copies, max(local, default=0), error_text(error), began, 0)
        finally:
            if not copies.abandoned:
                self._store.held = frozenset()

    def _listed(self, copies: Copies) -> dict[int, dict[str, int]]:
        """Lists the store's steps.

        Raises:
          CheckpointError: they are another run's, and left alone.
        """
        there = copies.steps()
        # afterwards: a run claims the store before it puts a file there
        copies.is_claimed(self._store.folder)
        return there

    def _is_due(self, step: int) -> bool:
        assert self._known is not None
        self._seen.add(step)
        with contextlib.suppress(FileNotFoundError):  # deleted by now
            bad = step in self._store.bad_steps or step in self._stuck
            return not bad and self._key(step) not in self._known
        return False

    def _key(self, step: int) -> tuple[int, int]:
        # A step that is saved again, since the run went back, has another manifest.
        return step, (self._store.folder / str(step) / MANIFEST).stat().st_mtime_ns

    def _copy(self, copies: Copies, step: int, failed: set[int]) -> None:
        if copies.abandoned:
            raise Abandoned(self.url)
        began = time.monotonic()
        is_sound = False
        self._store.held = frozenset({step})
        assert self._known is not None
        try:
            key = self._key(step)
            # In this thread alone: at the end of the process, Python would wait for a
            # pool's.
            integrity.check(self._store.folder, step, run=self._store.run, threads=1)
            is_sound = True
            size = copies.copy(self._store.folder, step, self._beside)
            self._known.add(key)
            self._report(copies, step, "", began, size)
        except Abandoned:
            raise
        except Exception as error:  # of the store's client, or of the disk
            failed.add(step)
            # damaged here: reported once
            if isinstance(error, CheckpointError) and not is_sound:
                self._known.add(key)
            if not folders.is_deleted(self._store.folder, step):
                self._report(copies, step, error_text(error), began, 0)

    def _expire(self, copies: Copies) -> None:
        """Deletes what the rules of keeping would, and what the run has gone back
        behind.

        Other steps that are newer than all here stay: what is here may be old, from a
        machine that had the run before. They are replaced once the run comes to them.
        """
        local = self._store.steps()
        there = self._listed(copies)
        if not local:
            return
        good = [
            n for n in there if MANIFEST in there[n] and n not in self._store.milestones
        ]
        gone = folders.expired(
            good,
            newest=local[-1],
            keep_last=self._store.config.keep_last,
            keep_every=self._store.config.keep_every,
            best=self._store.best,
        )
        for step in there:
            if step > local[-1] and (
                step in self._seen or copies.is_undone(self._store.folder, step)
            ):
                gone.append(step)
        for step in gone:
            if step not in local:
                copies.remove(step, there[step])

    def _report(
        self, copies: Copies | None, step: int, error: str, began: float, size: int
    ) -> None:
        if copies is None or not copies.abandoned:
            self._results.put(CopyResult(step, error, time.monotonic() - began, size))
