"""Table of the runs below a folder: their states, and the config keys that differ.

Needs no jax.
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

_MAX_DEPTH = 6  # levels of folders that are searched
_MAX_KEYS = 8  # differing keys that are printed for a run
# name of the loss of the last evaluation
_EVALUATION = "last eval"
# folders of a workdir, which hold no other run
_INSIDE = ("checkpoints", "quarantine", "profile", "tensorboard", "wandb")


def find_runs(folder: Path) -> list[Path]:
    """Finds the workdirs at and below a folder, sorted. It follows no links.

    Raises:
      ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; give one with runs in it, or start a run"
        )
    workdirs = []
    for name, subfolders, _ in os.walk(folder):
        path = Path(name)
        skipped: tuple[str, ...] = ()
        if status.is_run(path):
            workdirs.append(path)
            skipped = _INSIDE
        # os.walk visits the names that are left in its list
        subfolders[:] = sorted(
            name for name in subfolders if name[0] != "." and name not in skipped
        )
        if len(path.relative_to(folder).parts) >= _MAX_DEPTH:
            subfolders.clear()
    return workdirs


def table(folder: Path) -> dict[str, Any]:
    """Builds the document of `jaxdist runs --json`.

    It has the status of each run, and the keys in which configs differ.
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
    """Lists the keys that differ between configs; keys that some lack come last."""
    configs = [run.config for run in runs if run.config]
    keys = {
        change.path
        for config in configs[1:]
        for change in schema.diff(configs[0], config)
    }
    in_all = [key for key in keys if all(key in config for config in configs)]
    return sorted(in_all) + sorted(keys.difference(in_all))


def as_text(document: Mapping[str, Any]) -> str:
    """Formats the table as text; below each run are its differing keys."""
    runs = document["runs"]
    if not runs:
        return f"no runs below {document['folder']}"
    units = sorted({run["unit"] for run in runs}, reverse=True)
    speed = f"{' or '.join(units)}/s"
    rows = [["run", "state", "step", "loss", _EVALUATION, speed, "MFU", "started"]]
    rows += [_cells(run) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(rows[0], widths)]
    for run, row in zip(runs, rows[1:], strict=True):
        lines.append(_line(row, widths))
        if run["state"] == status.OTHER_VERSION:
            lines.append(f"    {run['reason']}")
        changes = [f"    {key}={value}" for key, value in run["differs"].items()]
        lines += changes[:_MAX_KEYS]
        if len(changes) > _MAX_KEYS:
            lines.append(f"    and {len(changes) - _MAX_KEYS} more")
    lines += _held_out_lines(runs)
    # values come from files that anybody may have written
    return "\n".join(map(untrusted.printable, lines))


def _held_out_lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says if evaluation losses cannot be compared: they are of different sets."""
    sizes = {number(run["eval_tokens"]) for run in runs}
    known = sorted(size for size in sizes if size is not None)
    if len(known) < 2:
        return []
    texts = ", ".join(field_text("eval_tokens", size) for size in known)
    return [
        f"{_EVALUATION}: losses of held-out sets of different sizes ({texts} targets)"
    ]


def _cells(run: Mapping[str, Any]) -> list[str]:
    cells = [run["name"], run["state"], f"{run['step']:,}"]
    if run["steps"]:
        cells[-1] += f"/{run['steps']:,}"
    for name in ("loss", "eval_loss", "tokens_per_s", "mfu"):
        value = number(run[name])
        cells.append("-" if value is None else field_text(name, value))
    if run["started"] is None:
        cells.append("-")
    else:
        cells.append(time.strftime("%m-%d %H:%M", time.localtime(run["started"])))
    return cells


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Aligns a line of the table: two columns of text, then numbers."""
    padded = [text.ljust(width) for text, width in zip(cells, widths, strict=True)]
    for index in range(2, len(cells)):
        padded[index] = cells[index].rjust(widths[index])
    return "  ".join(padded).rstrip()
