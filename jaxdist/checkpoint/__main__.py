"""Command `jaxdist checkpoint list|inspect|verify|diff PATH`.

Shows and checks a folder of checkpoints. PATH is a workdir, its `checkpoints`, or one
step in it; it may be a gs:// path. The command changes nothing, and needs neither jax
nor a device.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    ConfigError,
    command_line,
    extras,
    schema,
)
from jaxdist.config.extras import MissingExtra
from jaxdist.storage import run_format
from jaxdist.storage.paths import is_local
from jaxdist.storage.untrusted import Malformed, read_json

Result = tuple[dict[str, Any], int]  # the document that --json prints; the exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    The codes are 0, 1 (damaged or different), 77 (no intact checkpoint), and 78
    (configuration error).
    """
    try:
        flags = _parser().parse_args(argv)
        document, code = _ACTIONS[flags.action](flags)
    except (
        ConfigError,
        MissingExtra,
        CheckpointError,
        OSError,
        ValueError,
        TypeError,
    ) as error:
        command_line.print_faults(error)
        if isinstance(error, CheckpointError):
            return EXIT_NO_CHECKPOINT
        return EXIT_CONFIG
    if flags.json:
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(_lines(document)))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="jaxdist checkpoint", description=__doc__.partition("\n\n")[2]
    )
    actions = parser.add_subparsers(
        dest="action", required=True, parser_class=command_line.Parser
    )
    for name, meaning in (
        (
            "list",
            "list the steps, their sizes, the steps in the memory of this host, and those in quarantine",
        ),
        ("inspect", "show the arrays and the metadata of a step (default: the newest)"),
        (
            "verify",
            "compare every file with its checksum; exit code 1 if a step is damaged, 77 if all are",
        ),
        ("diff", "show the arrays that differ between two steps; exit code 1 if any"),
    ):
        action = actions.add_parser(name, help=meaning, description=meaning)
        action.add_argument(
            "path", help="workdir, folder of checkpoints, or one step in it"
        )
        if name == "diff":
            action.add_argument("other", help="path to compare with, of the same kinds")
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _read(text: str) -> tuple[int, folders.StepInfo, integrity.Manifest]:
    """Reads the description of the step that a path names, or of the newest."""
    folder, named_step = _located(text)
    for step in folders.newest_first(folder) if named_step is None else [named_step]:
        try:
            info = folders.read_step(folder, step)
            manifest = integrity.read_manifest(folder / str(step))
            return step, info, manifest
        except (CheckpointError, OSError):
            if named_step is not None or not folders.is_deleted(folder, step):
                raise
    raise CheckpointError(f"there is no checkpoint in {folder}")


def _located(text: str) -> tuple[Path, int | None]:
    """Locates checkpoints as `locate` does, if this version has written them.

    Raises:
      OtherVersion: another version has written the folder, or a step in it.
    """
    folder, named_step = folders.locate(text)
    integrity.refuse_other_versions(folder)
    return folder, named_step


def _list(flags: argparse.Namespace) -> Result:
    folder, _ = _located(flags.path)
    notes = sorted(folders.quarantine_folder(folder).glob("*.json"))
    document = {
        "folder": str(folder),
        "steps": _rows(folder, contents=False),
        "memory": _memory_rows(folders.as_path(flags.path), folder),
        "quarantine": [_read_note(note) for note in notes],
    }
    return document, 0


