"""When steps have become slow, and why."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax

from jaxdist.distributed import coordination
from jaxdist.trainer.callbacks import Callback, Run, StepView

_WINDOW, _EVERY = 16, 4  # steps whose median is the pace; steps between two looks at it
_LOOKS, _LEARNT = 64, 4  # looks at paces that tell what is usual; how many are enough
_SLOW, _USUAL = 1.5, 1.25  # times the usual pace: an event from here on, and its end
_LONG_S = 0.5  # that a window must have lasted: shorter pauses are the machine's own
# steps that other processes have to say what they see, where nothing explains a
# slowdown
_ANSWER = 8
# steps that what they have said holds: the one that is slow sees it first, by its
# queues
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


@dataclass(frozen=True)
class Parts:
    """Seconds of a step: the median, and means of what this process did in them."""

    step: float
    data: float  # waited for its batch
    host: float  # other work of its own
    # waited for devices: its own, or those that wait for another process
    devices: float


class StepAlarm:
    """Learns how long a step takes; a lasting slowdown is an event `slow_steps` that
    names its cause.

    The pace is a median of 16 steps, so one slow step is none. Steps are timed twice,
    where they are started and where they are recorded, and the slower pace counts:
    after a pause of the loop some are started at once, before one some are recorded at
    once. With several processes each says what it sees; the first blames the one whose
    own work grew most, or, where no process's did, devices.
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
        self._event, self._note, self._clock = event, note, clock
        self._board = coordination.Board("slow steps")
        self._looks: deque[Parts] = deque(maxlen=_LOOKS)  # of paces that were usual
        self._slow_since: int | None = None
        self._report_by: int | None = None  # step
        self._count = 0
        self.begin()

    def begin(self) -> None:
        """Says that the loop begins, or begins anew: what is usual stays."""
        self._started, self._recorded = _Laps(), _Laps()
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WINDOW + 1)

    def skip(self, seconds: float) -> None:
        """Leaves out a pause that has just ended."""
        for laps in (self._started, self._recorded):
            if laps.last is not None:
                laps.last += seconds

    def record(self) -> None:
        """Says that a step was seen to be done."""
        self._recorded.lap(self._clock())

    def start(self, step: int, *, data_s: float, devices_s: float) -> None:
        """Says that a step has just been started. All processes make the same calls.

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
        now, usual = self._parts(), self._usual()
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
        (data, devices), (data_then, devices_then) = self._waits[-1], self._waits[0]
        paces = [
            statistics.median(laps.recent)
            for laps in (self._started, self._recorded)
            if laps.recent
        ]
        waited = (data - data_then) / _WINDOW, (devices - devices_then) / _WINDOW
        host = max(0.0, statistics.fmean(self._started.recent) - sum(waited))
        return Parts(max(paces), waited[0], host, waited[1])

    def _usual(self) -> Parts | None:
        if len(self._looks) < _LEARNT:
            return None
        names = ("step", *_PARTS)
        return Parts(
            *(
                statistics.median(getattr(look, name) for look in self._looks)
                for name in names
            )
        )

    def _share(self, step: int, now: Parts, usual: Parts) -> None:
        """Tells the first process what has grown in this one, and again while it lasts.

        The first steps that are slow are few of a window: what came before them may
        have grown as much.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self._is_alone():
                self._board.put({"step": step, **_grown(now, usual)})

    def _is_alone(self) -> bool:
        return self._board.client is None

    def _name_cause(self, step: int, now: Parts, usual: Parts) -> None:
        """Writes the event once a process's own work explains the slowdown, or all had
        time to tell of it.
        """
        assert self._report_by is not None
        grown: dict[int, Mapping[str, float]] = {0: _grown(now, usual)}
        if not self._is_alone():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                told = self._board.values()
                grown |= {
                    n: said
                    for n, said in told.items()
                    if n and said["step"] >= step - _RECENT
                }
        process, phase = blamed(grown, alone=self._is_alone())
        if phase == "devices" and step < self._report_by:
            return
        self._report_by = None
        times = {"step_s": now.step, "usual_step_s": usual.step}
        self._event("slow_steps", step, process=process, phase=phase, **times)
        who = (
            ""
            if process is None
            else "its "
            if self._is_alone()
            else f"process {process}'s "
        )
        what = {"data": "data", "host": "own work, beside data and devices"}.get(
            phase, "devices"
        )
        self._note(
            f"step {step}: steps take {1e3 * now.step:.0f} ms, usual are {1e3 * usual.step:.0f} ms; "
            f"what takes longer: {who}{what}"
        )


def _grown(now: Parts, usual: Parts) -> dict[str, float]:
    return {name: getattr(now, name) - getattr(usual, name) for name in _PARTS}


def blamed(
    grown: Mapping[int, Mapping[str, float]], *, alone: bool
) -> tuple[int | None, str]:
    """Returns which process holds up a step, and what it does: "data", "host" or
    "devices".

    Args:
      grown: by process, by how many seconds a step each of `_PARTS` takes longer than
        usual. Where no process's own work is the most of it, devices are slow: of
        several processes nobody knows whose.
      alone: whether there is one process only.
    """

    def own(process: int) -> float:
        return grown[process]["data"] + grown[process]["host"]

    process = max(grown, key=own)
    if own(process) <= max(0.0, grown[process]["devices"]):
        return (process if alone else None), "devices"
    return process, max(("data", "host"), key=lambda name: grown[process][name])


class SlowSteps(Callback):
    """Sounds the alarm where steps become slow, and names the process and the cause."""

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
