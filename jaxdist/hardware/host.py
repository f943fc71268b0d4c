"""Facts of the machine that this process runs on."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_KIB = 1024


class Room(NamedTuple):
    """Free bytes, and where the number comes from."""

    bytes: int
    source: str


def memory_bytes() -> int:
    """Reads the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(root: Path = Path("/")) -> Room | None:
    """Finds the memory that this host or its container has left; None = unknown.

    Args:
      root: folder that has /proc and /sys.
    """
    rooms = [_of_machine(root), *_of_cgroups(root)]
    known = [room for room in rooms if room is not None]
    return min(known, default=None, key=lambda room: room.bytes)


def _of_machine(root: Path) -> Room | None:
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return Room(int(line.split()[1]) * _KIB, "MemAvailable of the machine")
    return None


def _of_cgroups(root: Path) -> Iterator[Room | None]:
    """Yields the room in each control group of this process, from both versions.

    Files in memory count against it. Pages of the disk's cache do not: they are freed
    when memory is short.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        folder = root / "sys/fs/cgroup"
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            folder /= "memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        path = folder / group.lstrip("/")
        for place in [path, *path.parents]:
            if place.is_relative_to(folder):
                yield _of_cgroup(place, *names)


def _of_cgroup(place: Path, limit: str, usage: str, cache: str) -> Room | None:
    texts = [read_lines(place / name) for name in (limit, usage)]
    if not all(texts) or not texts[0][0].isdecimal():  # absent, or "max"
        return None
    used = int(texts[1][0])
    for line in read_lines(place / "memory.stat"):
        if line.split()[0] == cache:
            used -= int(line.split()[1])
    return Room(max(0, int(texts[0][0]) - used), f"{limit} of the container")


def read_lines(path: Path) -> list[str]:
    """Reads a text file; a file that cannot be read has no lines."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
