"""Copies of finished steps in any store that fsspec knows, and their download.

    <copy_to>/config.json, run.json      the workdir's files at the last copy
    <copy_to>/checkpoints/identity       the run of these steps
    <copy_to>/checkpoints/<step>/...     a step's files; manifest.json comes last

The layout is that of a workdir: a download of the store is a workdir. Stores need no
rename and no lock, since a step counts only once its manifest is there. Needs no jax
and no device.
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

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import MANIFEST, CheckpointError, error_text
from jaxdist.config import ConfigError, extras
from jaxdist.storage import atomic, untrusted

DELAYS_S = (1.0, 4.0, 16.0)  # seconds before the retries of a call of the store
_STEPS = "checkpoints"
_FETCHING = ".fetching"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_NO_FILE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


class Abandoned(Exception):
    """Error of work that was given up, since it took too long."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
# errors after which a retry would fail, too
_LASTING = (*_NO_FILE, PermissionError, CheckpointError, Abandoned)


class Copies:
    """Copies of one run's steps in a store."""

    def __init__(self, url: str) -> None:
        """Makes the store's client, without any request to the store.

        Raises:
          ConfigError: fsspec does not know such a store.
          extras.MissingExtra: the package of the store is not installed.
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
        # set when the work is given up; the next call of the store then fails
        self.abandoned = False
        # monotonic seconds of the current call's last progress; None: there is no call
        self._progress_at: float | None = None

    def is_at(self, place: Path) -> bool:
        """Checks if the store's folder of steps is the folder `place` itself."""
        if not isinstance(self._fs, LocalFileSystem):
            return False
        steps = os.path.realpath(f"{self._root}/{_STEPS}")
        return steps == os.path.realpath(place)

    def silent_s(self) -> float:
        """Measures the seconds since the last progress of a call; 0 between calls."""
        since = self._progress_at  # another thread may set it to None meanwhile
        if since is None:
            return 0.0
        return time.monotonic() - since

    def steps(self) -> dict[int, dict[str, int]]:
        """Lists all steps, whole or not, ascending: {step: {file: bytes}}."""
        folder = f"{self._root}/{_STEPS}"
        steps: dict[int, dict[str, int]] = {}
        self._fs.invalidate_cache()
        listed = self._call(lambda: self._fs.find(folder, detail=True))
        for path, info in listed.items():
            step, _, name = path.removeprefix(f"{folder}/").partition("/")
            if name and _is_step(step):
                steps.setdefault(int(step), {})[name] = info["size"]
        return dict(sorted(steps.items()))

    def whole_steps(self) -> list[int]:
        """Lists the steps that have a manifest, newest first."""
        steps = [step for step, names in self.steps().items() if MANIFEST in names]
        return steps[::-1]

    def holds(self, folder: Path, step: int) -> bool:
        """Checks if the store has the step of `folder`, with the same manifest."""
        with contextlib.suppress(FileNotFoundError):
            return self.manifest(step) == (folder / str(step) / MANIFEST).read_bytes()
        return False

    def manifest(self, step: int) -> bytes:
        """Reads the manifest of a step without checks.

        Raises:
          FileNotFoundError: the store has no such manifest.
        """
        content: bytes = self._call(
            lambda: self._fs.cat_file(self._path(step, MANIFEST))
        )
        return content

    def is_undone(self, folder: Path, step: int) -> bool:
        """Checks if the run in `folder` has rolled back a step of the store."""
        undone = folders.undone_manifests(folder, step)
        with contextlib.suppress(FileNotFoundError):
            return bool(undone) and self.manifest(step) in undone
        return False

    def copy(self, folder: Path, step: int, extra_files: Iterable[Path] = ()) -> int:
        """Copies a step to the store, its manifest last.

        A different step of the same number in the store is deleted first.

        Args:
          folder: folder of the run's steps.
          step: number of the step.
          extra_files: files of the workdir, copied to the store's root if they exist.

        Returns:
          The bytes of the step.

        Raises:
          CheckpointError: the manifest is damaged, the store belongs to another run, or
            a file did not arrive.
          Exception: an error of the store's client.
        """
        if not self.is_claimed(folder):
            identity = (folder / integrity.IDENTITY).read_bytes()
            self._call(lambda: self._fs.pipe_file(self._identity, identity))
        manifest = integrity.read_manifest(folder / str(step))
        stored = self.steps().get(step, {})
        # the store may even be the folder itself, by another path
        if MANIFEST in stored and self.holds(folder, step):
            return _size(manifest)
        if stored:
            self.remove(step, stored)
        for name in sorted(manifest.files):
            self._put(folder / str(step) / name, self._path(step, name))
        for file in extra_files:
            if file.is_file():
                self._put(file, f"{self._root}/{file.name}")
        self._check_files(manifest, self.steps().get(step, {}))
        self._put(folder / str(step) / MANIFEST, self._path(step, MANIFEST))
        return _size(manifest)

    def remove(self, step: int, names: Iterable[str]) -> None:
        """Deletes a step of the store, its manifest first.

        Args:
          step: number of the step.
          names: names of its files in the store.
        """
        with contextlib.suppress(FileNotFoundError):  # a failed try deleted it
            if MANIFEST in names:
                self._call(lambda: self._fs.rm_file(self._path(step, MANIFEST)))
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):  # it had no other file
            self._call(lambda: self._fs.rm(self._path(step), recursive=True))

    def download(
        self, step: int, folder: Path, *, run: str | None, say: Callable[[str], object]
    ) -> tuple[Path, int]:
        """Downloads a step's files and checks them against its manifest.

        Args:
          step: number of the step.
          folder: folder of the run's steps; files go to a temporary folder in it.
          run: identity that the step must have; None = any.
          say: prints a line for each file.

        Returns:
          The folder with the files, and their bytes.

        Raises:
          CheckpointError: the step is damaged, or belongs to another run.
          ConfigError: the disk has no room for it.
          Exception: an error of the store's client or of the disk.
        """
        # a start that was killed may have left files
        shutil.rmtree(folder / _FETCHING, ignore_errors=True)
        # The folder has a random name: a download that was given up may still run, and
        # deletes its own files at its end.
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
        stored = self.steps().get(step, {})
        if stored.get(MANIFEST, 0) > untrusted.MAX_BYTES:
            raise CheckpointError(f"{MANIFEST} has {stored[MANIFEST]:,} bytes")
        self._get(self._path(step, MANIFEST), target / MANIFEST)
        manifest = integrity.read_manifest(target, place=f"{self.url}, step {step},")
        if run is not None and manifest.run != run:
            raise CheckpointError(
                f"it belongs to another run ({manifest.run}; this one is {run})"
            )
        self._check_files(manifest, stored)
        size = _size(manifest)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise ConfigError(
                f"{folder}: step {step} of {self.url} has {size:,} bytes, {free:,} are free"
            )
        for name in manifest.files:
            if self.abandoned:  # a line would count as progress of the run
                raise Abandoned(self.url)
            say(f"fetching {self.url} step {step}: {name}")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self._get(self._path(step, name), target / name)
        integrity.check(target.parent, step)
        return size

    def place(self, source: Path, folder: Path) -> None:
        """Moves a downloaded step from `source` to the steps of `folder`.

        A step of the same number in `folder` goes to quarantine.
        """
        target = folder / source.name
        if target.exists():
            reason = f"not sound; its copy in {self.url} has taken its place"
            folders.quarantine(folder, int(source.name), reason)
        os.replace(source, target)
        _remove_partial(source)

    def fetch_extra(self, files: Iterable[Path]) -> None:
        """Downloads missing files of the workdir, if the store has them."""
        for file in files:
            if file.exists():
                continue
            with (
                contextlib.suppress(FileNotFoundError),
                atomic.replacing(file) as partial,
            ):
                self._get(f"{self._root}/{file.name}", partial)

    def is_claimed(self, folder: Path) -> bool:
        """Checks if the store belongs to the run in `folder`; False = to no run yet.

        Raises:
          CheckpointError: the store belongs to another run.
        """
        try:
            identity = self._call(lambda: self._fs.cat_file(self._identity))
        except FileNotFoundError:
            return False
        if identity != (folder / integrity.IDENTITY).read_bytes():
            raise CheckpointError(
                f"{self.url} has the copies of another run ({identity[:40]!r}); give this run a "
                f"checkpoint.copy_to of its own"
            )
        return True

    @property
    def _identity(self) -> str:
        return f"{self._root}/{_STEPS}/{integrity.IDENTITY}"

    def _check_files(
        self, manifest: integrity.Manifest, stored: dict[str, int]
    ) -> None:
        """Checks the names and sizes of a step's files in the store.

        Args:
          manifest: the manifest of the step.
          stored: {file: bytes} in the store.

        Raises:
          CheckpointError: a name leads out of the step, or a size differs.
        """
        for name, (size, _) in manifest.files.items():
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts or str(parts) != name:
                raise CheckpointError(
                    f"{name!r} in its manifest is no name of a file in a step"
                )
            if stored.get(name) != size:
                raise CheckpointError(
                    f"{name} has {stored.get(name, 'no')} bytes in the store, {size} when sealed"
                )

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{_STEPS}/{step}/{name}".rstrip("/")

    def _put(self, file: Path, path: str) -> None:
        progress = _TransferProgress(self._note_progress)
        self._call(lambda: self._fs.put_file(str(file), path, callback=progress))

    def _get(self, path: str, file: Path) -> None:
        progress = _TransferProgress(self._note_progress)
        self._call(lambda: self._fs.get_file(path, str(file), callback=progress))

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _call(self, call: Callable[[], Any]) -> Any:
        """Calls the store's client, with up to three retries.

        Raises:
          Abandoned: the work was given up.
          Exception: an error of the client that a retry does not solve.
        """
        for delay_s in (*DELAYS_S, math.inf):
            if self.abandoned:
                raise Abandoned(self.url)
            self._note_progress()
            try:
                return call()
            except Exception as error:  # each client has its own types of errors
                is_full = isinstance(error, OSError) and error.errno in _FULL
                if delay_s == math.inf or is_full or isinstance(error, _LASTING):
                    raise
            finally:
                self._progress_at = None
            time.sleep(delay_s)
        return None


