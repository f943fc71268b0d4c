"""Summary of a run from all files of its workdir: state and key figures."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.hardware import chips, published
from jaxdist.operations.page import cost
from jaxdist.operations.page.event_log import EventLog
from jaxdist.operations.page.row_sample import RowSample
from jaxdist.operations.page.run_files import (
    ENDS,
    RunFiles,
    WorkdirReader,
    fields,
    finite,
    number,
    state_text,
)
from jaxdist.storage import run_format
from jaxdist.telemetry import metrics
from jaxdist.telemetry.units import (
    count_text,
    duration_text,
    field_text,
    percent_text,
)

ALERTS = ("preempted", "peer_lost", "hang", "bad_checkpoint", "nonfinite")


@dataclass(frozen=True, kw_only=True)
class RunSummary(RunFiles):
    """Contents of all files of a workdir."""

    name: str
    sample: str  # content of sample.txt
    plan: str  # content of plan.txt
    arrays: Sequence[metrics.Row]  # rows of arrays.jsonl
    # number of rows of metrics.jsonl; more than `rows` has if that is a sample
    num_rows: int
    is_sampled: bool  # `rows` has some of the steps
    unreadable: Sequence[str]  # a line for each unreadable part of a file

    def column(self, field: str) -> list[tuple[float, float]]:
        """Collects (step, value) of the rows whose field is a number or NaN."""
        rows = self.rows.train
        if field == "eval_loss":
            rows = self.rows.evaluation
        pairs = []
        for row in rows:
            step = number(row["step"])
            value = number(row.get(field))
            if step is not None and value is not None:
                pairs.append((step, value))
        return pairs

    def values(self, field: str) -> list[float]:
        """Collects the values of `column`."""
        return [value for _, value in self.column(field)]


def read_run(workdir: str | os.PathLike[str], name: str = "") -> RunSummary:
    """Reads the run of a workdir.

    Args:
      workdir: the folder.
      name: name of the run; "" = the name of the folder.

    Raises:
      ConfigError: the folder does not exist, holds no run, or holds another version's.
    """
    folder = Path(workdir)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; give the workdir of a training run"
        )
    known = (metrics.METRICS_FILE, metrics.EVENTS_FILE, run_format.RUN, "plan.txt")
    if not any((folder / file).exists() for file in known):
        raise ConfigError(
            f"{folder}: holds no run (none of {', '.join(known)}); give the --workdir of train or plan"
        )
    run_format.check_folder(folder)
    reader = WorkdirReader(folder)
    rows = _MetricsSample(folder)
    files = reader.read(rows.rows(), EventLog(metrics.iter_events(folder)))
    arrays, unreadable = read_arrays(folder)
    reader.note_lines(metrics.ARRAYS_FILE, unreadable)
    return RunSummary(
        name=name or folder.resolve().name,
        sample=reader.text("sample.txt"),
        plan=reader.text("plan.txt"),
        arrays=arrays,
        num_rows=rows.num_rows,
        is_sampled=rows.is_sampled,
        unreadable=reader.faults,
        **files,
    )


class _MetricsSample:
    """Rows of a metrics.jsonl: those of `metrics.read_rows`, or a sample of them.

    Peaks of the loss and the best evaluation remain.
    """

    def __init__(self, folder: Path) -> None:
        self._train = RowSample(_loss)
        self._evaluation = RowSample(lambda row: -_evaluation_loss(row))
        self._unreadable = 0
        newest = -1  # step of the last row of a training step
        for line in metrics.iter_rows(folder):
            if line.row is None:
                self._unreadable += 1
            elif metrics.EXTENDED in line.row:
                newest = min(newest, line.row["step"])
                self._train.drop_after(line.row["step"])
                self._evaluation.drop_after(line.row["step"])
            elif "eval_loss" in line.row:
                self._evaluation.add(line.row, line.num_bytes)
            else:
                if metrics.is_of_step(line.row):
                    if line.row["step"] <= newest:
                        self._drop_undone(line.row["step"])
                    newest = line.row["step"]
                self._train.add(line.row, line.num_bytes)

    def _drop_undone(self, first: int) -> None:
        """Drops the rows of steps that the run does again, as `read_rows` does."""
        self._train.drop_after(first - 1, metrics.is_of_step)
        self._evaluation.drop_after(first - 1)

    @property
    def num_rows(self) -> int:
        """The number of all rows of the file."""
        return self._train.num_added + self._evaluation.num_added

    @property
    def is_sampled(self) -> bool:
        """Checks if rows are missing that `metrics.read_rows` has."""
        return not (self._train.is_whole and self._evaluation.is_whole)

    def rows(self) -> metrics.MetricRows:
        """Lists the kept rows, sorted by step."""
        return metrics.MetricRows(
            train=self._train.rows(),
            evaluation=self._evaluation.rows(),
            unreadable=self._unreadable,
        )


def _loss(row: metrics.Row) -> float:
    """Reads the loss of a row; minus infinity if it has none."""
    loss = number(row.get("loss"))
    return -math.inf if loss is None else loss


def _evaluation_loss(row: metrics.Row) -> float:
    """Reads the loss of an evaluation; infinity if it is not finite."""
    loss = finite(row["eval_loss"])
    return math.inf if loss is None else loss


def read_arrays(folder: Path) -> tuple[list[metrics.Row], int]:
    """Reads the rows of an arrays.jsonl, or a sample; and its number of bad lines."""
    sample = RowSample()
    unreadable = 0
    for line in metrics.iter_arrays(folder):
        if line.row is None:
            unreadable += 1
        else:
            sample.drop_after(line.row["step"] - 1)
            sample.add(line.row, line.num_bytes)
    return sample.rows(), unreadable


def mfu_peak(info: Mapping[str, Any]) -> str:
    """Formats the peak of MFU: "989.4 TFLOP/s in bfloat16"; "" if it is unknown.

    Args:
      info: content of run.json.
    """
    peak = fields(info, "mfu_peak")
    rate = finite(peak.get("flops_per_s"))
    if not rate or rate < 0:
        return ""
    return f"{rate / 1e12:.4g} TFLOP/s in {peak.get('dtype')}"


def limit_text(run: RunFiles) -> str:
    """Formats what limits a step: "memory: 131 FLOPs per byte, threshold 153".

    It is "" if the limit is unknown.
    """
    found = fields(run.events.last_of("start") or {}, "roofline")
    intensity = finite(found.get("intensity"))
    threshold = finite(found.get("threshold"))
    bound = found.get("bound")
    if bound not in ("compute", "memory") or intensity is None or threshold is None:
        return ""
    return f"{bound}: {intensity:.0f} FLOPs per byte, threshold {threshold:.0f}"


def published_text(run: RunFiles) -> str:
    """Formats the published MFU of such runs; "" if nothing is published.

    Models with experts or adapters are compared with no publication.
    """
    parameters = finite(run.info.get("parameters"))
    is_dense = run.info.get("active_parameters") == run.info.get("parameters")
    if parameters is None or not is_dense or run.config.get("lora.rank"):
        return ""
    chip = chips.chip_for(str(run.info.get("device_kind")))
    dtype = str(fields(run.info, "mfu_peak").get("dtype"))
    band = published.band_for(chip, parameters, dtype)
    return band.text() if band else ""


def sizes(info: Mapping[str, Any]) -> dict[str, float | None]:
    """Reads a model's sizes from run.json.

    Returns:
      "parameters", "active_parameters" (those that a token uses) and "flops_per_token"
      (as in MFU). An unknown size is None.
    """
    return {
        "parameters": finite(info.get("parameters")),
        "active_parameters": finite(info.get("active_parameters")),
        "flops_per_token": finite(fields(info, "flops_per_token").get("causal")),
    }


_TONES = {"finished": "good", "stopped": "good", "running": "", "not started": ""}


def state(run: RunSummary) -> tuple[str, str]:
    """Finds the state of a run, and its tone on the page: "good", "bad" or "".

    The state is that of `jaxdist status`. The page is also written while the process
    of a run ends: the event `stop` then says more than that it still runs.
    """
    name, reason = run.outcome
    end = run.events.last_of(*ENDS)
    life = run.current_life
    has_stopped = False
    if end is not None and end["event"] == "stop":
        # else it is of an earlier life, and this one is starting
        has_stopped = life is None or end["time"] >= life.began
    if run.running and not has_stopped:
        return "running", _TONES["running"]
    return state_text(name, reason), _TONES.get(name, "bad")


def mesh_text(run: RunFiles) -> str:
    """Formats the mesh axes larger than 1: "data 2 × tensor 4"; "" if unknown."""
    if "mesh" not in run.info:
        return ""
    sizes = [f"{axis} {size}" for axis, size in run.info["mesh"].items() if size != 1]
    return " × ".join(sizes) or "one device"


def figures(run: RunSummary) -> dict[str, str]:
    """Formats the known key figures of a run by their names, in reading order."""
    texts = {
        "last loss": _last(run, "loss"),
        "last evaluation loss": _last(run, "eval_loss"),
        "best evaluation loss": _best_evaluation(run),
        "held-out targets": _held_out_targets(run),
        "steps": _last(run, "step"),
        f"{run.unit} seen": _last(run, "tokens_seen"),
        **_size_texts(run.info),
        f"{run.unit}/s, median": _median(run, "tokens_per_s"),
        "step time, median": _median(run, "step_time_s"),
        "peak, in MFU": mfu_peak(run.info) if run.column("mfu_causal") else "",
        "MFU causal, median": _median(run, "mfu_causal"),
        "MFU full, median": _median(run, "mfu_full"),
        "HFU, median": _median(run, "hfu"),
        "published MFU": published_text(run),
        "limit of a step": limit_text(run),
        "device memory, peak": _last(run, "device_memory_peak_bytes"),
        "device memory, limit": _last(run, "device_memory_limit_bytes"),
        **_time_texts(run),
        **_cost_texts(run),
    }
    return {name: text for name, text in texts.items() if text}


def _last(run: RunSummary, field: str) -> str:
    values = run.values(field)
    return field_text(field, values[-1]) if values else ""


def _median(run: RunSummary, field: str) -> str:
    values = run.values(field)
    return field_text(field, statistics.median(values)) if values else ""


def evaluations(run: RunSummary) -> list[metrics.Row]:
    """Selects the evaluations on the held-out set of the last one.

    A run whose train.steps was raised may evaluate on more targets from there on. The
    losses before and after are of different sets.
    """
    rows = run.rows.evaluation
    if not rows:
        return []
    targets = rows[-1].get("eval_tokens")
    return [row for row in rows if row.get("eval_tokens") == targets]


def _best_evaluation(run: RunSummary) -> str:
    losses = [finite(row["eval_loss"]) for row in evaluations(run)]
    known = [loss for loss in losses if loss is not None]
    return field_text("eval_loss", min(known)) if known else ""


def _held_out_targets(run: RunSummary) -> str:
    rows = run.rows.evaluation
    targets = finite(rows[-1].get("eval_tokens")) if rows else None
    return "" if targets is None else field_text("eval_tokens", targets)


def _time_texts(run: RunSummary) -> dict[str, str]:
    """Formats the goodput and the wall time of the run's account; {} without one."""
    goodput = run.account.goodput
    if goodput is None:
        return {}
    return {
        "goodput": percent_text(goodput),
        "time since start": duration_text(run.account.wall_s),
    }


def _size_texts(info: Mapping[str, Any]) -> dict[str, str]:
    size = sizes(info)
    parameters = size["parameters"]
    active = size["active_parameters"]
    flops = size["flops_per_token"]
    texts = {}
    if parameters is not None:
        texts["parameters"] = count_text(parameters)
        if active is not None and active < parameters:
            texts["active for a token"] = count_text(active)
            if flops is not None:
                texts["FLOPs of a token, in MFU"] = count_text(flops)
    return texts


def _cost_texts(run: RunSummary) -> dict[str, str]:
    document = cost.cost(
        run.config,
        run.info,
        run.lives,
        run.account,
        max(run.values("tokens_seen"), default=None),
    )
    return cost.as_texts(document, run.unit)
