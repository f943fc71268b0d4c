"""Hooks of the training loop: functions that are called between two steps, each at
steps of its own.

`jaxdist.fit(hooks=[jaxdist.every(100, look)])` calls `look(view)` after every 100th
step.

A hook may evaluate, log, save or end the run. Before it is called, the steps so far are
done and recorded, so a hook at each step costs the devices their queue: use `every(n,
...)`. All processes call the same hooks at the same steps, so a hook may run programs on all devices.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.operations.ledger import ledger
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
    # whether a signal asked to stop: there may be no time for long work
    interrupted: bool
    # adds a row (step, values) to metrics.jsonl and loggers
    log: Callable[[int, Mapping[str, Any]], None]
    # {path: what is trained}, as checkpoints have it
    weights: Callable[[], dict[str, jax.Array]]
    save_requested: bool = field(default=False, init=False)
    stop_reason: str = field(default="", init=False)

    def save(self) -> None:
        """Requests a checkpoint of this step."""
        self.save_requested = True

    def stop(self, reason: str) -> None:
        """Ends training after this step as after the last one: it is evaluated and
        saved.
        """
        self.stop_reason = reason


@dataclass
class Hook:
    """A function that is called after some steps; see `every`."""

    steps: int
    function: Callable[[StepView], None]
    at_end: bool
    # of the ledger, that its time goes to
    bucket: str = field(default=ledger.HOOKS, init=False)
    # the last step that it was called after
    called_at: int = field(default=-1, init=False)

    def is_due(self, step: int) -> bool:
        """Returns whether to call the hook after an update; the same on all
        processes.
        """
        return self.steps > 0 and step % self.steps == 0

    def __call__(self, view: StepView) -> None:
        """Calls the function if the step is due. The loop does so once more after the
        last step.
        """
        at_end = self.at_end and self.steps > 0 and view.last
        due = not view.interrupted and (at_end or self.is_due(view.step))
        if due and view.step != self.called_at:
            self.function(view)
            self.called_at = view.step


def every(
    steps: int, function: Callable[[StepView], None], *, at_end: bool = False
) -> Hook:
    """Returns a hook that calls `function` after each `steps` updates; never, if that
    is 0.

    Args:
      at_end: also after the last step. A run that a signal ends does not wait for the
        function.
    """
    return Hook(steps, function, at_end)


def check_hooks(hooks: Iterable[object]) -> None:
    """Raises ConfigError if one of them is no hook."""
    if wrong := [hook for hook in hooks if not isinstance(hook, Hook)]:
        raise ConfigError(
            [
                f"hooks: {hook!r:.60} is no hook; write jaxdist.every(100, function)"
                for hook in wrong
            ]
        )
