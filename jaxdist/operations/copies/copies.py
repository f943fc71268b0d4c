"""Copies of finished steps in any store that fsspec knows, and their download.

    <copy_to>/config.json, run.json      the workdir's files at the last copy; config.json
                                         comes first, so that a store without any step
                                         shows whose it is
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import MANIFEST, CheckpointError, error_text
from jaxdist.config import ConfigError, extras, redact
from jaxdist.storage import atomic, run_format, untrusted
from jaxdist.storage.digest import digest_file
from jaxdist.trainer import run_metadata

DELAYS_S = (1.0, 4.0, 16.0)  # seconds before the retries of a call of the store
_STEPS = "checkpoints"
_FETCHING = ".fetching"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_NO_FILE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


class Abandoned(Exception):
    """Error of work that was given up, since it took too long."""


class Foreign(CheckpointError):
    """Error of a store that another run has, or that nothing says whose it is."""


class Unreadable(CheckpointError):
    """Error of a store that is there, and whose steps cannot be listed or read."""


class _Owner(NamedTuple):
    """Content of a store's file `identity`."""

    run: str | None  # None: the file is absent or damaged
    fault: str  # why it is no identity; "" if it is absent or sound
    content: bytes  # its first bytes


# Tests whether the content of a config.json is a config of this run.
Fits = Callable[[bytes], bool]
# Raises a ConfigError if a step with such metadata is not one to resume from.
Accept = Callable[[Mapping[str, Any]], None]
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNREADABLE = (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError)
# errors after which a retry would fail, too
_LASTING = (
    *_NO_FILE,
    PermissionError,
    CheckpointError,
    untrusted.Malformed,
    Abandoned,
)


def config_test(accept: Accept | None) -> Fits:
    """Makes the test whether a config.json is one that a run can resume from."""

    def fits(content: bytes) -> bool:
        if accept is None:
            return False
        try:
            document = untrusted.parse_json(content, dict)
            accept({run_metadata.CONFIG: run_format.unmarked(document, "")})
        except (ConfigError, untrusted.Malformed):
            return False
        return True

    return fits


