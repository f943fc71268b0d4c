"""The runs below a folder, side by side: how each stands, and in which keys their
configs differ. No jax.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.operations.page import status
from jaxdist.operations.page.status import RunStatus
from jaxdist.operations.page.summary import number
from jaxdist.storage import untrusted
from jaxdist.telemetry.units import count_text, percent_text

_DEPTH = 6  # folders below the one given
_SHOWN = 8  # keys that differ, of a run
# of a run, not runs
_INSIDE = ("checkpoints", "quarantine", "profile", "tensorboard", "wandb")


def find_runs(folder: Path) -> list[Path]:
    """Returns the workdirs at and below a folder, sorted; links to folders are not
    followed.

    Raises:
      ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; give one with runs in it, or start a run"
        )
    found = []
    for place, inside, _ in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        is_run = status.is_run(Path(place))
        if is_run:
            found.append(Path(place))
        kept = [
            name
            for name in inside
            if not (name.startswith(".") or is_run and name in _INSIDE)
        ]
        inside[:] = sorted(kept) if depth < _DEPTH else []
    return found


def table(folder: Path) -> dict[str, Any]:
    """Returns what `jaxdist runs --json` prints: the status of each run, and in which
    keys they differ.
    """
    runs = [status.read_any_status(workdir) for workdir in find_runs(folder)]
    keys = differing_keys(runs)
    rows = []
    for run in runs:
        name = (
            folder.resolve().name
            if run.folder == folder
            else str(run.folder.relative_to(folder))
        )
        differs = {key: run.config[key] for key in keys if key in run.config}
        rows.append({"name": name, **run.document(), "differs": differs})
    return {"folder": str(folder), "differing_keys": keys, "runs": rows}


def differing_keys(runs: Sequence[RunStatus]) -> list[str]:
    """Returns the keys that not all configs have with the same value; those that some
    lack come last.
    """
    configs = [run.config for run in runs if run.config]
    keys = {
        change.path
        for config in configs[1:]
        for change in schema.diff(configs[0], config)
    }
    return sorted(
        keys, key=lambda key: (any(key not in config for config in configs), key)
    )


def as_text(document: Mapping[str, Any]) -> str:
    """Returns the table for people; below each run what its config has of its own."""
    if not document["runs"]:
        return f"no runs below {document['folder']}"
    units = " or ".join(sorted({run["unit"] for run in document["runs"]}, reverse=True))
    head = ["run", "state", "step", "loss", f"{units}/s", "MFU", "started"]
    rows = [_cells(run) for run in document["runs"]]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_line(head, widths)]
    for run, row in zip(document["runs"], rows, strict=True):
        lines.append(_line(row, widths))
        if run["state"] == status.OTHER_VERSION:
            lines.append(f"    {run['reason']}")
        changes = [f"{key}={value}" for key, value in run["differs"].items()]
        more = f"and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        lines += [f"    {change}" for change in filter(None, [*changes[:_SHOWN], more])]
    # values are text of the runs' folders
    return "\n".join(map(untrusted.printable, lines))


def _cells(run: Mapping[str, Any]) -> list[str]:
    shows = (
        ("loss", "{:.4f}".format),
        ("tokens_per_s", count_text),
        ("mfu", percent_text),
    )
    numbers = [_shown(number(run[name]), show) for name, show in shows]
    steps = f"{run['step']:,}/{run['steps']:,}" if run["steps"] else f"{run['step']:,}"
    began = run["started"]
    started = (
        time.strftime("%m-%d %H:%M", time.localtime(began))
        if began is not None
        else "-"
    )
    return [run["name"], run["state"], steps, *numbers, started]


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Returns a line of the table: names to the left, numbers to the right."""
    left = [text.ljust(width) for text, width in zip(cells[:2], widths, strict=False)]
    right = [
        text.rjust(width) for text, width in zip(cells[2:], widths[2:], strict=True)
    ]
    return "  ".join([*left, *right]).rstrip()
