"""One process at a time: the lock of a file, which ends with its process."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path


class Locked(Exception):
    """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def exclusive(path: Path, *, before_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Creates a file, holds its lock and writes into it which process does.

    A file system without locks counts as locked for a caller that does not wait, and as free for
    one that does.

    Args:
      before_wait: called once, before waiting for another process; None: do not wait.

    Raises:
      Locked: another process holds the lock, and `before_wait` is None.
      OSError: the file cannot be created.
    """
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if before_wait is None:
                file.seek(0)
                raise Locked(file.read().strip() or "another process") from None
            if isinstance(error, BlockingIOError):
                before_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # a full disk: what matters is the lock
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
