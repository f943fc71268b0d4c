"""Folder of the memory tier on one host, and the memory that there is for it.

    <memory_folder>/jaxdist-<run>/<step>-<owner>.shards   file of `memory_file.py`
    <memory_folder>/jaxdist-<run>/.<...>.partial          file that is being written
    <memory_folder>/jaxdist-<run>/<step>-<owner>.bad      file that failed a check

Several processes of a host share the folder. Files that came from another host have the
same names: a copy is simply the file of another owner. Runs have folders of their own,
which only their user can read.

Nothing here needs jax or a device.
"""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxdist.checkpoint import folders, memory_file
from jaxdist.checkpoint.folders import LAST_STEP, CheckpointError
from jaxdist.checkpoint.memory_file import BadFile, Opened
from jaxdist.hardware.host import Room, free_memory, read_lines
from jaxdist.storage import atomic, run_format
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import (
    Malformed,
    is_amount,
    is_count,
    of_kind,
    open_regular,
    read_json,
)

_FILE = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,6})\.shards")
_PARTIAL = re.compile(r"\..*\.partial")
_BAD = ".bad"
_VARIABLE = re.compile(r"\$\{?(\w+)")
# file systems whose files take memory
_IN_MEMORY = {"tmpfs", "ramfs"}
# Share of the needed bytes that must be free beside them. Headers and padding take a
# little, and the rest of the process also allocates while files are written.
_MARGIN = 0.1


