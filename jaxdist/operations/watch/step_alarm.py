"""Alarm for steps that become slow, with the process and the cause."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from jaxdist.distributed import coordination
from jaxdist.step.state import Metrics
from jaxdist.trainer.callbacks import Callback, Run, StepView

_WINDOW = 16  # steps whose median time is the pace
_EVERY = 4  # steps between two samples of the pace
_MAX_SAMPLES = 64  # samples whose median is the usual pace
_MIN_SAMPLES = 4  # fewest samples that make a usual pace
_SLOW = 1.5  # times the usual pace: a slowdown begins
_USUAL = 1.25  # times the usual pace: a slowdown ends
# least seconds of a window with a slowdown: shorter ones are noise of the machine
_MIN_WINDOW_S = 0.5
# steps in which other processes report, if this process cannot explain a slowdown
_ANSWER = 8
# steps for which a report counts: because of queues, the slow process sees it earlier
_RECENT = 48
_KEPT = 512  # slow steps after which their pace becomes the usual one


@dataclass
class _Laps:
    """Times between two calls: the last ones."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    last: float | None = None

    def lap(self, now: float) -> None:
        if self.last is not None:
            self.recent.append(now - self.last)
        self.last = now


_PARTS = ("data", "host", "devices")


class Parts(NamedTuple):
    """Seconds of a step, and its parts in this process."""

    step: float  # median
    data: float  # mean wait for a batch
    host: float  # mean of other work of the process
    # mean wait for devices: slow ones, or ones that wait for another process
    devices: float