class Copies:
    """Copies of one run's steps in a store."""

    def __init__(self, url: str, fits: Fits = lambda content: False) -> None:
        """Makes the store's client. Most clients send no request before the first call.

        Args:
          url: the store. It may have secrets.
          fits: tells if a config.json is of this run. A store without any whole step
            is then this run's, whatever its identity.

        Raises:
          ConfigError: fsspec does not know such a store, or cannot reach it.
          extras.MissingExtra: the package of the store is not installed.
        """
        self.url = redact.without_secrets(url)  # for messages
        self._address = url
        self._fits = fits
        # A run takes a half-made store once. Later another run has taken it.
        self._has_claimed = False
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
                f"checkpoint.copy_to={self.url}: {redact.without_secrets(str(error), url)}; "
                f"give e.g. s3://bucket/run"
            ) from error
        except Exception as error:  # a client that connects at once
            raise ConfigError(
                f"checkpoint.copy_to={self.url} cannot be reached ({self.text(error)}); make it "
                f"answer, or leave checkpoint.copy_to empty"
            ) from error
        self._root = root.rstrip("/")
        # `find` of fsspec itself leaves out folders that cannot be read. Clients with a
        # `find` of their own list all files in few requests, or raise an error.
        if isinstance(self._fs, AsyncFileSystem):
            self._lists_by_folder = type(self._fs)._find is AsyncFileSystem._find
        else:
            self._lists_by_folder = type(self._fs).find is AbstractFileSystem.find
        # set when the work is given up; the next call of the store then fails
        self.abandoned = False
        # monotonic seconds of the current call's last progress; None: there is no call
        self._progress_at: float | None = None

    def renewed(self) -> "Copies":
        """Makes another client of the same store, for another thread."""
        copies = Copies(self._address, self._fits)
        copies._has_claimed = self._has_claimed
        return copies

    def text(self, error: Exception) -> str:
        """Formats an error of the client on one line, without the URL's secrets."""
        return error_text(error, self._address)

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
        """Lists all steps, whole or not, ascending: {step: {file: bytes}}.

        Raises:
          Unreadable: a file has the place of the steps.
          Exception: an error of the store's client; a part cannot be listed.
        """
        folder = f"{self._root}/{_STEPS}"
        steps: dict[int, dict[str, int]] = {}
        self._fs.invalidate_cache()
        listed = self._call(lambda: self._list(folder))
        if folder in listed:
            raise Unreadable(self.unreadable("it is a file, no folder of steps"))
        for path, info in listed.items():
            step, _, name = path.removeprefix(f"{folder}/").partition("/")
            if name and _is_step(step):
                steps.setdefault(int(step), {})[name] = info["size"]
        return dict(sorted(steps.items()))

    def _list(self, folder: str) -> dict[str, Any]:
        """Lists all files below a folder, {path: facts}; {} if there is no folder."""
        if not self._lists_by_folder:
            found: dict[str, Any] = self._fs.find(folder, detail=True)
            return found
        files: dict[str, Any] = {}
        remaining = [folder]
        while remaining:
            path = remaining.pop()
            try:
                entries = self._fs.ls(path, detail=True)
            except FileNotFoundError:  # there is none, or it was deleted meanwhile
                continue
            for entry in entries:
                name = entry["name"].rstrip("/")
                if entry["type"] == "directory" and name != path:
                    remaining.append(name)
                else:
                    files[name] = entry
        return files

    def unreadable(self, reason: str) -> str:
        """Formats the message of an `Unreadable`."""
        return (
            f"{self.url}/{_STEPS} cannot be read ({reason}): copies of this run may be there. Make it "
            f"readable, or start a new run without them: --config.checkpoint.copy_to="
        )

    def whole_steps(self) -> list[int]:
        """Lists the steps that have a manifest, newest first."""
        steps = [step for step, names in self.steps().items() if MANIFEST in names]
        return steps[::-1]

    def holds(self, folder: Path, step: int) -> bool:
        """Checks if the store has the step of `folder`, with the same manifest."""
        with contextlib.suppress(FileNotFoundError, untrusted.Malformed):
            return self.manifest(step) == (folder / str(step) / MANIFEST).read_bytes()
        return False

    def manifest(self, step: int) -> bytes:
        """Reads the manifest of a step without checks.

        Raises:
          FileNotFoundError: the store has no such manifest.
        """
        return self._read(self._path(step, MANIFEST), untrusted.MAX_BYTES)

    def _read(self, path: str, limit: int) -> bytes:
        """Reads a file's bytes, of a longer file the first `limit + 1`.

        Raises:
          FileNotFoundError: the store has no such file.
          Malformed: a folder or a pipe has the file's place.
        """

        def read() -> bytes:
            if isinstance(self._fs, LocalFileSystem):
                return _read_local(Path(path), limit + 1)
            try:
                content: bytes = self._fs.cat_file(path, start=0, end=limit + 1)
                return content
            except FileNotFoundError:
                raise
            except Exception:
                # S3 refuses to read a part of an empty file.
                if self._fs.info(path)["size"] == 0:
                    return b""
                raise

        content: bytes = self._call(read)
        return content

    def is_undone(self, folder: Path, step: int) -> bool:
        """Checks if the run in `folder` has rolled back a step of the store."""
        undone = folders.undone_manifests(folder, step)
        with contextlib.suppress(FileNotFoundError, untrusted.Malformed):
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
          Foreign: the store belongs to another run.
          CheckpointError: the manifest is damaged, or a file did not arrive.
          Exception: an error of the store's client.
        """
        manifest = integrity.read_manifest(folder / str(step))
        if not self.is_claimed(manifest.run):
            self._claim(manifest.run, extra_files)
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
        if not self.is_claimed(manifest.run):
            raise Foreign(f"{self.url}: {integrity.IDENTITY} was deleted meanwhile")
        self._put(folder / str(step) / MANIFEST, self._path(step, MANIFEST))
        return _size(manifest)

    def _claim(self, run: str, extra_files: Iterable[Path]) -> None:
        """Makes the store that of a run; its config comes first (`_is_own_half`)."""
        for file in extra_files:
            if file.name == run_format.CONFIG and file.is_file():
                self._put(file, f"{self._root}/{file.name}")
        content = integrity.identity_file(run)
        self._call(lambda: self._fs.pipe_file(self._identity, content))
        self._has_claimed = True

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
        self,
        step: int,
        folder: Path,
        *,
        run: str | None,
        say: Callable[[str], object],
        accept: Accept | None = None,
    ) -> tuple[Path, int]:
        """Downloads a step's files and checks them against its manifest.

        Args:
          step: number of the step.
          folder: folder of the run's steps; files go to a temporary folder in it.
          run: identity that the step must have; None = any.
          say: prints a line for each file.
          accept: checks the step's metadata before other files are downloaded.

        Returns:
          The folder with the files, and their bytes.

        Raises:
          CheckpointError: the step is damaged, or belongs to another run.
          ConfigError: the disk has no room for it, or it is not accepted.
          Exception: an error of the store's client or of the disk.
        """
        # a start that was killed may have left files
        shutil.rmtree(folder / _FETCHING, ignore_errors=True)
        # The folder has a random name: a download that was given up may still run, and
        # deletes its own files at its end.
        target = folder / _FETCHING / secrets.token_hex(8) / str(step)
        target.mkdir(parents=True)
        try:
            return target, self._download(step, folder, target, run, say, accept)
        except BaseException as error:
            _remove_partial(target)
            if isinstance(error, _NO_FILE):
                raise CheckpointError(
                    f"its files cannot all be fetched: {self.text(error)}"
                ) from error
            raise

    def _download(
        self,
        step: int,
        folder: Path,
        target: Path,
        run: str | None,
        say: Callable[[str], object],
        accept: Accept | None,
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
        # The metadata comes first: a step of another config is not fetched.
        for name in sorted(manifest.files, key=lambda n: n != folders.METADATA_FILE):
            if self.abandoned:  # a line would count as progress of the run
                raise Abandoned(self.url)
            say(f"fetching {self.url} step {step}: {name}")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self._get(self._path(step, name), target / name)
            if accept and name == folders.METADATA_FILE:
                _check_digest(target / name, manifest.files[name][1])
                accept(folders.read_description(target, step).metadata)
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

    def is_claimed(self, run: str | None) -> bool:
        """Checks if the store belongs to a run; False = the run may claim it.

        A run may claim a store without whole steps of others, if nobody has claimed it
        or a start of this run has, which was lost before its first copy was whole.

        Args:
          run: identity of the run; None = it has none yet.

        Raises:
          Foreign: the store belongs to another run, or nothing says whose it is.
        """
        owner = self._read_owner()
        if run is not None and owner.run == run:
            self._has_claimed = True
            return True
        runs = self._runs_of_steps()
        own_steps = runs.pop(run or "", [])
        fix = (
            f"give this run a checkpoint.copy_to of its own, or delete {self.url} if nobody needs "
            f"these copies"
        )
        if runs:
            raise Foreign(
                f"{self.url} has the copies of another run ({integrity.shown_steps(runs)}); {fix}"
            )
        is_absent = owner.run is None and not owner.fault
        if own_steps or is_absent:
            return False
        if self._is_own_half(owner):
            return False
        if owner.fault:
            raise Foreign(
                f"{self.url}/{_STEPS}/{integrity.IDENTITY} is damaged ({owner.fault}), so that nothing "
                f"says whose copies these are; delete that file, or give this run a "
                f"checkpoint.copy_to of its own"
            )
        raise Foreign(
            f"{self.url} has the copies of another run ({owner.run}), none of them whole yet; {fix}"
        )

    def _read_owner(self) -> _Owner:
        try:
            content = self._read(self._identity, integrity.MAX_IDENTITY_BYTES)
        except FileNotFoundError:
            return _Owner(None, "", b"")
        except (IsADirectoryError, untrusted.Malformed) as error:
            return _Owner(None, self.text(error), b"/")
        try:
            return _Owner(integrity.parse_identity(content), "", content)
        except untrusted.Malformed as error:
            return _Owner(None, str(error), content)

    def _runs_of_steps(self) -> dict[str, list[int]]:
        """Groups the whole steps by the run of their manifests: {run: steps}.

        A damaged manifest counts as one of an unknown run.
        """
        runs: dict[str, list[int]] = {}
        for step in self.whole_steps():
            run = "unknown"
            with contextlib.suppress(CheckpointError, *_NO_FILE, untrusted.Malformed):
                run = integrity.parse_manifest(self.manifest(step), self.url).run
            runs.setdefault(run, []).append(step)
        return runs

    def _is_own_half(self, owner: _Owner) -> bool:
        """Tests if a store without whole steps was claimed by a lost start of this run.

        Its config then fits. A claim without a config was cut off.
        """
        if self._has_claimed:
            return False
        try:
            config = self._read(
                f"{self._root}/{run_format.CONFIG}", untrusted.MAX_BYTES
            )
        except (*_NO_FILE, untrusted.Malformed):
            return owner.run is not None or integrity.is_half_identity(owner.content)
        return self._fits(config)

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


def _read_local(file: Path, limit: int) -> bytes:
    """Reads the first bytes of a file on a disk, without waiting for a pipe.

    Raises:
      OSError: the file is absent, or the disk fails.
      Malformed: no regular file has the place.
    """
    try:
        with untrusted.open_regular(file) as opened:
            return opened.read(limit)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise untrusted.Malformed("a link to itself") from error
        raise


def _check_digest(file: Path, digest: str) -> None:
    """Checks a downloaded file before it is read.

    Raises:
      CheckpointError: it has changed since it was sealed.
    """
    if digest_file(file) != digest:
        raise CheckpointError(f"{file.name} has changed since it was sealed")


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
    accept: Accept | None = None,
) -> tuple[int, int, dict[int, str]]:
    """Fetches the newest step that is whole, wanted and sound.

    Args:
      copies: the store.
      folder: folder of the run's steps.
      extra_files: files of the workdir that are fetched, too, if they are missing.
      run: identity that the step must have; None = any.
      wanted: accepts a step's number.
      say: prints a line for each file.
      accept: checks the step's metadata before other files are downloaded.

    Returns:
      The step (0 = there is none), its bytes, and {step: reason} of newer steps that
      are not sound.

    Raises:
      OtherVersion: another version of jaxdist has written the store.
      Unreadable: the store's steps cannot be listed or read.
      Foreign: the store has no whole step, and another run has claimed it.
      CheckpointError: the store has steps, and none is sound.
      ConfigError: the store does not answer, the disk has no room, or the step is not
        accepted.
    """
    bad: dict[int, str] = {}
    try:
        for step in [step for step in copies.whole_steps() if wanted(step)]:
            try:
                source, size = copies.download(
                    step, folder, run=run, say=say, accept=accept
                )
                copies.place(source, folder)
                copies.fetch_extra(extra_files)
                return step, size, bad
            except integrity.OtherVersion:
                raise  # older steps of the run have another version, too
            except CheckpointError as error:
                bad[step] = str(error)
        if not bad:
            copies.is_claimed(run)
    except (ConfigError, CheckpointError):
        raise
    except _UNREADABLE as error:
        raise Unreadable(copies.unreadable(copies.text(error))) from error
    except Exception as error:
        raise ConfigError(
            f"checkpoint.copy_to={copies.url} cannot be read ({copies.text(error)}), and {folder} has no "
            f"sound step: the run may have copies there; make it answer, or leave checkpoint.copy_to empty"
        ) from error
    if bad:
        tried = "; ".join(f"step {step}: {reason}" for step, reason in bad.items())
        raise CheckpointError(
            f"no usable copy in {copies.url}; all are left there: {tried}", bad
        )
    return 0, 0, bad
