"""A summary of the run in a workdir: its state and its key figures."""

import json
import math
import operator
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.telemetry import metrics
from jaxdist.telemetry.units import count_text, duration_text, percent_text, time_text

ALERTS = ("preempted", "peer_lost", "hang", "bad_checkpoint", "nonfinite")


@dataclass(frozen=True)
class RunSummary:
    """What a workdir says about its run; absent files are empty."""

    name: str
    folder: Path
    config: Mapping[str, object]  # flat: dotted path -> value
    info: Mapping[str, Any]  # run.json
    rows: metrics.MetricRows
    events: Sequence[metrics.Row]
    sample: str
    ops: Sequence[Mapping[str, Any]]  # profile/top_ops.json
    plan: str  # plan.txt

    def column(self, field: str) -> list[tuple[float, float]]:
        """Returns (step, value) of the rows that have the field as a number (NaN included)."""
        rows = self.rows.evaluation if field == "eval_loss" else self.rows.train
        pairs = ((number(row["step"]), number(row.get(field))) for row in rows)
        return [(step, value) for step, value in pairs if step is not None and value is not None]


def read_run(workdir: str | os.PathLike[str], name: str = "") -> RunSummary:
    """Returns the run of a workdir; `name` defaults to the folder's name.

    Raises:
      ConfigError: the folder does not exist or holds no run.
    """
    folder = Path(workdir)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the workdir of a training run")
    known = (metrics.METRICS_FILE, metrics.EVENTS_FILE, "run.json", "plan.txt")
    if not any((folder / file).exists() for file in known):
        raise ConfigError(
            f"{folder}: holds no run (none of {', '.join(known)}); give the --workdir of train or plan"
        )

    def text_of(file: str) -> str:
        path = folder / file
        return path.read_text(errors="replace") if path.exists() else ""

    return RunSummary(
        name=name or folder.resolve().name,
        folder=folder,
        config=schema.flatten(_read_json(folder / "config.json", {})),
        info=_read_json(folder / "run.json", {}),
        rows=metrics.read_rows(folder),
        events=metrics.read_events(folder),
        sample=text_of("sample.txt"),
        ops=_read_json(folder / "profile" / "top_ops.json", []),
        plan=text_of("plan.txt"),
    )


def number(value: object) -> float | None:
    """Returns the value as a float, None if it is no number."""
    return float(value) if isinstance(value, int | float) else None


def state(run: RunSummary) -> tuple[str, str]:
    """Returns what became of the run, and how to show it: "good", "bad" or ""."""
    last = next((e for e in reversed(run.events) if e["event"] in ("start", "stop", *ALERTS)), None)
    if last is None:
        return "no events", ""
    if last["event"] == "stop":
        return f"stopped: {last.get('reason')}", "good"
    if last["event"] in ALERTS:
        return f"last event: {last['event']}", "bad"
    return "running, or ended without a stop event", ""


def mesh_text(run: RunSummary) -> str:
    """Returns the mesh axes larger than 1, e.g. "data 2 × tensor 4"; "" if unknown."""
    if "mesh" not in run.info:
        return ""
    sizes = [f"{axis} {size}" for axis, size in run.info["mesh"].items() if size != 1]
    return " × ".join(sizes) or "one device"


def figures(run: RunSummary) -> dict[str, str]:
    """Returns the key figures of a run by name, in reading order; unknown ones are left out."""
    times = [time for event in run.events if (time := number(event.get("time"))) is not None]
    evaluated = [loss for _, loss in run.column("eval_loss") if math.isfinite(loss)]
    parameters = number(run.info.get("parameters"))
    last, median = operator.itemgetter(-1), statistics.median

    def text(of: Callable[[list[float]], float], field: str, show: Callable[[float], str]) -> str:
        values = [value for _, value in run.column(field)]
        return show(of(values)) if values else ""

    texts = {
        "last loss": text(last, "loss", "{:.4f}".format),
        "best evaluation loss": f"{min(evaluated):.4f}" if evaluated else "",
        "steps": text(last, "step", "{:,.0f}".format),
        "tokens seen": text(last, "tokens_seen", count_text),
        "parameters": "" if parameters is None else count_text(parameters),
        "tokens/s, median": text(median, "tokens_per_s", count_text),
        "step time, median": text(median, "step_time_s", time_text),
        "MFU causal, median": text(median, "mfu_causal", percent_text),
        "MFU full, median": text(median, "mfu_full", percent_text),
        "time since start": duration_text(times[-1] - times[0]) if times else "",
    }
    return {name: text for name, text in texts.items() if text}


def _read_json(path: Path, empty: Any) -> Any:
    """Returns the JSON of a file if it has the type of `empty`, else `empty` (absent, torn)."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return empty
    return value if isinstance(value, type(empty)) else empty
