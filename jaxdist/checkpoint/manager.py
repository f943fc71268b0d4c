"""The checkpoints of one run: when to save, saving beside training, keeping, restoring.

Orbax is imported on first use, or by `prepare` or `preload` in a background thread.
"""

import contextlib
import dataclasses
import errno
import functools
import queue
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import fingerprint, state_dict
from jaxdist.checkpoint import manifest as integrity
from jaxdist.checkpoint.background import Background
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.files import CheckpointError, StepInfo, error_text
from jaxdist.checkpoint.interval import SaveInterval
from jaxdist.config import extras, trees
from jaxdist.distributed import coordination, initialize
from jaxdist.storage import lock

# With several processes, process 0's clock decides for all; asking it is a wait for
# that process, so the time rule is looked at only at multiples of this many steps.
CLOCK_STEPS = 10
_TAKEN = "another process's"  # of the folder, among the reasons why no save can begin
# for the file system, at least; for Orbax to say itself what took too long
_ANSWER_S = 2
_GRACE_S = 10


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """How one save ended; with `ok` it is committed, and an `error` beside it says that
    old ones stay.
    """

    step: int
    ok: bool
    error: CheckpointError | None
    seconds: float  # from the call of `save` until committed or failed
    # of the arrays, each counted once over all processes, before compression
    bytes: int


Wanted = Callable[[StepInfo], Any]  # what a step says about itself -> abstract state
# (a damaged step, why) -> that step, if its copy has its place now, or 0; (None, ""):
# any. Raises nothing
Fetch = Callable[[int | None, str], int]


class NotOwner(CheckpointError):
    """Another process has become the owner of the folder."""

    reason = "owner"  # in the event `stop`


class Restored(NamedTuple):
    """A state in the target shardings, and the metadata that was saved with it."""

    state: Any
    metadata: dict[str, Any]


def preload() -> Any:
    """Imports what needs Orbax (a second or two), so that the first save or restore
    does not wait for it.
    """
    return extras.load("jaxdist.checkpoint.orbax_backend")


