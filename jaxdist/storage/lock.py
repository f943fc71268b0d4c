"""One process at a time: a file's lock, which ends with its process; where there is
none, a lease.
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

# of a network file system without locks
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
RENEW_S = 10  # between two renewals of a lease
TAKEOVER_S = 120  # a lease that was not renewed for so long is over
_SETTLE_S = 1.0  # after which the last of several writers of a record sees itself

# whether it is still ours: a file can be replaced, a lease taken over
IsHeld = Callable[[], bool]


class Locked(Exception):
    """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def exclusive(
    path: Path, *, before_wait: Callable[[], None] | None = None
) -> Iterator[IsHeld]:
    """Creates a file, holds its lock and writes into it which process does.

    A file system without locks counts as free for a caller that waits.

    Args:
      before_wait: called once, before waiting for another process; None: do not wait.

    Raises:
      Locked: another process holds the lock, and `before_wait` is None.
      OSError: the file cannot be created, or not be locked, or is a link or a pipe.
    """
    with contextlib.ExitStack() as stack:
        # To read: a file that is open to write keeps its disk from being remounted
        # read-only.
        file = stack.enter_context(_opened(path, "r"))
        try:
            _take(file, before_wait)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            file = stack.enter_context(_opened(path, "r+"))  # NFS locks nothing else
            _take(file, before_wait)
        # A full disk: what matters is the lock.
        with contextlib.suppress(OSError), _opened(path, "r+") as record:
            record.truncate()
            record.write(f"process {os.getpid()} on {socket.gethostname()}")

        def is_held() -> bool:
            try:
                return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
            except OSError:
                # whoever took the file away has not put another in its place
                return True

        yield is_held


def is_held(path: Path) -> bool | None:
    """Checks whether a process of this machine holds the lock of a file; None if that
    is unknown.

    Nothing is locked for that: who starts meanwhile is not refused.
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
    with contextlib.suppress(OSError):  # a system that does not say who has locked what
        # "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF"
        held = rf"^.* {holder[1]} \S*:{inode} "
        return bool(re.search(held, Path("/proc/locks").read_text(), re.MULTILINE))
    return _is_alive(int(holder[1]))


def _opened(path: Path, mode: str) -> IO[str]:
    """Opens a file, made if need be; not what a link there leads to, and nothing that
    waits.

    Raises:
      OSError: it cannot be opened, or is no regular file.
    """
    safe = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = open(
            path, mode, opener=lambda name, flags: os.open(name, flags | safe, 0o666)
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, errno.ELOOP, "a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _refusal(path, errno.EINVAL, "no regular file")
    return file


def _refusal(path: Path, number: int, kind: str) -> OSError:
    return OSError(number, f"{path.name} is {kind}; remove it", str(path))


def _take(file: IO[str], before_wait: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if before_wait is None:
            raise Locked(file.read().strip() or "another process") from None
        before_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if before_wait is None or error.errno == errno.EBADF:
            raise


# --- stores without locks -------------------------------------------------------------


@contextlib.contextmanager
def lease(path: Path, run: str, *, resumes: bool) -> Iterator[IsHeld]:
    """Writes who owns the folder of `path`, and renews that from a thread until the
    body ends.

    Two that come at once may both begin; then `is_held` says no to the one that wrote
    first. No clock is trusted to say that an owner is gone: it must also let a time for
    renewal pass.

    Args:
      path: of the record, a file in any kind of store.
      resumes: whether no other process goes on with `run`, so that one that died need
        not be waited for.

    Raises:
      Locked: another process has renewed its lease less than `TAKEOVER_S` ago.
      OSError: the record cannot be read or written.
    """
    mine = {
        "run": run,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": time.time(),
    }
    ended = threading.Event()

    def is_held() -> bool:
        try:
            other = _read_record(path)
        except Exception:  # the store is away for a while
            return True
        return other is None or {key: other[key] for key in mine} == mine

    def renew() -> None:
        record = run_format.marked(mine | {"time": time.time()})
        atomic.write_text(path, json.dumps(record))

    def keep() -> None:
        while not ended.wait(RENEW_S):
            with contextlib.suppress(Exception):  # the store is away for a while
                if not is_held():
                    return
                renew()

    try:
        _wait_for_the_other(path, run, resumes)
        renew()
    except (Locked, OSError):
        raise
    except Exception as error:  # of an object store's client
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
    time.sleep(_SETTLE_S)
    if not is_held():
        raise Locked(_name(_read_record(path) or mine))
    thread = threading.Thread(target=keep, name="lease", daemon=True)
    thread.start()
    try:
        yield is_held
    finally:
        ended.set()
        thread.join(RENEW_S)
        with contextlib.suppress(Exception):
            if is_held():
                path.unlink()


def _wait_for_the_other(path: Path, run: str, resumes: bool) -> None:
    """Waits until the lease of a record, if there is one, is over.

    Raises:
      Locked: its owner renews it, or that takes long to see.
    """
    other = _read_record(path)
    if other is None:
        return
    left_s = other["time"] + TAKEOVER_S - time.time()
    ours = resumes and other["run"] == run
    if ours and other["host"] == socket.gethostname() and not _is_alive(other["pid"]):
        return
    if ours or not 0 < left_s < 2 * TAKEOVER_S:  # over, or a clock is wrong
        # One that lives renews it meanwhile, whatever its clock says, and though its
        # store be slow.
        time.sleep(2 * RENEW_S + _SETTLE_S)
        if _read_record(path) in (None, other):
            return
        left_s = TAKEOVER_S
    raise Locked(f"{_name(other)}; if that has ended, wait {left_s:.0f} s")


def _name(record: dict[str, Any]) -> str:
    return f"process {record['pid']} on {record['host']} (run {record['run']})"


def _read_record(path: Path) -> dict[str, Any] | None:
    """Reads a record; None if there is none, or none of ours.

    Raises:
      OSError: it cannot be read.
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
    return pid != os.getpid()  # it is our own number, of a process before us
