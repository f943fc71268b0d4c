"""A one-way copy of finished steps to any store that fsspec knows, and the way back.

    <copy_to>/config.json, run.json      the workdir's, as they were at the last copy
    <copy_to>/checkpoints/identity       the run whose steps these are
    <copy_to>/checkpoints/<step>/...     a step's files as in `files`, manifest.json last

The layout is that of a workdir, so that a copy of it is one. Stores need no rename and no lock: a step
counts from its manifest on, here as there. Without jax or a device.
"""

import contextlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest as integrity
from jaxdist.checkpoint.files import MANIFEST, CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, extras
from jaxdist.storage import atomic

DELAYS_S = (1.0, 4.0, 16.0)  # before a call of the store is tried again
_STEPS, _FETCHING = "checkpoints", ".fetching"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_LASTING = (FileNotFoundError, PermissionError, CheckpointError)  # trying again would not help


class Copies:
    """The copies of one run's steps in a store."""

    def __init__(self, url: str):
        """Opens nothing yet, so that a store that does not answer holds nobody here.

        Raises:
          ConfigError: fsspec does not know such a store.
          extras.MissingExtra: what reads it is not installed.
        """
        self.url, protocol = url, url.partition("://")[0]
        if package := _PACKAGES.get(protocol):
            extras.require(package)
        try:
            options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
            self._fs, root = fsspec.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint.copy_to={url}: {error}; give e.g. s3://bucket/run") from error
        self._root = root.rstrip("/")

    def steps(self) -> dict[int, dict[str, int]]:
        """Returns {step: {file: bytes}} of all that is there, whole or not, ascending."""
        folder, found = f"{self._root}/{_STEPS}", dict[int, dict[str, int]]()
        self._fs.invalidate_cache()
        for path, info in _tried(lambda: self._fs.find(folder, detail=True)).items():
            step, _, name = path.removeprefix(f"{folder}/").partition("/")
            if step.isdecimal() and str(int(step)) == step and int(step) <= folders.LAST_STEP and name:
                found.setdefault(int(step), {})[name] = info["size"]
        return dict(sorted(found.items()))

    def holds(self, folder: Path, step: int) -> bool:
        """Returns whether the store's manifest of a step is the one in `folder`."""
        with contextlib.suppress(FileNotFoundError):
            there = _tried(lambda: self._fs.cat_file(self._path(step, MANIFEST)))
            return there == (folder / str(step) / MANIFEST).read_bytes()
        return False

    def copy(self, folder: Path, step: int, beside: Iterable[Path] = ()) -> int:
        """Copies a step, its manifest last, and the files beside it; returns the step's bytes.

        Whatever has the step's place in the store is deleted before.

        Raises:
          CheckpointError: its manifest is damaged; the store has another run's; a file did not arrive.
          Exception: any of the store's client.
        """
        self._claim((folder / integrity.IDENTITY).read_bytes())
        manifest = integrity.read_manifest(folder / str(step))
        if there := self.steps().get(step):
            self.remove(step, there)
        for name in sorted(manifest.files):
            self._put(folder / str(step) / name, self._path(step, name))
        for file in beside:
            if file.is_file():
                self._put(file, f"{self._root}/{file.name}")
        self._check_files(manifest, self.steps().get(step, {}))
        self._put(folder / str(step) / MANIFEST, self._path(step, MANIFEST))
        return sum(size for size, _ in manifest.files.values())

    def remove(self, step: int, names: Iterable[str]) -> None:
        """Deletes a step, its manifest first."""
        if MANIFEST in names:
            self._fs.rm_file(self._path(step, MANIFEST))
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):  # it had nothing else
            self._fs.rm(self._path(step), recursive=True)

    def fetch(self, step: int, folder: Path, *, run: str | None, say: Callable[[str], object]) -> int:
        """Puts a step into `folder`, once all its files are there and are what was sealed; returns its bytes.

        Args:
          run: the identity that it must have; None: any.
          say: is told of every file.

        Raises:
          CheckpointError: it is not what was sealed, or another run's.
          ConfigError: the disk has no room for it.
          Exception: any of the store's client, or of the disk.
        """
        shutil.rmtree(folder / _FETCHING, ignore_errors=True)  # of a start that was killed
        target = folder / _FETCHING / str(step)
        target.mkdir(parents=True)
        try:
            self._get(self._path(step, MANIFEST), target / MANIFEST)
            manifest = integrity.read_manifest(target)
            if run is not None and manifest.run != run:
                raise CheckpointError(f"it belongs to another run ({manifest.run}; this one is {run})")
            self._check_files(manifest, self.steps().get(step, {}))
            size = sum(size for size, _ in manifest.files.values())
            if (free := shutil.disk_usage(folder).free) < size:
                raise ConfigError(
                    f"{folder}: step {step} of {self.url} has {size:,} bytes, {free:,} are free"
                )
            for name in manifest.files:
                say(f"fetching {self.url} step {step}: {name}")
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                self._get(self._path(step, name), target / name)
            integrity.check(folder / _FETCHING, step)
            if (folder / str(step)).exists():
                folders.quarantine(folder, step, f"not sound; its copy in {self.url} has taken its place")
            os.replace(target, folder / str(step))
        finally:
            shutil.rmtree(folder / _FETCHING, ignore_errors=True)
        return size

    def fetch_beside(self, files: Iterable[Path]) -> None:
        """Gets those of the files beside the steps that are not here and that the store has."""
        for file in files:
            if not file.exists():
                with contextlib.suppress(FileNotFoundError), atomic.replacing(file) as partial:
                    self._get(f"{self._root}/{file.name}", partial)

    def _claim(self, identity: bytes) -> None:
        path = f"{self._root}/{_STEPS}/{integrity.IDENTITY}"
        try:
            there = _tried(lambda: self._fs.cat_file(path))
        except FileNotFoundError:
            _tried(lambda: self._fs.pipe_file(path, identity))
            return
        if there != identity:
            raise CheckpointError(
                f"{self.url} has the copies of another run ({there[:40]!r}); give this run a "
                f"checkpoint.copy_to of its own"
            )

    def _check_files(self, manifest: integrity.Manifest, there: dict[str, int]) -> None:
        """Raises CheckpointError if a file of a step has another size in the store, or no good name."""
        for name, (size, _) in manifest.files.items():
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts or str(parts) != name:
                raise CheckpointError(f"{name!r} in its manifest is no name of a file in a step")
            if there.get(name) != size:
                raise CheckpointError(
                    f"{name} has {there.get(name, 'no')} bytes in the store, {size} when sealed"
                )

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{_STEPS}/{step}/{name}".rstrip("/")

    def _put(self, file: Path, path: str) -> None:
        _tried(lambda: self._fs.put_file(str(file), path))

    def _get(self, path: str, file: Path) -> None:
        _tried(lambda: self._fs.get_file(path, str(file)))