def _is_step(name: str) -> bool:
    """Checks if a folder's name is a step's number."""
    if not name.isdecimal() or str(int(name)) != name:
        return False
    return int(name) <= folders.LAST_STEP


def _size(manifest: integrity.Manifest) -> int:
    """Adds up the bytes of a step's files."""
    return sum(size for size, _ in manifest.files.values())


def _remove_partial(step: Path) -> None:
    shutil.rmtree(step.parent, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds another download
        step.parent.parent.rmdir()


class _TransferProgress(fsspec.Callback):  # type: ignore[misc]  # fsspec is untyped
    """Callback of fsspec for each part of a file that was transferred."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def call(self, *_: Any, **__: Any) -> None:
        """Notes progress."""
        self._note()


def fetch_newest(
    copies: Copies,
    folder: Path,
    extra_files: Sequence[Path] = (),
    *,
    run: str | None = None,
    wanted: Callable[[int], bool] = lambda step: True,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[int, int, dict[int, str]]:
    """Fetches the newest step that is whole, wanted and sound.

    Args:
      copies: the store.
      folder: folder of the run's steps.
      extra_files: files of the workdir that are fetched, too, if they are missing.
      run: identity that the step must have; None = any.
      wanted: accepts a step's number.
      say: prints a line for each file.

    Returns:
      The step (0 = there is none), its bytes, and {step: reason} of newer steps that
      are not sound.

    Raises:
      OtherVersion: another version of jaxdist has written the store.
      CheckpointError: the store has steps, and none is sound.
      ConfigError: the store does not answer, or the disk has no room.
    """
    bad: dict[int, str] = {}
    try:
        for step in [step for step in copies.whole_steps() if wanted(step)]:
            try:
                source, size = copies.download(step, folder, run=run, say=say)
                copies.place(source, folder)
                copies.fetch_extra(extra_files)
                return step, size, bad
            except integrity.OtherVersion:
                raise  # older steps of the run have another version, too
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
