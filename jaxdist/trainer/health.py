"""The detection of numerical faults, and the data that a run skips because of them.

A numerical fault is a non-finite step, a spike of the loss, or a difference between
copies of a parameter. Updates are numbered from 1 and batches from 0 (`trainer.loop`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxdist.config.groups.health import HealthConfig
from jaxdist.data.dataset import Dataset
from jaxdist.data.packing import Batch

# file of a workdir with the windows of batches that the run skips, each [first, end)
SKIPPED_FILE = "skipped.json"

_EVERY_ROW = slice(None)
_RECENT = 100  # losses that define the usual range
_ENOUGH = 20  # losses needed to define it
_REFRESH = 10  # steps between two computations of it
# Share of the largest median of a run that a deviation has at least. The noise of a loss
# near zero is many times its median, and nothing that anybody could act on.
_LEAST_OF_LARGEST = 1e-3
_QUIET = 100  # steps without a spike that end a series of spikes


class Diverged(Exception):
    """A numerical fault. The run must roll back to before step `first`, or stop."""

    def __init__(
        self, kind: str, reason: str, *, first: int, last: int, policy: str
    ) -> None:
        super().__init__(reason)
        self.kind = kind  # "nonfinite", "spike" or "drift"
        # range of the faulty steps
        self.first = first
        self.last = last
        self.policy = policy  # "stop" or "rollback"
        self.skip = kind != "drift"  # whether the data can be the cause


@dataclass
class _Spikes:
    """A series of spikes: each follows the one before within `_QUIET` steps."""

    first: int  # its first step
    last: int
    count: int
    highest: float  # its highest loss


class Monitor:
    """The check of each step's metrics. It waits until the step is done."""

    def __init__(
        self,
        config: HealthConfig,
        *,
        nonfinite_limit: int,
        samples: Callable[[int], tuple[int, int]],
        event: Callable[..., None],
        note: Callable[[str], None],
    ) -> None:
        """Takes the settings and the outputs of the check.

        Args:
          config: the settings `health.*`.
          nonfinite_limit: consecutive non-finite steps that are allowed.
          samples: returns the first and the last global sample index of a step's batch.
          event: writes an event, from its name, step and fields.
          note: prints a line.
        """
        self._config = config
        self._limit = nonfinite_limit
        self._samples = samples
        self._event = event
        self._note = note
        self.waited_s = 0.0  # seconds spent waiting for steps
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._median = math.inf
        self._high = math.inf  # loss above which a step is a spike
        self._largest_median = 0.0
        self._spikes: _Spikes | None = None  # the current series

    def check_step(self, number: int, metrics: dict[str, jax.Array]) -> None:
        """Checks the loss of a step.

        Raises:
          Diverged: the step has a fault that `health.*` does not allow.
        """
        began = time.monotonic()
        # twice as fast as int() and float() of jax's arrays, at each step
        skipped = np.asarray(metrics["skipped"]).item()
        loss = np.asarray(metrics["loss"]).item()
        self.waited_s += time.monotonic() - began
        if skipped:
            self._report_nonfinite(number, skipped)
        elif math.isfinite(loss):
            self._look_for_spike(number, loss)

    def _sample_fields(self, number: int) -> dict[str, int]:
        first, last = self._samples(number)
        return {"first_sample": first, "last_sample": last}

    def _report_nonfinite(self, number: int, skipped: int) -> None:
        self._event(
            "nonfinite", number, skipped_in_a_row=skipped, **self._sample_fields(number)
        )
        self._note(f"step {number}: loss or gradients are not finite; update skipped")
        if skipped <= self._limit:
            return
        raise Diverged(
            "nonfinite",
            f"{skipped} steps in a row with non-finite loss or gradients "
            f"(optimizer.nonfinite_limit={self._limit})",
            first=number - skipped + 1,
            last=number,
            policy=self._config.nonfinite,
        )

    def _look_for_spike(self, number: int, loss: float) -> None:
        self._losses.append(loss)
        if not self._config.spike_sigmas:
            return
        if loss > self._high:
            self._report_spike(number, loss)
        elif self._spikes is not None and number - self._spikes.last >= _QUIET:
            self.end_spikes()
        if len(self._losses) >= _ENOUGH and number % _REFRESH == 0:
            self._update_range()

    def _report_spike(self, number: int, loss: float) -> None:
        """Reports the first spike of a series, and counts the others.

        Raises:
          Diverged: the run must go back.
        """
        text = f"step {number}: loss {loss:.4g} spikes above the recent median {self._median:.4g}"
        if self._spikes is None:
            self._spikes = _Spikes(first=number, last=number, count=1, highest=loss)
            self._event(
                "spike",
                number,
                loss=loss,
                median=self._median,
                **self._sample_fields(number),
            )
            self._note(text)
        else:
            self._spikes.last = number
            self._spikes.count += 1
            self._spikes.highest = max(self._spikes.highest, loss)
        if self._config.spike == "rollback":
            raise Diverged("spike", text, first=number, last=number, policy="rollback")

    def end_spikes(self) -> None:
        """Ends the current series of spikes, and reports it if it has several."""
        spikes = self._spikes
        self._spikes = None
        if spikes is None or spikes.count == 1:
            return
        self._event(
            "spikes_end",
            spikes.last,
            first_step=spikes.first,
            spikes=spikes.count,
            highest=spikes.highest,
        )
        self._note(
            f"steps {spikes.first} to {spikes.last}: {spikes.count} spikes of the loss, "
            f"the highest {spikes.highest:.4g}"
        )

    def _update_range(self) -> None:
        """Computes the usual range of losses from the median absolute deviation."""
        self._median = statistics.median_high(self._losses)
        sigma = 1.4826 * statistics.median_high(
            abs(loss - self._median) for loss in self._losses
        )
        self._largest_median = max(self._largest_median, abs(self._median))
        # Smooth losses have a tiny deviation. At least 1 % of the median counts.
        sigma = max(
            sigma,
            0.01 * abs(self._median),
            _LEAST_OF_LARGEST * self._largest_median,
        )
        self._high = self._median + self._config.spike_sigmas * sigma

    def rewound(self) -> None:
        """Forgets all losses, because the run has rolled back."""
        self._losses.clear()
        self._high = math.inf
        self._spikes = None


