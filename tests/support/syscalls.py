"""What a program did to files, system call by system call, to be done again up to any
of them.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TRACED = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,rename,renameat,renameat2,unlink,unlinkat,rmdir,"
    "mkdir,mkdirat,truncate,ftruncate,link,linkat,symlink,symlinkat,sendfile,copy_file_range,fallocate"
)
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)")
_UNFINISHED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PLACE = re.compile(r"(?:AT_FDCWD|\d+)<((?:\\x[0-9a-f]{2}|[^<>])*)>")


class Call(NamedTuple):
    """A system call that succeeded."""

    name: str
    arguments: str
    result: int

    def strings(self) -> list[bytes]:
        return [
            bytes.fromhex(text.replace("\\x", ""))
            for text in _STRING.findall(self.arguments)
        ]

    def places(self) -> list[str]:
        """Returns the paths of the descriptors among the arguments."""
        found = _PLACE.findall(self.arguments)
        return [
            re.sub(r"\\x(..)", lambda hex_: chr(int(hex_[1], 16)), text)
            for text in found
        ]

    def paths(self) -> list[str]:
        """Returns the absolute paths among the arguments."""
        folders = self.places() if "at" in self.name else []
        names = [os.fsdecode(text) for text in self.strings()]
        folders += [""] * (len(names) - len(folders))
        return [
            os.path.join(folder, name)
            for folder, name in zip(folders, names, strict=False)
        ]


def trace(command: list[str], log: Path, **options) -> list[Call]:
    """Runs a command and returns what it did to files, in order of completion."""
    strace = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-xx",
        "-s",
        "99999999",
        "-o",
        str(log),
    ]
    subprocess.run(
        [*strace, "-e", f"trace={TRACED}", "--", *command], check=True, **options
    )
    return list(_calls(log))


def _calls(log: Path) -> Iterator[Call]:
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        if match := _UNFINISHED.match(line):
            begun[match[1]] = line.removesuffix(" <unfinished ...>")
            continue
        if match := _RESUMED.match(line):
            line = begun.pop(match[1]) + match[2]
        if (match := _CALL.match(line)) and int(match[4]) >= 0:
            yield Call(match[2], match[3], int(match[4]))


def replay(calls: list[Call], source: Path, target: Path) -> Iterator[Call]:
    """Does again, below `target`, what was done below `source`; yields each call once
    it is done.
    """

    def moved(path: str) -> Path | None:
        inside = os.path.normpath(path)
        return (
            target / os.path.relpath(inside, source)
            if inside.startswith(str(source))
            else None
        )

    ends: dict[str, int] = {}  # of files that are appended to, by path
    for call in calls:
        writes = call.name in ("write", "writev", "pwrite64", "ftruncate")
        paths = [
            moved(path) for path in (call.places()[:1] if writes else call.paths())
        ]
        if not paths or paths[0] is None:
            continue
        first, key = paths[0], str(paths[0])
        match call.name:
            case "open" | "openat" | "creat":
                if (
                    not re.search("O_CREAT|O_TRUNC", call.arguments)
                    and call.name != "creat"
                ):
                    continue
                if "O_TRUNC" in call.arguments or not first.exists():
                    first.write_bytes(b"")
                ends[key] = 0
            case "write" | "writev" | "pwrite64":
                content = b"".join(call.strings())
                at = (
                    int(call.arguments.rpartition(",")[2])
                    if call.name == "pwrite64"
                    else ends.get(key, 0)
                )
                with first.open("r+b") as file:
                    file.seek(at)
                    file.write(content[: call.result])
                ends[key] = at + call.result
            case "ftruncate":
                os.truncate(first, int(call.arguments.rpartition(",")[2]))
            case "rename" | "renameat" | "renameat2":
                os.replace(first, paths[1])
                ends[str(paths[1])] = ends.pop(key, 0)
            case "mkdir" | "mkdirat":
                first.mkdir()
            case "rmdir":
                first.rmdir()
            case "unlink" | "unlinkat":
                first.rmdir() if first.is_dir() else first.unlink()
            case other:
                raise NotImplementedError(f"{other}({call.arguments[:200]})")
        yield call


def same_files(one: Path, other: Path) -> bool:
    """Returns whether two folders hold the same names and contents."""
    contents = [
        {
            path.relative_to(root): path.is_file() and path.read_bytes()
            for path in root.rglob("*")
        }
        for root in (one, other)
    ]
    return contents[0] == contents[1]


available = shutil.which("strace") is not None
