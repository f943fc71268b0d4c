"""A one-way copy of finished steps to any store that fsspec knows, and the way back.

    <copy_to>/config.json, run.json      the workdir's, as they were at the last copy
    <copy_to>/checkpoints/identity       the run whose steps these are
    <copy_to>/checkpoints/<step>/...     a step's files as in `files`, manifest.json
    last

The layout is that of a workdir, so that a copy of it is one. Stores need no rename and
no lock: a step counts from its manifest on, here as there. Without jax or a device.
"""

import contextlib
import errno
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest as integrity
from jaxdist.checkpoint.files import MANIFEST, CheckpointError, error_text
from jaxdist.config import ConfigError, extras
from jaxdist.storage import atomic, untrusted

DELAYS_S = (1.0, 4.0, 16.0)  # before a call of the store is tried again
_STEPS = "checkpoints"
_FETCHING = ".fetching"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_NO_FILE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


class Abandoned(Exception):
    """The work took too long; nothing waits for it any more."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
# trying again would not help
_LASTING = (*_NO_FILE, PermissionError, CheckpointError, Abandoned)


class Copies:
    """The copies of one run's steps in a store."""

    def __init__(self, url: str) -> None:
        """Opens nothing yet, so that a store that does not answer holds nobody here.

        Raises:
          ConfigError: fsspec does not know such a store.
          extras.MissingExtra: what reads it is not installed.
        """
        self.url = url
        protocol = url.partition("://")[0]
        if protocol in _PACKAGES:
            extras.require(_PACKAGES[protocol])
        options = {}
        if protocol in ("file", "local"):
            options["auto_mkdir"] = True
        try:
            self._fs, root = fsspec.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoint.copy_to={url}: {error}; give e.g. s3://bucket/run"
            ) from error
        self._root = root.rstrip("/")
        # set when nothing waits any more; the next call of the store then fails
        self.abandoned = False
        # the last sign of the call under way, monotonic seconds
        self._called_at: float | None = None

    def is_at(self, place: Path) -> bool:
        """Checks whether the store's steps would be those in a folder themselves."""
        if not isinstance(self._fs, LocalFileSystem):
            return False
        steps = os.path.realpath(f"{self._root}/{_STEPS}")
        return steps == os.path.realpath(place)

    def silent_s(self) -> float:
        """Measures the seconds for which the call under way has shown no sign; 0
        between calls.
        """
        since = self._called_at  # another thread may set it to None meanwhile
        if since is None:
            return 0.0
        return time.monotonic() - since

    def steps(self) -> dict[int, dict[str, int]]:
        """Lists all steps, whole or not, ascending: {step: {file: bytes}}."""
        folder = f"{self._root}/{_STEPS}"
        found: dict[int, dict[str, int]] = {}
        self._fs.invalidate_cache()
        listed = self._call(lambda: self._fs.find(folder, detail=True))
        for path, info in listed.items():
            step, _, name = path.removeprefix(f"{folder}/").partition("/")
            if name and _is_step(step):
                found.setdefault(int(step), {})[name] = info["size"]
        return dict(sorted(found.items()))

    def whole_steps(self) -> list[int]:
        """Lists the steps that have a manifest, newest first."""
        steps = [step for step, names in self.steps().items() if MANIFEST in names]
        return steps[::-1]

    def holds(self, folder: Path, step: int) -> bool:
        """Checks whether the store's manifest of a step is the one in `folder`."""
        with contextlib.suppress(FileNotFoundError):
            return self.manifest(step) == (folder / str(step) / MANIFEST).read_bytes()
        return False

    def manifest(self, step: int) -> bytes:
        """Reads the manifest of a step, unchecked.

        Raises:
          FileNotFoundError: there is none.
        """
        return self._call(lambda: self._fs.cat_file(self._path(step, MANIFEST)))

    def is_undone(self, folder: Path, step: int) -> bool:
        """Checks whether the run in `folder` has gone back behind a step."""
        undone = folders.undone_manifests(folder, step)
        with contextlib.suppress(FileNotFoundError):
            return bool(undone) and self.manifest(step) in undone
        return False

    def copy(self, folder: Path, step: int, beside: Iterable[Path] = ()) -> int:
        """Copies a step, its manifest last, and the files beside it; returns the step's
        bytes.

        Another step in its place in the store is deleted first.

        Raises:
          CheckpointError: its manifest is damaged; the store has another run's; a file
            did not arrive.
          Exception: any of the store's client.
        """
        if not self.is_claimed(folder):
            identity = (folder / integrity.IDENTITY).read_bytes()
            self._call(lambda: self._fs.pipe_file(self._identity, identity))
        manifest = integrity.read_manifest(folder / str(step))
        there = self.steps().get(step, {})
        # it may even be this one, by another path
        if MANIFEST in there and self.holds(folder, step):
            return _size(manifest)
        if there:
            self.remove(step, there)
        for name in sorted(manifest.files):
            self._put(folder / str(step) / name, self._path(step, name))
        for file in beside:
            if file.is_file():
                self._put(file, f"{self._root}/{file.name}")
        self._check_files(manifest, self.steps().get(step, {}))
        self._put(folder / str(step) / MANIFEST, self._path(step, MANIFEST))
        return _size(manifest)

    def remove(self, step: int, names: Iterable[str]) -> None:
        """Deletes a step, its manifest first."""
        with contextlib.suppress(FileNotFoundError):  # by an earlier try
            if MANIFEST in names:
                self._call(lambda: self._fs.rm_file(self._path(step, MANIFEST)))
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):  # it had nothing else
            self._call(lambda: self._fs.rm(self._path(step), recursive=True))

    def download(
        self, step: int, folder: Path, *, run: str | None, say: Callable[[str], object]
    ) -> tuple[Path, int]:
        """Downloads a step's files, and compares them with what was sealed.

        Args:
          run: the identity that the step must have; None: any.
          say: takes a line for every file.

        Returns:
          The folder with the files, and their bytes.

        Raises:
          CheckpointError: the step is not what was sealed, or another run's.
          ConfigError: the disk has no room for it.
          Exception: any of the store's client, or of the disk.
        """
        # of a start that was killed
        shutil.rmtree(folder / _FETCHING, ignore_errors=True)
        # A name of its own: a download that was given up may end later, and deletes
        # what it has.
        target = folder / _FETCHING / secrets.token_hex(8) / str(step)
        target.mkdir(parents=True)
        try:
            return target, self._download(step, folder, target, run, say)
        except BaseException as error:
            _remove_partial(target)
            if isinstance(error, _NO_FILE):
                raise CheckpointError(
                    f"its files cannot all be fetched: {error}"
                ) from error
            raise

    def _download(
        self,
        step: int,
        folder: Path,
        target: Path,
        run: str | None,
        say: Callable[[str], object],
    ) -> int:
        there = self.steps().get(step, {})
        if there.get(MANIFEST, 0) > untrusted.MAX_BYTES:
            raise CheckpointError(f"{MANIFEST} has {there[MANIFEST]:,} bytes")
        self._get(self._path(step, MANIFEST), target / MANIFEST)
        manifest = integrity.read_manifest(target, place=f"{self.url}, step {step},")
        if run is not None and manifest.run != run:
            raise CheckpointError(
                f"it belongs to another run ({manifest.run}; this one is {run})"
            )
        self._check_files(manifest, there)
        size = _size(manifest)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise ConfigError(
                f"{folder}: step {step} of {self.url} has {size:,} bytes, {free:,} are free"
            )
        for name in manifest.files:
            if self.abandoned:  # what it says would count as progress
                raise Abandoned(self.url)
            say(f"fetching {self.url} step {step}: {name}")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self._get(self._path(step, name), target / name)
        integrity.check(target.parent, step)
        return size

    def place(self, source: Path, folder: Path) -> None:
        """Puts the step that was downloaded to `source` among those of `folder`; one in
        its place goes to quarantine.
        """
        target = folder / source.name
        if target.exists():
            reason = f"not sound; its copy in {self.url} has taken its place"
            folders.quarantine(folder, int(source.name), reason)
        os.replace(source, target)
        _remove_partial(source)

    def fetch_beside(self, files: Iterable[Path]) -> None:
        """Downloads the files beside the steps that are not here and that the store
        has.
        """
        for file in files:
            if not file.exists():
                with (
                    contextlib.suppress(FileNotFoundError),
                    atomic.replacing(file) as partial,
                ):
                    self._get(f"{self._root}/{file.name}", partial)

    def is_claimed(self, folder: Path) -> bool:
        """Checks whether the store names the run in `folder`; False if it names none.

        Raises:
          CheckpointError: it names another run.
        """
        try:
            there = self._call(lambda: self._fs.cat_file(self._identity))
        except FileNotFoundError:
            return False
        if there != (folder / integrity.IDENTITY).read_bytes():
            raise CheckpointError(
                f"{self.url} has the copies of another run ({there[:40]!r}); give this run a "
                f"checkpoint.copy_to of its own"
            )
        return True

    @property
    def _identity(self) -> str:
        return f"{self._root}/{_STEPS}/{integrity.IDENTITY}"

    def _check_files(self, manifest: integrity.Manifest, there: dict[str, int]) -> None:
        """Raises CheckpointError if a file of a step has another size in the store, or
        no good name.
        """
        for name, (size, _) in manifest.files.items():
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts or str(parts) != name:
                raise CheckpointError(
                    f"{name!r} in its manifest is no name of a file in a step"
                )
            if there.get(name) != size:
                raise CheckpointError(
                    f"{name} has {there.get(name, 'no')} bytes in the store, {size} when sealed"
                )

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{_STEPS}/{step}/{name}".rstrip("/")

    def _put(self, file: Path, path: str) -> None:
        self._call(
            lambda: self._fs.put_file(str(file), path, callback=_Signs(self._heard))
        )

    def _get(self, path: str, file: Path) -> None:
        self._call(
            lambda: self._fs.get_file(path, str(file), callback=_Signs(self._heard))
        )

    def _heard(self) -> None:
        self._called_at = time.monotonic()

    def _call(self, call: Callable[[], Any]) -> Any:
        """Calls the store's client; if that fails, up to three more times.

        Raises:
          Abandoned: nothing waits for this work any more.
        """
        for delay_s in (*DELAYS_S, math.inf):
            if self.abandoned:
                raise Abandoned(self.url)
            self._heard()
            try:
                return call()
            except Exception as error:  # each client has types of its own
                full = isinstance(error, OSError) and error.errno in _FULL
                if delay_s == math.inf or full or isinstance(error, _LASTING):
                    raise
            finally:
                self._called_at = None
            time.sleep(delay_s)
        return None


