"""`jaxdist.train` with stores that are slow or fail, as clients of fsspec:
`slow:///folder`, `hanging://...`.

Each is a folder of this machine; what goes wrong is what its name says.
"""

import errno
import os
import runpy
import sys
import threading
import time
from typing import ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

_PARTS, _PAUSE_S = 8, 0.005  # of a file, and between two of them


class _Folder(LocalFileSystem):
    protocol: ClassVar[str]

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))


class Slow(_Folder):
    """Writes a file in parts, so that a kill leaves files cut short."""

    protocol = "slow"

    def put_file(self, source, target, callback=None, **_):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(source, "rb") as file:
            content = file.read()
        size = max(1, -(-len(content) // _PARTS))
        with open(target, "wb", buffering=0) as file:
            for begin in range(0, len(content), size):
                file.write(content[begin : begin + size])
                time.sleep(_PAUSE_S)


class Hanging(_Folder):
    """A put never returns."""

    protocol = "hanging"

    def put_file(self, source, target, callback=None, **_):
        threading.Event().wait()


class Denied(_Folder):
    """Nothing may be written."""

    protocol = "denied"

    def pipe_file(self, path, value, **_):
        raise PermissionError("Access Denied")

    put_file = pipe_file


class Expired(_Folder):
    """Credentials end amid the first step."""

    protocol = "expired"
    puts = 0

    def put_file(self, source, target, callback=None, **_):
        Expired.puts += 1
        if Expired.puts > 3:
            raise PermissionError("The provided token has expired.")
        super().put_file(source, target)


class Full(_Folder):
    """Each file is cut short."""

    protocol = "full"

    def put_file(self, source, target, callback=None, **_):
        super().put_file(source, target)
        os.truncate(target, os.path.getsize(target) // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)


class Lossy(_Folder):
    """Says that it has taken every file, and loses the end of some."""

    protocol = "lossy"

    def put_file(self, source, target, callback=None, **_):
        super().put_file(source, target)
        if "/state/" in target:
            os.truncate(target, os.path.getsize(target) // 2)


for store in (Slow, Hanging, Denied, Expired, Full, Lossy):
    fsspec.register_implementation(store.protocol, store, clobber=True)

if __name__ == "__main__":
    sys.argv[0] = "jaxdist.train"
    runpy.run_module("jaxdist.train", run_name="__main__")
