"""Manager of a run's checkpoints: when to save, background saves, retention, restore.

Orbax is imported on first use. `prepare` and `preload` import it early, in a background
thread.
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

from jaxdist.checkpoint import fingerprint, folders, integrity, state_dict
from jaxdist.checkpoint.background import Background
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError, StepInfo, error_text
from jaxdist.checkpoint.interval import SaveInterval
from jaxdist.config import extras, trees
from jaxdist.distributed import coordination, initialize
from jaxdist.storage import lock

# With several processes, the clock of process 0 decides for all. The others wait for its
# answer, so the time rule is checked only at multiples of this many steps.
CLOCK_STEPS = 10
# The obstacle to a save that `_make_room` reports if the folder has another owner.
_TAKEN = "another process's"
# Least seconds to wait for an answer of the file system.
_ANSWER_S = 2
# Seconds after `timeout_s` in which Orbax can still report its own timeout.
_GRACE_S = 10


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """Outcome of one save.

    With `ok`, the save is committed. An `error` of a committed save means that expired
    steps could not be deleted.
    """

    step: int
    ok: bool
    error: CheckpointError | None
    seconds: float  # from the call of `save` until committed or failed
    # bytes of all arrays before compression; replicas are counted once
    bytes: int


# Makes the abstract state to restore into, from the description of a stored step.
Wanted = Callable[[StepInfo], Any]
# Takes a damaged step and the damage, and puts a copy in the step's place. The result is
# that step, or 0 if there is no copy. (None, "") asks for the copy of any step. It never
# raises an error.
Fetch = Callable[[int | None, str], int]


class NotOwner(CheckpointError):
    """Error of a process whose folder another process has taken over."""

    reason = "owner"  # in the event `stop`


class Restored(NamedTuple):
    """State in the target shardings, and the metadata that was saved with it."""

    state: Any
    metadata: dict[str, Any]


def preload() -> Any:
    """Imports the module that needs Orbax, which takes a second or two.

    The first save or restore then does not wait for the import.
    """
    return extras.load("jaxdist.checkpoint.orbax_backend")


class CheckpointManager:
    """Manager that saves and restores states under `folder/<step>/`.

    All processes call `save`, `restore` and `should_save` in the same order, because
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
        self.bad_steps: dict[int, str] = {}
        # steps that are always due and never expire
        self.milestones: frozenset[int] = frozenset()
        self._results = queue.SimpleQueue[SaveResult]()
        self.interval = SaveInterval(config)
        self._background = Background(self.folder, config.timeout_s + _GRACE_S)
        self.newest = 0  # the step that was last restored or saved; 0 = none
        # the best steps of the run, oldest first; the last one that was saved is kept
        self.best: list[int] = []
        # steps that must stay because they are being copied
        self.held: frozenset[int] = frozenset()
        # fetches a copy of a step that a restore found damaged
        self.fetch: Fetch = lambda step, reason: 0
        # the step that was last saved or restored, which is not due again
        self._last_step: int | None = None
        # seconds on the clock of `should_save`; None until its first call
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
            if not isinstance(self.folder, Path):
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
        """Returns the identity of the run that owns the folder.

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
        """Lists the committed steps that are on disk at the moment, ascending."""
        return folders.list_steps(self.folder)

    def prepare(self, abstract_state: Any) -> None:
        """Imports and compiles what the first save or restore needs, ahead of time."""
        preload()
        with initialize.lead_first("save"):
            fingerprint.start.lower(state_dict.to_canonical(abstract_state)).compile()

    def should_save(
        self, step: int, now: float, *, last: bool = False, stopped: bool = False
    ) -> bool:
        """Tests whether a save is due after `step`.

        The method remembers `now`. The next `save` counts as begun at that time.

        Args:
          step: finished updates. A step that was just saved or restored is never due.
          now: seconds on any steady clock, the same clock in each call. The first call
            starts the time rule.
          last: whether training ends here. Then `save_at_end` counts, too.
          stopped: whether training stops early and is to be resumed. Then a save is
            always due.
        """
        self._now = now
        seconds = self.interval.seconds
        if self._last_save is None:
            self._last_save = now
        due = stopped or step in self.milestones or self.config.is_due(step, last=last)
        checks_clock = jax.process_count() == 1 or step % CLOCK_STEPS == 0
        if not due and seconds > 0 and checks_clock:
            due = coordination.broadcast(now - self._last_save >= seconds)
        due = due and step != self._last_step
        if last or stopped:
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
        self._last_step = step
        sums = self._start(step, arrays, document)
        finish = functools.partial(
            self._finish, step, names=list(arrays), sums=sums, report=report
        )
        if isinstance(sums, Exception) or not self.config.asynchronous:
            finish()
        else:
            self._background.begin(finish, f"save of step {step}")

    def _obstacle(self, step: int, num_bytes: int, *, wait: bool) -> str:
        """Explains why no save can begin ("" if one can); process 0 decides for all.

        Raises:
          NotOwner: another process has become the owner of the folder.
        """
        reason = ""
        if jax.process_index() == 0:
            answers = queue.SimpleQueue[str]()
            patience_s = self.config.patience_s
            ended = self.wait(None if wait else patience_s)
            if ended:
                make_room = functools.partial(self._make_room, step, num_bytes)
                self._background.begin(
                    lambda: answers.put(make_room()),
                    f"look at the disk before step {step}",
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
        """Prepares the folder for a save, or explains why none can begin."""
        try:
            if not self._is_ours():
                return _TAKEN
            # The remains of failed saves would fill the disk.
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
        except Exception as error:  # clients of object stores raise many types
            return error_text(error)
        return ""

    def _start(
        self, step: int, arrays: Mapping[str, Any], document: Mapping[str, Any]
    ) -> jax.Array | Exception:
        """Starts the save, and returns the state's fingerprint or the error."""
        try:
            sums: jax.Array = fingerprint.start(arrays)
            self._backend.start(self.folder / str(step), arrays, document)
        except Exception as error:  # `_finish` reports it; training continues
            return error
        return sums

    def _finish(
        self,
        step: int,
        *,
        names: list[str],
        sums: jax.Array | Exception,
        report: Callable[..., None],
    ) -> None:
        """Commits the step, deletes expired steps and reports the outcome.

        An asynchronous save runs this in its background thread.
        """
        ok = True
        problem = None
        try:
            if isinstance(sums, Exception):
                raise sums
            self._commit(step, names, sums)
        except Exception as error:
            text = error_text(error)
            path = str(self.folder / str(step))
            if path not in text:  # errors of write and fsync name no file
                text += f" ({path})"
            ok = False
            problem = CheckpointError(f"step {step} was not saved: {text}")
            self._last_step = None  # a save at the end of the run tries this step again
        try:
            if jax.process_index() == 0 and self._is_ours():
                self._tidy(step, committed=ok)
        except Exception as error:
            problem = problem or CheckpointError(
                f"old checkpoints were not deleted: {error_text(error)}"
            )
        report(problem, ok=ok)

    def _commit(self, step: int, names: list[str], sums: jax.Array) -> None:
        """Waits until all is written, and seals the step."""
        self._backend.finish()
        fingerprints = fingerprint.finish(names, sums)
        if jax.process_index() == 0:
            if not self._is_ours():
                raise CheckpointError(f"another process has taken {self.folder}")
            assert self.run is not None
            integrity.seal(self.folder, step, self.run, fingerprints)
        self.newest = step

    def _tidy(self, step: int, *, committed: bool) -> None:
        """Deletes the expired steps, or the remains of an uncommitted save."""
        if not committed:
            folders.remove_leftovers(self.folder)
            return
        folders.end_save(self.folder, step)
        deletable = [
            saved
            for saved in self.steps()
            if saved not in self.bad_steps and saved not in self.milestones
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
        """Returns the saves that ended since the last call, oldest first."""
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
        abstract_state: Any | Wanted,
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> Restored:
        """Restores the state of `step`, or of the newest step that can be trusted.

        A trusted step is sealed, belongs to this run, and is unchanged on disk. Once
        its arrays are on the devices, they have the fingerprints that were saved. Each
        array is read into its target sharding, so mesh, devices and processes may
        differ from those of the save.

        Damaged steps that are newer are listed in `bad_steps`. With mode "write" they
        are moved to quarantine, unless no step is good: then all stay in place.

        Args:
          abstract_state: tree of leaves with shape, dtype and sharding, or a function
            that makes it from the description of a sound step.
          step: the only step to try. None tries all, newest first.
          partial: whether the state may lack some of the stored arrays. These are not
            read.

        Raises:
          state_dict.LayoutError: the checkpoint holds another model or optimizer. All
            names are listed.
          CheckpointError: there is no usable checkpoint. Its `steps` has the reason for
            each step that was tried.
        """
        if not callable(abstract_state):
            state_dict.require_shardings(state_dict.to_canonical(abstract_state))
        if self.mode == "write":
            self.check_owner()
        self.wait()
        failures: dict[int, str] = {}
        for candidate in self._candidates(step, failures):
            try:
                restored = self._attempt(candidate, abstract_state, partial=partial)
            except state_dict.LayoutError:
                # The step is not damaged. An older one must not replace it silently.
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
        self, only_step: int | None, failures: Mapping[int, str]
    ) -> Iterator[int]:
        """Yields the steps to try, newest first; torn ones between whole ones, too.

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
        self.bad_steps.pop(fetched, None)
        return fetched

    def _attempt(
        self, step: int, abstract_state: Any | Wanted, *, partial: bool
    ) -> Restored:
        """Restores the state of `step`.

        Raises:
          LayoutError: the step holds another model or optimizer.
          CheckpointError: a process cannot read or trust the step. All processes raise
            it.
        """
        # The read below waits for all processes, so all must know of an error first.
        with _error_on_all(CheckpointError, OSError):
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
        with _error_on_all(Exception):
            abstract_arrays = state_dict.to_canonical(abstract_state)
            arrays = self._backend.read(self.folder / str(step), abstract_arrays)
            restored = Restored(
                state_dict.from_canonical(arrays, abstract_state), info.metadata
            )
        _check_arrays(step, arrays, manifest)
        return restored

    def _set_aside(self, failures: Mapping[int, str]) -> None:
        """Moves damaged steps, {step: reason}, to quarantine. A reader moves none."""
        if self.mode == "write" and jax.process_index() == 0:
            for step, reason in failures.items():
                # A step that cannot be moved stays in `bad_steps` and is not used.
                with contextlib.suppress(OSError):
                    folders.quarantine(self.folder, step, reason)

    @functools.cached_property
    def _backend(self) -> Any:
        return preload().OrbaxBackend(timeout_s=self.config.timeout_s)

    def close(self) -> None:
        """Waits for the running save and releases threads and the lock.

        `poll` still reports the result of that save.
        """
        if not self.wait():
            return  # a save that hangs still needs the backend and the lock
        if "_backend" in self.__dict__:
            self._backend.close()
            del self._backend
        self._ownership.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_arrays(
    step: int, arrays: Mapping[str, jax.Array], manifest: integrity.Manifest
) -> None:
    """Checks that restored arrays are those that were saved as `step`.

    Raises:
      CheckpointError: fingerprints differ, or the state is that of another step.
    """
    sums = fingerprint.of(arrays)
    changed = [name for name in sums if sums[name] != manifest.fingerprints.get(name)]
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
def _error_on_all(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds on any process into a CheckpointError on all."""
    reason = ""
    try:
        yield
    except kinds as error:
        reason = error_text(error)
    reason = coordination.first_error(reason)
    if reason:
        raise CheckpointError(reason)
