"""`jaxdist checkpoint list|inspect|verify|diff PATH`: what is in a folder of
checkpoints.

PATH is a workdir, its `checkpoints`, or one step in it; also gs://. Changes nothing,
and needs neither jax nor a device.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdist import config
from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest as integrity
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.config import schema
from jaxdist.config.extras import MissingExtra
from jaxdist.storage import run_format
from jaxdist.storage.untrusted import Malformed, read_json

Result = tuple[dict[str, Any], int]  # what --json prints, and the exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 damaged or different, 77 none
    usable, or 78.
    """
    try:
        flags = _parser().parse_args(argv)
        document, code = _ACTIONS[flags.action](flags)
    except (
        config.ConfigError,
        MissingExtra,
        CheckpointError,
        OSError,
        ValueError,
        TypeError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return (
            config.EXIT_NO_CHECKPOINT
            if isinstance(error, CheckpointError)
            else config.EXIT_CONFIG
        )
    print(json.dumps(document, indent=1) if flags.json else "\n".join(_lines(document)))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = config.Parser(
        prog="jaxdist checkpoint", description=__doc__.partition("\n\n")[2]
    )
    actions = parser.add_subparsers(
        dest="action", required=True, parser_class=config.Parser
    )
    for name, meaning in (
        ("list", "the steps, their sizes, and what is in quarantine"),
        ("inspect", "the arrays and the metadata of a step (default: the newest)"),
        (
            "verify",
            "compare every file with its checksum; exit code 1 if one is damaged, 77 if all are",
        ),
        ("diff", "which arrays differ between two steps; exit code 1 if any does"),
    ):
        action = actions.add_parser(name, help=meaning, description=meaning)
        action.add_argument(
            "path", help="workdir, folder of checkpoints, or one step in it"
        )
        if name == "diff":
            action.add_argument("other", help="the same, to compare with")
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _one(text: str) -> tuple[int, folders.StepInfo, integrity.Manifest]:
    """Returns the step that a path means, the newest if it names none, and what it says
    about itself.
    """
    folder, only = _located(text)
    for step in folders.newest_first(folder) if only is None else [only]:
        try:
            return (
                step,
                folders.read_step(folder, step),
                integrity.read_manifest(folder / str(step)),
            )
        except (CheckpointError, OSError):
            if only is not None or not folders.is_deleted(folder, step):
                raise
    raise CheckpointError(f"there is no checkpoint in {folder}")


def _located(text: str) -> tuple[Path, int | None]:
    """Locates checkpoints as `locate` does.

    Raises:
      OtherVersion: another version has written the folder, or a step in it.
    """
    folder, only = folders.locate(text)
    integrity.refuse_other_versions(folder)
    return folder, only


def _list(flags: argparse.Namespace) -> Result:
    folder, _ = _located(flags.path)
    notes = sorted(folders.quarantine_folder(folder).glob("*.json"))
    quarantine = [_noted(note) for note in notes]
    return {
        "folder": str(folder),
        "steps": _rows(folder, contents=False),
        "quarantine": quarantine,
    }, 0


def _noted(note: Path) -> dict[str, Any]:
    try:
        return run_format.unmarked(read_json(note, dict), note)
    except (FileNotFoundError, Malformed, run_format.OtherVersion) as error:
        return {"step": note.stem, "reason": f"{note} cannot be read: {error}"}


def _rows(folder: Path, **what: Any) -> list[dict[str, Any]]:
    """Returns a row for each step, ascending, but for those that their run deletes
    meanwhile.
    """
    rows = [
        _row(folder, step, **what)
        for step in folders.newest_first(folder, folders.all_steps)
    ]
    return [
        row
        for row in rows[::-1]
        if "fault" not in row or not folders.is_deleted(folder, row["step"])
    ]


def _row(folder: Path, step: int, **what: Any) -> dict[str, Any]:
    """Describes what a step holds, or what is wrong with it."""
    try:
        manifest = integrity.check(folder, step, **what)
    except (CheckpointError, OSError) as error:
        return {"step": step, "fault": str(error)}
    counts = {"arrays": len(manifest.fingerprints), "files": len(manifest.files)}
    num_bytes = sum(size for size, _ in manifest.files.values())
    return {"step": step, **counts, "bytes": num_bytes, "run": manifest.run}


def _inspect(flags: argparse.Namespace) -> Result:
    step, info, manifest = _one(flags.path)
    arrays = {
        name: {
            "dtype": x.dtype,
            "shape": list(x.shape),
            "fingerprint": manifest.fingerprints.get(name),
        }
        for name, x in info.arrays.items()
    }
    return {
        "step": step,
        "run": manifest.run,
        "metadata": info.metadata,
        "arrays": arrays,
    }, 0


def _verify(flags: argparse.Namespace) -> Result:
    folder, only = _located(flags.path)
    run = integrity.identity(folder, create=False)
    how: dict[str, Any] = {"run": run, "contents": True}
    rows = _rows(folder, **how) if only is None else [_row(folder, only, **how)]
    good = ["fault" not in row for row in rows]
    code = 0 if all(good) else 1
    if not any(good):
        code = config.EXIT_NO_CHECKPOINT
    return {
        "folder": str(folder),
        "steps": rows,
        "good": f"{sum(good)} of {len(good)}",
    }, code


def _diff(flags: argparse.Namespace) -> Result:
    pairs = [_one(flags.path), _one(flags.other)]
    infos = [info for _, info, _ in pairs]
    prints = [manifest.fingerprints for *_, manifest in pairs]
    a, b = (info.arrays for info in infos)
    differ = {n: f"{a[n]} and {b[n]}" for n in a if n in b and a[n] != b[n]}
    for name in a:
        is_alike = name in b and name not in differ
        if is_alike and prints[0].get(name) != prints[1].get(name):
            differ[name] = "values"
    only = {
        "only_first": [n for n in a if n not in b],
        "only_second": [n for n in b if n not in a],
    }
    equal = not (differ or only["only_first"] or only["only_second"])
    changes = schema.diff(*({"run": dict(info.metadata)} for info in infos))
    metadata = [change.text(" and ") for change in changes]
    return {
        "equal": equal,
        "different": differ,
        **only,
        "metadata": metadata,
    }, 0 if equal else 1


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Yields nested JSON as indented lines; what has few and plain parts is
    one line.
    """
    rows = value.items() if isinstance(value, dict) else [("-", x) for x in value]
    for key, item in rows:
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
            continue
        if isinstance(item, dict):
            item = ", ".join(
                f"{name} {x:,}" if type(x) is int else f"{name} {x}"
                for name, x in item.items()
            )
        yield f"{indent}{key} {item if parts or item not in ([], '') else 'none'}"


_ACTIONS = {"list": _list, "inspect": _inspect, "verify": _verify, "diff": _diff}

if __name__ == "__main__":
    sys.exit(config.quiet_pipe(main))