class CheckpointManager:
    """Saves and restores states under `folder/<step>/`.

    With several processes each makes the same calls in the same order (`save`,
    `restore` and `should_save` communicate); process 0 alone seals, deletes and moves.
    One store may write to a folder at a time: with mode "write" it is locked, and the
    leftovers of dead saves are deleted. Mode "read" changes nothing. Always `close` (or
    use `with`): a save that still runs when the interpreter ends is lost.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        *,
        mode: Literal["write", "read"] = "write",
        run: str | None = None,
    ) -> None:
        """Opens the folder; with mode "write" makes it and becomes its owner.

        Args:
          run: the identity of the caller's run, where it is known.

        Raises:
          CheckpointError: the folder cannot be written, or belongs to another run.
          lock.Locked: another process owns it.
        """
        self.folder = folders.as_path(folder)
        self.config = config
        self.mode = mode
        # {step: reason} of what `restore` could not use
        self.bad_steps: dict[int, str] = {}
        # steps that are always due, and never expire
        self.milestones: frozenset[int] = frozenset()
        self._results = queue.SimpleQueue[SaveResult]()
        self.interval = SaveInterval(config)
        self._background = Background(self.folder, config.timeout_s + _GRACE_S)
        self.newest = 0  # the newest step that was restored or saved since; 0: none
        self.best: list[int] = []  # steps to keep: the last of them that was saved
        # steps that stay for as long as they are copied
        self.held: frozenset[int] = frozenset()
        self.fetch: Fetch = lambda step, reason: 0  # for what a restore finds damaged
        self._last_step: int | None = None  # saved or restored; not due again
        # of `should_save`'s clock; None before its first call
        self._last_save: float | None = None
        self._now: float | None = None
        self.run: str | None = None  # identity of the run; process 0 knows it
        self._owned = contextlib.ExitStack()
        self._is_ours: lock.IsHeld = lambda: True  # process 0 asks
        if jax.process_index() == 0:
            self.run = integrity.identity(self.folder, create=False, own=run)
            if mode == "write":
                try:
                    self._become_owner(run)
                except OSError as error:
                    self._owned.close()
                    raise CheckpointError(
                        f"{self.folder} cannot be written: {error_text(error)}"
                    ) from error

    def _become_owner(self, run: str | None) -> None:
        """Locks the folder, or where nothing can be locked leases it, and removes what
        dead saves left.

        Raises:
          OSError: the folder cannot be written.
          lock.Locked: another process owns it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if not isinstance(self.folder, Path):
                raise OSError(errno.ENOLCK, "an object store")
            self._is_ours = self._owned.enter_context(
                lock.exclusive(self.folder / folders.LOCK)
            )
        except OSError as error:
            if error.errno not in lock.UNSUPPORTED:
                raise
            resumes = run is not None
            name = self.run or secrets.token_hex(8)
            lease = lock.lease(self.folder / folders.OWNER, name, resumes=resumes)
            self._is_ours = self._owned.enter_context(lease)
        folders.remove_leftovers(self.folder)
        self.run = integrity.identity(self.folder, create=True, own=run)

    def owner(self) -> str | None:
        """Returns the identity of the run whose folder this process sees; None if it
        sees none.
        """
        return integrity.read_identity(self.folder)

    def check_owner(self) -> None:
        """Raises NotOwner, on all processes, if another process has become the folder's
        owner.
        """
        if coordination.broadcast(jax.process_index() == 0 and not self._is_ours()):
            raise NotOwner(self._taken())

    def _taken(self) -> str:
        return (
            f"{self.folder}: another process has taken it over, or replaced its {folders.LOCK}; this run "
            f"saves no more there; stop one of the two, or give it another checkpoint.folder"
        )

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending, as they are on disk now."""
        return folders.list_steps(self.folder)

    def prepare(self, abstract_state: Any) -> None:
        """Imports and compiles what the first save or restore needs, so that it does
        not wait for it.
        """
        preload()
        with initialize.lead_first("save"):
            fingerprint.start.lower(state_dict.to_canonical(abstract_state)).compile()

    def should_save(
        self, step: int, now: float, *, last: bool = False, stopped: bool = False
    ) -> bool:
        """Tests whether a save is due after `step`; remembers `now` as the time of
        the save.

        Args:
          step: updates finished. A step that was just saved or restored is never due.
          now: seconds on any steady clock, the same one in each call; the first call
            starts it.
          last: whether training ends here (then `save_at_end` counts too).
          stopped: whether it ends before its time and goes on later: always due.
        """
        self._now = now
        seconds = self.interval.seconds
        if self._last_save is None:
            self._last_save = now
        due = stopped or step in self.milestones or self.config.is_due(step, last=last)
        if (
            not due
            and seconds > 0
            and (jax.process_count() == 1 or step % CLOCK_STEPS == 0)
        ):
            due = coordination.broadcast(now - self._last_save >= seconds)
        due = due and step != self._last_step
        # At the end only some may know that a save has failed.
        return coordination.broadcast(due) if last or stopped else due

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Start to save `state` and `metadata` as one unit; the outcome comes from
        `poll`.

        Returns once the arrays are copied to the host: they may be donated right after.
        Waits for the save before, and for an answer of the file system, for
        `patience_s` each, then gives this one up, and `poll` says so: a slow disk does
        not stop training.

        Args:
          metadata: JSON values: data position, config fingerprint, versions, ...
          wait: wait longer for both, for `timeout_s`: this one is the last.

        Raises:
          TypeError, ValueError: `metadata` is not JSON, or the store is read-only. A
          disk or Orbax
            error is never raised here, it is a `SaveResult`.
          NotOwner: another process has become the folder's owner.
        """
        if self.mode != "write":
            raise ValueError(
                f"the store of {self.folder} was opened to read; open it to write"
            )
        arrays = state_dict.to_canonical(state)
        document = folders.describe(step, state_dict.describe(arrays), metadata)
        num_bytes = trees.tree_bytes(arrays)
        started = time.monotonic()

        def report(error: CheckpointError | None, *, ok: bool) -> None:
            self._results.put(
                SaveResult(step, ok, error, time.monotonic() - started, num_bytes)
            )

        obstacle = self._obstacle(step, num_bytes, wait)
        self._last_save = self._now
        if obstacle:
            report(CheckpointError(f"step {step} was not saved: {obstacle}"), ok=False)
            return None
        self._last_step = step
        sums = self._start(step, arrays, document)
        finish = functools.partial(self._finish, step, list(arrays), sums, report)
        if isinstance(sums, Exception) or not self.config.asynchronous:
            return finish()
        self._background.begin(finish, f"save of step {step}")
        return None

    def _obstacle(self, step: int, num_bytes: int, wait: bool) -> str:
        """Explains why no save can begin, "" if one can; process 0 decides for all.

        Raises:
          NotOwner: another process has become the folder's owner.
        """
        reason = ""
        if jax.process_index() == 0:
            answers = queue.SimpleQueue[str]()
            patience_s = self.config.patience_s
            ended = self.wait(None if wait else patience_s)
            if ended:
                ask = functools.partial(self._make_room, step, num_bytes)
                self._background.begin(
                    lambda: answers.put(ask()), f"look at the disk before step {step}"
                )
                ended = self.wait(None if wait else max(patience_s, _ANSWER_S))
            reason = answers.get() if ended else self.delay()
        reason = coordination.first_error(reason)
        if reason == _TAKEN:
            raise NotOwner(self._taken())
        if not reason:
            self.wait()
        return reason

    def _make_room(self, step: int, num_bytes: int) -> str:
        try:
            if not self._is_ours():
                return _TAKEN
            # of failed saves: they eat the rest of the disk
            folders.remove_leftovers(self.folder)
            path = self.folder / str(step)
            reason = self.bad_steps.pop(step, "")
            if path.exists() and (reason or step not in self.steps()):
                folders.quarantine(
                    self.folder, step, reason or "it was in the way and no checkpoint"
                )
            if path.exists():
                return f"{path} already exists"
            if isinstance(self.folder, Path):
                free = shutil.disk_usage(self.folder).free
                if free < num_bytes:
                    return f"{num_bytes:,} bytes are needed, {free:,} are free in {self.folder}"
            folders.begin_save(self.folder, step)
        except Exception as error:  # of the disk, or of an object store's client
            return error_text(error)
        return ""

    def _start(
        self, step: int, arrays: Mapping[str, Any], document: dict
    ) -> jax.Array | Exception:
        """Returns the state's fingerprint under way, or why the save could not
        begin.
        """
        try:
            sums = fingerprint.start(arrays)
            self._backend.start(self.folder / str(step), arrays, document)
        except Exception as error:  # training goes on, the caller hears of it
            return error
        return sums

    def _finish(
        self,
        step: int,
        names: list[str],
        sums: jax.Array | Exception,
        report: Callable[..., None],
    ) -> None:
        """Wait for the commit, seal, delete what has expired and report; runs in the
        save's thread.
        """
        ok = True
        problem = None
        try:
            if isinstance(sums, Exception):
                raise sums
            self._backend.finish()
            fingerprints = fingerprint.finish(names, sums)
            if jax.process_index() == 0:
                if not self._is_ours():
                    raise CheckpointError(f"{self.folder} is another process's by now")
                assert self.run is not None
                integrity.seal(self.folder, step, self.run, fingerprints)
            self.newest = step
        except Exception as error:
            text = error_text(error)
            place = str(self.folder / str(step))
            # errors of write and fsync name nothing
            text += "" if place in text else f" ({place})"
            ok = False
            problem = CheckpointError(f"step {step} was not saved: {text}")
            self._last_step = None  # so that a save at the end is tried again
        try:
            if jax.process_index() == 0 and self._is_ours():
                self._tidy(step, committed=ok)
        except Exception as error:
            problem = problem or CheckpointError(
                f"old checkpoints were not deleted: {error_text(error)}"
            )
        report(problem, ok=ok)

    def _tidy(self, step: int, *, committed: bool) -> None:
        if not committed:
            folders.remove_leftovers(self.folder)
            return
        folders.end_save(self.folder, step)
        good = [
            n
            for n in self.steps()
            if n not in self.bad_steps and n not in self.milestones
        ]
        last = self.config.keep_last
        every = self.config.keep_every
        for old in folders.expired(
            good, newest=step, keep_last=last, keep_every=every, best=self.best
        ):
            if old not in self.held:
                folders.remove_step(self.folder, old)

    def poll(self) -> list[SaveResult]:
        """Returns the saves that ended since the last call, oldest first, without
        waiting.
        """
        return [self._results.get() for _ in range(self._results.qsize())]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the save, `seconds` or until it has had `timeout_s`; returns whether
        none is running.
        """
        return self._background.wait(seconds)

    def delay(self) -> str:
        """Describes a save that has not ended."""
        return self._background.delay()

    def restore(
        self,
        abstract_state: Any | Wanted,
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> Restored:
        """Returns the state of `step`, or of the newest step that can be trusted.

        Trusted is what is sealed, of this run, unchanged on disk, and has the
        fingerprint it was saved with once it is in place. Each array is read straight
        into its target sharding: any mesh, any number of devices or processes. Newer
        steps are noted in `bad_steps` and, with mode "write", moved to quarantine. If
        none is good all stay where they are.

        Args:
          abstract_state: leaves with shape, dtype and sharding; or what returns them
            for a sound step.
          partial: whether the state may lack some of what is stored; that is not read.

        Raises:
          state_dict.LayoutError: the checkpoint holds another model or optimizer; all
            names are listed.
          CheckpointError: there is no (usable) checkpoint; `steps` says why for each
            one tried.
        """
        if not callable(abstract_state):
            state_dict.require_shardings(state_dict.to_canonical(abstract_state))
        if self.mode == "write":
            self.check_owner()
        self.wait()
        failures: dict[int, str] = {}
        for candidate in self._candidates(step, failures):
            try:
                restored = self._attempt(candidate, abstract_state, partial)
            except state_dict.LayoutError:
                # not damage: an older step would not fit either, and must not win
                # silently
                raise
            except CheckpointError as error:
                failures[candidate] = str(error)
                if not folders.is_deleted(self.folder, candidate):
                    self.bad_steps[candidate] = str(error)
                continue
            self._last_step = self.newest = candidate
            self._set_aside(
                {bad: self.bad_steps[bad] for bad in failures if bad in self.bad_steps}
            )
            return restored
        raise folders.none_usable(self.folder, failures)

    def _candidates(
        self, only: int | None, failures: Mapping[int, str]
    ) -> Iterator[int]:
        """Yields the newest whole steps and the torn ones between them, newest first;
        to all the same.

        Who asks for another has `failures` of the last one: its copy, where there is
        one, takes its place and is yielded next. At the end comes the newest copy that
        was not tried.
        """
        steps = (
            folders.newest_first(self.folder, folders.steps_to_try)
            if only is None
            else iter([only])
        )
        while (step := coordination.broadcast(next(steps, -1))) >= 0:
            yield step
            if self._fetch(step, failures.get(step, "")):
                yield step
        if only is None and (step := self._fetch(None, "")):
            yield step

    def _fetch(self, step: int | None, reason: str) -> int:
        """Returns the step whose copy was fetched, 0 if none was; process 0 decides for
        all.
        """
        fetched = coordination.broadcast(
            self.fetch(step, reason) if jax.process_index() == 0 else 0
        )
        self.bad_steps.pop(fetched, None)
        return fetched

    def _attempt(
        self, step: int, abstract_state: Any | Wanted, partial: bool
    ) -> Restored:
        """Returns the state of `step`.

        Raises:
          LayoutError: it holds another model or optimizer.
          CheckpointError: some process cannot read or trust it; all raise the same.
        """
        # before a read that waits for all processes
        with _error_on_all(CheckpointError, OSError):
            share = jax.process_index(), jax.process_count()
            manifest = integrity.check(self.folder, step, run=self.run, part=share)
            info = folders.read_step(self.folder, step)
        if callable(abstract_state):
            abstract_state = abstract_state(info)
        state_dict.check(info.arrays, abstract_state, partial=partial)
        # Orbax and TensorStore raise many types for the same damage
        with _error_on_all(Exception):
            wanted = state_dict.to_canonical(abstract_state)
            arrays = self._backend.read(self.folder / str(step), wanted)
            restored = Restored(
                state_dict.from_canonical(arrays, abstract_state), info.metadata
            )
        sums = fingerprint.of(arrays)
        changed = [
            name for name in sums if sums[name] != manifest.fingerprints.get(name)
        ]
        if changed:
            raise CheckpointError(
                f"not what was saved, by fingerprint: {', '.join(changed[:8])}"
            )
        made = int(arrays["step"]) if "step" in arrays else step
        if made != step:
            raise CheckpointError(
                f"its state had made {made} steps, not {step}: another step's content"
            )
        return restored

    def _set_aside(self, failures: Mapping[int, str]) -> None:
        if self.mode == "write" and jax.process_index() == 0:
            for step, reason in failures.items():
                # it stays in `bad_steps`, and is not used
                with contextlib.suppress(OSError):
                    folders.quarantine(self.folder, step, reason)

    @functools.cached_property
    def _backend(self) -> Any:
        return preload().OrbaxBackend(timeout_s=self.config.timeout_s)

    def close(self) -> None:
        """Wait for the running save and release threads; `poll` still gives
        its result.
        """
        if self.wait():  # else the save that hangs still needs both
            if "_backend" in self.__dict__:
                self._backend.close()
                del self._backend
            self._owned.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _error_on_all(*kinds: type[Exception]) -> Iterator[None]:
    """Raises a CheckpointError on all processes where one has had an error of these
    kinds.
    """
    reason = ""
    try:
        yield
    except kinds as error:
        reason = error_text(error)
    reason = coordination.first_error(reason)
    if reason:
        raise CheckpointError(reason)
