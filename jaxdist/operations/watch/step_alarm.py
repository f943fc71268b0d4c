"""Finds when steps have become slow, and why."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from jaxdist.distributed import coordination
from jaxdist.trainer.callbacks import Callback, Run, StepView

_WINDOW = 16  # steps whose median is the pace
_EVERY = 4  # steps between two looks at the pace
_LOOKS = 64  # at paces, whose median is the usual one
_LEARNT = 4  # looks before a pace is usual
_SLOW = 1.5  # times the usual pace: an event
_USUAL = 1.25  # times the usual pace: the end of a slowdown
_LONG_S = 0.5  # the least length of a window: shorter pauses are the machine's
# steps in which other processes report, if nothing explains a slowdown
_ANSWER = 8
# steps for which a report holds: the slow process sees the slowdown first, by its queues
_RECENT = 48
_KEPT = 512  # slow steps after which their pace is the usual one


@dataclass
class _Laps:
    """The last times between two calls."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    last: float | None = None

    def lap(self, now: float) -> None:
        if self.last is not None:
            self.recent.append(now - self.last)
        self.last = now


_PARTS = ("data", "host", "devices")


class Parts(NamedTuple):
    """Seconds of a step: the median, and means of what this process did in them."""

    step: float
    data: float  # waited for its batch
    host: float  # other work of its own
    # waited for devices: its own, or those that wait for another process
    devices: float


