"""What a run is doing, from the files of its workdir: read in milliseconds, also while
it trains. No jax.
"""

import math
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page import cost, experts, planned
from jaxdist.operations.page.step_parts import step_parts
from jaxdist.operations.page.summary import is_failure, number, sizes, unit_of
from jaxdist.storage import lock, run_format, untrusted
from jaxdist.telemetry import metrics
from jaxdist.telemetry.units import count_text, duration_text, percent_text, time_text
from jaxdist.trainer import reproduce

_OPS = "profile/top_ops.json"
# one of them is in the folder of any run
RUN_FILES = (metrics.METRICS_FILE, metrics.EVENTS_FILE, run_format.RUN)
ACTIVITIES = {
    "start": "starting",
    "restore": "reading a checkpoint",
    "compile": "compiling",
    "data": "training",
    "step": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "end": "writing its last files",
}
# events; the last of them says how a life went
ENDS = ("start", "stop", "preempted", "peer_lost", "hang")
OTHER_VERSION = "other version"
_QUIET_S = 3 * run_lives.BEAT_S  # after which a run on another machine counts as ended


@dataclass(frozen=True)
class RunStatus:
    """The files of a workdir as they are now."""

    folder: Path
    config: Mapping[str, Any]  # flat
    info: Mapping[str, Any]  # run.json
    rows: metrics.MetricRows  # the last ones
    events: list[metrics.Row]
    lives: list[run_lives.Life]
    ops: list[dict[str, Any]]  # of a profile
    now: float  # seconds since 1970
    other_version: str = ""  # of jaxdist, whose run it is; then nothing else is read

    @property
    def unit(self) -> str:
        """What the run counts: "tokens" or "samples"."""
        return unit_of(self.info)

    @property
    def running(self) -> bool:
        """Whether a process trains it: it holds the lock, or has written its ledger a
        moment ago.
        """
        held = lock.is_held(self.folder / ".lock")
        if held is None:
            life = self.lives[-1] if self.lives else None
            return (
                life is not None
                and not life.ended
                and self.now - life.written < _QUIET_S
            )
        return held

    def _life(self) -> run_lives.Life | None:
        """Returns the life that goes on; None if there is none, or it has not written
        yet.

        Who holds the lock has taken it after the last word of a life that was killed.
        """
        life = self.lives[-1] if self.lives and self.running else None
        if life is None or life.ended:
            return None
        old = self.now - life.written > _QUIET_S
        return None if old and (self._lock_time() or 0.0) > life.written else life

    def _lock_time(self) -> float | None:
        """Returns when the lock was taken, seconds since 1970; None if that cannot be
        told.
        """
        try:
            return os.stat(self.folder / ".lock").st_mtime
        except OSError:
            return None

    def document(self) -> dict[str, Any]:
        """Returns what `jaxdist status --json` prints."""
        row = self.rows.train[-1] if self.rows.train else {}
        evaluated = self.rows.evaluation[-1] if self.rows.evaluation else {}
        state, reason = self._state()
        running, life = state == "running", self._life()
        phase = life.phase if life else "start"
        # a start that has not written yet
        is_new = running and bool(self.lives) and life is None
        steps, step = _whole(self.config.get("train.steps")), self._step()
        step_s = number(row.get("step_time_s"))
        spent = self._account()
        plan = planned.read_plan(self.folder, self.config, self.info, self.events, row)
        parts = step_parts(row, self.info, self.ops, plan)
        document = {
            "workdir": str(self.folder),
            "state": state,
            "reason": reason,
            "doing": ACTIVITIES.get(phase, phase) if running and self.lives else None,
            "since": life.since
            if running and life
            else (is_new and self._lock_time()) or self._last_time(),
            "step": step,
            "steps": steps,
            "eta_s": step_s * (steps - step)
            if running and steps and step_s is not None
            else None,
            "next_save": self._next_save(step, steps, step_s) if running else None,
            **{
                name: row.get(name)
                for name in (
                    "loss",
                    "tokens_per_s",
                    "mfu",
                    "hfu",
                    "tokens_seen",
                    "step_time_s",
                )
            },
            "unit": self.unit,  # of tokens_per_s and tokens_seen
            "eval_loss": evaluated.get("eval_loss"),
            "experts": experts.figures(row),
            **sizes(self.info),
            "started": next(
                (event["time"] for event in self.events if event["event"] == "start"),
                None,
            ),
            "starts": sum(event["event"] == "start" for event in self.events),
            "step_parts": parts and dict(parts.shares),  # shares of a step, estimated
            "verdict": parts and parts.verdict(planned.command(self.folder, self.info)),
            "step_parts_source": parts and parts.source,
            "plan": plan
            and plan.document(parts.measured_to_planned if parts else None),
            "goodput": spent.goodput,
            "ledger": {"buckets": spent.buckets, "wall_s": spent.wall_s},
            "cost": cost.cost(
                self.config,
                self.info,
                self.lives,
                spent,
                number(row.get("tokens_seen")),
            ),
            "repeat": reproduce.repeat(self.folder, self.info, self.config),
        }
        return {name: _finite(value) for name, value in document.items()}

    def _state(self) -> tuple[str, str | None]:
        """Returns the state, and why: running, finished, stopped, failed, preempted,
        died, not started, or another version's.
        """
        if self.other_version:
            return OTHER_VERSION, self.other_version
        if self.running:
            return "running", None
        ends = [event for event in self.events if event["event"] in ENDS]
        last = ends[-1] if ends else None
        if last is None:
            return (
                ("died", "before its first step")
                if self.lives
                else ("not started", None)
            )
        name, reason = last["event"], str(last.get("reason"))
        if name == "stop":
            bad = is_failure(last)
            return (
                "failed" if bad else "finished" if reason == "finished" else "stopped",
                reason,
            )
        if name == "start":
            return "died", "its process ended without a word"
        return ("preempted", None) if name == "preempted" else ("failed", name)

    def _step(self) -> int:
        """Returns the updates finished: of the last life, as its ledger or, once it is
        over, its rows say.
        """
        row, life = (
            (self.rows.train or [{}])[-1],
            self.lives[-1] if self.lives else None,
        )
        if life is None or life.first is None:
            return row.get("step", 0)
        is_own = not self.running and (number(row.get("time")) or 0.0) >= life.began
        return max(life.step, row.get("step", 0)) if is_own else life.step

    def _last_time(self) -> float | None:
        times = [event["time"] for event in self.events[-1:]]
        times += [
            row["time"]
            for row in self.rows.train[-1:]
            if run_lives.is_time(row.get("time"))
        ]
        return max(times, default=None)

    def _next_save(
        self, step: int, steps: int, step_s: float | None
    ) -> dict[str, Any] | None:
        """Returns the step of the next save, or the time to it, as far as
        `checkpoint.*` says.
        """
        auto = self.config.get("checkpoint.interval") == "auto"
        every = 0 if auto else _whole(self.config.get("checkpoint.every_steps"))
        at_end = (
            steps if self.config.get("checkpoint.save_at_end") and steps > step else 0
        )
        if every and (not at_end or (step // every + 1) * every < at_end):
            at_end = (step // every + 1) * every
        in_s = [step_s * (at_end - step)] if at_end and step_s is not None else []
        minutes = number(self.config.get("checkpoint.every_minutes")) or 0.0
        if interval_s := self._chosen_interval_s() if auto else 60 * minutes:
            saves = [
                event["time"]
                for event in self.events
                if event["event"] in ("save", "start")
            ]
            in_s.append(
                max(0.0, saves[-1] + interval_s - self.now) if saves else interval_s
            )
        return (
            {"step": at_end or None, "in_s": min(in_s, default=None)}
            if at_end or in_s
            else None
        )

    def _chosen_interval_s(self) -> float:
        """Returns the seconds between saves that interval=auto has chosen since the
        start; 0: none.
        """
        for event in reversed(self.events):
            if event["event"] == "save_interval":
                return number(event.get("interval_s")) or 0.0
            if event["event"] == "start":
                break
        return 0.0

    def _account(self) -> run_lives.Account:
        return run_lives.account(self.lives, self.now if self._life() else None)


def read_status(workdir: Path | str, *, now: float | None = None) -> RunStatus:
    """Returns the status of the run in a folder.

    Raises:
      ConfigError: it holds no run.
      run_format.OtherVersion: another version has written it.
    """
    folder = Path(workdir)
    if not is_run(folder):
        known = ", ".join((*RUN_FILES, run_lives.LEDGER_FILE))
        raise ConfigError(
            f"{folder}: holds no run (none of {known}); give the --workdir of train"
        )
    run_format.check_folder(folder)
    config = schema.flatten(_fields(folder / run_format.CONFIG))
    info = _fields(folder / run_format.RUN)
    rows, events = metrics.read_last_rows(folder), metrics.read_events(folder)
    now = time.time() if now is None else now
    return RunStatus(
        folder,
        config,
        info,
        rows,
        events,
        run_lives.read_lives(folder),
        _ops(folder),
        now,
    )


def read_any_status(workdir: Path) -> RunStatus:
    """Returns the status of the run in a folder, which may be another version's.

    Raises:
      ConfigError: it holds no run.
    """
    try:
        return read_status(workdir)
    except run_format.OtherVersion as error:
        rows = metrics.MetricRows([], [])
        now = time.time()
        return RunStatus(workdir, {}, {}, rows, [], [], [], now, str(error))


def _fields(file: Path) -> Mapping[str, Any]:
    """Returns what a JSON file says beside its format; nothing, if it cannot be read:
    the others say enough.
    """
    try:
        return run_format.unmarked(untrusted.read_json(file, dict), file)
    except (OSError, ValueError):  # OtherVersion is one: profile/ of another folder
        return {}


def _ops(folder: Path) -> list[dict[str, Any]]:
    """Returns the operations of a run's profile; [] without one that can be read."""
    rows = _fields(folder / _OPS).get("ops")
    if not isinstance(rows, list):
        return []
    return [
        row
        for row in rows
        if isinstance(row, dict) and isinstance(row.get("share"), int | float)
    ]


def is_run(folder: Path) -> bool:
    """Returns whether a folder is the workdir of a run."""
    return any(
        (folder / file).is_file() for file in (*RUN_FILES, run_lives.LEDGER_FILE)
    )


_NUMBERS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("loss", "{:.4f}".format),
    ("eval_loss", "{:.4f}".format),
    ("tokens_per_s", count_text),
    ("mfu", percent_text),
    ("hfu", percent_text),
    ("step_time_s", time_text),
)


def as_text(document: Mapping[str, Any]) -> str:
    """Returns a status for people, a line for each thing."""
    doing, since = document["doing"] or document["reason"], document["since"]
    passed = duration_text(max(0.0, time.time() - since)) if since else ""
    how_long = f" for {passed}" if document["doing"] else f", {passed} ago"
    said = f"{document['state']}{f': {doing}' if doing else ''}{how_long if passed else ''}"
    steps = f" of {document['steps']:,}" if document["steps"] else ""
    lines = [
        document["workdir"],
        f"state     {said}",
        f"step      {document['step']:,}{steps}",
    ]
    if document["eta_s"] is not None:
        lines[-1] += f", done in {duration_text(document['eta_s'])}"
    if save := document["next_save"]:
        at = f"at step {save['step']:,}" if save["step"] else ""
        within = f"in {duration_text(save['in_s'])}" if save["in_s"] is not None else ""
        lines.append(f"next save {', '.join(filter(None, (at, within)))}")
    known = ((name, number(document[name]), show) for name, show in _NUMBERS)
    names = {"tokens_per_s": f"{document['unit']}_per_s"}
    shown = [
        f"{names.get(name, name)} {show(value)}"
        for name, value, show in known
        if value is not None
    ]
    lines += [f"now       {', '.join(shown)}"] * bool(shown)
    if document["experts"]:
        lines.append(f"experts   {experts.as_line(document['experts'])}")
    lines += [f"model     {text}" for text in experts.size_text(document)]
    plan = planned.as_line(document["plan"]) if document["plan"] else ""
    for name, text in (("verdict", document["verdict"] or ""), ("plan", plan)):
        wrapped = textwrap.wrap(
            text, 70, break_long_words=False, break_on_hyphens=False
        )
        lines += [
            f"{'' if index else name:<10}{line}" for index, line in enumerate(wrapped)
        ]
    lines += _ledger_lines(document)
    named = cost.as_texts(document["cost"], document["unit"]).items()
    lines += [
        f"cost      {', '.join(f'{name} {text}' for name, text in named)}"
    ] * bool(named)
    heads = ("repeat    ", " " * 10)
    lines += [
        head + line
        for head, line in zip(
            heads, reproduce.as_lines(document["repeat"]), strict=False
        )
    ]
    # reasons and names are text of the run's folder
    return "\n".join(map(untrusted.printable, lines))


def _ledger_lines(document: Mapping[str, Any]) -> list[str]:
    spent = document["ledger"]
    if not spent["wall_s"]:
        return []
    goodput = (
        percent_text(document["goodput"]) if document["goodput"] is not None else "-"
    )
    starts = f"{document['starts']} start{'s' * (document['starts'] != 1)}"
    lines = [f"goodput   {goodput} of {duration_text(spent['wall_s'])} in {starts}"]
    for name, seconds in sorted(spent["buckets"].items(), key=lambda item: -item[1]):
        if seconds > 0:
            lines.append(
                f"  {name:<10}{duration_text(seconds):>9}  {percent_text(seconds / spent['wall_s']):>7}"
            )
    return lines


def _whole(value: object) -> int:
    return value if type(value) is int and 0 < value < 2**53 else 0


def _finite(value: Any) -> Any:
    """Returns a value that JSON has: NaN and infinities as text, as in
    metrics.jsonl.
    """
    return (
        str(value) if isinstance(value, float) and not math.isfinite(value) else value
    )
