"""Files on whose system calls a program fails, or waits: what `disk_faults.c` does, for
tests.
"""

import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
available = shutil.which("gcc") is not None


class Fault(NamedTuple):
    """What becomes of some calls on the files of a pattern."""

    calls: str  # with commas: open, write, fsync, rename, make, remove, look; or *
    files: str  # as fnmatch has it, of the absolute path
    error: str = "EIO"  # a name of errno; "" waits while `Faults.stall` exists
    first: int = 1  # of the calls of one process
    last: int = 0  # 0: all after the first

    def text(self) -> str:
        number = getattr(errno, self.error) if self.error else 0
        return f"{self.calls}\t{number}\t{self.files}\t{self.first}\t{self.last}"


@dataclass(frozen=True)
class Faults:
    """A place for the library and its files."""

    folder: Path

    @property
    def stall(self) -> Path:
        """While it exists, calls wait."""
        return self.folder / "stall"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def environment(self, *faults: Fault) -> dict[str, str]:
        """Returns the variables that load the library into a program."""
        library = self.folder / "disk_faults.so"
        if not library.exists():
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"],
                check=True,
            )
        return {
            "LD_PRELOAD": str(library),
            "DISK_FAULTS": "\n".join(fault.text() for fault in faults),
            "DISK_STALL": str(self.stall),
            "DISK_FAULTS_LOG": str(self.log),
        }

    def met(self) -> list[str]:
        """Returns the calls that failed or waited, each as CALL PATH."""
        return (
            os.fsdecode(self.log.read_bytes()).splitlines() if self.log.exists() else []
        )
