"""Exclusive ownership of a file: a lock, or a lease in stores without locks.

A lock ends with its process. A lease ends if it is not renewed.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxdist.storage import atomic, run_format, untrusted

# Errors of a network file system without locks.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
RENEW_S = 10  # seconds between two renewals of a lease
TAKEOVER_S = 120  # seconds without a renewal after which a lease is over
_SETTLE_S = 1.0  # seconds until all processes read the last of several writes

# Tests whether this process still holds a lock or a lease. A lock's file may be
# replaced, and a lease may be taken over.
IsHeld = Callable[[], bool]


class Locked(Exception):
    """Error of a lock that another process holds. The message names the process."""


@contextlib.contextmanager
def exclusive(
    path: Path, *, before_wait: Callable[[], None] | None = None
) -> Iterator[IsHeld]:
    """Creates a file, holds its lock, and writes the holding process into it.

    If the file system has no locks, a caller that waits gets the lock in any case.

    Args:
      path: the file.
      before_wait: function that is called once before waiting for another process. None
        does not wait.

    Raises:
      Locked: another process holds the lock, and `before_wait` is None.
      OSError: the file cannot be created or locked, or is a link or a pipe.
    """
    with contextlib.ExitStack() as stack:
        # A file that is open to write would keep its disk from being remounted
        # read-only.
        file = stack.enter_context(_opened(path, "r"))
        try:
            _take(file, before_wait)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # NFS only locks files that are open to write.
            file = stack.enter_context(_opened(path, "r+"))
            _take(file, before_wait)
        # On a full disk the record is missing, and the lock still holds.
        with contextlib.suppress(OSError), _opened(path, "r+") as record:
            record.truncate()
            record.write(f"process {os.getpid()} on {socket.gethostname()}")

        def is_held() -> bool:
            try:
                return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
            except OSError:
                return True  # the file was removed, and no other took its place

        yield is_held


def is_held(path: Path) -> bool | None:
    """Tests whether a process of this machine holds the lock of a file.

    The result is None if that is unknown. The function takes no lock, so it never makes
    a starting process fail.
    """
    try:
        inode = os.stat(path).st_ino
        text = untrusted.read_bytes(path).decode(errors="replace")
    except FileNotFoundError:
        return False
    except (OSError, untrusted.Malformed):
        return None
    holder = re.fullmatch(r"process (\d{1,9}) on (.*)", text.strip())
    if holder is None or holder[2] != socket.gethostname():
        return None
    with contextlib.suppress(OSError):  # not every system has /proc/locks
        # "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF"
        entry = rf"^.* {holder[1]} \S*:{inode} "
        return bool(re.search(entry, Path("/proc/locks").read_text(), re.MULTILINE))
    return _is_alive(int(holder[1]))


def _opened(path: Path, mode: str) -> IO[str]:
    """Opens a file, and creates it if it is absent. Never waits, never follows a link.

    Raises:
      OSError: the file cannot be opened, or is no regular file.
    """
    safe = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | safe, 0o666)

    try:
        file: IO[str] = open(path, mode, opener=opener)  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, errno.ELOOP, "a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _refusal(path, errno.EINVAL, "no regular file")
    return file


def _refusal(path: Path, code: int, kind: str) -> OSError:
    return OSError(code, f"{path.name} is {kind}; remove it", str(path))


def _take(file: IO[str], before_wait: Callable[[], None] | None) -> None:
    """Locks an open file; see `exclusive`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if before_wait is None:
            raise Locked(file.read().strip() or "another process") from None
        before_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        # Without locks, a caller that waits continues as if it had the lock.
        if before_wait is None or error.errno == errno.EBADF:
            raise


# --- Stores without locks -------------------------------------------------------------


@contextlib.contextmanager
def lease(path: Path, run: str, *, resumes: bool) -> Iterator[IsHeld]:
    """Writes a record of the owner of a folder, and renews it until the body ends.

    Two processes that start at once may both begin. Then `is_held` is false for the one
    that wrote first. Clocks may be wrong. A lease therefore counts as over only if it
    is also not renewed while this process waits.

    Args:
      path: file of the record, in any kind of store.
      run: identity of the run.
      resumes: whether no other process continues `run`. A dead process of the run then
        need not be waited for.

    Raises:
      Locked: another process has renewed its lease less than `TAKEOVER_S` ago.
      OSError: the record cannot be read or written.
    """
    owner = {
        "run": run,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": time.time(),
    }
    ended = threading.Event()

    def is_held() -> bool:
        try:
            record = _read_record(path)
        except Exception:  # the store does not answer for a while
            return True
        return record is None or {key: record[key] for key in owner} == owner

    def renew() -> None:
        record = run_format.marked(owner | {"time": time.time()})
        atomic.write_text(path, json.dumps(record))

    def keep_renewing() -> None:
        while not ended.wait(RENEW_S):
            # the store may not answer for a while
            with contextlib.suppress(Exception):
                if not is_held():
                    return
                renew()

    try:
        _wait_until_over(path, run, resumes=resumes)
        renew()
    except (Locked, OSError):
        raise
    except Exception as error:  # clients of object stores raise many types
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
    time.sleep(_SETTLE_S)
    if not is_held():
        raise Locked(_name(_read_record(path) or owner))
    thread = threading.Thread(target=keep_renewing, name="lease", daemon=True)
    thread.start()
    try:
        yield is_held
    finally:
        ended.set()
        thread.join(RENEW_S)
        with contextlib.suppress(Exception):
            if is_held():
                path.unlink()


def _wait_until_over(path: Path, run: str, *, resumes: bool) -> None:
    """Waits until the lease of a record, if there is one, is over.

    Raises:
      Locked: its owner renews the lease, or the lease ends only after a long time.
    """
    record = _read_record(path)
    if record is None:
        return
    remaining_s = record["time"] + TAKEOVER_S - time.time()
    is_ours = resumes and record["run"] == run
    is_here = record["host"] == socket.gethostname()
    if is_ours and is_here and not _is_alive(record["pid"]):
        return
    # The lease is over, or a clock is wrong, or its process should have ended.
    if is_ours or not 0 < remaining_s < 2 * TAKEOVER_S:
        # A live process renews it meanwhile, whatever its clock and even in a slow
        # store.
        time.sleep(2 * RENEW_S + _SETTLE_S)
        if _read_record(path) in (None, record):
            return
        remaining_s = TAKEOVER_S
    raise Locked(f"{_name(record)}; if that has ended, wait {remaining_s:.0f} s")


def _name(record: dict[str, Any]) -> str:
    return f"process {record['pid']} on {record['host']} (run {record['run']})"


def _read_record(path: Path) -> dict[str, Any] | None:
    """Reads a record; None if it is absent or malformed.

    Raises:
      OSError: the record cannot be read.
    """
    kinds = {"run": str, "host": str, "pid": int, "start": float, "time": float}
    try:
        record = untrusted.read_json(path, dict)
        record = {key: kind(record[key]) for key, kind in kinds.items()}
        return record if math.isfinite(record["time"]) else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return pid != os.getpid()  # a dead process had the id of this one