def _is_step(name: str) -> bool:
    """Checks whether a folder's name is that of a step."""
    if not name.isdecimal() or str(int(name)) != name:
        return False
    return int(name) <= folders.LAST_STEP


def _size(manifest: integrity.Manifest) -> int:
    """Adds up the bytes of a step's files."""
    return sum(size for size, _ in manifest.files.values())


def _remove_partial(step: Path) -> None:
    shutil.rmtree(step.parent, ignore_errors=True)
    with contextlib.suppress(OSError):  # another download is there
        step.parent.parent.rmdir()


class _Signs(fsspec.Callback):
    """Hears of every part of a file that a client has transferred."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__()
        self._heard = heard

    def call(self, *_: Any, **__: Any) -> None:
        """Is called by fsspec."""
        self._heard()


def fetch_newest(
    copies: Copies,
    folder: Path,
    beside: Sequence[Path] = (),
    *,
    run: str | None = None,
    wanted: Callable[[int], bool] = lambda step: True,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[int, int, dict[int, str]]:
    """Fetches the newest step that is whole, wanted and sound.

    Args:
      beside: files that are fetched too if they are not here.
      wanted: tells whether a step may be fetched.
      run, say: as `Copies.download`.

    Returns:
      The step, 0 if there is none; its bytes; {step: reason} of newer ones that are not
      sound.

    Raises:
      OtherVersion: another version has written the store.
      CheckpointError: the store has steps, and none is sound.
      ConfigError: the store does not answer, or the disk has no room.
    """
    bad: dict[int, str] = {}
    try:
        for step in [step for step in copies.whole_steps() if wanted(step)]:
            try:
                source, size = copies.download(step, folder, run=run, say=say)
                copies.place(source, folder)
                copies.fetch_beside(beside)
                return step, size, bad
            except integrity.OtherVersion:
                raise  # older steps of the run would not be this version's either
            except CheckpointError as error:
                bad[step] = str(error)
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        raise ConfigError(
            f"checkpoint.copy_to={copies.url} cannot be read ({error_text(error)}), and {folder} has no "
            f"sound step: the run may have copies there; make it answer, or leave checkpoint.copy_to empty"
        ) from error
    if bad:
        tried = "; ".join(f"step {step}: {reason}" for step, reason in bad.items())
        raise CheckpointError(
            f"no usable copy in {copies.url}; all are left there: {tried}", bad
        )
    return 0, 0, bad
