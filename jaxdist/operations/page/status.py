"""Status of a run, from the files of its workdir.

Reading takes milliseconds, also while the run trains. Needs no jax.
"""

import contextlib
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page import cost, experts, planned, step_parts
from jaxdist.operations.page.event_log import EventLog
from jaxdist.operations.page.run_files import (
    ENDS,
    RunFiles,
    WorkdirReader,
    number,
    state_text,
)
from jaxdist.operations.page.summary import sizes
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry import device_memory, metrics
from jaxdist.telemetry.units import duration_text, field_text, percent_text
from jaxdist.trainer import reproduce

# each workdir has at least one of these files
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
OTHER_VERSION = "other version"
_ROW_FIELDS = (
    "loss",
    "tokens_per_s",
    "mfu",
    "hfu",
    "tokens_seen",
    "step_time_s",
    *device_memory.FIELDS,
)


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunFiles):
    """Current contents of a workdir, with the last rows only."""

    # message if another version wrote the run, of which nothing else is read; "": this
    # version did
    other_version: str = ""
    # event of the newest step in memory; None = there is none
    memory_save: metrics.Row | None = None

    def document(self) -> dict[str, Any]:
        """Builds the document of `jaxdist status --json`."""
        row = self.last_row
        state, reason = self._state()
        is_running = state == "running"
        step = self._step()
        steps = _count_or_0(self.config.get("train.steps"))
        step_s = number(row.get("step_time_s"))
        account = self.account
        document: dict[str, Any] = {
            "workdir": str(self.folder),
            "state": state,
            "reason": reason,
            "doing": self._activity() if is_running else None,
            "since": self._since(is_running),
            "step": step,
            "steps": steps,
            "eta_s": None,
            "next_save": self._next_save(step, steps, step_s) if is_running else None,
        }
        if is_running and steps and step_s is not None:
            document["eta_s"] = step_s * (steps - step)
        document |= {name: row.get(name) for name in _ROW_FIELDS}
        document["unit"] = self.unit  # unit of tokens_per_s and tokens_seen
        evaluation = self.rows.evaluation[-1] if self.rows.evaluation else {}
        # of the last evaluation, and the targets of its held-out set
        document["eval_loss"] = evaluation.get("eval_loss")
        document["eval_tokens"] = evaluation.get("eval_tokens")
        document["experts"] = experts.figures(row)
        document |= sizes(self.info)
        document["started"] = self.started
        document["starts"] = self.events.numbers["start"]
        document |= self._step_parts()
        document["slow_parts"] = self._slow_parts()
        document["memory_step"] = self._memory_step()
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
        document: dict[str, Any] = {
            "step_parts": None,
            "verdict": None,
            "step_parts_source": None,
            "plan": None,
        }
        ratio = None
        if parts is not None:
            ratio = parts.measured_to_planned
            command = planned.command(self.folder, self.info)
            document["step_parts"] = dict(parts.shares)  # estimated shares of a step
            document["verdict"] = parts.verdict(command)
            document["step_parts_source"] = parts.source
        if plan is not None:
            document["plan"] = plan.document(ratio)
        return document

    def _slow_parts(self) -> list[str]:
        """Lists the chips, links and memories that are slow since the last probe."""
        event = self.events.last_of("slow_parts", "start")
        parts = event.get("parts") if event else None
        if not isinstance(parts, list):
            return []
        return [
            str(part["text"])
            for part in parts
            if isinstance(part, dict) and "text" in part
        ]

    def _memory_step(self) -> dict[str, Any] | None:
        """Describes the newest step in memory; None if there is none."""
        if self.memory_save is None:
            return None
        restore = self.events.last_of("memory_restore")
        life = self.last_life
        resumed_at = None
        if restore is not None and life is not None and restore["time"] >= life.began:
            resumed_at = restore["step"]
        return {
            "step": self.memory_save["step"],
            "age_s": max(0.0, self.now - self.memory_save["time"]),
            "resumed_at": resumed_at,
        }

    def _activity(self) -> str | None:
        """Describes the phase of a running run; None without a ledger."""
        if not self.lives:
            return None
        life = self.current_life
        phase = life.phase if life else "start"
        return ACTIVITIES.get(phase, phase)

    def _since(self, is_running: bool) -> float | None:
        """Finds the time when the state began, in seconds since 1970."""
        if is_running and self.lives:
            life = self.current_life
            if life is not None:
                return life.since
            lock_time = self.lock_time
            if lock_time:  # a start that has not written yet
                return lock_time
        times = []
        if self.events.last is not None:
            times.append(self.events.last["time"])
        row_time = self.last_row.get("time")
        if untrusted.is_amount(row_time, below=1e12):
            times.append(row_time)
        return max(times, default=None)

    def _state(self) -> tuple[str, str | None]:
        """Finds the state of the run, and its reason.

        States are "running", `OTHER_VERSION` and those of `outcome`.
        """
        if self.other_version:
            return OTHER_VERSION, self.other_version
        if self.running:
            return "running", None
        return self.outcome

    def _step(self) -> int:
        """Finds the number of finished updates.

        It is that of the ledger. Once the run has ended, its last row may be newer.
        """
        row = self.last_row
        row_step: int = row.get("step", 0)
        life = self.last_life
        if life is None or life.first is None:
            return row_step
        row_time = number(row.get("time")) or 0.0
        if self.running or row_time < life.began:
            return life.step
        return max(life.step, row_step)

    def _next_save(
        self, step: int, steps: int, step_s: float | None
    ) -> dict[str, Any] | None:
        """Predicts the next save from `checkpoint.*`.

        Args:
          step: number of finished updates.
          steps: number of all updates.
          step_s: seconds of a step; None = unknown.

        Returns:
          Its step and the seconds until it; None if no save comes.
        """
        is_auto = self.config.get("checkpoint.interval") == "auto"
        next_step = None
        if self.config.get("checkpoint.save_at_end") and steps > step:
            next_step = steps
        every = _count_or_0(self.config.get("checkpoint.every_steps"))
        if every and not is_auto:
            regular = (step // every + 1) * every
            next_step = min(regular, next_step or regular)
        times_s = []
        if next_step is not None and step_s is not None:
            times_s.append(step_s * (next_step - step))
        if is_auto:
            interval_s = self._chosen_interval_s()
        else:
            minutes = number(self.config.get("checkpoint.every_minutes"))
            interval_s = 60 * (minutes or 0.0)
        if interval_s:
            times_s.append(self._until_save_s(interval_s))
        if next_step is None and not times_s:
            return None
        return {"step": next_step, "in_s": min(times_s, default=None)}

    def _until_save_s(self, interval_s: float) -> float:
        """Computes the seconds until a save that comes `interval_s` after the last."""
        event = self.events.last_of("save", "start")
        if event is None:
            return interval_s
        save_time: float = event["time"] + interval_s
        return max(0.0, save_time - self.now)

    def _chosen_interval_s(self) -> float:
        """Finds the interval that `checkpoint.interval=auto` chose since the start.

        Returns:
          Seconds between saves; 0 = none was chosen yet.
        """
        event = self.events.last_of("save_interval", "start")
        if event is None or event["event"] == "start":
            return 0.0
        return number(event.get("interval_s")) or 0.0


def read_status(workdir: Path | str, *, now: float | None = None) -> RunStatus:
    """Reads the status of the run in a folder.

    Args:
      workdir: the folder.
      now: seconds since 1970; None = the current time.

    Raises:
      ConfigError: the folder holds no run.
      run_format.OtherVersion: another version of jaxdist has written the run.
    """
    folder = Path(workdir)
    if not is_run(folder):
        known = ", ".join(RUN_FILES)
        raise ConfigError(
            f"{folder}: holds no run (none of {known}); give the --workdir of train"
        )
    run_format.check_folder(folder)
    names = (*ENDS, "save", "save_interval", "slow_parts", "memory_restore")
    events = EventLog(metrics.iter_events(folder, names))
    last_events = metrics.read_last_events(folder)
    for event in last_events[-1:]:
        events.last = event
    files = WorkdirReader(folder).read(metrics.read_last_rows(folder), events)
    if now is not None:
        files["now"] = now
    files["memory_save"] = _last_memory_save(folder, last_events)
    return RunStatus(**files)


def _last_memory_save(
    folder: Path, events: Sequence[metrics.Row]
) -> metrics.Row | None:
    """Finds the event of the newest step in memory; None if there is none.

    Args:
      folder: the workdir.
      events: its last events. Saves in memory are frequent, so one is among them.
    """
    began = None
    with contextlib.suppress(OSError, untrusted.Malformed):
        branch = untrusted.read_json(folder / run_format.MEMORY, dict)
        began = number(branch.get("began"))
    if began is None:
        return None
    found: metrics.Row | None = None
    for event in events:
        # a run that has gone back has begun another history since
        if event["time"] < began or event.get("step") is None:
            continue
        if event["event"] == "memory_save" and event.get("ok") is True:
            found = event
        is_restore = event["event"] == "memory_restore"
        if is_restore and (found is None or event["step"] != found["step"]):
            found = event  # newer steps were bad, or their events were not written
    return found


def read_any_status(workdir: Path) -> RunStatus:
    """Reads the status of the run in a folder, also if another version wrote it.

    Raises:
      ConfigError: the folder holds no run.
    """
    try:
        return read_status(workdir)
    except run_format.OtherVersion as error:
        return RunStatus(folder=workdir, other_version=str(error))


def is_run(folder: Path) -> bool:
    """Checks if a folder is the workdir of a run."""
    return any((folder / file).is_file() for file in RUN_FILES)


_NUMBERS = ("loss", "eval_loss", "tokens_per_s", "mfu", "hfu", "step_time_s")


def as_text(document: Mapping[str, Any]) -> str:
    """Formats a status as text, with a line for each fact."""
    lines = [
        document["workdir"],
        f"state     {_state_text(document)}",
        f"step      {_step_text(document)}",
    ]
    if document["next_save"]:
        lines.append(f"next save {_save_text(document['next_save'])}")
    if document["memory_step"]:
        lines.append(f"in memory {_memory_step_text(document['memory_step'])}")
    numbers = _numbers_text(document)
    if numbers:
        lines.append(f"now       {numbers}")
    memory = _memory_text(document)
    if memory:
        lines.append(f"memory    {memory}")
    for text in document["slow_parts"]:
        lines += _wrapped("slow", text)
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
    # reasons and names come from files that anybody may have written
    return "\n".join(map(untrusted.printable, lines))


def _state_text(document: Mapping[str, Any]) -> str:
    doing = document["doing"]
    text = state_text(document["state"], doing or document["reason"])
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


def _memory_step_text(step: Mapping[str, Any]) -> str:
    text = f"step {step['step']:,}, {duration_text(step['age_s'])} old"
    if step["resumed_at"] is not None:
        text += f"; the run resumed from memory at step {step['resumed_at']:,}"
    return text


def _numbers_text(document: Mapping[str, Any]) -> str:
    texts = []
    for field in _NUMBERS:
        value = number(document[field])
        if value is not None:
            name = field.replace("tokens", document["unit"])
            texts.append(f"{name} {field_text(field, value)}")
    return ", ".join(texts)


def _memory_text(document: Mapping[str, Any]) -> str:
    """Formats the memory of the fullest device; "" if the run does not know it."""
    texts = []
    for name, field in (
        ("in use", "device_memory_bytes"),
        ("peak", "device_memory_peak_bytes"),
        ("limit", "device_memory_limit_bytes"),
    ):
        value = number(document[field])
        if value is not None:
            texts.append(f"{name} {field_text(field, value)}")
    return ", ".join(texts)


def _wrapped(name: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, 70, break_long_words=False, break_on_hyphens=False)
    return _headed(name, lines)


def _headed(name: str, lines: list[str]) -> list[str]:
    """Puts a name before the first line, and indents the others."""
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


def _count_or_0(value: Any) -> int:
    """Reads a count of a file; 0 if the value is no count."""
    if not untrusted.is_count(value):
        return 0
    count: int = value
    return count


def _json_value(value: Any) -> Any:
    """Converts NaN and infinities, which JSON lacks, to text, as in metrics.jsonl."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
