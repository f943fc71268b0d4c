"""A summary of the run in a workdir: its state and its key figures."""

import math
import operator
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxdist.config import ConfigError, schema
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page import cost
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry import metrics
from jaxdist.telemetry.units import count_text, duration_text, percent_text, time_text

_Kind = TypeVar("_Kind", dict, list)
_MOST = 1e250  # and a factor of units remains a finite number
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
    lives: Sequence[run_lives.Life]  # of ledger.json
    plan: str  # plan.txt
    arrays: Sequence[metrics.Row]  # arrays.jsonl
    unreadable: Sequence[str]  # what of its files could not be read, a line each

    @property
    def unit(self) -> str:
        """What the run counts, see `unit_of`."""
        return unit_of(self.info)

    def column(self, field: str) -> list[tuple[float, float]]:
        """Returns (step, value) of the rows that have the field as a number (NaN
        included).
        """
        rows = self.rows.evaluation if field == "eval_loss" else self.rows.train
        pairs = ((number(row["step"]), number(row.get(field))) for row in rows)
        return [
            (step, value)
            for step, value in pairs
            if step is not None and value is not None
        ]


def unit_of(info: Mapping[str, Any]) -> str:
    """Returns what a run with this run.json counts: "tokens", or "samples" of a model
    without tokens.
    """
    return "samples" if info.get("unit") == "samples" else "tokens"


def mfu_peak(info: Mapping[str, Any]) -> str:
    """Returns the peak that MFU is a share of ("989.4 TFLOP/s in bfloat16") from
    run.json; "" if unknown.
    """
    peak = info.get("mfu_peak")
    rate = (number(peak.get("flops_per_s")) or 0.0) if isinstance(peak, dict) else 0.0
    return (
        f"{rate / 1e12:.4g} TFLOP/s in {info['mfu_peak'].get('dtype')}"
        if 0 < rate < math.inf
        else ""
    )


_SIZES = ("parameters", "active_parameters", "flops_per_token")


