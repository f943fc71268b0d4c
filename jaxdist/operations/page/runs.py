"""The runs below a folder, side by side: how each stands, and in which keys their
configs differ. No jax.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.operations.page import status
from jaxdist.operations.page.run_files import number
from jaxdist.operations.page.status import RunStatus
from jaxdist.storage import untrusted
from jaxdist.telemetry.units import field_text

_DEPTH = 6  # folders below the given one
_SHOWN = 8  # of a run's keys that differ
# folders of a run that hold no other run
_INSIDE = ("checkpoints", "quarantine", "profile", "tensorboard", "wandb")


def find_runs(folder: Path) -> list[Path]:
    """Finds the workdirs at and below a folder, sorted; follows no links.

    Raises:
      ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; give one with runs in it, or start a run"
        )
    found = []
    for name, inside, _ in os.walk(folder):
        place = Path(name)
        skipped: tuple[str, ...] = ()
        if status.is_run(place):
            found.append(place)
            skipped = _INSIDE
        inside[:] = sorted(
            name for name in inside if name[0] != "." and name not in skipped
        )
        if len(place.relative_to(folder).parts) >= _DEPTH:
            inside.clear()
    return found


def table(folder: Path) -> dict[str, Any]:
    """Collects what `jaxdist runs --json` prints: the status of each run, and in which
    keys they differ.
    """
    runs = [status.read_any_status(workdir) for workdir in find_runs(folder)]
    keys = differing_keys(runs)
    rows = []
    for run in runs:
        name = str(run.folder.relative_to(folder))
        if run.folder == folder:
            name = folder.resolve().name
        differs = {key: run.config[key] for key in keys if key in run.config}
        rows.append({"name": name, **run.document(), "differs": differs})
    return {"folder": str(folder), "differing_keys": keys, "runs": rows}


def differing_keys(runs: Sequence[RunStatus]) -> list[str]:
    """Lists the keys that differ between configs; those that some lack come last."""
    configs = [run.config for run in runs if run.config]
    keys = {
        change.path
        for config in configs[1:]
        for change in schema.diff(configs[0], config)
    }
    everywhere = [key for key in keys if all(key in config for config in configs)]
    return sorted(everywhere) + sorted(keys.difference(everywhere))


def as_text(document: Mapping[str, Any]) -> str:
    """Formats the table for people; below each run are its keys that differ."""
    runs = document["runs"]
    if not runs:
        return f"no runs below {document['folder']}"
    units = sorted({run["unit"] for run in runs}, reverse=True)
    speed = f"{' or '.join(units)}/s"
    rows = [["run", "state", "step", "loss", speed, "MFU", "started"]]
    rows += [_cells(run) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(rows[0], widths)]
    for run, row in zip(runs, rows[1:], strict=True):
        lines.append(_line(row, widths))
        if run["state"] == status.OTHER_VERSION:
            lines.append(f"    {run['reason']}")
        changes = [f"    {key}={value}" for key, value in run["differs"].items()]
        lines += changes[:_SHOWN]
        if len(changes) > _SHOWN:
            lines.append(f"    and {len(changes) - _SHOWN} more")
    # values are text of the runs' folders
    return "\n".join(map(untrusted.printable, lines))


def _cells(run: Mapping[str, Any]) -> list[str]:
    cells = [run["name"], run["state"], f"{run['step']:,}"]
    if run["steps"]:
        cells[-1] += f"/{run['steps']:,}"
    for name in ("loss", "tokens_per_s", "mfu"):
        value = number(run[name])
        cells.append("-" if value is None else field_text(name, value))
    if run["started"] is None:
        cells.append("-")
    else:
        cells.append(time.strftime("%m-%d %H:%M", time.localtime(run["started"])))
    return cells


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Sets a line of the table: two columns of text, then numbers."""
    padded = [text.ljust(width) for text, width in zip(cells, widths, strict=True)]
    for index in range(2, len(cells)):
        padded[index] = cells[index].rjust(widths[index])
    return "  ".join(padded).rstrip()