def _memory_rows(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Describes the steps in this host's memory that a restart would see, ascending.

    Args:
      path: the workdir, or its `checkpoints`.
      folder: folder of the checkpoints.
    """
    workdir = path.parent if path.name == "checkpoints" else path
    if not is_local(workdir) or not (workdir / run_format.MEMORY).exists():
        return []
    memory_list = extras.load("jaxdist.checkpoint.memory_list")
    rows: list[dict[str, Any]] = memory_list.rows(workdir / run_format.MEMORY, folder)
    return rows


def _read_note(note: Path) -> dict[str, Any]:
    """Reads the note of a quarantined step, or describes why it cannot be read."""
    try:
        return run_format.unmarked(read_json(note, dict), note)
    except (FileNotFoundError, Malformed, run_format.OtherVersion) as error:
        return {"step": note.stem, "reason": f"{note} cannot be read: {error}"}


def _rows(
    folder: Path, *, run: str | None = None, contents: bool
) -> list[dict[str, Any]]:
    """Describes each step, ascending. A step that its run is deleting is skipped.

    Args:
      folder: folder of the checkpoints.
      run: identity that the steps must have. None accepts any.
      contents: whether to compare files with their checksums.
    """
    rows = [
        _row(folder, step, run=run, contents=contents)
        for step in folders.newest_first(folder, folders.all_steps)
    ]
    return [
        row
        for row in reversed(rows)
        if "fault" not in row or not folders.is_deleted(folder, row["step"])
    ]


def _row(folder: Path, step: int, *, run: str | None, contents: bool) -> dict[str, Any]:
    """Describes the content of a step, or its fault."""
    try:
        manifest = integrity.check(folder, step, run=run, contents=contents)
    except (CheckpointError, OSError) as error:
        return {"step": step, "fault": str(error)}
    return {
        "step": step,
        "arrays": len(manifest.fingerprints),
        "files": len(manifest.files),
        "bytes": sum(size for size, _ in manifest.files.values()),
        "run": manifest.run,
    }


def _inspect(flags: argparse.Namespace) -> Result:
    step, info, manifest = _read(flags.path)
    arrays = {
        name: {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "fingerprint": manifest.fingerprints.get(name),
        }
        for name, array in info.arrays.items()
    }
    document = {
        "step": step,
        "run": manifest.run,
        "metadata": info.metadata,
        "arrays": arrays,
    }
    return document, 0


def _verify(flags: argparse.Namespace) -> Result:
    folder, named_step = _located(flags.path)
    run = integrity.identity(folder, create=False)
    if named_step is None:
        rows = _rows(folder, run=run, contents=True)
    else:
        rows = [_row(folder, named_step, run=run, contents=True)]
    is_intact = ["fault" not in row for row in rows]
    code = 0 if all(is_intact) else 1
    if not any(is_intact):
        code = EXIT_NO_CHECKPOINT
    document = {
        "folder": str(folder),
        "steps": rows,
        "good": f"{sum(is_intact)} of {len(is_intact)}",
    }
    return document, code


def _diff(flags: argparse.Namespace) -> Result:
    _, first, first_manifest = _read(flags.path)
    _, second, second_manifest = _read(flags.other)
    only_first = [name for name in first.arrays if name not in second.arrays]
    only_second = [name for name in second.arrays if name not in first.arrays]
    differ = {}
    for name, array in first.arrays.items():
        if name in second.arrays and array != second.arrays[name]:
            differ[name] = f"{array} and {second.arrays[name]}"
    for name in first.arrays:
        is_alike = name in second.arrays and name not in differ
        fingerprint = first_manifest.fingerprints.get(name)
        if is_alike and fingerprint != second_manifest.fingerprints.get(name):
            differ[name] = "values"
    equal = not (differ or only_first or only_second)
    changes = schema.diff({"run": first.metadata}, {"run": second.metadata})
    document = {
        "equal": equal,
        "different": differ,
        "only_first": only_first,
        "only_second": only_second,
        "metadata": [change.text(" and ") for change in changes],
    }
    return document, 0 if equal else 1


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Yields nested JSON as indented lines. An item of few short parts is one line."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = [("-", item) for item in value]
    for key, item in items:
        parts: list[Any] = []
        if isinstance(item, dict):
            parts = list(item.values())
        elif isinstance(item, list):
            parts = item
        if len(parts) > 6 or any(
            isinstance(part, dict) or len(str(part)) > 60 for part in parts
        ):
            yield f"{indent}{key}"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{key} {_inline(item)}"


def _inline(item: Any) -> str:
    """Formats an item of few short parts, "none" if it is empty."""
    if isinstance(item, dict):
        item = ", ".join(
            f"{name} {part:,}" if type(part) is int else f"{name} {part}"
            for name, part in item.items()
        )
    return "none" if item in ([], "") else str(item)


_ACTIONS = {"list": _list, "inspect": _inspect, "verify": _verify, "diff": _diff}

if __name__ == "__main__":
    sys.exit(command_line.quiet_pipe(main))
