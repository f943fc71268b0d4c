"""Manager of a run's checkpoints: when to save, background saves, retention, restore.

Orbax is imported on first use. `prepare` and `preload` import it early, in a background
thread.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import queue
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax

from jaxdist.checkpoint import fingerprint, folders, integrity, state_dict
from jaxdist.checkpoint.background import Background
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError, StepInfo, error_text
from jaxdist.checkpoint.interval import SaveInterval
from jaxdist.config import extras, trees
from jaxdist.distributed import coordination, initialize
from jaxdist.storage import lock
from jaxdist.storage.paths import is_local

# With several processes, the clock of process 0 decides for all. The others wait for
# its answer, so the time rule is checked only at multiples of this many steps.
CLOCK_STEPS = 10
# Least seconds to wait for an answer of the file system.
_ANSWER_S = 2
# Seconds after `timeout_s` in which Orbax can still report its own timeout.
_GRACE_S = 10


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """Outcome of one save.

    With `ok`, the step is sealed. An `error` of a sealed step means that expired steps
    could not be deleted. On processes other than the first, `ok` means that the arrays
    are written. The first process may still be sealing the step then, and may fail.
    """

    step: int
    ok: bool
    error: CheckpointError | None
    seconds: float  # from the call of `save` until sealed or failed
    # bytes of all arrays before compression; replicas are counted once
    bytes: int


# Makes the abstract state to restore into, from the description of a sealed step.
MakeAbstract = Callable[[StepInfo], Any]
# Takes a damaged step and the damage, and puts a copy in the step's place. The result
# is that step, or 0 if there is no copy. (None, "") asks for the copy of any step. It
# never raises an error.
Fetch = Callable[[int | None, str], int]


class NotOwner(CheckpointError):
    """Error of a process whose folder another process has taken over."""

    reason = "owner"  # in the event `stop`


class _Room(NamedTuple):
    """Answer of the first process to whether a save can begin."""

    owns_folder: bool  # whether the folder still belongs to this run
    obstacle: str  # why no save can begin; "" = one can


class Restored(NamedTuple):
    """State in the target shardings, and the metadata that was saved with it."""

    state: Any
    metadata: dict[str, Any]


class MemoryTier(Protocol):
    """Steps in memory that are newer than those of the folder (`memory_tier.py`).

    Every process makes the calls, but `newest_metadata` and `leave_branch`.
    """

    def restore(
        self, abstract_state: Any, *, not_before: int, partial: bool
    ) -> Restored | None:
        """Restores the newest sound step; None = there is none.

        Args:
          abstract_state: as in `CheckpointManager.restore`.
          not_before: steps before this one do not count.
          partial: as in `CheckpointManager.restore`.

        Raises:
          state_dict.LayoutError: the step holds another model or optimizer.
        """

    def confirm(self) -> bool:
        """Tests whether a step can be restored. It hashes the files of the newest."""

    def newest_metadata(self, not_before: int) -> dict[str, Any]:
        """Finds the metadata of the newest step; {} = there is none."""

    def leave_branch(self) -> None:
        """Makes all steps invalid, because the run goes back to an older one."""


def preload() -> Any:
    """Imports the module that needs Orbax, which takes a second or two.

    The first save or restore then does not wait for the import.
    """
    return extras.load("jaxdist.checkpoint.orbax_backend")


class CheckpointManager:
    """Manager that saves and restores states under `folder/<step>/`.

    All processes call `save`, `restore` and `decide_save` in the same order, because
    these methods communicate. Process 0 alone seals, deletes and moves steps.

    One manager may write to a folder at a time. With mode "write" the manager locks the
    folder, and deletes the remains of interrupted saves. Mode "read" changes nothing.

    Always call `close`, or use `with`: a save that still runs when the interpreter ends
    is lost.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        *,
        mode: Literal["write", "read"] = "write",
        run: str | None = None,
    ) -> None:
        """Opens the folder. With mode "write", creates it and becomes its owner.

        Args:
          folder: folder of the checkpoints, a path or gs://...
          config: settings of saves and of retention.
          mode: whether this manager may save, delete and move steps.
          run: identity of the caller's run, if it is known.

        Raises:
          CheckpointError: the folder cannot be written, or belongs to another run.
          lock.Locked: another process owns the folder.
        """
        self.folder = folders.as_path(folder)
        self.config = config
        self.mode = mode
        # {step: reason} of the steps that `restore` could not use
        self.damaged_steps: dict[int, str] = {}
        # steps that are always due and never expire
        self.milestones: frozenset[int] = frozenset()
        self._results = queue.SimpleQueue[SaveResult]()
        self.interval = SaveInterval(config)
        self._background = Background(self.folder, config.timeout_s + _GRACE_S)
        # the step that was last restored, or sealed by a save; 0 = none
        self.last_sealed = 0
        # the best steps of the run, oldest first; the last one that was saved is kept
        self.best: list[int] = []
        # steps that must stay because they are being copied
        self.held: frozenset[int] = frozenset()
        # fetches a copy of a step that a restore found damaged
        self.fetch: Fetch = lambda step, reason: 0
        # newer steps in memory; None = there are none
        self.memory: MemoryTier | None = None
        # collects the metadata of a step from the run's progress
        self.metadata: Callable[[Any], dict[str, Any]] = lambda progress: {}
        # the step that was last restored, or whose save began last. It is not due
        # again. None: there is none, or that save has failed.
        self._last_begun: int | None = None
        # seconds on the clock of `decide_save`; None until its first call
        self._last_save: float | None = None
        self._now: float | None = None
        self.run: str | None = None  # identity of the run; only process 0 has it
        self._ownership = contextlib.ExitStack()
        # tests whether the folder is still this process's; only process 0 calls it
        self._is_ours: lock.IsHeld = lambda: True
        if jax.process_index() == 0:
            self.run = integrity.identity(self.folder, create=False, own=run)
            if mode == "write":
                try:
                    self._become_owner(run)
                except OSError as error:
                    self._ownership.close()
                    raise CheckpointError(
                        f"{self.folder} cannot be written: {error_text(error)}"
                    ) from error

    def _become_owner(self, run: str | None) -> None:
        """Locks the folder and removes the remains of interrupted saves.

        A file system or store without locks gets a lease in place of the lock.

        Raises:
          OSError: the folder cannot be written.
          lock.Locked: another process owns the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if not is_local(self.folder):
                raise OSError(errno.ENOLCK, "an object store")
            self._is_ours = self._ownership.enter_context(
                lock.exclusive(self.folder / folders.LOCK)
            )
        except OSError as error:
            if error.errno not in lock.UNSUPPORTED:
                raise
            resumes = run is not None
            name = self.run or secrets.token_hex(8)
            lease = lock.lease(self.folder / folders.OWNER, name, resumes=resumes)
            self._is_ours = self._ownership.enter_context(lease)
        folders.remove_leftovers(self.folder)
        self.run = integrity.identity(self.folder, create=True, own=run)

    def owner(self) -> str | None:
        """Reads the identity of the run that owns the folder.

        It is None if this process sees no folder or no identity.
        """
        return integrity.read_identity(self.folder)

    def check_owner(self) -> None:
        """Checks that this process still owns the folder.

        Raises:
          NotOwner: another process has become the owner. All processes raise it.
        """
        if coordination.broadcast(jax.process_index() == 0 and not self._is_ours()):
            raise NotOwner(self._taken())

    def _taken(self) -> str:
        return (
            f"{self.folder}: another process has taken it over, or replaced its {folders.LOCK}. This run "
            f"saves no more there. Stop one of the two runs, or give it another checkpoint.folder."
        )

    def steps(self) -> list[int]:
        """Lists the sealed steps that are on disk at the moment, ascending."""
        return folders.list_steps(self.folder)

    def prepare(self, abstract_state: Any) -> None:
        """Imports and compiles what the first save or restore needs, ahead of time."""
        preload()
        with initialize.lead_first("save"):
            fingerprint.start.lower(state_dict.to_canonical(abstract_state)).compile()

    def decide_save(
        self, step: int, now: float, *, last: bool = False, required: bool = False
    ) -> bool:
        """Decides whether a save is due after `step`, the same on all processes.

        The method changes the manager: the first call starts the clock of the time
        rule, and the next `save` counts as begun at `now`. It may communicate. It may
        be called several times for a step.

        Args:
          step: finished updates. A step that was just saved or restored is never due.
          now: seconds on any steady clock, the same clock in each call.
          last: whether training ends here. Then `save_at_end` counts, too.
          required: whether something other than the rules requires the save, such as
            a callback or a signal that stops training. Then it is due.
        """
        self._now = now
        seconds = self.interval.seconds
        if self._last_save is None:
            self._last_save = now
        due = required or step in self.milestones or self.config.is_due(step, last=last)
        checks_clock = jax.process_count() == 1 or step % CLOCK_STEPS == 0
        if not due and seconds > 0 and checks_clock:
            due = coordination.broadcast(now - self._last_save >= seconds)
        due = due and step != self._last_begun
        if last or required:
            # Some processes may not know yet that the save of this step has failed.
            due = coordination.broadcast(due)
        return due

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Starts to save `state` and `metadata` as one unit.

        `poll` reports the outcome. The method returns as soon as the arrays are copied
        to the host. They may be donated after that.

        A slow disk does not stop training. The method waits up to `patience_s` seconds
        for the previous save, and up to `patience_s` seconds for an answer of the file
        system. After that it skips this save, and `poll` reports it as failed. `poll`
        also reports errors of the disk and of Orbax.

        Args:
          step: finished updates of `state`.
          state: train state, with arrays of any sharding.
          metadata: JSON values, such as data position, config fingerprint and versions.
          wait: whether to wait up to `timeout_s` in place of `patience_s`, for the last
            save of a run.

        Raises:
          TypeError: `metadata` is not JSON.
          ValueError: `metadata` holds NaN or infinity, or the manager was opened to
            read.
          NotOwner: another process has become the owner of the folder.
        """
        if self.mode != "write":
            raise ValueError(
                f'{self.folder} was opened to read. Saves need mode="write".'
            )
        arrays = state_dict.to_canonical(state)
        document = folders.describe(step, state_dict.describe(arrays), metadata)
        num_bytes = trees.tree_bytes(arrays)
        started = time.monotonic()

        def report(error: CheckpointError | None, *, ok: bool) -> None:
            self._results.put(
                SaveResult(
                    step=step,
                    ok=ok,
                    error=error,
                    seconds=time.monotonic() - started,
                    bytes=num_bytes,
                )
            )

        obstacle = self._obstacle(step, num_bytes, wait=wait)
        self._last_save = self._now
        if obstacle:
            report(CheckpointError(f"step {step} was not saved: {obstacle}"), ok=False)
            return
        self._last_begun = step
        try:
            sums = self._start(step, arrays, document)
        except Exception as error:  # training continues
            self._clean_up_and_report(step, error, report)
            return
        finish = functools.partial(
            self._finish,
            step,
            names=list(arrays),
            sums=sums,
            report=report,
            beside=self.config.asynchronous and not wait,
        )
        if self.config.asynchronous:
            self._background.begin(finish, f"save of step {step}")
        else:
            finish()

    def _obstacle(self, step: int, num_bytes: int, *, wait: bool) -> str:
        """Explains why no save can begin ("" if one can); process 0 decides for all.

        Raises:
          NotOwner: another process has become the owner of the folder.
        """
        room = _Room(owns_folder=True, obstacle="")
        if jax.process_index() == 0:
            room = self._wait_for_room(step, num_bytes, wait=wait)
        owns_folder, obstacle = coordination.broadcast(room)
        # All processes meet here. The first one hosts the answer and must not end
        # before all have read it; nor may a save begin before the last one's round
        # ends.
        coordination.barrier()
        if not owns_folder:
            raise NotOwner(self._taken())
        if not obstacle:
            # The previous save has ended on process 0, but perhaps not on this one.
            self.wait()
        return str(obstacle)

    def _wait_for_room(self, step: int, num_bytes: int, *, wait: bool) -> _Room:
        """Waits for the previous save, and then until the folder is prepared.

        The background thread prepares the folder, because a disk may not answer.
        """
        patience_s = self.config.patience_s
        if not self.wait(None if wait else patience_s):
            return _Room(owns_folder=True, obstacle=self.delay())
        answers = queue.SimpleQueue[_Room]()

        def answer() -> None:
            answers.put(self._make_room(step, num_bytes))

        self._background.begin(answer, f"look at the disk before step {step}")
        if not self.wait(None if wait else max(patience_s, _ANSWER_S)):
            return _Room(owns_folder=True, obstacle=self.delay())
        return answers.get()

    def _make_room(self, step: int, num_bytes: int) -> _Room:
        """Prepares the folder for a save, if it is this run's."""
        try:
            if not self._is_ours():
                return _Room(owns_folder=False, obstacle="")
            obstacle = self._prepare_folder(step, num_bytes)
        except Exception as error:  # clients of object stores raise many types
            obstacle = error_text(error)
        return _Room(owns_folder=True, obstacle=obstacle)

    def _prepare_folder(self, step: int, num_bytes: int) -> str:
        """Removes what is in the way of a save and marks the step as unfinished.

        Returns:
          Why no save can begin; "" if one can.
        """
        # The remains of failed saves would fill the disk.
        folders.remove_leftovers(self.folder)
        path = self.folder / str(step)
        reason = self.damaged_steps.pop(step, "")
        if path.exists() and (reason or step not in self.steps()):
            folders.quarantine(
                self.folder, step, reason or "it was in the way and no checkpoint"
            )
        if path.exists():
            return f"{path} already exists"
        if is_local(self.folder):
            free = shutil.disk_usage(self.folder).free
            if free < num_bytes:
                return f"{num_bytes:,} bytes are needed, {free:,} are free in {self.folder}"
        folders.mark_unfinished(self.folder, step)
        return ""

    def _start(
        self, step: int, arrays: Mapping[str, Any], document: Mapping[str, Any]
    ) -> jax.Array:
        """Starts to write a step, and returns the sums of `fingerprint.start`.

        The sums are computed after Orbax has copied the arrays, so that training does
        not wait for them. The arrays are not donated before this method returns.

        Raises:
          Exception: any error of Orbax or of the disk.
        """
        try:
            self._backend.start(self.folder / str(step), arrays, document)
        except Exception:
            # The sums communicate. So they are started even if Orbax has failed: on the
            # other processes it may not have.
            with contextlib.suppress(Exception):  # the first error counts
                fingerprint.start(arrays)
            raise
        try:
            sums: jax.Array = fingerprint.start(arrays)
        except Exception:
            with contextlib.suppress(Exception):  # the first error counts
                self._backend.finish()
            raise
        return sums

    def _finish(
        self,
        step: int,
        *,
        names: list[str],
        sums: jax.Array,
        report: Callable[..., None],
        beside: bool,
    ) -> None:
        """Seals the step, deletes expired steps and reports the outcome.

        An asynchronous save runs this in its background thread. With `beside`, training
        goes on meanwhile.
        """
        try:
            self._seal(step, names, sums, beside=beside)
        except Exception as error:
            self._clean_up_and_report(step, error, report)
        else:
            self._clean_up_and_report(step, None, report)

    def _clean_up_and_report(
        self, step: int, error: Exception | None, report: Callable[..., None]
    ) -> None:
        """Deletes the expired steps, or the remains of a failed save, and reports it.

        Args:
          step: the step of the save.
          error: why the save has failed; None = it is sealed.
          report: called with the error to report and the keyword `ok`.
        """
        problem = None
        if error is not None:
            text = error_text(error)
            path = str(self.folder / str(step))
            if path not in text:  # errors of write and fsync name no file
                text += f" ({path})"
            problem = CheckpointError(f"step {step} was not saved: {text}")
            # A save at the end of the run tries this step again.
            self._last_begun = None
        try:
            if jax.process_index() == 0 and self._is_ours():
                self._tidy(step, sealed=error is None)
        except Exception as failure:
            problem = problem or CheckpointError(
                f"old checkpoints were not deleted: {error_text(failure)}"
            )
        report(problem, ok=error is None)

    def _seal(
        self, step: int, names: list[str], sums: jax.Array, *, beside: bool
    ) -> None:
        """Waits until all arrays are written. The first process then seals the step."""
        self._backend.finish()
        fingerprints = fingerprint.finish(names, sums)
        if jax.process_index() == 0:
            if not self._is_ours():
                raise CheckpointError(f"another process has taken {self.folder}")
            assert self.run is not None
            integrity.seal(self.folder, step, self.run, fingerprints, beside=beside)
        self.last_sealed = step

    def _tidy(self, step: int, *, sealed: bool) -> None:
        """Deletes the expired steps, or the remains of a failed save."""
        if not sealed:
            folders.remove_leftovers(self.folder)
            return
        folders.unmark(self.folder, step)
        deletable = [
            saved
            for saved in self.steps()
            if saved not in self.damaged_steps and saved not in self.milestones
        ]
        expired = folders.expired(
            deletable,
            newest=step,
            keep_last=self.config.keep_last,
            keep_every=self.config.keep_every,
            best=self.best,
        )
        for old in expired:
            if old not in self.held:
                folders.remove_step(self.folder, old)

    def poll(self) -> list[SaveResult]:
        """Collects the saves that ended since the last call, oldest first."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the running save, and returns True if none is running afterwards.

        Args:
          seconds: longest wait. None waits until the save has taken `timeout_s`.
        """
        return self._background.wait(seconds)

    def delay(self) -> str:
        """Describes a save that has not ended."""
        return self._background.delay()

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> Restored:
        """Restores the state of `step`, or of the newest intact step.

        An intact step is sealed, belongs to this run, and is unchanged on disk. Once
        its arrays are on the devices, they have the fingerprints that were saved. Each
        array is read into its target sharding, so mesh, devices and processes may
        differ from those of the save.

        Damaged steps that are newer are listed in `damaged_steps`. With mode "write"
        they move to quarantine, unless no step is intact: then all stay in place.

        A sound step in `memory` that is as new as those of the folder comes first. One
        that is newer than the newest intact step comes before that step.

        Args:
          abstract_state: tree of leaves with shape, dtype and sharding, or a function
            that makes it from the description of a step (`MakeAbstract`). The function
            raises `CheckpointError` to treat the step as damaged.
          step: the only step to try. None tries all, newest first.
          partial: whether the state may lack some of the stored arrays. These are not
            read.

        Raises:
          state_dict.LayoutError: the checkpoint holds another model or optimizer. All
            names are listed.
          CheckpointError: there is no intact step. Its `steps` has the reason for
            each step that was tried.
        """
        if not callable(abstract_state):
            state_dict.require_shardings(state_dict.to_canonical(abstract_state))
        if self.mode == "write":
            self.check_owner()
        self.wait()
        failures: dict[int, str] = {}
        newest = coordination.broadcast(max(self.steps(), default=-1))
        # after the last step of the folder, any step in memory may be tried
        for candidate in itertools.chain(self._candidates(step, failures), [-1]):
            if step is None:
                from_memory = self._restore_from_memory(
                    abstract_state,
                    failures,
                    # a torn step that is newer than all sealed ones does not count
                    not_before=candidate if failures else newest,
                    partial=partial,
                )
                if from_memory is not None:
                    return from_memory
            if candidate < 0:
                break
            try:
                restored = self._attempt(candidate, abstract_state, partial=partial)
            except state_dict.LayoutError:
                # The step is not damaged. An older one must not replace it silently.
                raise
            except CheckpointError as error:
                failures[candidate] = str(error)
                if not folders.is_deleted(self.folder, candidate):
                    self.damaged_steps[candidate] = str(error)
                continue
            self._last_begun = self.last_sealed = candidate
            self._quarantine_damaged(failures)
            return restored
        raise folders.none_intact(self.folder, failures)

    def _restore_from_memory(
        self,
        abstract_state: Any,
        failures: Mapping[int, str],
        *,
        not_before: int,
        partial: bool,
    ) -> Restored | None:
        """Restores a step in memory that is not older than `not_before`; None = none.

        Args:
          abstract_state: as in `restore`.
          failures: {step: reason} of the folder's newer steps, which were tried.
          not_before: the folder's newest step that was not tried.
          partial: as in `restore`.
        """
        if self.memory is None:
            return None
        restored = self.memory.restore(
            abstract_state, not_before=not_before, partial=partial
        )
        if restored is not None:
            self._quarantine_damaged(failures)
            sealed = [step for step in self.steps() if step not in failures]
            self.last_sealed = coordination.broadcast(max(sealed, default=0))
        return restored

    def _candidates(
        self, only_step: int | None, failures: Mapping[int, str]
    ) -> Iterator[int]:
        """Yields the steps to try, newest first; torn ones between sealed ones, too.

        All processes get the same steps. The caller writes the error of a step into
        `failures` before it takes the next one. If a copy of the failed step can be
        fetched, that step is yielded again. The last candidate is the newest copy that
        was not tried.

        Args:
          only_step: the only step to yield. None yields all.
          failures: {step: reason} of the steps that failed so far.
        """
        if only_step is None:
            steps = folders.newest_first(self.folder, folders.steps_to_try)
        else:
            steps = iter([only_step])
        while (step := coordination.broadcast(next(steps, -1))) >= 0:
            yield step
            if self._fetch(step, failures.get(step, "")):
                yield step
        if only_step is not None:
            return
        fetched = self._fetch(None, "")
        if fetched:
            yield fetched

    def _fetch(self, step: int | None, reason: str) -> int:
        """Fetches a copy of `step`. The result is that step, or 0 if there is no copy.

        Process 0 fetches for all. With None as `step`, the copy of any step is fetched.
        """
        copied = 0
        if jax.process_index() == 0:
            copied = self.fetch(step, reason)
        fetched: int = coordination.broadcast(copied)
        self.damaged_steps.pop(fetched, None)
        return fetched

    def _attempt(self, step: int, abstract_state: Any, *, partial: bool) -> Restored:
        """Restores the state of `step`.

        Raises:
          LayoutError: the step holds another model or optimizer.
          CheckpointError: a process cannot read the step, or finds it damaged. All
            processes raise it.
        """
        # The read below waits for all processes, so all must know of an error first.
        with error_on_all(CheckpointError, OSError):
            manifest = integrity.check(
                self.folder,
                step,
                run=self.run,
                part=(jax.process_index(), jax.process_count()),
            )
            info = folders.read_step(self.folder, step)
        if callable(abstract_state):
            abstract_state = abstract_state(info)
        state_dict.check(info.arrays, abstract_state, partial=partial)
        # Orbax and TensorStore raise many types for the same damage.
        with error_on_all(Exception):
            abstract_arrays = state_dict.to_canonical(abstract_state)
            arrays = self._backend.read(self.folder / str(step), abstract_arrays)
            restored = Restored(
                state_dict.from_canonical(arrays, abstract_state), info.metadata
            )
        check_arrays(step, arrays, manifest.fingerprints)
        return restored

    def _quarantine_damaged(self, failures: Mapping[int, str]) -> None:
        """Moves the damaged ones of the steps that failed to quarantine.

        A reader moves none.
        """
        if self.mode == "write" and jax.process_index() == 0:
            for step in filter(self.damaged_steps.__contains__, failures):
                reason = self.damaged_steps[step]
                # A step that cannot be moved stays in `damaged_steps` and is not used.
                with contextlib.suppress(OSError):
                    folders.quarantine(self.folder, step, reason)

    @functools.cached_property
    def _backend(self) -> Any:
        return preload().OrbaxBackend(
            timeout_s=self.config.timeout_s, compress=self.config.compress
        )

    def close(self) -> None:
        """Waits for the running save and releases threads and the lock.

        `poll` still reports the result of that save.
        """
        if not self.wait():
            return  # a save that hangs still needs the backend and the lock
        self._background.close()
        if "_backend" in self.__dict__:
            self._backend.close()
            del self._backend
        self._ownership.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_arrays(
    step: int, arrays: Mapping[str, jax.Array], fingerprints: Mapping[str, str]
) -> None:
    """Checks that restored arrays are those that were saved as `step`.

    Args:
      step: the step.
      arrays: its arrays on the devices, by canonical name.
      fingerprints: fingerprint of each array that was saved.

    Raises:
      CheckpointError: fingerprints differ, or the state is that of another step.
    """
    sums = fingerprint.of(arrays)
    changed = [name for name in sums if sums[name] != fingerprints.get(name)]
    if changed:
        raise CheckpointError(
            f"not what was saved, by fingerprint: {', '.join(changed[:8])}"
        )
    step_in_state = int(arrays["step"]) if "step" in arrays else step
    if step_in_state != step:
        raise CheckpointError(
            f"its state had made {step_in_state} steps, not {step}: another step's content"
        )


@contextlib.contextmanager
def error_on_all(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds on any process into a CheckpointError on all."""
    reason = ""
    try:
        yield
    except kinds as error:
        reason = error_text(error)
    reason = coordination.first_error(reason)
    if reason:
        raise CheckpointError(reason)