class MemoryStore:
    """The folder of a run on this host. It is a `peers.Store`."""

    def __init__(self, folder: Path, *, run: str, branch: str) -> None:
        """Names the folder; `open` makes it.

        Args:
          folder: folder of the memory tier, which other runs share.
          run: identity of the run.
          branch: history of the run whose files count, see `memory_file.Header`.
        """
        self.run = run
        self.branch = branch
        self.folder = folder / f"jaxdist-{digest(run)[:16]}"

    def open(self) -> None:
        """Makes the folder and removes files that a dead process has not finished.

        Raises:
          CheckpointError: the folder belongs to another user, or cannot be written.
        """
        self.make()
        for path in self._entries():
            if _PARTIAL.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def make(self) -> None:
        """Makes the folder unless it is there. Somebody may delete it during a run.

        Raises:
          CheckpointError: the folder belongs to another user, or cannot be written.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise CheckpointError(
                    f"checkpoint.memory_folder: {self.folder} belongs to another user, "
                    f"or is no folder. Remove it, or choose another memory_folder."
                )
            self.folder.chmod(0o700)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.memory_folder: {self.folder} cannot be written "
                f"({error.strerror}). Choose a folder in memory that can, such as "
                f"/dev/shm."
            ) from error

    @property
    def place(self) -> str:
        """Name of the folder that is equal on all processes that share it."""
        status = self.folder.stat()
        return f"{os.uname().nodename}:{status.st_dev}:{status.st_ino}"

    def inventory(self) -> dict[int, dict[int, int]]:
        """Lists the files: {step: {owner: bytes}}. Their content is not read."""
        found: dict[int, dict[int, int]] = {}
        for path in self._entries():
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) <= LAST_STEP:
                # another process may delete it meanwhile
                with contextlib.suppress(OSError):
                    size = path.stat().st_size
                    found.setdefault(int(match[1]), {})[int(match[2])] = size
        return found

    def bytes(self) -> int:
        """Adds up the bytes of all files in the folder, whatever they are."""
        total = 0
        for path in self._entries():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir())
        except OSError:  # deleted, or unmounted: it has no files then
            return []

    def path(self, step: int, owner: int) -> Path:
        """Names the file of a step and an owner."""
        return self.folder / f"{step}-{owner}.shards"

    def open_read(self, step: int, owner: int) -> BinaryIO:
        """Opens a file to read.

        Raises:
          KeyError: there is no such file.
        """
        try:
            file: BinaryIO = open_regular(self.path(step, owner))  # type: ignore[assignment]
        except (OSError, Malformed) as error:
            raise KeyError(f"step {step}, part {owner}: {error}") from error
        return file

    def read_header(self, step: int, owner: int) -> Opened:
        """Reads the header of a file, and checks that it is this one's.

        Raises:
          BadFile: the header is damaged, or that of another file.
          KeyError: there is no such file.
        """
        with self.open_read(step, owner) as file:
            opened = memory_file.read_header(file)
        self._require(opened, step, owner)
        return opened

    def verify(self, step: int, owner: int) -> None:
        """Checks every byte of a file, and that it is this one's.

        Raises:
          BadFile: the file is not what was written.
          KeyError: there is no such file.
        """
        with self.open_read(step, owner) as file:
            opened = memory_file.verify(file)
        self._require(opened, step, owner)

    def _require(self, opened: Opened, step: int, owner: int) -> None:
        memory_file.require(
            opened, run=self.run, branch=self.branch, step=step, owner=owner
        )

    @contextlib.contextmanager
    def write(self, step: int, owner: int) -> Iterator[BinaryIO]:
        """Yields a file that takes its name once the body ends without an error.

        Raises:
          OSError: the file cannot be written.
        """
        with self._replacing(step, owner) as file:
            yield file

    @contextlib.contextmanager
    def receive(self, step: int, owner: int, size: int) -> Iterator[BinaryIO]:
        """Yields a file to write a copy into; it counts only if it is verified.

        Args:
          step: step of the copy.
          owner: its owner.
          size: its bytes.

        Raises:
          BadFile: the bytes are not those of this step and owner.
          OSError: the file cannot be written, or there is no room.
        """
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise OSError(
                f"{size:,} bytes are needed, {free:,} are free in {self.folder}"
            )

        def check(file: BinaryIO) -> None:
            if file.seek(0, os.SEEK_END) != size:
                raise BadFile(f"{file.tell():,} bytes came, {size:,} were announced")
            self._require(memory_file.verify(file), step, owner)

        with self._replacing(step, owner, check) as file:
            yield file

    @contextlib.contextmanager
    def _replacing(
        self,
        step: int,
        owner: int,
        check: Callable[[BinaryIO], None] | None = None,
    ) -> Iterator[BinaryIO]:
        target = self.path(step, owner)
        partial = self.folder / f".{target.stem}.{secrets.token_hex(6)}.partial"
        try:
            with partial.open("xb+") as file:
                yield file
                file.flush()
                if check:
                    check(file)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def set_aside(self, step: int, owner: int) -> None:
        """Renames a bad file, so that it no longer counts. It stays for a look at it.

        The next complete save deletes it.
        """
        path = self.path(step, owner)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(_BAD))

    def keep(self, is_kept: Callable[[int], bool]) -> None:
        """Deletes the files of all steps that are not kept, and the bad ones."""
        for path in self._entries():
            match = _FILE.fullmatch(path.name)
            is_expired = match is not None and not is_kept(int(match[1]))
            if is_expired or path.suffix == _BAD:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes the folder with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


# --- Names ----------------------------------------------------------------------------


class Branch(NamedTuple):
    """The history of a run whose steps in memory count, as `memory.json` tells."""

    run: str  # identity of the run
    name: str  # see `memory_file.Header.branch`
    folder: str  # checkpoint.memory_folder
    # newest step that the run has sealed in its folder of checkpoints; 0 = none
    sealed: int
    began: float  # seconds since 1970

    def write(self, file: Path) -> None:
        """Writes the file that `read_branch` reads.

        Raises:
          OSError: the file cannot be written.
        """
        document = run_format.marked(self._asdict())
        atomic.write_text(file, json.dumps(document) + "\n", durable=True)

    def is_set_back(self, folder: Path) -> bool:
        """Tests whether the folder of checkpoints was set back by hand.

        It was if the newest step that the run has sealed is gone, while older ones are
        there. The run itself never deletes that step. It moves it to quarantine if it
        is damaged. A folder without any step is lost, not set back.

        Raises:
          CheckpointError: the folder cannot be read.
        """
        newest = max(folders.all_steps(folder), default=self.sealed)
        return newest < self.sealed and not folders.was_damaged(folder, self.sealed)


def read_branch(file: Path) -> Branch | None:
    """Reads the present history of a run; None if there is none.

    Files in memory do not count without it.
    """
    try:
        document = run_format.unmarked(read_json(file, dict), file)
        branch = Branch(**document)
        for text in (branch.run, branch.name, branch.folder):
            of_kind(text, str)
    except (OSError, Malformed, run_format.OtherVersion, TypeError):
        return None
    is_sound = is_count(branch.sealed) and is_amount(branch.began, below=1e12)
    return branch if is_sound else None


def expand(folder: str) -> Path:
    """Makes the path of checkpoint.memory_folder on this host.

    A leading ~ and variables of the environment, such as $USER, are replaced.

    Raises:
      CheckpointError: a variable is not set, or a user has no home.
    """
    expanded = os.path.expandvars(folder)
    missing = _VARIABLE.search(expanded)
    if missing:
        raise CheckpointError(
            f"checkpoint.memory_folder={folder}: the variable {missing[1]} is not set on "
            f"this host. Set it, or give a path without it."
        )
    try:
        return Path(expanded).expanduser().absolute()
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint.memory_folder={folder}: {error} Give a path without ~."
        ) from error


# --- Memory ---------------------------------------------------------------------------


def room_of(folder: Path) -> Room:
    """Finds the room for more files in a folder."""
    room = Room(shutil.disk_usage(folder).free, f"in {folder}")
    memory = free_memory() if is_in_memory(folder) else None
    return room if memory is None else min(room, memory)


def shortage(folder: Path, count: int) -> str:
    """Explains why a folder does not take bytes more; "" if it does."""
    room = room_of(folder)
    needed = with_margin(count)
    if needed <= room.bytes:
        return ""
    return (
        f"{needed:,} bytes are needed with a margin of {_MARGIN:.0%}, {room.bytes:,} "
        f"are free ({room.source})"
    )


def with_margin(count: int) -> int:
    """Adds the bytes that must stay free."""
    return count + math.ceil(_MARGIN * count)


def room_fault(
    store: MemoryStore, part: int, *, processes: int, files: int, staged: int
) -> str:
    """Explains why a host cannot hold its part of a state so many times; "" if it can.

    Args:
      store: the folder of the host. What it holds is room: the run replaces it.
      part: bytes of the state that the processes of the host save.
      processes: number of these processes.
      files: files of each process.
      staged: copies of the part beside the files.
    """
    there = store.bytes()
    file_bytes = with_margin(files * part)
    counted = (
        f"checkpoint.memory_folder={store.folder.parent}: the {processes} processes of "
        f"this host save {part:,} bytes"
    )
    fix = "Use more hosts or more memory, or leave checkpoint.memory_folder empty."
    free = shutil.disk_usage(store.folder).free + there
    if file_bytes > free:
        return (
            f"{counted}. {files} files need {file_bytes:,} with a margin of "
            f"{_MARGIN:.0%}, and {free:,} are free in that file system. {fix}"
        )
    memory = free_memory()
    if memory is None:
        return ""
    copies = staged
    free = memory.bytes
    if is_in_memory(store.folder):
        copies += files
        free += there
    needed = with_margin(copies * part)
    if needed > free:
        return (
            f"{counted}. {copies} copies need {needed:,} with a margin of "
            f"{_MARGIN:.0%}, and {free:,} are free ({memory.source}). {fix}"
        )
    return ""


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Tests whether files in a folder take memory.

    Args:
      folder: an existing folder.
      root: folder that has /proc.
    """
    kind = ""
    longest = -1
    for line in read_lines(root / "proc/mounts"):
        _, place, kind_here, *_ = line.split()
        mount = Path(place.replace("\\040", " "))
        if folder.is_relative_to(mount) and len(mount.parts) >= longest:
            longest = len(mount.parts)
            kind = kind_here
    return kind in _IN_MEMORY