class StepAlarm:
    """Learns how long a step takes. A lasting slowdown makes an event `slow_steps` that
    names its cause.

    The pace is a median of 16 steps, so one slow step makes no event. Steps are timed
    twice, as they are started and as they are recorded, and the slower pace counts:
    after a pause of the loop several start at once, before one several are recorded at
    once. Each process reports what it sees. The first blames the process whose own work
    grew most, or the devices if no process's did.
    """

    def __init__(
        self,
        event: Callable[..., None],
        note: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        event: takes an event's name, step and fields.
        note: takes a line for people.
        """
        self._event = event
        self._note = note
        self._clock = clock
        self._board = coordination.Board("slow steps")
        self._looks: deque[Parts] = deque(maxlen=_LOOKS)  # of paces that were usual
        self._slow_since: int | None = None
        self._report_by: int | None = None  # step
        self._count = 0
        self.begin()

    def begin(self) -> None:
        """Begins the loop, or begins it anew; the usual pace stays."""
        self._started = _Laps()
        self._recorded = _Laps()
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WINDOW + 1)

    def skip(self, seconds: float) -> None:
        """Excludes a pause that has just ended."""
        for laps in (self._started, self._recorded):
            if laps.last is not None:
                laps.last += seconds

    def record(self) -> None:
        """Times a step that was seen to be done."""
        self._recorded.lap(self._clock())

    def start(self, step: int, *, data_s: float, devices_s: float) -> None:
        """Times a step that has just been started. All processes make the same calls.

        Args:
          data_s, devices_s: that this process has waited for batches and for devices,
          in all.
        """
        self._started.lap(self._clock())
        self._waits.append((data_s, devices_s))
        self._count += 1
        if self._count % _EVERY == 0 and len(self._waits) > _WINDOW:
            self._look(step)

    def _look(self, step: int) -> None:
        now = self._parts()
        usual = self._usual()
        if self._slow_since is None:
            lasted = sum(self._started.recent) >= _LONG_S
            if usual and lasted and now.step > _SLOW * usual.step:
                self._slow_since = step
                if jax.process_index() == 0:
                    self._report_by = step if self._is_alone() else step + _ANSWER
            else:
                self._looks.append(now)
        elif usual and now.step < _USUAL * usual.step:
            self._slow_since = None
        elif step - self._slow_since >= _KEPT:
            self._looks.clear()
            self._slow_since = None
        if self._slow_since is not None and usual:
            self._share(step, now, usual)
        if self._report_by is not None and usual:
            self._name_cause(step, now, usual)

    def _parts(self) -> Parts:
        paces = [
            statistics.median(laps.recent)
            for laps in (self._started, self._recorded)
            if laps.recent
        ]
        data_then, devices_then = self._waits[0]
        data_now, devices_now = self._waits[-1]
        data = (data_now - data_then) / _WINDOW
        devices = (devices_now - devices_then) / _WINDOW
        host = statistics.fmean(self._started.recent) - (data + devices)
        return Parts(step=max(paces), data=data, host=max(0.0, host), devices=devices)

    def _usual(self) -> Parts | None:
        if len(self._looks) < _LEARNT:
            return None
        return Parts(*map(statistics.median, zip(*self._looks, strict=True)))

    def _share(self, step: int, now: Parts, usual: Parts) -> None:
        """Tells the first process which parts have grown in this one, and again while
        the slowdown lasts.

        The first slow steps are few of a window. The steps before them may have grown
        as much.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self._is_alone():
                self._board.put({"step": step, **_grown(now, usual)})

    def _is_alone(self) -> bool:
        return self._board.client is None

    def _name_cause(self, step: int, now: Parts, usual: Parts) -> None:
        """Writes the event once a process's own work explains the slowdown, or all had
        time to report.
        """
        assert self._report_by is not None
        grown: dict[int, Mapping[str, float]] = {0: _grown(now, usual)}
        if not self._is_alone():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for number, report in self._board.values().items():
                    if number and report["step"] >= step - _RECENT:
                        grown[number] = report
        process, phase = blamed(grown, alone=self._is_alone())
        if phase == "devices" and step < self._report_by:
            return
        self._report_by = None
        self._event(
            "slow_steps",
            step,
            process=process,
            phase=phase,
            step_s=now.step,
            usual_step_s=usual.step,
        )
        cause = "own work, beside data and devices" if phase == "host" else phase
        if self._is_alone():
            cause = f"its {cause}"
        elif process is not None:
            cause = f"process {process}'s {cause}"
        self._note(
            f"step {step}: steps take {1e3 * now.step:.0f} ms, usual are {1e3 * usual.step:.0f} ms; "
            f"what takes longer: {cause}"
        )


def _grown(now: Parts, usual: Parts) -> dict[str, float]:
    return {name: getattr(now, name) - getattr(usual, name) for name in _PARTS}


def blamed(
    grown: Mapping[int, Mapping[str, float]], *, alone: bool
) -> tuple[int | None, str]:
    """Finds the process that holds up a step, and its slow part: "data", "host" or
    "devices".

    If no process's own work is most of the slowdown, devices are slow. Of several
    processes nobody knows whose; the process is then None.

    Args:
      grown: by process, the seconds of a step that each of `_PARTS` takes longer than
        usual.
      alone: whether there is one process only.
    """

    def own_work(process: int) -> float:
        return grown[process]["data"] + grown[process]["host"]

    process = max(grown, key=own_work)
    if own_work(process) <= max(0.0, grown[process]["devices"]):
        return (process if alone else None), "devices"
    return process, max(("data", "host"), key=lambda name: grown[process][name])


class SlowSteps(Callback):
    """Sounds the alarm where steps become slow, and names the process and the cause."""

    may_request = False

    def on_start(self, run: Run) -> None:
        """Begins to learn what is usual."""
        self._alarm = StepAlarm(run.event, run.note)
        self._paused_s = 0.0

    def on_step(self, view: StepView) -> None:
        """Times the step, without pauses of the loop before it."""
        if view.paused_s > self._paused_s:
            self._alarm.skip(view.paused_s - self._paused_s)
            self._paused_s = view.paused_s
        self._alarm.start(
            view.step, data_s=view.data_wait_s, devices_s=view.device_wait_s
        )

    def on_record(self, step: int) -> None:
        """Times the step a second time, now that it is done."""
        self._alarm.record()

    def on_fault(self, error: Exception) -> None:
        """Begins anew: the loop does so after a rollback."""
        self._alarm.begin()