# --- skipped data ---------------------------------------------------------------------


class SkippingDataset(Dataset):
    """A dataset whose training skips windows of batches, each [first, end).

    The windows alone determine the batch of a step.
    """

    def __init__(self, dataset: Dataset, windows: Iterable[Sequence[int]] = ()) -> None:
        # The methods that this class inherits work on the dataset's attributes. Those
        # below call `_whole`, which may be of a subclass of Dataset.
        vars(self).update(vars(dataset))
        self._whole = getattr(dataset, "_whole", dataset)
        self.windows = [[first, end] for first, end in windows]

    def position(self, step: int) -> int:
        """Computes the number of the batch that follows `step` updates."""
        position = step
        counted_end = 0  # end of the windows that were counted: windows may overlap
        for first, end in sorted(self.windows):
            first = max(first, counted_end)
            if position >= first:
                position += max(end - first, 0)
            counted_end = max(counted_end, end)
        return position

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = _EVERY_ROW
    ) -> Batch:
        """Reads rows of the global batch that follows `step` updates; see Dataset."""
        return self._whole.train_batch(self.position(step), global_size, rows)

    @property
    def any_step(self) -> bool:
        """Whether steps can be read in any order; see Dataset."""
        return self._whole.any_step

    def attention_work(
        self, step: int, global_size: int, chunks: int = 1
    ) -> np.ndarray | None:
        """Computes the attention work of a global batch's rows; see Dataset."""
        return self._whole.attention_work(self.position(step), global_size, chunks)

    def reader_state(self, step: int) -> Any:
        """Looks up the state of the caller's iterator after `step` updates."""
        return self._whole.reader_state(self.position(step))

    def go_to(self, step: int, state: Any) -> str:
        """Moves the caller's iterator to the batch that follows `step` updates."""
        return self._whole.go_to(self.position(step), state)

    def without(self, first_step: int, last_step: int) -> SkippingDataset:
        """Makes a dataset that also skips the batches of these updates.

        Without updates (`last_step < first_step`) the new window is empty. It still
        counts as a rollback (`health.max_rollbacks`).
        """
        first = self.position(first_step - 1)
        # Batches between two updates may be skipped already, so an end can lie before.
        end = max(first, self.position(last_step - 1) + 1)
        return SkippingDataset(self, [*self.windows, [first, end]])


def describe_window(window: Sequence[int]) -> str:
    """Describes a window of batches, [first, end), as a subject with its verb."""
    first, end = window
    if end == first:
        return "no batch is"
    if end == first + 1:
        return f"batch {first} is"
    return f"batches {first} to {end - 1} are"
