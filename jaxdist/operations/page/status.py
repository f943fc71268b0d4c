"""What a run is doing, from the files of its workdir. Reading takes milliseconds, also
while the run trains. No jax.
"""

import math
import os
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page import cost, experts, planned, step_parts
from jaxdist.operations.page.run_files import RunFiles, WorkdirReader, number
from jaxdist.operations.page.summary import is_failure, sizes
from jaxdist.storage import lock, run_format, untrusted
from jaxdist.telemetry import metrics
from jaxdist.telemetry.units import duration_text, field_text, percent_text
from jaxdist.trainer import reproduce

# one of them is in the folder of any run
RUN_FILES = (
    metrics.METRICS_FILE,
    metrics.EVENTS_FILE,
    run_format.RUN,
    run_lives.LEDGER_FILE,
)
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
_FROM_ROW = ("loss", "tokens_per_s", "mfu", "hfu", "tokens_seen", "step_time_s")


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunFiles):
    """The files of a workdir as they are now; of its rows the last ones."""

    now: float  # seconds since 1970
    other_version: str = ""  # why nothing else is read; "": this version's run

    @property
    def running(self) -> bool:
        """Whether a process trains it: one holds the lock, or has just written the
        ledger.
        """
        held = lock.is_held(self.folder / ".lock")
        if held is not None:
            return held
        life = self._last_life()
        return life is not None and not life.ended and not self._is_quiet(life)

    def _last_life(self) -> run_lives.Life | None:
        if not self.lives:
            return None
        return self.lives[-1]

    def _is_quiet(self, life: run_lives.Life) -> bool:
        return self.now - life.written >= _QUIET_S

    def _current_life(self) -> run_lives.Life | None:
        """Finds the life that goes on; None if there is none, or it has not written
        yet.

        A process takes the lock after the last word of a life that was killed.
        """
        life = self._last_life()
        if life is None or life.ended or not self.running:
            return None
        is_older_than_lock = (self._lock_time() or 0.0) > life.written
        if self._is_quiet(life) and is_older_than_lock:
            return None
        return life

    def _lock_time(self) -> float | None:
        """Tells when the lock was taken, in seconds since 1970; None if unknown."""
        try:
            return os.stat(self.folder / ".lock").st_mtime
        except OSError:
            return None

    def document(self) -> dict[str, Any]:
        """Collects what `jaxdist status --json` prints."""
        row = self.last_row
        state, reason = self._state()
        running = state == "running"
        step = self._step()
        steps = _whole(self.config.get("train.steps"))
        step_s = number(row.get("step_time_s"))
        account = run_lives.account(
            self.lives, self.now if self._current_life() else None
        )
        document: dict[str, Any] = {
            "workdir": str(self.folder),
            "state": state,
            "reason": reason,
            "doing": self._activity() if running else None,
            "since": self._since(running),
            "step": step,
            "steps": steps,
            "eta_s": None,
            "next_save": self._next_save(step, steps, step_s) if running else None,
        }
        if running and steps and step_s is not None:
            document["eta_s"] = step_s * (steps - step)
        document |= {name: row.get(name) for name in _FROM_ROW}
        document["unit"] = self.unit  # of tokens_per_s and tokens_seen
        document["eval_loss"] = None
        if self.rows.evaluation:
            document["eval_loss"] = self.rows.evaluation[-1].get("eval_loss")
        document["experts"] = experts.figures(row)
        document |= sizes(self.info)
        starts = [event["time"] for event in self.events if event["event"] == "start"]
        document["started"] = starts[0] if starts else None
        document["starts"] = len(starts)
        document |= self._step_parts()
        document["goodput"] = account.goodput
        document["ledger"] = {"buckets": account.buckets, "wall_s": account.wall_s}
        document["cost"] = cost.cost(
            self.config,
            self.info,
            self.lives,
            account,
            number(row.get("tokens_seen")),
        )
        document["repeat"] = reproduce.repeat(self.folder, self.info, self.config)
        return {name: _json_value(value) for name, value in document.items()}

    def _step_parts(self) -> dict[str, Any]:
        parts, plan = step_parts.of_run(self)
        shown: dict[str, Any] = {
            "step_parts": None,
            "verdict": None,
            "step_parts_source": None,
            "plan": None,
        }
        ratio = None
        if parts is not None:
            ratio = parts.measured_to_planned
            command = planned.command(self.folder, self.info)
            shown["step_parts"] = dict(parts.shares)  # of a step, estimated
            shown["verdict"] = parts.verdict(command)
            shown["step_parts_source"] = parts.source
        if plan is not None:
            shown["plan"] = plan.document(ratio)
        return shown

    def _activity(self) -> str | None:
        """Names what a running run does; None without a ledger."""
        if not self.lives:
            return None
        life = self._current_life()
        phase = life.phase if life else "start"
        return ACTIVITIES.get(phase, phase)

    def _since(self, running: bool) -> float | None:
        """Tells since when the state lasts, in seconds since 1970."""
        if running and self.lives:
            life = self._current_life()
            if life is not None:
                return life.since
            lock_time = self._lock_time()
            if lock_time:  # a start that has not written yet
                return lock_time
        times = [event["time"] for event in self.events[-1:]]
        row_time = self.last_row.get("time")
        if untrusted.is_amount(row_time, below=1e12):
            times.append(row_time)
        return max(times, default=None)

    def _state(self) -> tuple[str, str | None]:
        """Tells the state, and why: running, finished, stopped, failed, preempted,
        died, not started, or another version's.
        """
        if self.other_version:
            return OTHER_VERSION, self.other_version
        if self.running:
            return "running", None
        ends = [event for event in self.events if event["event"] in ENDS]
        if not ends and self.lives:
            return "died", "before its first step"
        if not ends:
            return "not started", None
        name = ends[-1]["event"]
        if name == "stop":
            return _stopped(ends[-1])
        if name == "start":
            return "died", "its process ended without a word"
        if name == "preempted":
            return "preempted", None
        return "failed", name

    def _step(self) -> int:
        """Tells the updates finished: of the last life, as its ledger or, once it is
        over, its rows say.
        """
        row = self.last_row
        life = self._last_life()
        if life is None or life.first is None:
            return row.get("step", 0)
        row_time = number(row.get("time")) or 0.0
        if self.running or row_time < life.began:
            return life.step
        return max(life.step, row.get("step", 0))

    def _next_save(
        self, step: int, steps: int, step_s: float | None
    ) -> dict[str, Any] | None:
        """Predicts the next save, its step or the seconds to it, from `checkpoint.*`;
        None if no save comes.
        """
        is_auto = self.config.get("checkpoint.interval") == "auto"
        next_step = None
        if self.config.get("checkpoint.save_at_end") and steps > step:
            next_step = steps
        every = _whole(self.config.get("checkpoint.every_steps"))
        if every and not is_auto:
            regular = (step // every + 1) * every
            next_step = min(regular, next_step or regular)
        in_s = []
        if next_step is not None and step_s is not None:
            in_s.append(step_s * (next_step - step))
        if is_auto:
            interval_s = self._chosen_interval_s()
        else:
            minutes = number(self.config.get("checkpoint.every_minutes"))
            interval_s = 60 * (minutes or 0.0)
        if interval_s:
            in_s.append(self._until_save_s(interval_s))
        if next_step is None and not in_s:
            return None
        return {"step": next_step, "in_s": min(in_s, default=None)}

    def _until_save_s(self, interval_s: float) -> float:
        """Computes the seconds to a save that comes so long after the last one."""
        for event in reversed(self.events):
            if event["event"] in ("save", "start"):
                return max(0.0, event["time"] + interval_s - self.now)
        return interval_s

    def _chosen_interval_s(self) -> float:
        """Finds the seconds between saves that interval=auto chose since the start; 0:
        none yet.
        """
        for event in reversed(self.events):
            if event["event"] == "save_interval":
                return number(event.get("interval_s")) or 0.0
            if event["event"] == "start":
                break
        return 0.0


def _stopped(stop: metrics.Row) -> tuple[str, str]:
    """Tells the state after an event `stop`, and its reason."""
    reason = str(stop.get("reason"))
    if is_failure(stop):
        return "failed", reason
    if reason == "finished":
        return "finished", reason
    return "stopped", reason


def read_status(workdir: Path | str, *, now: float | None = None) -> RunStatus:
    """Reads the status of the run in a folder.

    Args:
      now: seconds since 1970; by default the clock's.

    Raises:
      ConfigError: the folder holds no run.
      run_format.OtherVersion: another version has written it.
    """
    folder = Path(workdir)
    if not is_run(folder):
        known = ", ".join(RUN_FILES)
        raise ConfigError(
            f"{folder}: holds no run (none of {known}); give the --workdir of train"
        )
    run_format.check_folder(folder)
    found = WorkdirReader(folder).read(metrics.read_last_rows(folder))
    return RunStatus(now=time.time() if now is None else now, **found)


def read_any_status(workdir: Path) -> RunStatus:
    """Reads the status of the run in a folder, which may be another version's.

    Raises:
      ConfigError: the folder holds no run.
    """
    try:
        return read_status(workdir)
    except run_format.OtherVersion as error:
        return RunStatus(folder=workdir, now=time.time(), other_version=str(error))


def is_run(folder: Path) -> bool:
    """Checks whether a folder is the workdir of a run."""
    return any((folder / file).is_file() for file in RUN_FILES)


_NUMBERS = ("loss", "eval_loss", "tokens_per_s", "mfu", "hfu", "step_time_s")


def as_text(document: Mapping[str, Any]) -> str:
    """Formats a status for people, a line for each fact."""
    lines = [
        document["workdir"],
        f"state     {_state_text(document)}",
        f"step      {_step_text(document)}",
    ]
    if document["next_save"]:
        lines.append(f"next save {_save_text(document['next_save'])}")
    numbers = _numbers_text(document)
    if numbers:
        lines.append(f"now       {numbers}")
    if document["experts"]:
        lines.append(f"experts   {experts.as_line(document['experts'])}")
    lines += [f"model     {text}" for text in experts.size_text(document)]
    if document["verdict"]:
        lines += _wrapped("verdict", document["verdict"])
    if document["plan"]:
        lines += _wrapped("plan", planned.as_line(document["plan"]))
    lines += _ledger_lines(document)
    costs = cost.as_texts(document["cost"], document["unit"])
    if costs:
        text = ", ".join(f"{name} {value}" for name, value in costs.items())
        lines.append(f"cost      {text}")
    lines += _headed("repeat", reproduce.as_lines(document["repeat"]))
    # reasons and names are text of the run's folder
    return "\n".join(map(untrusted.printable, lines))


def _state_text(document: Mapping[str, Any]) -> str:
    doing = document["doing"]
    text = document["state"]
    if doing or document["reason"]:
        text += f": {doing or document['reason']}"
    if not document["since"]:
        return text
    passed = duration_text(max(0.0, time.time() - document["since"]))
    if doing:
        return f"{text} for {passed}"
    return f"{text}, {passed} ago"


def _step_text(document: Mapping[str, Any]) -> str:
    text = f"{document['step']:,}"
    if document["steps"]:
        text += f" of {document['steps']:,}"
    if document["eta_s"] is not None:
        text += f", done in {duration_text(document['eta_s'])}"
    return text


def _save_text(save: Mapping[str, Any]) -> str:
    texts = []
    if save["step"]:
        texts.append(f"at step {save['step']:,}")
    if save["in_s"] is not None:
        texts.append(f"in {duration_text(save['in_s'])}")
    return ", ".join(texts)


def _numbers_text(document: Mapping[str, Any]) -> str:
    texts = []
    for field in _NUMBERS:
        value = number(document[field])
        if value is not None:
            name = field.replace("tokens", document["unit"])
            texts.append(f"{name} {field_text(field, value)}")
    return ", ".join(texts)


def _wrapped(name: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, 70, break_long_words=False, break_on_hyphens=False)
    return _headed(name, lines)


def _headed(name: str, lines: list[str]) -> list[str]:
    """Sets a name before the first line, and indents the others as far."""
    heads = [name, *[""] * len(lines)]
    return [f"{head:<10}{line}" for head, line in zip(heads, lines, strict=False)]


def _ledger_lines(document: Mapping[str, Any]) -> list[str]:
    account = run_lives.Account(document["ledger"]["buckets"])
    if not account.wall_s:
        return []
    goodput = "-"
    if document["goodput"] is not None:
        goodput = percent_text(document["goodput"])
    starts = f"{document['starts']} starts"
    if document["starts"] == 1:
        starts = "1 start"
    lines = [f"goodput   {goodput} of {duration_text(account.wall_s)} in {starts}"]
    for name, seconds in account.largest():
        share = percent_text(seconds / account.wall_s)
        lines.append(f"  {name:<10}{duration_text(seconds):>9}  {share:>7}")
    return lines


def _whole(value: Any) -> int:
    """Converts a value of a file to a positive integer; 0 if it is none."""
    return value if untrusted.is_count(value) else 0


def _json_value(value: Any) -> Any:
    """Converts NaN and infinities, which JSON lacks, to text, as in metrics.jsonl."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