def sizes(info: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns parameters, active_parameters (for a token) and flops_per_token (of MFU)
    from run.json.
    """
    flops = info.get("flops_per_token")
    causal = flops.get("causal") if isinstance(flops, dict) else None
    values = (info.get("parameters"), info.get("active_parameters"), causal)
    known = zip(_SIZES, map(number, values), strict=True)
    return {
        name: x if x is not None and math.isfinite(x) else None for name, x in known
    }


def read_run(workdir: str | os.PathLike[str], name: str = "") -> RunSummary:
    """Returns the run of a workdir; `name` defaults to the folder's name.

    Raises:
      ConfigError: the folder does not exist or holds no run, or another version's.
    """
    folder = Path(workdir)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; give the workdir of a training run"
        )
    known = (metrics.METRICS_FILE, metrics.EVENTS_FILE, "run.json", "plan.txt")
    if not any((folder / file).exists() for file in known):
        raise ConfigError(
            f"{folder}: holds no run (none of {', '.join(known)}); give the --workdir of train or plan"
        )
    run_format.check_folder(folder)
    files = _Files(folder)
    rows, (events, unreadable) = metrics.read_rows(folder), metrics.scan_events(folder)
    files.lines(metrics.METRICS_FILE, rows.unreadable)
    files.lines(metrics.EVENTS_FILE, unreadable)
    arrays, unreadable = metrics.read_arrays(folder)
    files.lines(metrics.ARRAYS_FILE, unreadable)
    return RunSummary(
        name=name or folder.resolve().name,
        folder=folder,
        config=schema.flatten(files.document(run_format.CONFIG)),
        info=files.fields(run_format.RUN, _INFO),
        rows=rows,
        events=events,
        sample=files.text("sample.txt"),
        ops=files.rows("profile/top_ops.json", _OP),
        lives=run_lives.read_lives(folder),
        plan=files.text("plan.txt"),
        arrays=arrays,
        unreadable=files.faults,
    )


# Fields that the page reads, with their kinds; of others it shows whatever they hold.
_INFO: Mapping[str, Any] = {
    "mesh": dict,
    "pipeline": dict,
    "sharding": list,
    "device_kind": str,
    "timeline_svg": str,
    "split_sequences": list,
}
_OP: Mapping[str, Any] = {
    "op": str,
    "share": int | float,
    "seconds": int | float,
    "count": int,
}


class _Files:
    """The small files of a workdir; what of them cannot be read is noted and
    left out.
    """

    def __init__(self, folder: Path):
        self._folder, self.faults = folder, list[str]()

    def lines(self, file: str, unreadable: int) -> None:
        """Notes lines that its reader has left out."""
        if unreadable:
            self.faults.append(
                f"{file}: {unreadable} line{'s' * (unreadable > 1)} could not be read"
            )

    def text(self, file: str) -> str:
        """Returns the file's text, "" where it is absent."""
        return (self._bytes(file) or b"").decode(errors="replace")

    def json(self, file: str, kind: type[_Kind]) -> _Kind:
        """Returns the file's value, an empty one where it is absent or of
        another kind.
        """
        content = self._bytes(file)
        try:
            return kind() if content is None else untrusted.parse_json(content, kind)
        except untrusted.Malformed as error:
            self.faults.append(f"{file}: {error}")
            return kind()

    def document(self, file: str) -> dict[str, Any]:
        """Returns the file's object without its format."""
        value = self.json(file, dict)
        return {key: item for key, item in value.items() if key != run_format.KEY}

    def _bytes(self, file: str) -> bytes | None:
        try:
            return untrusted.read_bytes(self._folder / file)
        except FileNotFoundError:
            return None
        except untrusted.Malformed as error:
            self.faults.append(f"{file}: {error}")
            return None

    def fields(self, file: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the file's object without the fields that are of another kind."""
        value = self.document(file)
        wrong = [
            key
            for key, kind in kinds.items()
            if not isinstance(value.get(key, kind()), kind)
        ]
        self.faults += [
            f"{file}: {key} is {type(value[key]).__name__}" for key in wrong
        ]
        return {key: item for key, item in value.items() if key not in wrong}

    def rows(self, file: str, kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the objects of the file's `ops` that have these fields."""
        value = self.document(file).get("ops", [])
        if not isinstance(value, list):
            self.faults.append(f"{file}: ops is {type(value).__name__}")
            return []
        rows = [row for row in value if isinstance(row, dict)]
        rows = [
            row
            for row in rows
            if all(isinstance(row.get(key), kind) for key, kind in kinds.items())
        ]
        if len(rows) < len(value):
            self.faults.append(
                f"{file}: {len(value) - len(rows)} of {len(value)} rows could not be read"
            )
        return rows


def number(value: object) -> float | None:
    """Returns the value as a float, infinite where no chart could show it; None if it
    is no number.
    """
    if not isinstance(value, int | float):
        return None
    return math.copysign(math.inf, value) if abs(value) > _MOST else float(value)


def state(run: RunSummary) -> tuple[str, str]:
    """Returns what became of the run, and how to show it: "good", "bad" or ""."""
    last = next(
        (e for e in reversed(run.events) if e["event"] in ("start", "stop", *ALERTS)),
        None,
    )
    if last is None:
        return "no events", ""
    if last["event"] == "stop":
        text = f"stopped: {last.get('reason')}"
        return text, "bad" if is_failure(last) else "good"
    if last["event"] in ALERTS:
        return f"last event: {last['event']}", "bad"
    return "running, or ended without a stop event", ""


def is_failure(stop: metrics.Row) -> bool:
    """Checks whether an event `stop` is of a run that failed."""
    return "error" in stop or stop.get("reason") == "nonfinite"


def mesh_text(run: RunSummary) -> str:
    """Returns the mesh axes larger than 1, e.g. "data 2 × tensor 4"; "" if unknown."""
    if "mesh" not in run.info:
        return ""
    sizes = [f"{axis} {size}" for axis, size in run.info["mesh"].items() if size != 1]
    return " × ".join(sizes) or "one device"


def figures(run: RunSummary) -> dict[str, str]:
    """Returns the key figures of a run by name, in reading order; unknown ones are left
    out.
    """
    times = [
        time for event in run.events if (time := number(event.get("time"))) is not None
    ]
    evaluated = [loss for _, loss in run.column("eval_loss") if math.isfinite(loss)]
    size = sizes(run.info)
    parameters, active, flops = (size[name] for name in _SIZES)
    sparse = active is not None and parameters is not None and active < parameters
    last, median = operator.itemgetter(-1), statistics.median

    unit = run.unit

    def text(
        of: Callable[[list[float]], float], field: str, show: Callable[[float], str]
    ) -> str:
        values = [value for _, value in run.column(field)]
        return show(of(values)) if values else ""

    texts = {
        "last loss": text(last, "loss", "{:.4f}".format),
        "best evaluation loss": f"{min(evaluated):.4f}" if evaluated else "",
        "steps": text(last, "step", "{:,.0f}".format),
        f"{unit} seen": text(last, "tokens_seen", count_text),
        "parameters": "" if parameters is None else count_text(parameters),
        "active for a token": count_text(active)
        if sparse and active is not None
        else "",
        "FLOPs of a token, in MFU": count_text(flops)
        if sparse and flops is not None
        else "",
        f"{unit}/s, median": text(median, "tokens_per_s", count_text),
        "step time, median": text(median, "step_time_s", time_text),
        "peak, in MFU": mfu_peak(run.info) if run.column("mfu_causal") else "",
        "MFU causal, median": text(median, "mfu_causal", percent_text),
        "MFU full, median": text(median, "mfu_full", percent_text),
        "HFU, median": text(median, "hfu", percent_text),
        "goodput": text(last, "goodput", percent_text),
        "time since start": duration_text(times[-1] - times[0]) if times else "",
    }
    return {name: text for name, text in (texts | _cost(run)).items() if text}


def _cost(run: RunSummary) -> dict[str, str]:
    """Returns what the run has cost so far, if it has a ledger and its chips a
    price.
    """
    if not (lives := run_lives.read_lives(run.folder)):
        return {}
    seen = [number for _, number in run.column("tokens_seen")]
    account = run_lives.account(lives)
    return cost.as_texts(
        cost.cost(run.config, run.info, lives, account, max(seen, default=None)),
        run.unit,
    )