class StepAlarm:
    """Alarm that learns the usual time of a step and reports a lasting slowdown.

    A slowdown makes an event `slow_steps`, which names its cause. The pace is the
    median of 16 steps, so one slow step makes no event.

    Steps are timed twice: when they start and when they are recorded. The slower pace
    counts. After a pause of the loop several steps start at once, and before a pause
    several are recorded at once.

    Each process reports its parts of a step. The first process blames the process whose
    own work grew most, or the devices if no process's work grew.
    """

    def __init__(
        self,
        event: Callable[..., None],
        note: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to learn.

        Args:
          event: writes an event, given its name, step and fields.
          note: prints a line.
          clock: gives the seconds of a steady clock.
        """
        self._event = event
        self._note = note
        self._clock = clock
        self._board = coordination.Board("slow steps")
        # samples at times without a slowdown
        self._samples: deque[Parts] = deque(maxlen=_MAX_SAMPLES)
        self._slow_since: int | None = None  # first step of the current slowdown
        self._report_by: int | None = None  # step at which the cause is reported
        self._count = 0  # steps started
        self.begin()

    def begin(self) -> None:
        """Begins a loop; the usual pace stays."""
        self._started = _Laps()
        self._recorded = _Laps()
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WINDOW + 1)

    def skip(self, seconds: float) -> None:
        """Excludes a pause that has just ended."""
        for laps in (self._started, self._recorded):
            if laps.last is not None:
                laps.last += seconds

    def record(self) -> None:
        """Times a recorded step, which is known to be done."""
        self._recorded.lap(self._clock())

    def start(self, step: int, *, data_s: float, devices_s: float) -> None:
        """Times a step that has just been started. All processes make the same calls.

        Args:
          step: number of the step.
          data_s: seconds that this process has waited for batches since its start.
          devices_s: seconds that this process has waited for devices since its start.
        """
        self._started.lap(self._clock())
        self._waits.append((data_s, devices_s))
        self._count += 1
        if self._count % _EVERY == 0 and len(self._waits) > _WINDOW:
            self._sample(step)

    def _sample(self, step: int) -> None:
        """Compares the pace with the usual one; reports or ends a slowdown."""
        current = self._parts()
        is_long = sum(self._started.recent) >= _MIN_WINDOW_S
        waits_for_answers = self._report_by is not None
        if self._slow_since is None and not is_long and not waits_for_answers:
            # No slowdown can begin, so nothing compares with the usual pace. Its
            # medians would cost short steps the most.
            self._samples.append(current)
            return
        usual = self._usual()
        if self._slow_since is None:
            if usual and is_long and current.step > _SLOW * usual.step:
                self._slow_since = step
                if jax.process_index() == 0:
                    self._report_by = step if self._is_alone() else step + _ANSWER
            else:
                self._samples.append(current)
        elif usual and current.step < _USUAL * usual.step:
            self._slow_since = None
        elif step - self._slow_since >= _KEPT:
            self._samples.clear()
            self._slow_since = None
        if self._slow_since is not None and usual:
            self._post(step, current, usual)
        if self._report_by is not None and usual:
            self._report_cause(step, current, usual)

    def _parts(self) -> Parts:
        paces = [
            statistics.median(laps.recent)
            for laps in (self._started, self._recorded)
            if laps.recent
        ]
        data_begin, devices_begin = self._waits[0]
        data_end, devices_end = self._waits[-1]
        data = (data_end - data_begin) / _WINDOW
        devices = (devices_end - devices_begin) / _WINDOW
        host = statistics.fmean(self._started.recent) - (data + devices)
        return Parts(step=max(paces), data=data, host=max(0.0, host), devices=devices)

    def _usual(self) -> Parts | None:
        if len(self._samples) < _MIN_SAMPLES:
            return None
        return Parts(*map(statistics.median, zip(*self._samples, strict=True)))

    def _post(self, step: int, current: Parts, usual: Parts) -> None:
        """Posts how much each part has grown in this process.

        The post is repeated while the slowdown lasts: at first, most steps of the
        window are not slow.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self._is_alone():
                self._board.put({"step": step, **_growth(current, usual)})

    def _is_alone(self) -> bool:
        return self._board.client is None

    def _report_cause(self, step: int, current: Parts, usual: Parts) -> None:
        """Writes the event as soon as the cause is known.

        It is known if the work of a process explains the slowdown, or once all
        processes had time to post.
        """
        assert self._report_by is not None
        growth: dict[int, Mapping[str, float]] = {0: _growth(current, usual)}
        if not self._is_alone():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for other, post in self._board.values().items():
                    if other and post["step"] >= step - _RECENT:
                        growth[other] = post
        process, phase = find_cause(growth, alone=self._is_alone())
        if phase == "devices" and step < self._report_by:
            return
        self._report_by = None
        self._event(
            "slow_steps",
            step,
            process=process,
            phase=phase,
            step_s=current.step,
            usual_step_s=usual.step,
        )
        cause = "other work on the host" if phase == "host" else phase
        if self._is_alone():
            cause = f"its {cause}"
        elif process is not None:
            cause = f"process {process}'s {cause}"
        self._note(
            f"step {step}: steps take {1e3 * current.step:.0f} ms instead of {1e3 * usual.step:.0f} ms; "
            f"cause: {cause}"
        )


def _growth(current: Parts, usual: Parts) -> dict[str, float]:
    return {name: getattr(current, name) - getattr(usual, name) for name in _PARTS}


def find_cause(
    growth: Mapping[int, Mapping[str, float]], *, alone: bool
) -> tuple[int | None, str]:
    """Finds the process that slows down the steps, and its slow part.

    If no process's own work is most of the slowdown, devices are slow. With several
    processes, nobody knows which device it is.

    Args:
      growth: for each process, the seconds of a step that each of `_PARTS` takes longer
        than usual.
      alone: True if there is only one process.

    Returns:
      The process (None = unknown), and "data", "host" or "devices".
    """

    def own_work(process: int) -> float:
        return growth[process]["data"] + growth[process]["host"]

    process = max(growth, key=own_work)
    if own_work(process) <= max(0.0, growth[process]["devices"]):
        return (process if alone else None), "devices"
    return process, max(("data", "host"), key=lambda part: growth[process][part])


class SlowSteps(Callback):
    """Callback that reports slow steps, with the process and the cause."""

    may_request = False

    def on_start(self, run: Run) -> None:
        """Begins to learn the usual pace."""
        self._alarm = StepAlarm(run.event, run.note)
        self._paused_s = 0.0

    def on_step(self, view: StepView) -> None:
        """Times the start of the step, without the pauses of the loop before it."""
        if view.paused_s > self._paused_s:
            self._alarm.skip(view.paused_s - self._paused_s)
            self._paused_s = view.paused_s
        self._alarm.start(
            view.step, data_s=view.data_wait_s, devices_s=view.device_wait_s
        )

    def on_record(self, step: int, metrics: Metrics) -> None:
        """Times the step again, now that it is done."""
        self._alarm.record()

    def on_fault(self, error: Exception) -> None:
        """Begins the windows again, as the loop does after a rollback."""
        self._alarm.begin()
