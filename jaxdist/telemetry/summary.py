"""What a workdir says about its run, read for people: the run, its state, its key figures."""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist import config
from jaxdist.telemetry import metrics
from jaxdist.telemetry.units import count_text, duration_text, percent_text, time_text

ALERTS = ("preempted", "peer_lost", "hang", "bad_checkpoint", "nonfinite")


@dataclass(frozen=True)
class Run:
    """What a workdir says about its run; absent files are empty."""

    name: str
    folder: Path
    config: Mapping[str, object]  # flat: dotted path -> value
    info: Mapping[str, object]  # run.json
    rows: metrics.Rows
    events: Sequence[metrics.Row]
    sample: str
    ops: Sequence[Mapping[str, object]]  # profile/top_ops.json

    def column(self, field: str) -> list[tuple[float, float]]:
        """Returns (step, value) of the training rows that have the field."""
        return points(self.rows.train, field)


def read_run(workdir: str | os.PathLike[str], name: str = "") -> Run:
    """Returns the run of a workdir; `name` defaults to the folder's name.

    Raises:
      ConfigError: the folder does not exist or holds no run.
    """
    folder = Path(workdir)
    if not folder.is_dir():
        raise config.ConfigError(f"{folder}: no such folder; give the workdir of a training run")
    known = (metrics.METRICS_FILE, metrics.EVENTS_FILE, "run.json")
    if not any((folder / file).exists() for file in known):
        raise config.ConfigError(
            f"{folder}: holds no run (none of {', '.join(known)}); give the --workdir of train"
        )
    info = _read_json(folder / "run.json", {})
    sample = folder / "sample.txt"
    text = sample.read_text(errors="replace") if sample.exists() else info.get("sample", "")
    return Run(
        name=name or folder.resolve().name,
        folder=folder,
        config=config.flatten(_read_json(folder / "config.json", {})),
        info=info,
        rows=metrics.read_rows(folder),
        events=metrics.read_events(folder),
        sample=text if isinstance(text, str) else json.dumps(text, indent=1, ensure_ascii=False),
        ops=_read_json(folder / "profile" / "top_ops.json", []),
    )


def points(rows: Sequence[metrics.Row], field: str) -> list[tuple[float, float]]:
    """Returns (step, value) of the rows where the field is a number (NaN included)."""
    pairs = ((number(row.get("step")), number(row.get(field))) for row in rows)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def number(value: object) -> float | None:
    """Returns the value as a float, None if it is no number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def state(run: Run) -> tuple[str, str]:
    """Returns what became of the run, and how to show it: "good", "bad" or ""."""
    ends = [event for event in run.events if event["event"] in ("start", "stop", *ALERTS)]
    if not ends:
        return "no events", ""
    last = ends[-1]
    if last["event"] == "stop":
        reason = last.get("reason")
        return (f"stopped: {reason}" if reason else "finished"), "good"
    if last["event"] in ALERTS:
        return f"last event: {last['event']}", "bad"
    return "running, or ended without a stop event", ""


def mesh_text(run: Run) -> str:
    """Returns the mesh axes larger than 1, e.g. "data 2 × tensor 4"; "" if unknown."""
    mesh = run.info.get("mesh")
    if not isinstance(mesh, Mapping):
        return ""
    sizes = [f"{axis} {size}" for axis, size in mesh.items() if isinstance(size, int) and size != 1]
    return " × ".join(sizes) or "one device"


def _last_loss(run: Run) -> str | None:
    points = run.column("loss")
    return f"{points[-1][1]:.4f}" if points else None


def _best_evaluation(run: Run) -> str | None:
    finite = [p for p in points(run.rows.evaluation, "eval_loss") if math.isfinite(p[1])]
    return f"{min(value for _, value in finite):.4f}" if finite else None


def _steps(run: Run) -> str | None:
    return f"{run.rows.train[-1]['step']:,}" if run.rows.train else None


def _tokens(run: Run) -> str | None:
    points = run.column("tokens_seen")
    return count_text(points[-1][1]) if points else None


def _parameters(run: Run) -> str | None:
    for key in ("parameters", "parameter_count", "num_parameters"):
        value = number(run.info.get(key))
        if value is not None:
            return count_text(value)
    return None


def _wall(run: Run) -> str | None:
    times = [time for event in run.events if (time := number(event.get("time"))) is not None]
    return duration_text(times[-1] - times[0]) if len(times) > 1 else None


def _median(field: str, show: Callable[[float], str]) -> Callable[[Run], str | None]:
    def value_of(run: Run) -> str | None:
        finite = [value for _, value in run.column(field) if math.isfinite(value)]
        return show(statistics.median(finite)) if finite else None

    return value_of


def _read_json(path: Path, empty: Any) -> Any:
    """Returns the JSON of a file if it has the type of `empty`, else `empty` (absent, torn)."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return empty
    return value if isinstance(value, type(empty)) else empty


# Key figures of a run, in reading order: name, and how to get its text (None: unknown).
FIGURES: tuple[tuple[str, Callable[[Run], str | None]], ...] = (
    ("last loss", _last_loss),
    ("best evaluation loss", _best_evaluation),
    ("steps", _steps),
    ("tokens seen", _tokens),
    ("parameters", _parameters),
    ("tokens/s, median", _median("tokens_per_s", count_text)),
    ("step time, median", _median("step_time_s", time_text)),
    ("MFU causal, median", _median("mfu_causal", percent_text)),
    ("MFU full, median", _median("mfu_full", percent_text)),
    ("time since start", _wall),
)
