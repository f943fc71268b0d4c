"""Hooks of the training loop: functions that are called between two steps, each at steps of its own.

A hook may evaluate, log, save or end the run. Before it is called, the steps so far are done and recorded,
so a hook at each step costs the devices their queue: use `every(n, ...)`. All processes call the same
hooks at the same steps, so a hook may run programs on all devices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxdist.step.state import Metrics, State
from jaxdist.trainer.restore import Progress


@dataclass
class StepView:
    """The step that has just been done, as a hook sees it."""

    step: int  # updates finished
    state: State  # the next step takes its buffers: copy what is to last
    metrics: Metrics  # of this step, on the devices
    progress: Progress  # this step included; elapsed_s leaves out the time of hooks
    last: bool  # whether no step follows
    interrupted: bool  # whether a signal asked to stop: there may be no time for long work
    log: Callable[[int, Mapping[str, Any]], None]  # adds a row (step, values) to metrics.jsonl
    save_requested: bool = field(default=False, init=False)
    stop_reason: str = field(default="", init=False)

    def save(self) -> None:
        """Requests a checkpoint of this step."""
        self.save_requested = True

    def stop(self, reason: str) -> None:
        """Ends training after this step as after the last one: it is evaluated and saved."""
        self.stop_reason = reason


class Hook(Protocol):
    """Is called after the steps that are due, and once more after the last one."""

    def is_due(self, step: int) -> bool:
        """Returns whether to call the hook after an update; must be the same on all processes."""

    def __call__(self, view: StepView) -> None:
        """Does its work. `view.last` is set once the run ends, whether the step is due or not."""


class _Every:
    def __init__(self, steps: int, function: Callable[[StepView], None], at_end: bool):
        self._steps, self._function, self._at_end = steps, function, at_end
        self._called_at = -1

    def is_due(self, step: int) -> bool:
        return self._steps > 0 and step % self._steps == 0

    def __call__(self, view: StepView) -> None:
        at_end = self._at_end and self._steps > 0 and view.last
        wanted = not view.interrupted and (at_end or self.is_due(view.step))
        if wanted and view.step != self._called_at:
            self._function(view)
            self._called_at = view.step


def every(steps: int, function: Callable[[StepView], None], *, at_end: bool = False) -> Hook:
    """Returns a hook that calls `function` after each `steps` updates; never, if that is 0.

    Args:
      at_end: also after the last step. A run that a signal ends does not wait for the function.
    """
    return _Every(steps, function, at_end)