def _tried(call: Callable[[], Any]) -> Any:
    """Returns what a call of a store's client returns; where it fails, after up to three more tries."""
    for delay_s in DELAYS_S:
        try:
            return call()
        except _LASTING:
            raise
        except Exception:  # each client has types of its own
            time.sleep(delay_s)
    return call()


def fetch_newest(
    copies: Copies,
    folder: Path,
    beside: Sequence[Path] = (),
    *,
    run: str | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[int, int, dict[int, str]]:
    """Returns (step, its bytes) of the newest step that could be fetched, and {step: reason} of newer ones.

    The step is 0 if the store has none that is whole: then no copy has ended there.

    Args:
      beside: files that are fetched, too, where they are not here.
      run, say: as `Copies.fetch`.

    Raises:
      CheckpointError: the store has steps, and none is sound.
      ConfigError: the store does not answer, or the disk has no room.
    """
    bad: dict[int, str] = {}
    try:
        whole = [step for step, names in copies.steps().items() if MANIFEST in names]
        for step in reversed(whole):
            try:
                size = copies.fetch(step, folder, run=run, say=say)
                copies.fetch_beside(beside)
                return step, size, bad
            except CheckpointError as error:
                bad[step] = str(error)
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        raise ConfigError(
            f"checkpoint.copy_to={copies.url} cannot be read ({_short(error)}), and {folder} has no sound "
            f"step: the run may have copies there; make it answer, or leave checkpoint.copy_to empty"
        ) from error
    if bad:
        tried = "; ".join(f"step {step}: {reason}" for step, reason in bad.items())
        raise CheckpointError(f"no usable copy in {copies.url}; all are left there: {tried}", bad)
    return 0, 0, bad


class CopyResult(NamedTuple):
    """How one copy ended; no `error`: it is whole."""

    step: int
    error: str
    seconds: float
    bytes: int


class Copier:
    """Copies the steps of a store of checkpoints in a thread of its own, newest first.

    Nothing waits for it but `finish`. What a step lacks is tried again with the next one.
    """

    def __init__(self, copies: Copies, store: CheckpointManager, beside: Sequence[Path] = ()):
        """Begins with what the copies lack already.

        Args:
          beside: files that are copied with every step.
        """
        self.url, self._copies, self._store, self._beside = copies.url, copies, store, beside
        self._results = queue.SimpleQueue[CopyResult]()
        self._known: set[tuple[int, int]] | None = None  # (step, its manifest's time) of what is copied
        self._state, self._asked, self._idle = threading.Condition(), True, False
        threading.Thread(target=self._run, name="copy of checkpoints", daemon=True).start()

    def wake(self) -> None:
        """Says that a step is finished."""
        with self._state:
            self._asked, self._idle = True, False
            self._state.notify_all()

    def poll(self) -> list[CopyResult]:
        """Returns the copies that ended since the last call, oldest first, without waiting."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def finish(self, seconds: float) -> bool:
        """Waits for what is under way or due, so long at most; returns whether it has ended."""
        with self._state:
            return self._state.wait_for(lambda: self._idle, seconds)

    def _run(self) -> None:
        while True:
            with self._state:
                self._idle = not self._asked
                self._state.notify_all()
                self._state.wait_for(lambda: self._asked)
                self._asked = False
            self._round()

    def _round(self) -> None:
        """Copies all that the store lacks, and deletes there what has expired."""
        step, began, failed = self._store.newest, time.monotonic(), set[int]()
        try:
            if self._known is None:
                both = self._copies.steps().keys() & set(self._store.steps())
                same = {each for each in both if self._copies.holds(self._store.folder, each)}
                self._known = {self._key(each) for each in same}
            while missing := [n for n in self._store.steps() if n not in failed and self._is_due(n)]:
                step, began = missing[-1], time.monotonic()
                self._copy(step, failed)
            if not failed:
                self._expire()
        except Exception as error:  # of the store's client, or of the disk
            self._report(step, _short(error), began, 0)
        finally:
            self._store.held = frozenset()

    def _is_due(self, step: int) -> bool:
        assert self._known is not None
        with contextlib.suppress(FileNotFoundError):  # deleted by now
            return step not in self._store.bad_steps and self._key(step) not in self._known
        return False

    def _key(self, step: int) -> tuple[int, int]:
        # A step that is saved again, since the run went back, has another manifest.
        return step, (self._store.folder / str(step) / MANIFEST).stat().st_mtime_ns

    def _copy(self, step: int, failed: set[int]) -> None:
        began, self._store.held = time.monotonic(), frozenset({step})
        assert self._known is not None
        try:
            key = self._key(step)
            integrity.check(self._store.folder, step, run=self._store.run)
            size = self._copies.copy(self._store.folder, step, self._beside)
            self._known.add(key)
            self._report(step, "", began, size)
        except Exception as error:  # of the store's client, or of the disk
            failed.add(step)
            if isinstance(error, CheckpointError):  # of the step itself: reported once
                self._known.add(key)
            if not folders.is_deleted(self._store.folder, step):
                self._report(step, _short(error), began, 0)

    def _expire(self) -> None:
        """Deletes what the rules of keeping would, what a run that went back left, and half steps."""
        config, local, there = self._store.config, self._store.steps(), self._copies.steps()
        if not local:
            return
        good = [n for n in there if MANIFEST in there[n] and n not in self._store.milestones]
        last, every, best = config.keep_last, config.keep_every, self._store.best
        gone = folders.expired(good, newest=local[-1], keep_last=last, keep_every=every, best=best)
        gone += [n for n in there if n > local[-1] or MANIFEST not in there[n]]
        for step in gone:
            if step not in local:
                self._copies.remove(step, there[step])

    def _report(self, step: int, error: str, began: float, size: int) -> None:
        self._results.put(CopyResult(step, error, time.monotonic() - began, size))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
